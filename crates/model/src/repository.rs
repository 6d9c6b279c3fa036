//! Repositories of a code host that a sandbox gets as working trees.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::network::domain::domain_name;

/// Maximum length of the address of a repository, in bytes.
pub const REPOSITORY_URL_MAX: usize = 512;
/// Maximum length of the token for a repository, in characters.
pub const REPOSITORY_TOKEN_MAX: usize = 1024;
/// Maximum length of the path at which a working tree stands, in bytes.
pub const MOUNT_PATH_MAX: usize = 1024;

/// The address of a repository, whatever form a client wrote it in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoryUrl {
    /// The code host, in lower case.
    pub host: String,
    owner: String,
    name: String,
}

/// Text that is not the address of a repository. It is not shown, because it may contain a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRepositoryUrl {
    /// Of unknown form.
    #[error("must be https://HOST/OWNER/NAME, or git@HOST:OWNER/NAME, with or without .git at the end")]
    Form,
    /// With a user or a password.
    #[error("must not contain credentials: send the token as authorization_token")]
    Credentials,
    /// Too long.
    #[error("must have at most {REPOSITORY_URL_MAX} bytes")]
    Length,
}

impl RepositoryUrl {
    /// The address for HTTPS.
    #[must_use]
    pub fn https(&self) -> String {
        format!("https://{}/{}/{}.git", self.host, self.owner, self.name)
    }

    /// A key that is equal for all addresses of one repository: code hosts do not distinguish upper and lower case.
    #[must_use]
    pub fn key(&self) -> String {
        self.https().to_ascii_lowercase()
    }

    fn parse(host: &str, path: &str) -> Option<Self> {
        let host = domain_name(host)?;
        let path = path.strip_suffix('/').unwrap_or(path);
        let (owner, name) = path.split_once('/')?;
        let name = name.strip_suffix(".git").unwrap_or(name);
        let is_part = |part: &str| {
            let is_byte = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            !part.is_empty() && part.bytes().all(is_byte) && !part.starts_with(['-', '.']) || part == ".github" // The name of a repository that many organisations have.
        };
        (is_part(owner) && is_part(name)).then(|| Self {
            host,
            owner: owner.to_owned(),
            name: name.to_owned(),
        })
    }
}

impl FromStr for RepositoryUrl {
    type Err = InvalidRepositoryUrl;

    fn from_str(text: &str) -> Result<Self, InvalidRepositoryUrl> {
        if text.len() > REPOSITORY_URL_MAX {
            return Err(InvalidRepositoryUrl::Length);
        }
        let parsed = if let Some((scheme, rest)) = text.split_once("://") {
            let (authority, path) = rest.split_once('/').ok_or(InvalidRepositoryUrl::Form)?;
            let (user, authority) = match authority.rsplit_once('@') {
                Some((user, authority)) => (Some(user), authority),
                None => (None, authority),
            };
            let (expected_user, port) = match scheme.to_ascii_lowercase().as_str() {
                "https" => (None, ":443"),
                "ssh" | "git+ssh" | "ssh+git" => (Some("git"), ":22"),
                _ => return Err(InvalidRepositoryUrl::Form),
            };
            if user.is_some() && user != expected_user {
                return Err(InvalidRepositoryUrl::Credentials);
            }
            Self::parse(authority.strip_suffix(port).unwrap_or(authority), path)
        } else {
            // The form of scp.
            let (authority, path) = text.split_once(':').ok_or(InvalidRepositoryUrl::Form)?;
            match authority.rsplit_once('@') {
                Some(("git", host)) => Self::parse(host, path),
                Some(_) => return Err(InvalidRepositoryUrl::Credentials),
                None => None,
            }
        };
        parsed.ok_or(InvalidRepositoryUrl::Form)
    }
}

/// The path inside a sandbox at which a working tree stands: absolute, without `.`, `..`, and slashes that mean nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountPath(String);

