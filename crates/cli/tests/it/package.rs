//! What `scripts/release.sh` makes: complete, the same each time, and starting nothing by itself. With a stand-in for the
//! binary, so that it takes a second; `scripts/guest` installs the package with the real one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Ran, TestDir, command};

const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn tool(name: &str) -> Command {
    command(Path::new(name))
}

/// A shell script of the place.
fn program(place: &TestDir, name: &str, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let program = place.file(name, text);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program
}

/// A stand-in for the binary. Its completions and manual pages are the real ones.
fn stand_in(place: &TestDir) -> PathBuf {
    let text = concat!("#!/bin/sh\nexec '", env!("CARGO_BIN_EXE_ringfence"), "' \"$@\"\n");
    program(place, "stand-in", text)
}

/// Packages a stand-in into a directory of the place; answers the tarball and the Debian package.
fn release(place: &TestDir, into: &str) -> (PathBuf, PathBuf) {
    let stand_in = stand_in(place);
    let out = place.temp.path().join(into);
    let mut script = command(&root().join("scripts/release.sh"));
    Ran::of(
        script
            .args(["--without", "rpm,image"])
            .arg(&out)
            .env("RINGFENCE_BIN", stand_in),
    )
    .expect(0);
    let sums = fs::read_to_string(out.join("SHA256SUMS")).unwrap();
    Ran::of(
        tool("sha256sum")
            .args(["--check", "--strict", "SHA256SUMS"])
            .current_dir(&out),
    )
    .expect(0);
    let files: Vec<PathBuf> = sums
        .lines()
        .map(|line| out.join(line.split_once("  ").unwrap().1))
        .collect();
    let [tarball, package, bom] = files.try_into().unwrap();
    check_bom(&bom);
    assert!(
        !out.join("install.sh").exists() && !out.join("SHA256SUMS.sig").exists(),
        "without a key"
    );
    (tarball, package)
}

#[test]
fn files_of_two_architectures_are_in_one_list() {
    let place = TestDir::new();
    let stand_in = stand_in(&place);
    // What emulates an arm64 machine, which the stand-in is not for.
    program(&place, "qemu-aarch64-static", "#!/bin/sh\nexec \"$@\"\n");
    let path = format!("{}:{}", place.temp.path().display(), std::env::var("PATH").unwrap());
    let out = place.temp.path().join("both");
    let names = || {
        let sums = fs::read_to_string(out.join("SHA256SUMS")).unwrap();
        let mut names: Vec<String> = sums
            .lines()
            .filter_map(|line| Some(line.split_once("  ")?.1.split_once("linux-")?.1.to_owned()))
            .collect();
        names.sort();
        (sums.lines().count(), names)
    };
    // The second time, those of the other architecture are there; and what was changed meanwhile is not listed again.
    for (arch, want) in [
        ("arm64", (2, vec!["arm64.tar.gz"])),
        ("amd64", (4, vec!["amd64.tar.gz", "arm64.tar.gz"])),
        ("arm64", (4, vec!["amd64.tar.gz", "arm64.tar.gz"])),
    ] {
        let mut script = command(&root().join("scripts/release.sh"));
        let words = ["--arch", arch, "--without", "rpm,image,sbom", "--fast"];
        let ran = script
            .args(words)
            .arg(&out)
            .env("RINGFENCE_BIN", &stand_in)
            .env("PATH", &path);
        Ran::of(ran).expect(0);
        let (count, listed) = names();
        assert_eq!((count, listed.iter().map(String::as_str).collect()), want);
    }
    let package = |end: &str| {
        let mut entries = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        entries.find(|path| path.to_str().unwrap().ends_with(end)).unwrap()
    };
    let told = Ran::of(
        tool("dpkg-deb")
            .arg("-f")
            .arg(package("_arm64.deb"))
            .arg("Architecture"),
    )
    .expect(0);
    assert_eq!(told.stdout.trim(), "arm64");
    fs::write(package("amd64.tar.gz"), "another").unwrap();
    let mut script = command(&root().join("scripts/release.sh"));
    let words = ["--arch", "arm64", "--without", "rpm,image,sbom", "--fast"];
    Ran::of(
        script
            .args(words)
            .arg(&out)
            .env("RINGFENCE_BIN", &stand_in)
            .env("PATH", &path),
    )
    .expect(0);
    assert_eq!(names(), (2, vec!["arm64.tar.gz".to_owned()]));
    let mut script = command(&root().join("scripts/release.sh"));
    let refused = Ran::of(script.args(["--arch", "riscv64"]).arg(&out)).expect(2);
    assert!(refused.stderr.contains("amd64 or arm64"), "{}", refused.stderr);
}

