//! Files of the link in a data directory: the mark of a server, the credentials of a node. They also tell what a
//! directory is for, because a platform, a server and a node must not take each other's.
//!
//! Private keys have the mode 0600, in a directory that only its owner can enter, as the master key has. The authority of nodes
//! is in the database, encrypted under the master key, so that all servers on the database have the same; servers of earlier
//! versions have left it in a file.

use anyhow::{Context, Result, bail};
use link::{Address, Authority, Credentials};
use model::id::NodeId;
use secrecy::zeroize::{Zeroize as _, Zeroizing};
use serde::{Deserialize, Serialize};
use store::Store;

use crate::data_dir::DataDir;
use crate::master_key::MasterKey;
use crate::node_identity;

/// The directory of a server's files, below its data directory.
pub(crate) const SERVER: &str = "nodes";
/// The certificate of the authority of nodes, where an earlier version has made it.
const AUTHORITY: &str = "nodes/ca.pem";
/// The private key of that: who has it can make nodes.
const AUTHORITY_KEY: &str = "nodes/ca.key";
/// Under this name the database has the authority of nodes.
const STORED_AUTHORITY: &str = "authority-of-nodes";
/// The owner of the authority, as a sealed secret.
const AUTHORITY_OWNER: &str = "platform/authority-of-nodes";
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
    /// The servers, of which it is connected to one at a time.
    pub(crate) servers: Vec<Address>,
    /// Key and certificates.
    pub(crate) credentials: Credentials,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    /// The first server, for versions that know one.
    server: String,
    /// The others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    other_servers: Vec<String>,
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

/// Marks a data directory as that of a server.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn mark_server(dir: &DataDir) -> Result<()> {
    dir.make_directory(SERVER)
}

/// The authority as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredAuthority {
    key: String,
    certificate: String,
}

impl StoredAuthority {
    fn make() -> Result<Self> {
        let key = Authority::make_key()?;
        let certificate = Authority::make_certificate(&key)?;
        Ok(Self {
            key: key.as_str().to_owned(),
            certificate,
        })
    }

    /// The one that an earlier version has made.
    fn of_files(dir: &DataDir) -> Result<Option<Self>> {
        let Some(key) = dir.read_text(AUTHORITY_KEY)? else {
            return Ok(None);
        };
        let certificate = match dir.read_text(AUTHORITY)? {
            Some(certificate) => certificate.as_str().to_owned(),
            None => Authority::make_certificate(&key)?,
        };
        Ok(Some(Self {
            key: key.as_str().to_owned(),
            certificate,
        }))
    }
}

