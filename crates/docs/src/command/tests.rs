use super::{CommandError, OUTPUT_MAX_BYTES, run_on};
use crate::catalogue::{Catalogue, Page};

const fn page(route: &'static str, file: &'static str, body: &'static str) -> Page {
    Page {
        group: "Start",
        route,
        file,
        title: "T",
        description: "D",
        body,
    }
}

const PAGES: &[Page] = &[
    page("/", "/index.md", "# Start\n\nHello sandbox.\n"),
    page("/api", "/api/index.md", "# API\n"),
    page("/api/keys", "/api/keys.md", "# Keys\n\none\ntwo sandbox\nthree\nfour\n"),
    page("/network", "/network.md", "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n"),
];

fn ran(command: &str) -> Result<String, CommandError> {
    run_on(&Catalogue::of(PAGES), command, &|| false)
}

#[track_caller]
fn prints(command: &str, expected: &str) {
    assert_eq!(ran(command).as_deref(), Ok(expected), "{command}");
}

#[track_caller]
fn fails(command: &str, expected: &str) {
    let error = ran(command).expect_err(command).to_string();
    assert!(error.contains(expected), "{command}: {error}");
}

#[test]
fn ls() {
    prints("ls", "api/\nindex.md\nnetwork.md\n");
    prints("ls -la /", "api/\nindex.md\nnetwork.md\n");
    prints("ls api", "index.md\nkeys.md\n");
    prints("ls /api/", "index.md\nkeys.md\n");
    prints("ls /api/../../network.md", "/network.md\n");
    fails("ls -R", "unknown option -R");
    fails("ls / /api", "more than one path");
    fails("ls /nothing", "no such file or directory");
    fails("ls /network.md/", "not a directory");
}

#[test]
fn tree() {
    let all = "/\n├── api\n│   ├── index.md\n│   └── keys.md\n├── index.md\n└── network.md\n\n1 directory, 4 files\n";
    prints("tree", all);
    prints("tree / -L 2", all);
    prints(
        "tree -L1",
        "/\n├── api\n├── index.md\n└── network.md\n\n1 directory, 2 files\n",
    );
    prints(
        "tree /api",
        "/api\n├── index.md\n└── keys.md\n\n0 directories, 2 files\n",
    );
    fails("tree -L 0", "must be a number from 1");
    fails("tree -L", "needs a value");
    fails("tree -L x", "must be a number");
    fails("tree -d", "unknown option -d");
    fails("tree /network.md", "not a directory");
}

#[test]
fn cat() {
    prints("cat /index.md", "# Start\n\nHello sandbox.\n");
    prints("cat index.md api/index.md", "# Start\n\nHello sandbox.\n# API\n");
    fails("cat", "no file named");
    fails("cat -n /index.md", "unknown option -n");
    fails("cat /api", "is a directory");
    fails("cat /index", "did you mean /index.md");
    fails("cat /networks.md", "did you mean /network.md?");
}

#[test]
fn head() {
    prints("head /network.md", "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n");
    for command in [
        "head -n 2 /network.md",
        "head -n2 network.md",
        "head -2 /network.md",
        "head /network.md --lines=2",
    ] {
        prints(command, "1\n2\n");
    }
    prints("head -n 0 /network.md", "");
    prints("head -n 99999999999999999999 /api/index.md", "# API\n");
    prints(
        "head -1 /index.md /api/index.md",
        "==> /index.md <==\n# Start\n\n==> /api/index.md <==\n# API\n",
    );
    fails("head", "no file named");
    fails("head -n -5 /index.md", "must be a number from 0");
    fails("head -2x /index.md", "not a number of lines");
    fails("head -c 5 /index.md", "unknown option -c");
}

#[test]
fn rg() {
    prints("rg sandbox", "/api/keys.md:4:two sandbox\n/index.md:3:Hello sandbox.\n");
    prints("rg sandbox /api", "/api/keys.md:4:two sandbox\n");
    prints(
        "rg -C 1 sandbox /api/keys.md",
        "/api/keys.md-3-one\n/api/keys.md:4:two sandbox\n/api/keys.md-5-three\n",
    );
    prints(
        "rg -C1 '^(three|# Keys)$' /api",
        "/api/keys.md:1:# Keys\n/api/keys.md-2-\n--\n/api/keys.md-4-two sandbox\n/api/keys.md:5:three\n/api/keys.md-6-four\n",
    );
    prints("rg -il SANDBOX", "/api/keys.md\n/index.md\n");
    prints("rg -c sandbox", "/api/keys.md:1\n/index.md:1\n");
    prints("rg xyzzy", "(no matches)\n");
    prints("rg -e -1", "(no matches)\n");
    prints("rg -- -1 /", "(no matches)\n");
    fails("rg", "no pattern");
    fails("rg '('", "invalid pattern");
    fails("rg '(?=a)b'", "invalid pattern");
    fails("rg a /nothing", "no such file");
    fails("rg --pre cat a", "unknown option --pre");
    fails("rg -g '*.md' a", "unknown option -g");
}

#[test]
fn only_these_commands_exist() {
    fails("", "usage: ls");
    fails("  ", "the command is empty");
    fails("rm -rf /", "no such command; usage: ls");
    fails("'ls /'", "no such command");
    fails("ls | head", "unsupported pipe");
    fails("cat /*.md", "not expanded");
    fails(&"a".repeat(5000), "longer than 4096 bytes");
    // A message is bounded and on one line, whatever is in the command.
    let error = ran(&format!("'{}'", "é\u{202e}".repeat(500)))
        .expect_err("no command")
        .to_string();
    assert!(error.len() < 2000 && !error.contains('\u{202e}'), "{error}");
}

#[test]
fn patterns_are_bounded_in_size_and_time() {
    for pattern in [
        "a{1000}{1000}",
        r"\w{5000}",
        "(((((a{100}){100}){100})))",
        &"(".repeat(3000),
        &"a|".repeat(2000),
    ] {
        let begun = std::time::Instant::now();
        let _ = ran(&format!("rg '{pattern}'"));
        assert!(begun.elapsed().as_secs() < 5, "{pattern}");
    }
    let late = run_on(&Catalogue::of(PAGES), "rg a", &|| true).expect_err("late");
    assert!(late.to_string().contains("took too long"), "{late}");
}

#[test]
fn output_is_cut_at_a_line() {
    let line = "é".repeat(50) + "\n";
    let body: &'static str = Box::leak(line.repeat(OUTPUT_MAX_BYTES / line.len() + 10).into_boxed_str());
    let pages: &'static [Page] = Box::leak(Box::new([page("/long", "/long.md", body)]));
    let catalogue = Catalogue::of(pages);
    for command in ["cat /long.md", "cat /long.md /long.md", "rg é", "head -99999 /long.md"] {
        let output = run_on(&catalogue, command, &|| false).expect(command);
        assert!(output.len() < OUTPUT_MAX_BYTES + 200, "{command}: {}", output.len());
        assert!(output.contains("\n[output cut after "), "{command}");
        assert!(!output.trim_end().contains("]\n"), "{command}");
    }
    let short = run_on(&catalogue, "head -n 600 /long.md", &|| false).expect("a head");
    assert!(!short.contains("cut") && short.lines().count() == 600);
}
