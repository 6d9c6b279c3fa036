//! `<data-dir>/credentials.env`: what a client needs, in the form that shells, containers and SDKs read.
//!
//! The file is written as a whole or not at all. Values come from configuration and random bytes that were checked to
//! hold nothing a shell would expand, so they stand without quotes, which every reader of such files understands.

use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::config::{Config, Sources, keys};
use crate::data_dir::DataDir;
use crate::secret::{AccessPair, ApiKey};

/// Name of the file in the data directory.
pub(crate) const FILE: &str = "credentials.env";
/// Name of the file for HTTPS clients, which exists while HTTPS is enabled.
pub(crate) const TLS_FILE: &str = "credentials-tls.env";

/// The addresses of the platform for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// Base of the API.
    pub(crate) api_url: String,
    /// Base of sandbox traffic; on one port it is the same.
    pub(crate) sandbox_url: String,
    /// Domain of sandboxes.
    pub(crate) domain: String,
}

impl Addresses {
    /// The addresses for a bound listener. Clients cannot connect to a wildcard address, so it is replaced by loopback.
    pub(crate) fn of(bound: SocketAddr, domain: String) -> Self {
        let url = match bound {
            SocketAddr::V4(v4) if v4.ip().is_unspecified() => format!("http://127.0.0.1:{}", v4.port()),
            SocketAddr::V6(v6) if v6.ip().is_unspecified() => format!("http://localhost:{}", v6.port()),
            bound => format!("http://{bound}"),
        };
        Self {
            sandbox_url: url.clone(),
            api_url: url,
            domain,
        }
    }
}

/// What an earlier start wrote, as far as it can be read.
#[derive(Default)]
pub(crate) struct Credentials {
    /// The API key.
    pub(crate) api_key: Option<ApiKey>,
    /// The pair of access key and secret key.
    pub(crate) pair: Option<AccessPair>,
    /// Base of the API.
    pub(crate) api_url: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("api_key", &self.api_key)
            .field("pair", &self.pair)
            .field("api_url", &self.api_url)
            .finish()
    }
}

impl Credentials {
    /// Reads the file; none when there is no file.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub(crate) fn read(dir: &DataDir) -> Result<Option<Self>> {
        Ok(dir.read_text(FILE)?.map(|text| Self::parse(&text)))
    }

    fn parse(text: &str) -> Self {
        let value = |name: &str| {
            text.lines()
                .filter_map(|line| line.trim().split_once('='))
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.trim_matches(['"', '\'']).to_owned())
                .filter(|value| !value.is_empty())
        };
        Self {
            api_key: value("E2B_API_KEY").as_deref().and_then(ApiKey::parse),
            pair: value("RINGFENCE_ACCESS_KEY")
                .zip(value("RINGFENCE_SECRET_KEY"))
                .map(|(access, secret)| AccessPair { access, secret }),
            api_url: value("E2B_API_URL"),
        }
    }
}

/// The URL and the API key of a platform: as given, from the variables that the SDKs read, or from the file of the data
/// directory. With `--data-dir`, the file there takes precedence over the environment.
///
/// # Errors
/// When there is neither.
pub(crate) fn endpoint(url: Option<&str>, config: &Config, sources: &Sources) -> Result<(String, String)> {
    let dir_was_named = sources.flags.iter().any(|(key, _)| key.name == keys::DATA_DIR.name);
    let env = |name: &str| {
        if dir_was_named {
            None
        } else {
            sources.env.get(name).cloned()
        }
    };
    let (env_url, env_key) = (
        url.map(str::to_owned).or_else(|| env("E2B_API_URL")),
        env("E2B_API_KEY"),
    );
    if let (Some(url), Some(key)) = (&env_url, &env_key) {
        return Ok((url.clone(), key.clone()));
    }
    let path = config.data_dir.join(FILE);
    let found = DataDir::existing(&config.data_dir).and_then(|dir| Credentials::read(&dir));
    let found = match found {
        Ok(found) => found.with_context(|| format!("{} does not exist; is the platform running?", path.display())),
        Err(error) => Err(error),
    };
    let found = found.context("no platform address: set E2B_API_URL and E2B_API_KEY, or pass --data-dir")?;
    let key = env_key.or_else(|| found.api_key.map(|key| key.expose().to_owned()));
    match (env_url.or(found.api_url), key) {
        (Some(url), Some(key)) => Ok((url, key)),
        _ => bail!("{} contains no API key or no address", path.display()),
    }
}

/// Writes the file.
///
/// # Errors
/// When a system call fails.
pub(crate) fn write(dir: &DataDir, key: &ApiKey, pair: &AccessPair, addresses: &Addresses) -> Result<()> {
    let mut text = String::from(
        "# Written by `ringfence up`. Keys are kept; addresses are updated from the configuration.\n\
         # Load with: set -a; . <this file>; set +a\n",
    );
    for (name, value) in [
        ("E2B_API_KEY", key.expose()),
        ("E2B_API_URL", &addresses.api_url),
        ("E2B_SANDBOX_URL", &addresses.sandbox_url),
        ("E2B_DOMAIN", &addresses.domain),
        ("RINGFENCE_ACCESS_KEY", &pair.access),
        ("RINGFENCE_SECRET_KEY", &pair.secret),
    ] {
        let _ = writeln!(text, "{name}={value}");
    }
    dir.write_private(FILE, text.as_bytes())
}