impl Drop for StoredAuthority {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

/// The authority of nodes of all servers on a database, made when the first one starts.
///
/// # Errors
/// When the database fails, was sealed with another master key, or has another authority than that which an earlier version
/// has made here.
pub(crate) async fn authority(dir: &DataDir, store: &Store, master: &MasterKey) -> Result<Authority> {
    let own = StoredAuthority::of_files(dir)?;
    let had_own = own.is_some();
    let own = match own {
        Some(own) => own,
        None => StoredAuthority::make()?,
    };
    let text = Zeroizing::new(serde_json::to_string(&own).expect("texts are JSON"));
    let sealed = master.seal(AUTHORITY_OWNER, &text)?;
    let stored = store.platform_secret(STORED_AUTHORITY, &sealed).await?;
    let stored = Zeroizing::new(master.open(AUTHORITY_OWNER, &stored)?);
    // Without the parser's reason, which could quote what it read.
    let stored: StoredAuthority = serde_json::from_str(&stored)
        .map_err(|_| anyhow::anyhow!("the authority of nodes in the database is corrupt"))?;
    if had_own && stored.key.trim() != own.key.trim() {
        bail!(
            "the database has another authority of nodes than {}: another server uses the database. To work as one service with \
             it, remove {} and make the nodes of this server join again",
            dir.path().join(AUTHORITY_KEY).display(),
            dir.path().join(AUTHORITY_KEY).display()
        );
    }
    Ok(Authority::load(&stored.key, &stored.certificate)?)
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
        let servers = std::iter::once(&stored.server).chain(&stored.other_servers);
        Some(Joined {
            servers: servers.map(|server| server.parse().ok()).collect::<Option<_>>()?,
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
    let mut servers = joined.servers.iter().map(Address::to_string);
    let stored = Stored {
        server: servers.next().context("a node has a server")?,
        other_servers: servers.collect(),
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
    use super::*;
    use crate::master_key::KeySource;

    fn data_dir(temp: &tempfile::TempDir, name: &str) -> DataDir {
        DataDir::prepare(&temp.path().join(name)).unwrap()
    }

    #[tokio::test]
    async fn servers_on_a_database_have_one_authority() {
        let temp = tempfile::tempdir().unwrap();
        let (first, second) = (data_dir(&temp, "first"), data_dir(&temp, "second"));
        let store = Store::open(&format!("sqlite:{}", temp.path().join("db").display()))
            .await
            .unwrap();
        let _lock = first.lock().unwrap();
        let master = MasterKey::load_or_make(&first, &KeySource::DataDir).unwrap();
        let made = authority(&first, &store, &master).await.unwrap().certificate_pem();
        for dir in [&first, &second] {
            let again = authority(dir, &store, &master).await.unwrap();
            assert_eq!(again.certificate_pem(), made);
        }
        // It is of no use without the master key.
        let sealed = store.platform_secret(STORED_AUTHORITY, "").await.unwrap();
        assert!(
            !sealed.contains("PRIVATE") && !sealed.contains("CERTIFICATE"),
            "{sealed}"
        );
        let _second = second.lock().unwrap();
        let other = MasterKey::load_or_make(&second, &KeySource::DataDir).unwrap();
        authority(&second, &store, &other).await.unwrap_err();
        store.close().await;
    }

    #[tokio::test]
    async fn an_authority_of_an_earlier_version_stays() {
        let temp = tempfile::tempdir().unwrap();
        let (old, fresh) = (data_dir(&temp, "old"), data_dir(&temp, "fresh"));
        let key = Authority::make_key().unwrap();
        let certificate = Authority::make_certificate(&key).unwrap();
        for dir in [&old, &fresh] {
            mark_server(dir).unwrap();
        }
        old.write_private(AUTHORITY_KEY, key.as_bytes()).unwrap();
        old.write(AUTHORITY, 0o644, certificate.as_bytes()).unwrap();
        let _lock = old.lock().unwrap();
        let master = MasterKey::load_or_make(&old, &KeySource::DataDir).unwrap();
        let open = |name: &str| format!("sqlite:{}", temp.path().join(name).display());
        let store = Store::open(&open("db")).await.unwrap();
        let kept = Authority::load(&key, &certificate).unwrap().certificate_pem();
        assert_eq!(authority(&old, &store, &master).await.unwrap().certificate_pem(), kept);
        assert_eq!(
            authority(&fresh, &store, &master).await.unwrap().certificate_pem(),
            kept
        );
        store.close().await;
        // Its nodes trust no other one.
        let store = Store::open(&open("another")).await.unwrap();
        authority(&fresh, &store, &master).await.unwrap();
        let error = authority(&old, &store, &master).await.unwrap_err().to_string();
        assert!(error.contains("join again"), "{error}");
        store.close().await;
    }

    #[test]
    fn a_node_of_one_server_is_read_by_both_versions() {
        let text = r#"{"server": "https://a:1", "node": "x", "authority": "", "certificate": "", "key": ""}"#;
        let stored: Stored = serde_json::from_str(text).unwrap();
        assert!(stored.other_servers.is_empty());
        assert!(!serde_json::to_string(&stored).unwrap().contains("other"));
    }

    #[test]
    fn a_directory_has_one_role() {
        let temp = tempfile::tempdir().unwrap();
        let dir = |name: &str| DataDir::prepare(&temp.path().join(name)).unwrap();
        let (fresh, server, node, platform) = (dir("fresh"), dir("server"), dir("node"), dir("platform"));
        mark_server(&server).unwrap();
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