/// Every package that is built in is in the bill of materials, with its licence and hash.
fn check_bom(file: &Path) {
    let bom: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(
        (&bom["bomFormat"], &bom["specVersion"]),
        (&"CycloneDX".into(), &"1.5".into())
    );
    let components = bom["components"].as_array().unwrap();
    for name in ["tokio", "rustls", "aws-lc-sys"] {
        let found = components.iter().find(|component| component["name"] == name).unwrap();
        assert!(found["licenses"][0]["expression"].is_string(), "{found}");
        assert_eq!(
            found["hashes"][0]["content"].as_str().map(str::len),
            Some(64),
            "{found}"
        );
    }
    assert!(
        components.iter().all(|component| component["name"] != "tempfile"),
        "what only tests use"
    );
}

/// Every file of a listing of `tar -tv`, with its mode and owner.
fn listed(listing: &str) -> BTreeMap<String, (String, String)> {
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words[5].to_owned(), (words[0].to_owned(), words[1].to_owned()))
    };
    listing
        .lines()
        .map(entry)
        .filter(|(name, _)| !name.ends_with('/'))
        .collect()
}

#[test]
fn both_packages_are_whole_and_the_same_each_time() {
    let place = TestDir::new();
    let (tarball, package) = release(&place, "one");
    let (again, package_again) = release(&place, "two");
    assert_eq!(fs::read(&tarball).unwrap(), fs::read(again).unwrap());
    assert_eq!(fs::read(&package).unwrap(), fs::read(package_again).unwrap());

    let ran = Ran::of(tool("tar").arg("-tvf").arg(&tarball)).expect(0);
    let inside: Vec<String> = listed(&ran.stdout)
        .into_iter()
        .filter_map(|(name, (mode, owner))| {
            assert_eq!(owner, "0/0", "{name}");
            let (top, name) = name.split_once('/')?;
            assert!(top.starts_with("ringfence-"), "{top}");
            assert_eq!(
                mode,
                if name == "ringfence" {
                    "-rwxr-xr-x"
                } else {
                    "-rw-r--r--"
                },
                "{name}"
            );
            (!name.starts_with("docs/") && !name.starts_with("share/man/")).then(|| name.to_owned())
        })
        .collect();
    let files = [
        "CHANGELOG.md",
        "README.md",
        "SECURITY.md",
        "copyright",
        "monitoring/alerts.yml",
        "monitoring/grafana-dashboard.json",
        "ringfence",
        "ringfence.service",
        "ringfence.toml",
        "share/bash-completion/completions/ringfence",
        "share/fish/vendor_completions.d/ringfence.fish",
        "share/zsh/site-functions/_ringfence",
    ];
    assert_eq!(inside, files);

    let ran = Ran::of(tool("dpkg-deb").arg("-c").arg(&package)).expect(0);
    let doc = "./usr/share/doc/ringfence/";
    let inside: Vec<(String, String)> = listed(&ran.stdout)
        .into_iter()
        .filter(|(name, _)| {
            !name.starts_with(&format!("{doc}docs/")) && !name.starts_with("./usr/share/man/man1/ringfence-")
        })
        .map(|(name, (mode, owner))| {
            assert_eq!(owner, "root/root", "{name}");
            (name, mode)
        })
        .collect();
    let readable = "-rw-r--r--";
    let expected = [
        // It may come to hold the password of a database.
        ("./etc/ringfence/ringfence.toml".to_owned(), "-rw-------"),
        ("./usr/bin/ringfence".to_owned(), "-rwxr-xr-x"),
        ("./usr/lib/systemd/system/ringfence.service".to_owned(), readable),
        ("./usr/share/bash-completion/completions/ringfence".to_owned(), readable),
        (format!("{doc}README.md"), readable),
        (format!("{doc}SECURITY.md"), readable),
        (format!("{doc}changelog.gz"), readable),
        (format!("{doc}copyright"), readable),
        (format!("{doc}monitoring/alerts.yml"), readable),
        (format!("{doc}monitoring/grafana-dashboard.json"), readable),
        (
            "./usr/share/fish/vendor_completions.d/ringfence.fish".to_owned(),
            readable,
        ),
        ("./usr/share/man/man1/ringfence.1.gz".to_owned(), readable),
        ("./usr/share/zsh/vendor-completions/_ringfence".to_owned(), readable),
    ];
    assert_eq!(inside, expected.map(|(name, mode)| (name, mode.to_owned())));

    let control = place.temp.path().join("control");
    Ran::of(tool("dpkg-deb").arg("-e").arg(&package).arg(&control)).expect(0);
    assert_eq!(
        fs::read_to_string(control.join("conffiles")).unwrap(),
        "/etc/ringfence/ringfence.toml\n"
    );
    let text = fs::read_to_string(control.join("control")).unwrap();
    assert!(
        text.contains(&format!("\nVersion: {}", env!("CARGO_PKG_VERSION")))
            && !text.contains("@VERSION")
            && !text.contains("@SIZE"),
        "{text}"
    );
    let unpacked = place.temp.path().join("unpacked");
    Ran::of(tool("dpkg-deb").arg("-x").arg(&package).arg(&unpacked)).expect(0);
    assert_pictures(&unpacked.join("usr/share/doc/ringfence/docs"));
    let mut sums = tool("md5sum");
    Ran::of(
        sums.args(["--check", "--strict"])
            .arg(control.join("md5sums"))
            .current_dir(&unpacked),
    )
    .expect(0);
    for script in SCRIPTS {
        Ran::of(tool("sh").arg("-n").arg(control.join(script))).expect(0);
    }
}

