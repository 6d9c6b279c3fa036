//! The master key of a platform: where it comes from, what is derived from it, and how it is replaced.
//!
//! Under it everything secret in the database is encrypted, so the database alone, as a backup or with the operator of
//! PostgreSQL, opens nothing. Losing it loses the sealed secrets. Several servers on one database need the same key.
//!
//! The seed of the tokens of sandboxes, and of their certificate authorities, must outlive the key. At first it is derived
//! from the key; from then on it is in the database, encrypted like everything else.
//!
//! A new key is written to a file next to the old one before anything is encrypted with it, and takes the name of the old
//! one once everything is: whenever that is cut, both are there and both open what they encrypted.
//!
//! Invariant: nothing here is printed by `Debug`.

use std::convert::Infallible;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use hmac::{Hmac, KeyInit as _, Mac as _};
use model::secret::Secret;
use runtime::files::if_there;
use serde_json::Value;
use server::seal::{SealError, Sealer};
use sha2::Sha256;
use store::Store;
use store::sealed::{Resealed, SealedColumn};

use crate::clock::now_us;
use crate::data_dir::{DataDir, MASTER_FILE, write_and_rename};
use crate::output;
use crate::secret::random;

/// The environment variable of the master key.
pub(crate) const MASTER_ENV: &str = "RINGFENCE_MASTER_KEY";
/// What the name of a file has at its end while its key is not in use yet.
const NEXT: &str = ".next";
/// Under this name the database has the seed of the tokens of sandboxes.
const TOKEN_SEED: &str = "token-seed";
/// The owner of that seed, as a sealed secret.
const TOKEN_SEED_OWNER: &str = "platform/token-seed";

/// Where the master key comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeySource {
    /// The file of the data directory, which is made at the first start.
    DataDir,
    /// A file of the operator.
    File(PathBuf),
    /// The key in the environment.
    Environment(Secret),
}

type Key = [u8; 32];

/// The master key.
pub(crate) struct MasterKey {
    key: Key,
    /// Its successor, if a rotation was cut.
    next: Option<Key>,
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(hidden)")
    }
}

/// Parses the text of a key.
pub(crate) fn parse(text: &str) -> Option<Key> {
    hex::decode(text.trim()).ok()?.try_into().ok()
}

/// Reads the key of a file; none if there is no such file.
fn read(path: &Path) -> Result<Option<Key>> {
    let text = if_there(fs::read_to_string(path)).with_context(|| format!("read {}", path.display()))?;
    let Some(text) = text else { return Ok(None) };
    let key = parse(&text);
    key.map(Some)
        .with_context(|| format!("{} must contain exactly 64 hexadecimal characters", path.display()))
}

fn derive(key: &Key, label: &str) -> Key {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(label.as_bytes());
    mac.finalize().into_bytes().into()
}

fn seal_key(key: &Key) -> Key {
    derive(key, "ringfence/seal/1")
}

/// The files of a data directory that may have the master key.
pub(crate) fn files() -> [String; 2] {
    [MASTER_FILE.to_owned(), format!("{MASTER_FILE}{NEXT}")]
}

/// The name under which the objects of a database are known in a bucket. It says nothing about the seed.
pub(crate) fn blob_owner(token_seed: &Key) -> String {
    hex::encode(derive(token_seed, "ringfence/blob-owner/1"))
}

fn next_to(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(NEXT);
    name.into()
}

impl KeySource {
    /// The file with the key; none if it is not in a file.
    fn path(&self, dir: &DataDir) -> Option<PathBuf> {
        match self {
            Self::DataDir => Some(dir.path().join(MASTER_FILE)),
            Self::File(path) => Some(path.clone()),
            Self::Environment(_) => None,
        }
    }
}

impl MasterKey {
    /// Reads the key, or creates one in the data directory. The directory must be locked.
    ///
    /// # Errors
    /// When what should hold the key does not, or the system refuses.
    pub(crate) fn load_or_make(dir: &DataDir, source: &KeySource) -> Result<Self> {
        let Some(path) = source.path(dir) else {
            return Self::load(dir, source);
        };
        if *source == KeySource::DataDir && read(&path)?.is_none() {
            let text = hex::encode(random::<32>()?);
            dir.write_private(MASTER_FILE, format!("{text}\n").as_bytes())?;
        }
        Self::load(dir, source)
    }

    /// The key for a command, which may be the first one on the data directory, or run beside the platform.
    ///
    /// # Errors
    /// When what should hold the key does not, or the system refuses.
    pub(crate) fn of(dir: &DataDir, source: &KeySource) -> Result<Self> {
        if *source == KeySource::DataDir && !dir.path().join(MASTER_FILE).exists() {
            let _lock = dir.lock()?;
            return Self::load_or_make(dir, source);
        }
        Self::load(dir, source)
    }

