//! `rg` over the embedded pages prints the same lines as ripgrep over the same files.

#![expect(clippy::disallowed_methods, reason = "the test compares with a program")]

use std::path::Path;
use std::process::Command;

use docs::catalogue;
use docs::command::{self, OUTPUT_MAX_BYTES};

const PATTERNS: &[&str] = &[
    "sandbox",
    "Sandbox",
    "the",
    "^#",
    "^## .*",
    "^$",
    "",
    "$",
    r"\d+",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"\bE2B_\w+",
    r"`[^`]+`",
    r"(?i)TLS",
    "(create|delete)[sd]?",
    "a.c",
    r"\.",
    r"\|",
    "[0-9]+ (MiB|KiB|ms|s)",
    "^- ",
    r"\s{2,}\S",
    "é|ü|…|≤",
    r"\p{L}+ \p{N}",
    "x*",
    "(a|b)*c",
    r"[[:upper:]]{3,}",
    r"\w+@\w+",
    "^.{100,}$",
    r"https?://[^\s)]+",
    "not in any page at all",
    r"\$",
    r"(?-u:\w)+-",
    "(?m)^```",
    "timeout.*second",
    "ring|fence",
    r"\Asomething",
    r"end\z",
];

const FLAGS: &[&[&str]] = &[
    &[],
    &["-i"],
    &["-C", "2"],
    &["-C1", "-i"],
    &["-A", "1"],
    &["-B3"],
    &["-w"],
    &["-x"],
    &["-F"],
    &["-v"],
    &["-S"],
    &["-o"],
    &["-l"],
    &["-c"],
    &["-il"],
    &["-m", "1"],
    &["-n", "--context=1"],
];

/// The number of cases that found something, so that the corpus cannot become trivial.
const FOUND_MIN: usize = 300;

#[test]
fn the_lines_are_those_of_ripgrep() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    for page in catalogue().pages() {
        let path = root.join(&page.file[1..]);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        std::fs::write(path, page.body).expect("a page");
    }
    let mut found = 0;
    for pattern in PATTERNS {
        for flags in FLAGS {
            for path in ["/", "/configuration.md"] {
                let (ours, theirs) = (ours(flags, pattern, path), theirs(root, flags, pattern, path));
                found += usize::from(!theirs.is_empty());
                let at = format!("rg {flags:?} {pattern:?} {path}");
                // What is too long is cut at a line, with a note.
                if theirs.len() > OUTPUT_MAX_BYTES {
                    let (shown, note) = ours
                        .rsplit_once("[output cut")
                        .unwrap_or_else(|| panic!("{at}: not cut"));
                    assert!(note.len() < 200 && shown.len() > OUTPUT_MAX_BYTES / 2, "{at}");
                    assert!(theirs.starts_with(shown), "{at}");
                } else {
                    assert_eq!(ours, theirs, "{at}");
                }
            }
        }
    }
    assert!(found > FOUND_MIN, "{found} cases found something");
}

/// A word in quotes, by which a shell takes every character as it is.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn ours(flags: &[&str], pattern: &str, path: &str) -> String {
    let command = format!("rg {} -- {} {path}", flags.join(" "), quoted(pattern));
    let output = command::run(&command, &|| false).unwrap_or_else(|error| panic!("{command}: {error}"));
    if output == "(no matches)\n" {
        String::new()
    } else {
        output
    }
}

fn theirs(root: &Path, flags: &[&str], pattern: &str, path: &str) -> String {
    let output = Command::new("rg")
        .args([
            "--no-config",
            "--color=never",
            "--no-heading",
            "--line-number",
            "--with-filename",
            "--sort=path",
        ])
        .args(flags)
        .args(["--", pattern])
        .arg(root.join(&path[1..]))
        .output()
        .expect("ripgrep; scripts/test.sh installs it");
    let code = output.status.code();
    assert!(
        matches!(code, Some(0 | 1)),
        "{pattern:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).expect("text");
    let root = root.to_str().expect("a path");
    let lines = text
        .split_inclusive('\n')
        .map(|line| line.strip_prefix(root).unwrap_or(line));
    lines.collect::<String>()
}
