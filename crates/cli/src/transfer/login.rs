//! As whom a registry is used: the credentials of flags, or those that `docker login` or `skopeo login` left in a file.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use registry::Login;
use serde_json::Value;

use crate::args::RegistryArgs;

/// Maximum size of a file with a password, and of one with those of several registries, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// The credentials for a registry; none to use it without any.
pub(super) fn find(args: &RegistryArgs, host: &str) -> Result<Option<Login>> {
    if let Some(username) = &args.registry_user {
        let Some(path) = &args.registry_password_file else {
            bail!("--registry-user needs --registry-password-file; - is stdin");
        };
        let password = if path.as_os_str() == "-" {
            read(std::io::stdin().lock()).context("read the password from stdin")?
        } else {
            let file = fs::File::open(path);
            file.map_err(Into::into)
                .and_then(read)
                .with_context(|| format!("read {}", path.display()))?
        };
        let password = password.trim_end_matches(['\n', '\r']).to_owned();
        ensure!(!password.is_empty(), "the password of the registry is empty");
        let username = username.clone();
        return Ok(Some(Login { username, password }));
    }
    known(host)
}

/// The credentials that `docker login` left for a registry, if it did.
pub(crate) fn known(host: &str) -> Result<Option<Login>> {
    let Some(path) = known_logins() else { return Ok(None) };
    let text = match fs::File::open(&path) {
        Ok(file) => read(file).with_context(|| format!("read {}", path.display()))?,
        Err(_) => return Ok(None),
    };
    let key = match host {
        // What Docker calls its own.
        "docker.io" => "https://index.docker.io/v1/",
        host => host,
    };
    of_file(&text, key).with_context(|| format!("{}: {host}", path.display()))
}

/// As the API takes them.
pub(crate) fn body(login: &Login) -> Value {
    serde_json::json!({"type": "registry", "username": login.username, "password": login.password})
}

/// The credentials of a registry in a file of `docker login`, if it has them in plain.
fn of_file(text: &str, host: &str) -> Result<Option<Login>> {
    let file: Value = serde_json::from_str(text).map_err(|_| anyhow::anyhow!("not valid JSON"))?;
    let Some(entry) = file["auths"].get(host).and_then(|entry| entry["auth"].as_str()) else {
        return Ok(None);
    };
    if entry.is_empty() {
        return Ok(None);
    }
    let decoded = STANDARD
        .decode(entry)
        .ok()
        .and_then(|text| String::from_utf8(text).ok());
    let decoded = decoded.as_deref().and_then(|text| text.split_once(':'));
    let (username, password) = decoded.context("`auth` is not the Base64 of a user and a password")?;
    Ok(Some(Login {
        username: username.to_owned(),
        password: password.to_owned(),
    }))
}

fn read(from: impl std::io::Read) -> Result<String> {
    let mut text = String::new();
    let read = from.take(FILE_MAX + 1).read_to_string(&mut text)?;
    ensure!(read as u64 <= FILE_MAX, "larger than {FILE_MAX} bytes");
    Ok(text)
}

/// Path of the file in which `docker login` stores credentials.
#[expect(
    clippy::disallowed_methods,
    reason = "where another program has its file, and no configuration"
)]
fn known_logins() -> Option<PathBuf> {
    let own = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let home = || Some(Path::new(&std::env::var_os("HOME")?).join(".docker"));
    Some(own.or_else(home)?.join("config.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_of_other_programs_are_read() {
        let file = r#"{"auths":{"h.example:5000":{"auth":"dTpwOjE="},"empty":{},"bad":{"auth":"dQ=="},"none":{"auth":""}},"credsStore":"x"}"#;
        let login = of_file(file, "h.example:5000").unwrap().unwrap();
        assert_eq!((login.username.as_str(), login.password.as_str()), ("u", "p:1"));
        let header = login.header().unwrap();
        assert_eq!(header.to_str().unwrap(), "Basic dTpwOjE=");
        assert!(!format!("{login:?}{header:?}").contains("p:1"));
        for host in ["h.example", "empty", "none", "other"] {
            assert_eq!(of_file(file, host).unwrap(), None, "{host}");
        }
        assert!(of_file(file, "bad").is_err());
        assert!(of_file("{", "h").is_err());
        assert_eq!(of_file("{}", "h").unwrap(), None);
    }

    #[test]
    fn a_password_is_in_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("password");
        let args = |user: Option<&str>, file: Option<&Path>| RegistryArgs {
            registry_user: user.map(str::to_owned),
            registry_password_file: file.map(Path::to_owned),
        };
        assert!(find(&args(Some("u"), None), "h").is_err());
        assert!(find(&args(Some("u"), Some(&path)), "h").is_err());
        fs::write(&path, "pass word\n").unwrap();
        let login = find(&args(Some("u"), Some(&path)), "h").unwrap().unwrap();
        assert_eq!(login.password, "pass word");
        for bad in ["", "\n"] {
            fs::write(&path, bad).unwrap();
            assert!(find(&args(Some("u"), Some(&path)), "h").is_err());
        }
        fs::write(&path, "x".repeat(usize::try_from(FILE_MAX).unwrap() + 1)).unwrap();
        assert!(find(&args(Some("u"), Some(&path)), "h").is_err());
    }
}
