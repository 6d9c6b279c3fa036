//! `install.sh` of a release, from a server on this machine: it installs what is signed and whole, nothing else, and removes
//! what it has installed. The program in the packages is a stand-in, so that packing takes a second; `conformance/install` has
//! the real one on fresh systems.
//!
//! What installs does so in mounts of its own, over which nothing of the host changes: neither what the host has installed nor
//! another test matters.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::{Ran, command};

/// What the stand-in of the program does: it makes completions as the real one does, and finds every host fit.
const STAND_IN: &str = r#"#!/bin/sh
case $1 in
    completions | manual) exec '@REAL@' "$@" ;;
    doctor) echo 'ok        stand-in' ;;
    *) echo "$*" ;;
esac
"#;

/// A signed release.
struct Release {
    place: TempDir,
}

impl Release {
    /// Makes the one that all tests share and none changes.
    fn get() -> &'static Self {
        static RELEASE: OnceLock<Release> = OnceLock::new();
        RELEASE.get_or_init(|| {
            use std::os::unix::fs::PermissionsExt as _;
            let place = tempfile::tempdir().unwrap();
            let (stand_in, key) = (place.path().join("stand-in"), place.path().join("key.pem"));
            fs::write(&stand_in, STAND_IN.replace("@REAL@", env!("CARGO_BIN_EXE_ringfence"))).unwrap();
            fs::set_permissions(&stand_in, fs::Permissions::from_mode(0o755)).unwrap();
            let mut openssl = command(Path::new("openssl"));
            Ran::of(openssl.args(["genpkey", "-algorithm", "ed25519", "-out"]).arg(&key)).expect(0);
            let mut script = command(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/release.sh"));
            script
                .args(["--without", "rpm,image", "--fast"])
                .arg(place.path().join("dist"));
            let ran = Ran::of(
                script
                    .env("RINGFENCE_BIN", stand_in)
                    .env("RINGFENCE_SIGNING_KEY_FILE", &key),
            )
            .expect(0);
            let secret = fs::read_to_string(&key).unwrap();
            let secret = secret.lines().nth(1).unwrap();
            assert!(
                !ran.stdout.contains(secret) && !ran.stderr.contains(secret),
                "the key was shown"
            );
            Self { place }
        })
    }

    fn dist(&self) -> PathBuf {
        self.place.path().join("dist")
    }

    /// A copy, to be spoiled.
    fn copy(&self) -> TempDir {
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(self.dist()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        copy
    }
}

/// Serves the files of a directory until the program of the tests ends; answers its address.
fn serve(directory: &Path) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let directory = directory.to_owned();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that has gone away gets nothing.
            let _ = stream.and_then(|stream| answer(stream, &directory));
        }
    });
    address
}

fn answer(stream: TcpStream, directory: &Path) -> std::io::Result<()> {
    answer_with(stream, directory, |_| false)
}

/// Answers a request, with half of what it promises where `breaks_off` says so of the name.
fn answer_with(mut stream: TcpStream, directory: &Path, breaks_off: impl Fn(&str) -> bool) -> std::io::Result<()> {
    let (mut request, mut bytes) = (Vec::new(), [0; 4096]);
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            count => request.extend(&bytes[..count]),
        }
    }
    let request = String::from_utf8_lossy(&request).into_owned();
    let name = request.split(' ').nth(1).unwrap_or_default().trim_start_matches('/');
    let (status, content) = match fs::read(directory.join(name)) {
        Ok(content) => ("200 OK", content),
        Err(_) => ("404 Not Found", Vec::new()),
    };
    let length = content.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    let sent = if breaks_off(name) { length / 2 } else { length };
    stream.write_all(&content[..sent])
}

fn install(script: &Path) -> Command {
    let mut sh = command(Path::new("sh"));
    sh.arg(script);
    sh
}

/// What would be installed from this directory.
fn look(dist: &Path) -> Ran {
    Ran::of(install(&dist.join("install.sh")).args(["--dry-run", "--format", "tarball", "--url", &serve(dist)]))
}

fn named(dist: &Path, end: &str) -> PathBuf {
    let entries = fs::read_dir(dist).unwrap().map(|entry| entry.unwrap().path());
    let mut found = entries.filter(|path| path.to_string_lossy().ends_with(end));
    found.next().unwrap()
}

#[test]
fn a_dry_run_checks_everything_and_changes_nothing() {
    let dist = Release::get().dist();
    for (format, file) in [("tarball", ".tar.gz"), ("deb", ".deb")] {
        let url = serve(&dist);
        let ran =
            Ran::of(install(&dist.join("install.sh")).args(["--dry-run", "--format", format, "--url", &url])).expect(0);
        let name = named(&dist, file).file_name().unwrap().to_string_lossy().into_owned();
        assert!(ran.stdout.contains(&format!("{name} is signed and whole")), "{ran:?}");
        assert!(ran.stdout.contains("nothing was changed"), "{ran:?}");
    }
}

