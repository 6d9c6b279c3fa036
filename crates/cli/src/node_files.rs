//! Files of the link in a data directory: the authority of a server, the credentials of a node. They also tell what a
//! directory is for, because a platform, a server and a node must not take each other's.
//!
//! Private keys have the mode 0600, in a directory that only its owner can enter, as the master key has.

use anyhow::{Context, Result, bail};
use link::{Address, Authority, Credentials};
use model::id::NodeId;
use secrecy::zeroize::Zeroizing;
use serde::{Deserialize, Serialize};

use crate::data_dir::DataDir;
use crate::node_identity;

/// The directory of a server's files, below its data directory.
pub(crate) const SERVER: &str = "nodes";
/// The certificate of the authority of nodes.
const AUTHORITY: &str = "nodes/ca.pem";
/// The private key of the authority of nodes: who has it can make nodes.
const AUTHORITY_KEY: &str = "nodes/ca.key";
/// The credentials of a node, and the server that it has joined. One file, so that they always belong together.
const NODE: &str = "link.json";

/// What a data directory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The whole platform, by `up`.
    Platform,
    /// A server without a node of its own.
    Server,
    /// A node of a server.
    Node,
}

/// What a node has from joining.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    /// The server.
    pub(crate) server: Address,
    /// Key and certificates.
    pub(crate) credentials: Credentials,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    server: String,
    node: String,
    authority: String,
    certificate: String,
    key: String,
}

/// Checks that a data directory is not in use for something else.
///
/// # Errors
/// When it is.
pub(crate) fn require(dir: &DataDir, role: Role) -> Result<()> {
    let shown = dir.path().display();
    let (is_server, is_node) = (dir.path().join(SERVER).exists(), dir.path().join(NODE).exists());
    let is_platform = dir.path().join(node_identity::FILE).exists() && !is_server;
    match role {
        Role::Platform | Role::Node if is_server => bail!(
            "{shown} is the data directory of a server: use it with `ringfence server`, or name another with --data-dir"
        ),
        Role::Platform | Role::Server if is_node => bail!(
            "{shown} is the data directory of a node: use it with `ringfence node`, or name another with --data-dir"
        ),
        Role::Server | Role::Node if is_platform => bail!(
            "{shown} is the data directory of a platform, with its sandboxes: use it with `ringfence up`, or name another with \
             --data-dir"
        ),
        Role::Platform | Role::Server | Role::Node => Ok(()),
    }
}

/// The authority of a server, made at its first start.
///
/// # Errors
/// When its files cannot be read or written, or have something else.
pub(crate) fn authority(dir: &DataDir) -> Result<Authority> {
    dir.make_directory(SERVER)?;
    let key = match dir.read_text(AUTHORITY_KEY)? {
        Some(key) => key,
        None if dir.path().join(AUTHORITY).exists() => bail!(
            "{} is missing: restore it, or remove {} as well, and make all nodes join again",
            dir.path().join(AUTHORITY_KEY).display(),
            dir.path().join(AUTHORITY).display()
        ),
        None => {
            let key = Authority::make_key()?;
            dir.write_private(AUTHORITY_KEY, key.as_bytes())?;
            key
        }
    };
    let certificate = match dir.read_text(AUTHORITY)? {
        Some(certificate) => certificate,
        None => {
            let made = Authority::make_certificate(&key)?;
            dir.write(AUTHORITY, 0o644, made.as_bytes())?;
            Zeroizing::new(made)
        }
    };
    Ok(Authority::load(&key, &certificate)?)
}

/// What a node has from joining; none if it has not joined.
///
/// # Errors
/// When the file cannot be read, or has something else.
pub(crate) fn joined(dir: &DataDir) -> Result<Option<Joined>> {
    let Some(text) = dir.read_text(NODE)? else {
        return Ok(None);
    };
    // Without the parser's reason, which could quote what it read.
    let stored: Option<Stored> = serde_json::from_str(&text).ok();
    let joined = stored.and_then(|stored| {
        Some(Joined {
            server: stored.server.parse().ok()?,
            credentials: Credentials {
                key: Zeroizing::new(stored.key),
                certificate: stored.certificate,
                authority: stored.authority,
            },
        })
    });
    let path = dir.path().join(NODE);
    let joined = joined.with_context(|| format!("{} is damaged: join again", path.display()))?;
    joined
        .credentials
        .node()
        .with_context(|| format!("read {}", path.display()))?;
    Ok(Some(joined))
}

/// Keeps what a node has from joining, and returns its id.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn keep(dir: &DataDir, joined: &Joined) -> Result<NodeId> {
    let Credentials {
        key,
        certificate,
        authority,
    } = &joined.credentials;
    let node = joined.credentials.node()?;
    let stored = Stored {
        server: joined.server.to_string(),
        node: node.as_str().to_owned(),
        authority: authority.clone(),
        certificate: certificate.clone(),
        key: key.as_str().to_owned(),
    };
    let text = Zeroizing::new(serde_json::to_vec_pretty(&stored).expect("texts are JSON"));
    // The copy of the key.
    drop(Zeroizing::new(stored.key));
    dir.write_private(NODE, &text)?;
    Ok(node)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn the_authority_of_a_server_is_kept_in_private() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let first = authority(&dir).unwrap().certificate_pem();
        assert_eq!(authority(&dir).unwrap().certificate_pem(), first);
        let key = dir.path().join(AUTHORITY_KEY);
        assert_eq!(fs::metadata(&key).unwrap().mode() & 0o777, 0o600);
        // The certificate follows from the key.
        fs::remove_file(dir.path().join(AUTHORITY)).unwrap();
        authority(&dir).unwrap();
        // Nodes trust the certificate, so a lost key is not replaced behind their back.
        fs::remove_file(&key).unwrap();
        assert!(authority(&dir).unwrap_err().to_string().contains("ca.key"));
    }

    #[test]
    fn a_directory_has_one_role() {
        let temp = tempfile::tempdir().unwrap();
        let dir = |name: &str| DataDir::prepare(&temp.path().join(name)).unwrap();
        let (fresh, server, node, platform) = (dir("fresh"), dir("server"), dir("node"), dir("platform"));
        authority(&server).unwrap();
        node.write_private(NODE, b"{}").unwrap();
        platform.write_private(node_identity::FILE, b"{}").unwrap();
        for (dir, fits) in [
            (&fresh, vec![Role::Platform, Role::Server, Role::Node]),
            (&server, vec![Role::Server]),
            (&node, vec![Role::Node]),
            (&platform, vec![Role::Platform]),
        ] {
            for role in [Role::Platform, Role::Server, Role::Node] {
                assert_eq!(require(dir, role).is_ok(), fits.contains(&role), "{role:?}: {dir:?}");
            }
        }
    }

    #[test]
    fn damaged_credentials_are_not_quoted() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        assert!(joined(&dir).unwrap().is_none());
        dir.write_private(NODE, b"{\"key\": \"a secret\"").unwrap();
        let error = format!("{:#}", joined(&dir).unwrap_err());
        assert!(error.contains("join again") && !error.contains("a secret"), "{error}");
    }
}
