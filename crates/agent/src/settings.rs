//! What the host set with `/init`: who may call, as whom, and in which environment.

use std::collections::BTreeMap;

use jiff::Timestamp;
use protocol::agent::Init;
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::trust::Trust;

/// The agent's settings. Before the first `/init` no client needs a token and everything runs as root.
#[derive(Clone)]
pub(crate) struct AgentSettings {
    token: Option<String>,
    /// Whether every client is admitted, whatever token it shows or not.
    open_to_anonymous: bool,
    user_env: BTreeMap<String, String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
    /// None while the sandbox has no owner.
    metadata: Option<BTreeMap<String, String>>,
    pub(crate) default_user: String,
    pub(crate) default_workdir: Option<String>,
    /// Processors that the sandbox may use, if that is limited.
    pub(crate) cpu_count: Option<u32>,
    /// Memory that the sandbox may use in MiB, if that is limited.
    pub(crate) memory_mb: Option<u32>,
    /// The CA certificates that were installed, if any were.
    trust: Option<Trust>,
    /// Closed once the certificate is installed whose installation was deferred.
    deferred: Option<watch::Receiver<()>>,
    last_init: Option<Timestamp>,
}

impl Default for AgentSettings {
    fn default() -> Self {
        Self {
            token: None,
            open_to_anonymous: false,
            user_env: BTreeMap::new(),
            sandbox_id: None,
            template_id: None,
            metadata: None,
            default_user: "root".to_owned(),
            default_workdir: None,
            cpu_count: None,
            memory_mb: None,
            trust: None,
            deferred: None,
            last_init: None,
        }
    }
}

/// The timestamp of an `/init` is not an RFC 3339 time.
#[derive(Debug, thiserror::Error)]
#[error("invalid timestamp")]
pub(crate) struct InvalidTimestamp;

impl AgentSettings {
    /// Whether an `/init` is older than one that was taken before, and so has no effect.
    ///
    /// # Errors
    /// [`InvalidTimestamp`].
    pub(crate) fn is_stale(&self, init: &Init) -> Result<bool, InvalidTimestamp> {
        let timestamp = timestamp(init)?;
        Ok(matches!((self.last_init, timestamp), (Some(last), Some(new)) if new <= last))
    }

    /// Takes over what an `/init` says, unless it [is stale](Self::is_stale). Whether it was taken.
    ///
    /// # Errors
    /// [`InvalidTimestamp`]; nothing is changed then.
    pub(crate) fn apply(&mut self, init: Init) -> Result<bool, InvalidTimestamp> {
        if self.is_stale(&init)? {
            return Ok(false);
        }
        let timestamp = timestamp(&init)?;
        self.last_init = timestamp.or(self.last_init);
        self.token = init.access_token.filter(|token| !token.is_empty());
        self.open_to_anonymous = init.open_to_anonymous;
        self.cpu_count = init.cpu_count.filter(|count| *count > 0).or(self.cpu_count);
        self.memory_mb = init.memory_mb.filter(|memory| *memory > 0).or(self.memory_mb);
        if let Some(env) = init.env_vars {
            self.user_env = env;
        }
        if init.metadata.is_some() {
            self.metadata = init.metadata;
        }
        for (field, value) in [
            (&mut self.sandbox_id, init.sandbox_id),
            (&mut self.template_id, init.template_id),
        ] {
            if value.is_some() {
                *field = value;
            }
        }
        if let Some(user) = init.default_user.filter(|user| !user.is_empty()) {
            self.default_user = user;
        }
        if let Some(workdir) = init.default_workdir.filter(|workdir| !workdir.is_empty()) {
            self.default_workdir = Some(workdir);
        }
        Ok(true)
    }

    /// Makes processes that start from now on find a CA certificate that was installed.
    pub(crate) fn trust(&mut self, trust: Trust) {
        self.trust = Some(trust);
    }

    /// Says that a certificate is being installed, until the sender is dropped.
    pub(crate) fn defer_trust(&mut self, installed: watch::Receiver<()>) {
        self.deferred = Some(installed);
    }

    /// What to wait for before a process is started.
    pub(crate) fn deferred_trust(&self) -> Option<watch::Receiver<()>> {
        let mut installed = self.deferred.clone()?;
        // An error says that the sender is gone.
        installed.has_changed().is_ok().then(|| {
            installed.mark_unchanged();
            installed
        })
    }

    /// The token that clients must present, if any.
    pub(crate) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Whether a client with this `X-Access-Token`, or without one, may call; compared in constant time.
    pub(crate) fn admits(&self, presented: Option<&[u8]>) -> bool {
        match (&self.token, presented) {
            (None, _) => true,
            (Some(_), _) if self.open_to_anonymous => true,
            (Some(_), None) => false,
            (Some(token), Some(presented)) => token.as_bytes().ct_eq(presented).into(),
        }
    }