#[test]
fn both_packages_recommend_a_criu_that_is_not_passed_over() {
    let control = fs::read_to_string(root().join("packaging/debian/control")).unwrap();
    let recommended = control
        .lines()
        .find_map(|line| line.strip_prefix("Recommends: "))
        .unwrap();
    assert!(
        recommended.split(", ").any(|package| package == "criu (>= 4.2)"),
        "{recommended}"
    );
    let place = TestDir::new();
    let mut described = tool("python3");
    described
        .arg(root().join("scripts/release/rpm.py"))
        .arg(place.temp.path());
    let described = Ran::of(described.arg("1").arg(root().join("packaging/rpm"))).expect(0);
    let (_, recommended) = described.stdout.split_once(".recommends]\n").unwrap();
    assert!(
        recommended.lines().any(|line| line == "criu = \">= 4.2\""),
        "{recommended}"
    );
}

#[test]
fn licences_of_what_is_built_in_are_given_along() {
    let place = TestDir::new();
    let (_, package) = release(&place, "one");
    let unpacked = place.temp.path().join("unpacked");
    Ran::of(tool("dpkg-deb").arg("-x").arg(&package).arg(&unpacked)).expect(0);
    let text = fs::read_to_string(unpacked.join("usr/share/doc/ringfence/copyright")).unwrap();
    for part in [
        "Apache License",
        "GNU Lesser General Public License",
        "\ntokio 1.",
        "\nrustls 0.",
        "\naws-lc-sys 0.",
    ] {
        assert!(text.contains(part), "{part} is missing");
    }
}

#[test]
fn systemd_understands_the_unit() {
    let place = TestDir::new();
    let unit = fs::read_to_string(root().join("packaging/ringfence.service")).unwrap();
    // The program of the unit has to be there for the check.
    let there = unit.replace("/usr/bin/ringfence", env!("CARGO_BIN_EXE_ringfence"));
    assert_ne!(unit, there);
    let file = place.file("ringfence.service", &there);
    let ran = Ran::of(tool("systemd-analyze").args(["verify", "--man=no"]).arg(file)).expect(0);
    assert_eq!(ran.stderr, "");
    assert!(unit.contains("\nKillMode=process\n"));
    // Whatever needs a filter or this flag would be inherited by sandboxes.
    for line in unit.lines().filter(|line| !line.starts_with('#')) {
        for setting in [
            "NoNewPrivileges",
            "SystemCall",
            "Restrict",
            "Lock",
            "MemoryDeny",
            "Private",
            "ProtectC",
            "ProtectK",
        ] {
            assert!(!line.starts_with(setting), "{line}");
        }
    }
}

#[test]
fn the_configuration_that_is_installed_is_valid_with_every_line_in_use() {
    let place = TestDir::new();
    let installed = fs::read_to_string(root().join("packaging/ringfence.toml")).unwrap();
    let keys: Vec<&str> = installed.lines().filter_map(|line| line.strip_prefix("#: ")).collect();
    assert!(keys.len() > 5, "{keys:?}");
    // Every line is a comment, so nothing is decided for the host's owner.
    assert!(installed.lines().all(|line| line.is_empty() || line.starts_with('#')));
    // Read and checked before anything is done; without a data directory there is nothing to end.
    for (content, part) in [
        (keys.join("\n"), "no data directory"),
        (format!("{}\nx = 1", keys.join("\n")), "unknown"),
    ] {
        let file = place.file("ringfence.toml", &content);
        let ran = place.run(&["down", "--config", file.to_str().unwrap()]);
        assert!(ran.code != Some(0) && ran.stderr.contains(part), "{ran:?}");
    }
}

#[test]
fn the_version_is_told() {
    let ran = TestDir::new().run(&["--version"]).expect(0);
    assert!(
        ran.stdout.starts_with(concat!("ringfence ", env!("CARGO_PKG_VERSION"))),
        "{ran:?}"
    );
}

/// Checks that the pictures of all pages are beside them.
fn assert_pictures(docs: &Path) {
    let mut shown = 0;
    let mut directories = vec![docs.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let page = fs::read_to_string(&path).unwrap();
                for picture in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                    if picture.ends_with(".png") {
                        assert!(directory.join(picture).is_file(), "{}: {picture}", path.display());
                        shown += 1;
                    }
                }
            }
        }
    }
    assert!(shown > 0, "no page has a picture");
}
