//! Package sources of `apt` in a sandbox: the host's sources that contain no secrets.
//!
//! A source is copied if it is public: no user or password in its address, nothing that looks like a key, no file of
//! the host. Comments, proxies, pins and credentials of the host are not copied. Keyrings are copied if they contain
//! only public keys.

use std::fs;
use std::io;
use std::path::Path;

use super::copy::{create_dir, put, read_public};

/// Directories of keyrings that a source may name: those that are visible inside.
const KEYRINGS: [&str; 3] = ["/usr/share/keyrings/", "/etc/apt/keyrings/", "/etc/apt/trusted.gpg.d/"];
/// Start of a public key in text form.
const BEGIN: &str = "-----BEGIN PGP PUBLIC KEY BLOCK-----";
/// Minimum length of a random-looking part of an address to be considered a key.
const KEY_LENGTH: usize = 16;

/// Fills `/etc/apt` with sources and keyrings.
pub(super) fn copy(host: &Path, etc: &Path) -> io::Result<()> {
    let mut any = false;
    for dir in [
        "apt/keyrings",
        "apt/trusted.gpg.d",
        "apt/sources.list.d",
        "apt/apt.conf.d",
        "apt/preferences.d",
    ] {
        create_dir(&etc.join(dir), 0o755)?;
    }
    for dir in ["apt/keyrings", "apt/trusted.gpg.d"] {
        for name in names_in(&host.join("etc").join(dir)) {
            copy_keyring(host, etc, &format!("{dir}/{name}"))?;
        }
    }
    copy_keyring(host, etc, "apt/trusted.gpg")?;
    let listed = names_in(&host.join("etc/apt/sources.list.d"));
    let files = listed.iter().map(|name| format!("apt/sources.list.d/{name}"));
    for file in files.chain(["apt/sources.list".to_owned()]) {
        let Some(content) = read_public(&host.join("etc").join(&file))? else {
            continue;
        };
        let text = String::from_utf8_lossy(&content);
        let kept = match Path::new(&file).extension().and_then(|extension| extension.to_str()) {
            Some("list") => lines(&text),
            Some("sources") => stanzas(&text),
            _ => continue,
        };
        if !kept.is_empty() {
            any = true;
            put(&etc.join(&file), 0o644, kept)?;
        }
    }
    if !any {
        let release = fs::read_to_string(host.join("usr/lib/os-release")).unwrap_or_default();
        if let Some(text) = of_distribution(&release) {
            put(&etc.join("apt/sources.list.d/distribution.sources"), 0o644, text)?;
        }
    }
    Ok(())
}

/// Names of the files of a directory that `apt` reads.
fn names_in(dir: &Path) -> Vec<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.chars().all(plain))
        .collect();
    names.sort();
    names
}

fn copy_keyring(host: &Path, etc: &Path, file: &str) -> io::Result<()> {
    match read_public(&host.join("etc").join(file))? {
        Some(content) if is_public_key(&content) => put(&etc.join(file), 0o644, content),
        _ => Ok(()),
    }
}

/// Whether a keyring begins with a public key: as text, or as a packet of type 6 in either format (RFC 9580, 4.2).
pub(super) fn is_public_key(content: &[u8]) -> bool {
    content.starts_with(BEGIN.as_bytes()) || content.first().is_some_and(|first| matches!(first, 0x98..=0x9b | 0xc6))
}

/// The public sources of a file in one-line format.
pub(super) fn lines(text: &str) -> String {
    let sources = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim());
    let kept: Vec<&str> = sources.filter(|line| is_open_line(line)).collect();
    joined(&kept, "\n")
}

fn is_open_line(line: &str) -> bool {
    let Some(rest) = line.strip_prefix("deb-src ").or_else(|| line.strip_prefix("deb ")) else {
        return false;
    };
    let rest = rest.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inner) => match inner.split_once(']') {
            Some(split) => split,
            None => return false,
        },
        None => ("", rest),
    };
    let open = |option: &str| match option.split_once('=') {
        Some((name, value)) if name.eq_ignore_ascii_case("signed-by") => value.split(',').all(is_open_keyring),
        Some(_) => true,
        None => false,
    };
    let uri = rest.split_whitespace().next().unwrap_or_default();
    options.split_whitespace().all(open) && is_open(uri)
}

