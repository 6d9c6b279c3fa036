//! What `base` is on this host, as other hosts can compare it: unlike the keys of versions, it is the same on all hosts with
//! the same packages.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use protocol::template_file::BaseVersion;
use sha2::{Digest, Sha256};

use super::packages;

/// The distribution and the packages of this host.
///
/// # Errors
/// When the host's package database cannot be read.
pub fn version_of_host() -> io::Result<BaseVersion> {
    base_of(Path::new("/"))
}

fn base_of(host: &Path) -> io::Result<BaseVersion> {
    let release = fs::read_to_string(host.join("etc/os-release"))
        .or_else(|_| fs::read_to_string(host.join("usr/lib/os-release")))
        .unwrap_or_default();
    let field = |name: &str| {
        let mut lines = release.lines().filter_map(|line| line.split_once('='));
        let value = lines.find(|(key, _)| *key == name).map_or("", |(_, value)| value);
        let plain = value
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
        plain.take(64).collect::<String>()
    };
    let system = format!("{}-{}-{}", field("ID"), field("VERSION_ID"), std::env::consts::ARCH);
    let status = match fs::read(host.join(packages::STATUS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        status => status?,
    };
    let status = String::from_utf8_lossy(&status);
    let mut packages = BTreeSet::new();
    for paragraph in status.split("\n\n") {
        let field = |name: &str| {
            let mut lines = paragraph.lines();
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        if let (Some(name), Some(version)) = (field("Package"), field("Version"))
            && field("Status").is_some_and(|status| status.ends_with(" installed"))
        {
            packages.insert((name, field("Architecture"), version));
        }
    }
    let mut text = String::new();
    for (name, architecture, version) in packages {
        let _ = writeln!(text, "{name} {} {version}", architecture.unwrap_or_default());
    }
    let packages = hex::encode(Sha256::digest(text));
    Ok(BaseVersion { system, packages })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_the_same_packages_have_the_same_base() {
        let host = |release: &str, status: &str| {
            let host = tempfile::tempdir().unwrap();
            fs::create_dir_all(host.path().join("etc")).unwrap();
            fs::create_dir_all(host.path().join("var/lib/dpkg")).unwrap();
            fs::write(host.path().join("etc/os-release"), release).unwrap();
            fs::write(host.path().join("var/lib/dpkg/status"), status).unwrap();
            base_of(host.path()).unwrap()
        };
        let package = |name, status, version| {
            format!(
                "Package: {name}\nStatus: install ok {status}\nArchitecture: all\nVersion: {version}\nDescription: {status}\n"
            )
        };
        let debian = "ID=debian\nVERSION_ID=\"12\"\n";
        let (a, b) = (package("a", "installed", 1), package("b", "installed", 2));
        let one = host(debian, &format!("{a}\n{b}"));
        assert_eq!(one.system, format!("debian-12-{}", std::env::consts::ARCH));
        let removed = package("c", "config-files", 1);
        assert_eq!(one, host(debian, &format!("{b}\n{removed}\n{a}")));
        let newer = host(debian, &format!("{a}\n{}", package("b", "installed", 3)));
        assert_eq!(newer.system, one.system);
        assert_ne!(newer.packages, one.packages);
        assert_ne!(host("ID=alpine\n", &a).system, one.system);
    }
}