    /// Reads the key.
    ///
    /// # Errors
    /// When what should hold the key does not, or the system refuses.
    pub(crate) fn load(dir: &DataDir, source: &KeySource) -> Result<Self> {
        let Some(path) = source.path(dir) else {
            let KeySource::Environment(text) = source else {
                bail!("the master key has no source");
            };
            let key = parse(text.expose());
            let key = key.with_context(|| format!("{MASTER_ENV} must be exactly 64 hexadecimal characters"))?;
            return Ok(Self { key, next: None });
        };
        let key = read(&path)?.with_context(|| format!("the master key {} does not exist", path.display()))?;
        if fs::metadata(&path).is_ok_and(|file| file.mode() & 0o077 != 0) {
            tracing::warn!(
                "other users than its owner can read the master key {}: set its mode to 0600",
                path.display()
            );
        }
        Ok(Self {
            key,
            next: read(&next_to(&path))?,
        })
    }

    /// The seed from which the server derives the tokens of sandboxes, and what else must outlive the key.
    ///
    /// # Errors
    /// When the database fails, or was sealed with another key.
    pub(crate) async fn token_seed(&self, store: &Store) -> Result<Key> {
        let derived = derive(&self.key, "ringfence/token-seed/1");
        let sealed = self.seal(TOKEN_SEED_OWNER, &hex::encode(derived))?;
        let stored = store.platform_secret(TOKEN_SEED, &sealed).await?;
        let seed = self.open(TOKEN_SEED_OWNER, &stored).context(
            "the secrets in the database were sealed with another master key: restore that key, or give the secrets up \
             with `ringfence master-key forget`",
        )?;
        parse(&seed).context("the seed of the tokens in the database is corrupt")
    }

    /// What encrypts secrets for the database.
    pub(crate) fn sealer(&self) -> Sealer {
        let sealer = Sealer::new(seal_key(&self.key));
        match &self.next {
            None => sealer,
            Some(next) => sealer.and_open_with(seal_key(next)),
        }
    }

    /// Encrypts a secret for the database, as [`Sealer::seal`].
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub(crate) fn seal(&self, owner: &str, secret: &str) -> Result<String> {
        self.sealer().seal(owner, secret).context("seal a secret")
    }

    /// Decrypts what [`Self::seal`] made for the same owner.
    ///
    /// # Errors
    /// When it was sealed with another key, for another owner, or was changed.
    pub(crate) fn open(&self, owner: &str, sealed: &str) -> Result<String> {
        let opened = self.sealer().open(owner, sealed);
        opened.map_err(|error| match error {
            SealError::WrongKey => anyhow!("the secret of {owner} was sealed with another {MASTER_FILE}"),
            SealError::Corrupt | SealError::Random => anyhow!("the sealed secret of {owner} is corrupt"),
        })
    }
}

/// A secret in the database that the master key does not open.
#[derive(Debug, thiserror::Error)]
#[error("the secret {key} of {table} cannot be encrypted again, nothing was changed: {error}")]
struct Unreadable {
    table: &'static str,
    key: String,
    error: SealError,
}

/// `master-key rotate`: encrypts everything with a new key, of the file `to` or a random one, which then replaces the
/// file of the old one.
///
/// # Errors
/// When a platform runs, a secret cannot be decrypted, or the system refuses. The key before is still the one then.
pub(crate) async fn rotate(store: &Store, dir: &DataDir, source: &KeySource, to: Option<&Path>) -> Result<()> {
    let master = MasterKey::load_or_make(dir, source)?;
    master.token_seed(store).await?;
    let path = source.path(dir);
    let new = match (to, &path, master.next) {
        (Some(to), _, _) => read(to)?.with_context(|| format!("{} does not exist", to.display()))?,
        (None, None, _) => {
            bail!("the master key is in {MASTER_ENV}: write the new one to a file and name it with --to")
        }
        // A rotation that was cut is finished.
        (None, Some(_), Some(next)) => next,
        (None, Some(path), None) => {
            let new = random::<32>()?;
            let text = format!("{}\n", hex::encode(new));
            let next = next_to(path);
            write_and_rename(&next, 0o600, text.as_bytes()).with_context(|| format!("write {}", next.display()))?;
            new
        }
    };
    let mut sealer = Sealer::new(seal_key(&new)).and_open_with(seal_key(&master.key));
    if let Some(next) = &master.next {
        sealer = sealer.and_open_with(seal_key(next));
    }
    let count = store
        .reseal(now_us(), |column, key, text| {
            reseal(&sealer, column, key, text).map_err(|error| Unreadable {
                table: column.table,
                key: key.to_owned(),
                error,
            })
        })
        .await?;
    match (to, path) {
        (None, Some(path)) => {
            fs::rename(next_to(&path), &path).with_context(|| format!("replace {}", path.display()))?;
            if let Some(parent) = path.parent() {
                let synced = fs::File::open(parent).and_then(|parent| parent.sync_all());
                synced.with_context(|| format!("replace {}", path.display()))?;
            }
            output::line(&format!("{count} secrets have a new master key, {}", path.display()))
        }
        (Some(to), _) => output::line(&format!(
            "{count} secrets have the master key of {}: configure it now, because the previous key no longer decrypts anything",
            to.display()
        )),
        (None, None) => Ok(()),
    }
}