/// Writes the file for clients that speak HTTPS, with the keys of the other file. It holds no address but the domain:
/// SDKs then make `https://api.<domain>` and `https://<port>-<id>.<domain>` of it. `authority` is what they must trust,
/// where it is none that systems trust already.
///
/// # Errors
/// When a system call fails, or the other file contains no keys.
pub(crate) fn write_tls(dir: &DataDir, domain: &str, authority: Option<&Path>) -> Result<()> {
    let found = Credentials::read(dir)?.unwrap_or_default();
    let (Some(key), Some(pair)) = (found.api_key, found.pair) else {
        bail!("credentials are incomplete");
    };
    let mut text = String::from(
        "# Written by `ringfence up`, for HTTPS. Load with: set -a; . <this file>; set +a\n\
         # Not on top of credentials.env: the addresses there would win.\n",
    );
    for (name, value) in [
        ("E2B_API_KEY", key.expose()),
        ("E2B_DOMAIN", domain),
        ("RINGFENCE_ACCESS_KEY", &pair.access),
        ("RINGFENCE_SECRET_KEY", &pair.secret),
    ] {
        let _ = writeln!(text, "{name}={value}");
    }
    if let Some(path) = authority {
        let path = quoted(&path.display().to_string());
        let _ = writeln!(text, "SSL_CERT_FILE={path}\nNODE_EXTRA_CA_CERTS={path}");
    }
    dir.write_private(TLS_FILE, text.as_bytes())
}

/// Quotes a path for a shell. It holds no single quote: the data directory is checked for that.
fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if path.chars().all(plain) {
        path.to_owned()
    } else {
        format!("'{path}'")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_file_round_trips_and_follows_the_address() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        assert!(Credentials::read(&dir).unwrap().is_none());
        let (key, pair) = (ApiKey::generate().unwrap(), AccessPair::generate().unwrap());
        for port in [3000, 4000] {
            let bound = SocketAddr::from(([127, 0, 0, 1], port));
            let addresses = Addresses::of(bound, format!("sandbox.localhost:{port}"));
            write(&dir, &key, &pair, &addresses).unwrap();
            let path = dir.path().join(FILE);
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(
                text.contains(&format!("\nE2B_API_URL=http://127.0.0.1:{port}\n")),
                "{text}"
            );
            assert!(
                text.contains(&format!("\nE2B_SANDBOX_URL=http://127.0.0.1:{port}\n")),
                "{text}"
            );
            assert!(
                text.contains(&format!("\nE2B_DOMAIN=sandbox.localhost:{port}\n")),
                "{text}"
            );
            let read = Credentials::read(&dir).unwrap().unwrap();
            assert_eq!(read.api_key.unwrap().expose(), key.expose());
            let read_pair = read.pair.unwrap();
            assert_eq!(
                (read_pair.access, read_pair.secret),
                (pair.access.clone(), pair.secret.clone())
            );
        }
    }

    #[test]
    fn the_file_for_https_has_the_same_keys_and_no_address() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        assert!(write_tls(&dir, "d", None).is_err());
        let (key, pair) = (ApiKey::generate().unwrap(), AccessPair::generate().unwrap());
        let addresses = Addresses::of(SocketAddr::from(([127, 0, 0, 1], 1)), "d:1".to_owned());
        write(&dir, &key, &pair, &addresses).unwrap();
        let path = dir.path().join(TLS_FILE);
        for (authority, want) in [
            (None, None),
            (Some("/d/tls/ca.pem"), Some("/d/tls/ca.pem")),
            (Some("/my $data/ca.pem"), Some("'/my $data/ca.pem'")),
        ] {
            write_tls(&dir, "d:1", authority.map(Path::new)).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(&format!("\nE2B_API_KEY={}\n", key.expose())), "{text}");
            assert!(text.contains("\nE2B_DOMAIN=d:1\n") && !text.contains("_URL="), "{text}");
            assert!(
                text.contains(&format!("\nRINGFENCE_SECRET_KEY={}\n", pair.secret)),
                "{text}"
            );
            for name in ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"] {
                let line = want.map(|path| format!("\n{name}={path}\n"));
                assert!(line.map_or(!text.contains(name), |line| text.contains(&line)), "{text}");
            }
        }
    }

    #[test]
    fn damaged_files_yield_what_is_left_of_them() {
        let read = Credentials::parse("E2B_API_KEY=\"e2b_00\"\nRINGFENCE_ACCESS_KEY=rfa_1\n");
        assert_eq!(read.api_key.unwrap().expose(), "e2b_00");
        assert!(read.pair.is_none());
        let nothing = Credentials::parse("E2B_API_KEY=\nE2B_API_KEY\n=\n\u{0}");
        assert!(nothing.api_key.is_none() && nothing.api_url.is_none());
    }

    #[test]
    fn wildcards_become_the_loopback() {
        for (bound, want) in [
            ("0.0.0.0:80", "http://127.0.0.1:80"),
            ("[::]:80", "http://localhost:80"),
            ("[::1]:80", "http://[::1]:80"),
            ("10.1.2.3:80", "http://10.1.2.3:80"),
        ] {
            let addresses = Addresses::of(bound.parse().unwrap(), "d".to_owned());
            assert_eq!(addresses.api_url, want);
            assert_eq!(addresses.sandbox_url, want);
        }
    }
}