#[test]
fn what_was_changed_on_the_way_is_refused() {
    let append = |path: PathBuf, content: &[u8]| {
        let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
        file.write_all(content).unwrap();
    };
    type Spoil<'a> = &'a dyn Fn(&Path);
    let resigned = |dist: &Path| {
        // By another key.
        let key = dist.join("other.pem");
        let mut openssl = command(Path::new("openssl"));
        Ran::of(openssl.args(["genpkey", "-algorithm", "ed25519", "-out"]).arg(&key)).expect(0);
        let mut openssl = command(Path::new("openssl"));
        openssl.args(["pkeyutl", "-sign", "-rawin", "-inkey"]).arg(&key);
        openssl
            .arg("-in")
            .arg(dist.join("SHA256SUMS"))
            .arg("-out")
            .arg(dist.join("raw"));
        Ran::of(&mut openssl).expect(0);
        let mut base64 = command(Path::new("base64"));
        let text = Ran::of(base64.arg("-w0").arg(dist.join("raw"))).expect(0).stdout;
        fs::write(dist.join("SHA256SUMS.sig"), text).unwrap();
    };
    let older = |dist: &Path| {
        // Signed, and of another version than the program that installs.
        let script = fs::read_to_string(dist.join("install.sh")).unwrap();
        let line = script
            .lines()
            .find(|line| line.trim_start().starts_with("version="))
            .unwrap();
        fs::write(dist.join("install.sh"), script.replace(line, "version='99.0.0'")).unwrap();
    };
    let cut = |path: PathBuf| {
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    };
    let cases: [(&str, Spoil<'_>, &str); 11] = [
        (
            "the package",
            &|dist| append(named(dist, ".tar.gz"), b"x"),
            "has the SHA-256",
        ),
        (
            "the checksums",
            &|dist| append(dist.join("SHA256SUMS"), b"\n"),
            "is not signed",
        ),
        (
            "the signature",
            &|dist| fs::write(dist.join("SHA256SUMS.sig"), "AAAA").unwrap(),
            "is not signed",
        ),
        (
            "no signature",
            &|dist| fs::remove_file(dist.join("SHA256SUMS.sig")).unwrap(),
            "could not be downloaded",
        ),
        ("another key", &resigned, "is not signed"),
        (
            "no package",
            &|dist| fs::remove_file(named(dist, ".tar.gz")).unwrap(),
            "could not be downloaded",
        ),
        ("another version", &older, "has no ringfence-99.0.0-linux-"),
        ("half a package", &|dist| cut(named(dist, ".tar.gz")), "has the SHA-256"),
        ("half a list", &|dist| cut(dist.join("SHA256SUMS")), "is not signed"),
        (
            "half a signature",
            &|dist| cut(dist.join("SHA256SUMS.sig")),
            "is not signed",
        ),
        (
            "an empty list",
            &|dist| fs::write(dist.join("SHA256SUMS"), "").unwrap(),
            "is empty",
        ),
    ];
    for (what, spoil, why) in cases {
        let dist = Release::get().copy();
        spoil(dist.path());
        let ran = look(dist.path());
        assert_eq!(ran.code, Some(1), "{what}: {ran:?}");
        assert!(ran.stderr.contains(why), "{what}: {ran:?}");
        assert!(!ran.stdout.contains("would"), "{what}: {ran:?}");
    }
}

#[test]
fn a_copy_that_was_cut_off_does_nothing() {
    let dist = Release::get().copy();
    let script = fs::read(dist.path().join("install.sh")).unwrap();
    let cut = dist.path().join("cut.sh");
    // The last line is `main "$@"`.
    for length in (0..script.len() - "main \"$@\"\n".len()).step_by(97) {
        fs::write(&cut, &script[..length]).unwrap();
        let ran = Ran::of(install(&cut).args(["--help"]));
        assert_eq!(ran.stdout, "", "{length}: {ran:?}");
    }
    assert!(
        Ran::of(install(&dist.path().join("install.sh")).arg("--help"))
            .expect(0)
            .stdout
            .contains("--dry-run")
    );
}

/// A server that promises more than it sends.
fn serve_half(directory: &Path, name: &'static str) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let directory = directory.to_owned();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer_with(stream, &directory, |asked| asked.ends_with(name));
        }
    });
    address
}

#[test]
fn a_download_that_breaks_off_installs_nothing() {
    let dist = Release::get().dist();
    for name in [".tar.gz", "SHA256SUMS", "SHA256SUMS.sig"] {
        let url = serve_half(&dist, name);
        let ran = Ran::of(install(&dist.join("install.sh")).args(["--dry-run", "--format", "tarball", "--url", &url]))
            .expect(1);
        assert!(ran.stderr.contains("could not be downloaded"), "{name}: {ran:?}");
        assert!(!ran.stdout.contains("would"), "{name}: {ran:?}");
    }
}