/// `master-key forget`: gives up what the key does not open.
///
/// # Errors
/// When a platform runs, or the system refuses.
pub(crate) async fn forget(store: &Store, dir: &DataDir, source: &KeySource) -> Result<()> {
    let sealer = MasterKey::load_or_make(dir, source)?.sealer();
    let count = store
        .reseal(now_us(), |column, key, text| {
            Ok::<_, Infallible>(match reseal(&sealer, column, key, text) {
                Ok(_) => Resealed::Keep,
                Err(_) => Resealed::Drop,
            })
        })
        .await?;
    output::line(&format!("{count} secrets were given up"))
}

/// A sealed text, or JSON with such texts, under the current key.
fn reseal(sealer: &Sealer, column: &SealedColumn, key: &str, text: &str) -> Result<Resealed, SealError> {
    // The owner of texts of earlier versions.
    let owner = if column.is_json {
        format!("egress-proxy/{key}")
    } else {
        key.to_owned()
    };
    if !column.is_json {
        let replaced = sealer.reseal(&owner, text)?;
        return Ok(replaced.map_or(Resealed::Keep, Resealed::Replace));
    }
    let mut json: Value = serde_json::from_str(text).map_err(|_| SealError::Corrupt)?;
    Ok(if reseal_json(sealer, &owner, &mut json)? {
        Resealed::Replace(json.to_string())
    } else {
        Resealed::Keep
    })
}

/// Replaces the values of keys that end in `Sealed`. Returns whether there was one to replace.
fn reseal_json(sealer: &Sealer, owner: &str, json: &mut Value) -> Result<bool, SealError> {
    let mut changed = false;
    match json {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if key.ends_with("Sealed") => {
                        if let Some(replaced) = sealer.reseal(owner, text)? {
                            *text = replaced;
                            changed = true;
                        }
                    }
                    value => changed |= reseal_json(sealer, owner, value)?,
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                changed |= reseal_json(sealer, owner, item)?;
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> MasterKey {
        MasterKey {
            key: [byte; 32],
            next: None,
        }
    }

    #[test]
    fn the_master_key_is_kept() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let made = MasterKey::load_or_make(&dir, &KeySource::DataDir).unwrap();
        let read = MasterKey::load_or_make(&dir, &KeySource::DataDir).unwrap();
        assert_eq!(made.key, read.key);
        let mode = fs::metadata(dir.path().join(MASTER_FILE)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        for damaged in ["", "00", "zz", &"0".repeat(63)] {
            dir.write_private(MASTER_FILE, damaged.as_bytes()).unwrap();
            assert!(MasterKey::load_or_make(&dir, &KeySource::DataDir).is_err(), "{damaged}");
        }
    }

    #[test]
    fn a_key_of_the_operator_is_never_made() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let file = temp.path().join("key");
        let source = KeySource::File(file.clone());
        assert!(MasterKey::load_or_make(&dir, &source).is_err());
        assert!(!file.exists());
        fs::write(&file, "07".repeat(32)).unwrap();
        assert_eq!(MasterKey::load_or_make(&dir, &source).unwrap().key, [7; 32]);
        let source = KeySource::Environment(Secret::new("08".repeat(32)));
        assert_eq!(MasterKey::load_or_make(&dir, &source).unwrap().key, [8; 32]);
        assert!(!dir.path().join(MASTER_FILE).exists());
        for damaged in ["", "08"] {
            let source = KeySource::Environment(Secret::new(damaged.to_owned()));
            assert!(MasterKey::load_or_make(&dir, &source).is_err(), "{damaged}");
        }
    }

    #[test]
    fn sealed_secrets_open_for_their_owner_and_key_only() {
        let sealed = key(7).seal("rfa_1", "rfs_secret").unwrap();
        assert_ne!(sealed, key(7).seal("rfa_1", "rfs_secret").unwrap());
        assert_eq!(key(7).open("rfa_1", &sealed).unwrap(), "rfs_secret");
        assert!(key(7).open("rfa_2", &sealed).is_err());
        assert!(key(8).open("rfa_1", &sealed).is_err());
        for damaged in ["", "v1.", "v1.AAAA", "v2.AAAA", &sealed[..sealed.len() - 4]] {
            let error = key(7).open("rfa_1", damaged).unwrap_err();
            assert!(!error.to_string().contains("rfs_secret"), "{error}");
        }
    }

    #[test]
    fn sealed_texts_in_json_are_replaced_and_nothing_else() {
        let sealed = key(7).seal("egress-proxy/i1", "a password").unwrap();
        let mut json = serde_json::json!({"a": [{"passwordSealed": sealed, "b": "v2.x.y.z"}]});
        let both = key(8).sealer().and_open_with(seal_key(&[7; 32]));
        assert_eq!(reseal_json(&both, "egress-proxy/i1", &mut json), Ok(true));
        let replaced = json["a"][0]["passwordSealed"].as_str().unwrap();
        assert_eq!(key(8).open("egress-proxy/i1", replaced).unwrap(), "a password");
        assert_eq!(json["a"][0]["b"], "v2.x.y.z");
        assert_eq!(reseal_json(&both, "egress-proxy/i1", &mut json), Ok(false));
    }
}