/// Text that is not the path of a working tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMountPath {
    /// Relative path, or one with segments that depend on others.
    #[error("must be an absolute path of at most {MOUNT_PATH_MAX} bytes, without . and .. and control characters")]
    Form,
    /// Of the system.
    #[error("{0:?} belongs to the system")]
    System(String),
}

impl MountPath {
    /// The path as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the two paths are equal, or one is below the other.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let is_in = |inner: &str, outer: &str| {
            inner
                .strip_prefix(outer)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        is_in(&self.0, &other.0) || is_in(&other.0, &self.0)
    }
}

impl FromStr for MountPath {
    type Err = InvalidMountPath;

    fn from_str(text: &str) -> Result<Self, InvalidMountPath> {
        /// System directories, in which no files of users belong.
        const SYSTEM: [&str; 4] = ["proc", "sys", "dev", "run"];
        let is_text = text.len() <= MOUNT_PATH_MAX && !text.chars().any(char::is_control);
        let relative = text
            .strip_prefix('/')
            .filter(|_| is_text)
            .ok_or(InvalidMountPath::Form)?;
        let segments: Vec<&str> = relative.split('/').filter(|segment| !segment.is_empty()).collect();
        if segments.iter().any(|segment| matches!(*segment, "." | "..")) {
            return Err(InvalidMountPath::Form);
        }
        let path = format!("/{}", segments.join("/"));
        match segments.as_slice() {
            [] | ["tmp"] | ["var", "tmp"] => Err(InvalidMountPath::System(path)),
            [first, ..] if SYSTEM.contains(first) => Err(InvalidMountPath::System(path)),
            _ => Ok(Self(path)),
        }
    }
}

/// The branch to stand on, from the answer of a code host to the question for its references: the one that its HEAD
/// names, else the one that is most likely meant. `None` for an answer that names no branch.
#[must_use]
pub fn default_branch(references: &str) -> Option<String> {
    const BRANCHES: &str = "refs/heads/";
    let lines = || references.lines().filter_map(|line| line.split_once('\t'));
    let head = lines().find_map(|(left, name)| {
        let target = left.strip_prefix("ref: ")?;
        (name == "HEAD").then_some(target)?.strip_prefix(BRANCHES)
    });
    let branches = || lines().filter_map(|(_, name)| name.strip_prefix(BRANCHES));
    let usual = || branches().find(|name| matches!(*name, "main" | "master"));
    let branch = head.or_else(usual).or_else(|| branches().next())?;
    is_branch(branch).then(|| branch.to_owned())
}