#[test]
fn a_machine_of_another_kind_is_refused_before_anything_is_fetched() {
    let script = Release::get().dist().join("install.sh");
    let mut as_32_bit = command(Path::new("setarch"));
    as_32_bit
        .args(["linux32", "sh"])
        .arg(script)
        .args(["--dry-run", "--url", "http://127.0.0.1:1"]);
    let ran = Ran::of(&mut as_32_bit).expect(1);
    assert!(
        ran.stderr.contains("needs Linux on x86-64 or arm64; this is Linux on "),
        "{ran:?}"
    );
    assert_eq!(ran.stdout, "");
}

#[test]
fn without_root_nothing_is_installed_or_removed() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    const NOBODY: u32 = 65534;
    let dist = Release::get().copy();
    fs::set_permissions(dist.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for words in [
        &["--url", "http://127.0.0.1:1"][..],
        &["--uninstall"],
        &["--uninstall", "--purge"],
    ] {
        let mut plain = install(&dist.path().join("install.sh"));
        plain.args(words);
        if rustix::process::geteuid().is_root() {
            plain.uid(NOBODY).gid(NOBODY);
        }
        let ran = Ran::of(&mut plain).expect(1);
        assert!(
            ran.stderr.contains("run this as root, for example: sudo sh install.sh"),
            "{words:?}: {ran:?}"
        );
        assert_eq!(ran.stdout, "", "{words:?}");
    }
    // To look needs no rights.
    let mut plain = install(&dist.path().join("install.sh"));
    plain.args(["--dry-run", "--format", "tarball", "--url", &serve(dist.path())]);
    if rustix::process::geteuid().is_root() {
        plain.uid(NOBODY).gid(NOBODY);
    }
    assert!(Ran::of(&mut plain).expect(0).stdout.contains("nothing was changed"));
}

#[test]
fn wrong_words_are_explained() {
    let script = Release::get().dist().join("install.sh");
    for (words, why) in [
        (&["--dry-run"][..], "--url"),
        (&["--dry-run", "--url", "ftp://x"], "https://"),
        (&["--dry-run", "--url"], "needs a value"),
        (
            &["--dry-run", "--url", "http://127.0.0.1:1", "--format", "apk"],
            "deb, rpm or tarball",
        ),
        (&["--purge"], "--uninstall"),
        (&["--frobnicate"], "unknown option"),
    ] {
        let ran = Ran::of(install(&script).args(words)).expect(2);
        assert!(ran.stderr.contains(why), "{words:?}: {ran:?}");
    }
}

/// Runs as root, in mounts of its own, so that the host stays as it is.
const TWICE: &str = r#"
set -eu
cd "$1"
mkdir upper
mount -t tmpfs none upper
for place in etc var usr; do
    name=$place
    mkdir upper/$name upper/$name.work
    mount -t overlay none -o lowerdir=/$place,upperdir=upper/$name,workdir=upper/$name.work /$place
done
# No service manager, whatever the host has.
mount -t tmpfs none /run
left() { find upper/etc upper/var upper/usr \( -type f -o -type l \) | sort; }
sh install.sh --url "$2" --format tarball
echo kept >>/etc/ringfence/ringfence.toml
left >../first
sh install.sh --url "$2" --format tarball
left >../second
cmp ../first ../second
tail -n 1 /etc/ringfence/ringfence.toml
ringfence up
test -s /usr/local/share/man/man1/ringfence-up.1.gz
test -s /usr/local/share/bash-completion/completions/ringfence
sh install.sh --uninstall
echo after the removal: $(left)
sh install.sh --uninstall
mkdir /var/lib/ringfence
sh install.sh --uninstall --purge || echo kept the data: $?
sh install.sh --url "$2" --format tarball --no-start
echo data >/var/lib/ringfence/x
sh install.sh --uninstall --dry-run
test -x /usr/local/bin/ringfence
sh install.sh --uninstall --purge
echo after the purge: $(left)
"#;

#[test]
fn what_is_installed_twice_is_removed_without_rest() {
    let dist = Release::get().copy();
    if !rustix::process::geteuid().is_root() {
        let ran = Ran::of(install(&dist.path().join("install.sh")).args(["--url", "http://127.0.0.1:1"])).expect(1);
        assert!(ran.stderr.contains("as root"), "{ran:?}");
        return;
    }
    let url = serve(dist.path());
    let place = tempfile::tempdir().unwrap();
    let home = place.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::copy(dist.path().join("install.sh"), home.join("install.sh")).unwrap();
    let mut own = command(Path::new("unshare"));
    own.args(["--mount", "--propagation", "private", "sh", "-c", TWICE, "sh"])
        .arg(&home)
        .arg(url);
    let ran = Ran::of(&mut own).expect(0);
    for line in [
        "kept",
        "up",
        "after the removal: upper/etc/ringfence/ringfence.toml",
        "install.sh: ringfence is not installed",
        "kept the data: 1",
        "after the purge:",
    ] {
        assert!(ran.stdout.lines().any(|said| said == line), "{line}: {ran:?}");
    }
    assert_eq!(ran.stdout.matches("there is no systemd").count(), 2, "{ran:?}");
    assert!(ran.stdout.contains("not started, as you wished"), "{ran:?}");
}