    /// The environment of every process: what points to an installed CA certificate, over it the user's, and over that
    /// what names the sandbox.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.trust.as_ref().map(Trust::env).unwrap_or_default();
        env.extend(self.user_env.clone());
        env.insert("E2B_SANDBOX".to_owned(), "true".to_owned());
        for (key, value) in [
            ("E2B_SANDBOX_ID", &self.sandbox_id),
            ("E2B_TEMPLATE_ID", &self.template_id),
        ] {
            if let Some(value) = value {
                env.insert(key.to_owned(), value.clone());
            }
        }
        env
    }

    /// What the request for the sandbox gave, as JSON with the names of the API; none while it has no owner.
    pub(crate) fn given(&self) -> Option<Vec<u8>> {
        let metadata = self.metadata.as_ref()?;
        let given = serde_json::json!({
            "envVars": self.user_env,
            "metadata": metadata,
            "sandboxID": self.sandbox_id,
            "templateID": self.template_id,
        });
        Some(format!("{given}\n").into_bytes())
    }

    /// Names and contents of the files in `/run/e2b` by which programs recognise the sandbox.
    pub(crate) fn boot_files(&self) -> [(&'static str, Option<&str>); 3] {
        [
            (".E2B_SANDBOX", Some("true")),
            (".E2B_SANDBOX_ID", self.sandbox_id.as_deref()),
            (".E2B_TEMPLATE_ID", self.template_id.as_deref()),
        ]
    }
}

fn timestamp(init: &Init) -> Result<Option<Timestamp>, InvalidTimestamp> {
    let parse = |text: &String| text.parse().map_err(|_| InvalidTimestamp);
    init.timestamp.as_ref().map(parse).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(text: &str) -> Init {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn later_calls_win_and_older_ones_change_nothing() {
        let mut settings = AgentSettings::default();
        let first = r#"{"timestamp":"2026-01-01T00:00:01Z","accessToken":"a","envVars":{"A":"1","E2B_SANDBOX":"no"},
            "defaultUser":"user","defaultWorkdir":"/w","sandboxId":"s","templateId":"t","unknown":[]}"#;
        assert!(settings.apply(init(first)).unwrap());
        assert!(!settings.apply(init(first)).unwrap());
        assert!(
            !settings
                .apply(init(r#"{"timestamp":"2026-01-01T00:00:00.5Z","accessToken":"b"}"#))
                .unwrap()
        );
        assert_eq!(settings.token(), Some("a"));
        let env = settings.env();
        let env: Vec<_> = env.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let expect = [
            ("A", "1"),
            ("E2B_SANDBOX", "true"),
            ("E2B_SANDBOX_ID", "s"),
            ("E2B_TEMPLATE_ID", "t"),
        ];
        assert_eq!(env, expect);

        // Without a time a call always counts. An absent token opens the gate, absent variables stay.
        assert!(settings.apply(init("{}")).unwrap());
        assert_eq!(settings.token(), None);
        assert_eq!(settings.env().len(), 4);
        assert_eq!(
            (settings.default_user.as_str(), settings.default_workdir.as_deref()),
            ("user", Some("/w"))
        );

        // Variables are replaced as a whole.
        assert!(
            settings
                .apply(init(r#"{"envVars":{"B":"2"},"defaultUser":""}"#))
                .unwrap()
        );
        assert!(!settings.env().contains_key("A"));
        assert_eq!(settings.default_user, "user");
        assert!(
            settings
                .apply(init(r#"{"timestamp":"yesterday","accessToken":"c"}"#))
                .is_err()
        );
        assert_eq!(settings.token(), None);
    }

    #[test]
    fn the_gate() {
        let mut settings = AgentSettings::default();
        assert!(settings.admits(None) && settings.admits(Some(b"x")));
        settings.apply(init(r#"{"accessToken":"secret"}"#)).unwrap();
        assert!(settings.admits(Some(b"secret")));
        for wrong in [None, Some(b"".as_slice()), Some(b"Secret"), Some(b"secret ")] {
            assert!(!settings.admits(wrong));
        }
        settings
            .apply(init(r#"{"accessToken":"secret","openToAnonymous":true}"#))
            .unwrap();
        for shown in [
            None,
            Some(b"secret".as_slice()),
            Some(b""),
            Some(b"Secret"),
            Some(b"of another sandbox"),
        ] {
            assert!(settings.admits(shown));
        }
        // It goes with the token, and is not left behind.
        settings.apply(init(r#"{"accessToken":"secret"}"#)).unwrap();
        assert!(!settings.admits(None));
    }
}