/// The public sources of a file in deb822 format.
pub(super) fn stanzas(text: &str) -> String {
    let uncommented: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let kept: Vec<String> = uncommented
        .split(|line| line.trim().is_empty())
        .filter(|stanza| is_open_stanza(stanza))
        .map(|stanza| stanza.join("\n"))
        .collect();
    joined(&kept, "\n\n")
}

fn is_open_stanza(stanza: &[&str]) -> bool {
    let mut addresses = 0;
    let mut field = "";
    let mut embedded_key = false;
    for line in stanza {
        let value = if line.starts_with([' ', '\t']) {
            line.trim()
        } else if let Some((name, value)) = line.split_once(':') {
            field = name;
            value.trim()
        } else {
            return false;
        };
        let open = if field.eq_ignore_ascii_case("URIs") {
            addresses += value.split_whitespace().count();
            value.split_whitespace().all(is_open)
        } else if field.eq_ignore_ascii_case("Signed-By") {
            // A key may be embedded in the lines that follow.
            embedded_key = embedded_key || value == BEGIN;
            embedded_key || value.split_whitespace().all(is_open_keyring)
        } else {
            true
        };
        if !open {
            return false;
        }
    }
    addresses > 0
}

/// Whether this is a keyring path that is visible inside, or a fingerprint.
fn is_open_keyring(value: &str) -> bool {
    let seen = KEYRINGS.iter().any(|dir| value.starts_with(dir)) && !value.contains("..");
    seen || value.chars().all(|c| c.is_ascii_hexdigit() || c == '!')
}

/// Whether an address is public.
fn is_open(uri: &str) -> bool {
    let schemes = ["http://", "https://", "ftp://", "mirror+http://", "mirror+https://"];
    let Some(rest) = schemes.iter().find_map(|scheme| uri.strip_prefix(scheme)) else {
        return false;
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._~/:+$()[]".contains(c);
    let parts = rest.split(['/', '.', ':', '_']);
    !rest.is_empty() && rest.chars().all(plain) && !parts.into_iter().any(looks_random)
}

/// Hexadecimal, as in a UUID, or digits or both cases among letters. The timestamp in the address of a snapshot, two
/// letters among digits, does not match.
fn looks_random(part: &str) -> bool {
    let hexadecimal: String = part.chars().filter(|c| *c != '-').collect();
    let random = |run: &str| {
        let count = |is: fn(&char) -> bool| run.chars().filter(is).count();
        let (lower, upper) = (count(char::is_ascii_lowercase), count(char::is_ascii_uppercase));
        let mixed = count(char::is_ascii_digit) > 0 || (lower > 0 && upper > 0);
        run.len() >= KEY_LENGTH && lower + upper > 2 && mixed
    };
    (hexadecimal.len() >= KEY_LENGTH && hexadecimal.chars().all(|c| c.is_ascii_hexdigit()))
        || part.split('-').any(random)
}

fn joined<T: AsRef<str>>(parts: &[T], between: &str) -> String {
    let mut text = String::new();
    for part in parts {
        if !text.is_empty() {
            text.push_str(between);
        }
        text.push_str(part.as_ref());
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

/// The archive of the distribution, for a host without public sources.
pub(super) fn of_distribution(release: &str) -> Option<String> {
    let value = |key: &str| {
        let line = release
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
        Some(line.trim_matches('"'))
    };
    let suite = value("VERSION_CODENAME")?;
    let (uri, security, components, keyring) = match value("ID")? {
        "debian" => (
            "http://deb.debian.org/debian",
            "http://deb.debian.org/debian-security",
            "main",
            "debian-archive-keyring.gpg",
        ),
        "ubuntu" => (
            "http://archive.ubuntu.com/ubuntu",
            "http://security.ubuntu.com/ubuntu",
            "main restricted universe multiverse",
            "ubuntu-archive-keyring.gpg",
        ),
        _ => return None,
    };
    let source = |uri: &str, suites: &str| {
        format!(
            "Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: {components}\n\
             Signed-By: /usr/share/keyrings/{keyring}\n"
        )
    };
    Some(format!(
        "{}\n{}",
        source(uri, &format!("{suite} {suite}-updates")),
        source(security, &format!("{suite}-security"))
    ))
}
