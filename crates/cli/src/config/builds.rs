//! Values of the keys of builds of templates.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context as _;

use super::egress::upstream_roots;
use super::values::file;

/// The certificates of files, by registry.
pub(crate) fn registry_authorities(files: &BTreeMap<String, PathBuf>) -> anyhow::Result<BTreeMap<String, String>> {
    let read = |(host, path): (&String, &PathBuf)| {
        upstream_roots(path).with_context(|| format!("builds.registry_ca_files: {host}"))?;
        let pem = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        Ok((host.clone(), certificates(&pem)))
    };
    files.iter().map(read).collect()
}

/// The certificates of a text in PEM, and nothing else of it: a private key beside them stays on the host.
fn certificates(pem: &str) -> String {
    let mut kept = String::new();
    let mut is_inside = false;
    for line in pem.lines() {
        is_inside |= line.starts_with("-----BEGIN CERTIFICATE-----");
        if is_inside {
            kept.push_str(line);
            kept.push('\n');
        }
        is_inside &= !line.starts_with("-----END");
    }
    kept
}

/// The entries of a list; none of them is empty.
fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty() && *entry != "none")
}

fn is_host(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || ".-:[]".contains(c);
    !text.is_empty() && text.chars().all(allowed)
}

pub(super) fn hosts(text: &str) -> Result<Vec<String>, String> {
    entries(text)
        .map(|host| {
            if is_host(host) {
                Ok(host.to_owned())
            } else {
                Err(format!("{host:?} is not a host or host:port"))
            }
        })
        .collect()
}

pub(super) fn ca_files(text: &str) -> Result<BTreeMap<String, PathBuf>, String> {
    entries(text)
        .map(|entry| match entry.split_once('=') {
            Some((host, path)) if is_host(host.trim()) => Ok((host.trim().to_owned(), file(path.trim())?)),
            Some(_) | None => Err(format!("{entry:?} is not host=file")),
        })
        .collect()
}

pub(super) fn mirrors(text: &str) -> Result<BTreeMap<String, String>, String> {
    entries(text)
        .map(|entry| match entry.split_once('=') {
            Some((from, to)) if is_host(from.trim()) && is_host(to.trim()) => {
                Ok((from.trim().to_owned(), to.trim().to_owned()))
            }
            Some(_) | None => Err(format!("{entry:?} is not host=host")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_registries_are_checked() {
        assert_eq!(hosts(" a.b:5000, c ").unwrap(), ["a.b:5000", "c"]);
        assert_eq!(hosts("none").unwrap(), Vec::<String>::new());
        assert!(hosts("http://a").is_err());
        let one = mirrors("docker.io=mirror.local:5000").unwrap();
        assert_eq!(one.get("docker.io").map(String::as_str), Some("mirror.local:5000"));
        for bad in ["docker.io", "a=b/c", "=a"] {
            assert!(mirrors(bad).is_err(), "{bad}");
        }
        let files = ca_files("a.b:5000 = /etc/a.pem, c=/b").unwrap();
        assert_eq!(files.get("a.b:5000"), Some(&PathBuf::from("/etc/a.pem")));
        assert_eq!(files.get("c"), Some(&PathBuf::from("/b")));
        for bad in ["a", "a=", "=/etc/a.pem", "https://a=/b"] {
            assert!(ca_files(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn files_of_authorities_must_hold_certificates() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca.pem");
        let files = BTreeMap::from([("a.b".to_owned(), path.clone())]);
        assert!(registry_authorities(&files).is_err());
        std::fs::write(&path, "nothing").unwrap();
        let error = registry_authorities(&files).unwrap_err();
        assert!(format!("{error:#}").contains("a.b"), "{error:#}");
        let made = rcgen::generate_simple_self_signed(["a.b".to_owned()]).unwrap();
        // The key is not read.
        let text = format!("{}{}", made.signing_key.serialize_pem(), made.cert.pem());
        std::fs::write(&path, text.replace('\n', "\r\n")).unwrap();
        assert_eq!(
            registry_authorities(&files).unwrap()["a.b"],
            made.cert.pem().replace("\r\n", "\n")
        );
    }
}