/// Whether a text can be the name of a branch, as far as it matters for commands that it is part of.
fn is_branch(name: &str) -> bool {
    let is_allowed = |c: char| !c.is_control() && !" ~^:?*[\\".contains(c);
    (1..=255).contains(&name.len()) && name.chars().all(is_allowed) && !name.starts_with('-') && !name.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_same_repository_are_the_same() {
        for text in [
            "https://github.com/Owner/re.po-1_x",
            "https://github.com/Owner/re.po-1_x.git",
            "https://github.com/Owner/re.po-1_x/",
            "https://github.com/Owner/re.po-1_x.git/",
            "HTTPS://GitHub.com:443/Owner/re.po-1_x",
            "git@github.com:Owner/re.po-1_x.git",
            "git@github.com:Owner/re.po-1_x",
            "ssh://git@github.com/Owner/re.po-1_x.git",
            "ssh://git@github.com:22/Owner/re.po-1_x",
        ] {
            let url: RepositoryUrl = text.parse().expect(text);
            assert_eq!(url.https(), "https://github.com/Owner/re.po-1_x.git", "{text}");
            assert_eq!(url.key(), "https://github.com/owner/re.po-1_x.git");
        }
        assert!("https://github.com/o/.github".parse::<RepositoryUrl>().is_ok());
        let url: RepositoryUrl = "https://gitlab.example/a/b".parse().expect("an address");
        assert_eq!(url.host, "gitlab.example");
    }

    #[test]
    fn other_addresses_are_refused() {
        use InvalidRepositoryUrl::{Credentials, Form, Length};
        for (text, why) in [
            ("", Form),
            ("github.com/o/r", Form),
            ("http://github.com/o/r", Form),
            ("git://github.com/o/r", Form),
            ("file:///o/r", Form),
            ("https://github.com", Form),
            ("https://github.com/o", Form),
            ("https://github.com/o/", Form),
            ("https://github.com/o/r/tree/main", Form),
            ("https://github.com/o/r?x=1", Form),
            ("https://github.com/o/r#x", Form),
            ("https://github.com/o/..", Form),
            ("https://github.com/../r", Form),
            ("https://github.com/-o/r", Form),
            ("https://github.com/o/r%2f..", Form),
            ("https://github.com/o/r\n", Form),
            ("https://github.com:8443/o/r", Form),
            ("https://1.2.3.4/o/r", Form),
            ("https://user:word@github.com/o/r", Credentials),
            ("https://token@github.com/o/r", Credentials),
            ("ssh://root@github.com/o/r", Credentials),
            ("root@github.com:o/r", Credentials),
            ("github.com:o/r", Form),
            ("git@github.com:/o/r", Form),
            ("git@github.com:o", Form),
            (
                &format!("https://github.com/o/{}", "r".repeat(REPOSITORY_URL_MAX)),
                Length,
            ),
        ] {
            assert_eq!(text.parse::<RepositoryUrl>(), Err(why), "{text}");
        }
    }

    #[test]
    fn mount_paths_are_absolute_and_not_of_the_system() {
        for (text, want) in [
            ("/home/user/repo", "/home/user/repo"),
            ("//a///b/", "/a/b"),
            ("/a b/é", "/a b/é"),
            ("/tmp/x", "/tmp/x"),
            ("/running", "/running"),
        ] {
            assert_eq!(text.parse::<MountPath>().expect(text).as_str(), want);
        }
        for text in [
            "",
            "a",
            "./a",
            "/a/../b",
            "/a/./b",
            "/a\nb",
            &format!("/{}", "a".repeat(MOUNT_PATH_MAX)),
        ] {
            assert_eq!(text.parse::<MountPath>(), Err(InvalidMountPath::Form), "{text}");
        }
        for text in [
            "/", "//", "/tmp", "/tmp/", "/var/tmp", "/proc/1", "/sys", "/dev/x", "/run/x",
        ] {
            assert!(
                matches!(text.parse::<MountPath>(), Err(InvalidMountPath::System(_))),
                "{text}"
            );
        }
        let path = |text: &str| text.parse::<MountPath>().expect("a path");
        for (one, other, want) in [
            ("/a", "/a/", true),
            ("/a", "/a/b", true),
            ("/a/b/c", "/a", true),
            ("/a", "/ab", false),
            ("/a/b", "/a/c", false),
        ] {
            assert_eq!(path(one).overlaps(&path(other)), want, "{one} {other}");
        }
    }

    #[test]
    fn the_branch_is_the_one_of_head() {
        let oid = "0".repeat(40);
        for (references, want) in [
            (
                format!("ref: refs/heads/trunk\tHEAD\n{oid}\tHEAD\n{oid}\trefs/heads/main\n"),
                Some("trunk"),
            ),
            (
                format!("{oid}\tHEAD\n{oid}\trefs/heads/a\n{oid}\trefs/heads/main\n"),
                Some("main"),
            ),
            (format!("{oid}\trefs/heads/a\n{oid}\trefs/tags/main\n"), Some("a")),
            ("ref: refs/heads/-x\tHEAD\n".to_owned(), None),
            ("ref: refs/heads/a b\tHEAD\n".to_owned(), None),
            (format!("{oid}\trefs/tags/v1\n"), None),
            (String::new(), None),
        ] {
            assert_eq!(default_branch(&references).as_deref(), want, "{references}");
        }
    }
}
