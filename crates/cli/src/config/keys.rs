//! The one table of configuration keys: names, types, defaults and meanings.
//!
//! The help texts, the reference, the environment names and the check of the configuration file all read this table,
//! so a key cannot exist undocumented or be spelt differently in two places.

use std::fmt::Write as _;

/// What a key holds. A configuration file must use the same type, so that `launchers = "two"` is refused where it is
/// written and not where it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Any text.
    Text,
    /// A whole number.
    Integer,
    /// `true` or `false`.
    Boolean,
}

impl Kind {
    /// The type as an error message names it.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Text => "a text in quotes",
            Self::Integer => "a whole number",
            Self::Boolean => "true or false",
        }
    }
}

/// One configuration key.
#[derive(Debug)]
pub(crate) struct Key {
    /// The name in the configuration file; a dot stands for a table.
    pub(crate) name: &'static str,
    /// The flag of the command line, where there is one. Secrets have none: a process list shows flags.
    pub(crate) flag: Option<&'static str>,
    /// The type.
    pub(crate) kind: Kind,
    /// The default, in words or as a value.
    pub(crate) default: &'static str,
    /// What it means, in one sentence or two.
    pub(crate) meaning: &'static str,
}

impl Key {
    /// The environment variable that sets it.
    pub(crate) fn env(&self) -> String {
        format!("RINGFENCE_{}", self.name.replace('.', "_").to_uppercase())
    }
}

macro_rules! keys {
    ($($constant:ident = { $name:literal, $flag:expr, $kind:ident, $default:literal, $meaning:literal $(,)? }),+ $(,)?) => {
        $(pub(crate) const $constant: &Key = &Key {
            name: $name,
            flag: $flag,
            kind: Kind::$kind,
            default: $default,
            meaning: $meaning,
        };)+

        /// Every key, in the order in which the reference shows them.
        pub(crate) const ALL: &[&Key] = &[$($constant),+];
    };
}

keys! {
    DATA_DIR = {
        "data_dir", Some("--data-dir"), Text, "/var/lib/ringfence",
        "Where everything is kept: database, keys, sandboxes. Made with mode 0700 when it does not exist.",
    },
    LISTEN = {
        "listen", Some("--listen"), Text, "127.0.0.1:3000",
        "Address and port of the API and of sandbox traffic. Port 0 takes a free one.",
    },
    METRICS_LISTEN = {
        "metrics_listen", Some("--metrics-listen"), Text, "none",
        "Address and port of the metrics for Prometheus. They are served nowhere else, and to everyone who reaches it.",
    },
    DOMAIN = {
        "domain", Some("--domain"), Text, "sandbox.localhost:<port of listen>",
        "Domain under which sandboxes are reached as <port>-<id>.<domain>, with the port that clients use unless it is \
         the one of their scheme. Used as written.",
    },
    TLS = {
        "tls", Some("--tls"), Boolean, "false, or true with tls_cert",
        "Whether the port speaks HTTPS besides HTTP. Without tls_cert it shows a certificate of an authority of its \
         own, which clients must trust: <data-dir>/tls/ca.pem.",
    },
    TLS_CERT = {
        "tls_cert", Some("--tls-cert"), Text, "none",
        "File of the certificates to show, in PEM, the server's own first, for <domain> and *.<domain>. SIGHUP makes \
         the platform read it again.",
    },
    TLS_KEY = {
        "tls_key", Some("--tls-key"), Text, "none",
        "File of the private key of the first certificate, in PEM.",
    },
    LOG_FORMAT = {
        "log_format", Some("--log-format"), Text, "text",
        "Format of the log on stderr: text, or json with one object per line.",
    },
    LOG_LEVEL = {
        "log_level", Some("--log-level"), Text, "info for up, warn for the other commands",
        "What is logged: error, warn, info, debug or trace, or directives such as info,node=debug.",
    },
    DATABASE_URL = {
        "database_url", None, Text, "sqlite:<data-dir>/ringfence.db",
        "The database: sqlite:<path> or postgres://user:password@host/name. It may hold a password, so there is no \
         flag for it.",
    },
    LAUNCHERS = {
        "launchers", None, Integer, "one per core, at least 2",
        "Number of helper processes that start sandboxes side by side, 1 to 64.",
    },
    BASE_TEMPLATE = {
        "base_template", None, Boolean, "true",
        "Whether the built-in template `base` is offered. It shows this host's /usr, read-only, to its sandboxes.",
    },
    SANDBOX_CPU_COUNT = {
        "sandbox.cpu_count", None, Integer, "2",
        "Cores that a sandbox of `base` may use, 1 to 1024.",
    },
    SANDBOX_MEMORY_MB = {
        "sandbox.memory_mb", None, Integer, "1024",
        "Memory that a sandbox of `base` may use, in MiB, at least 64.",
    },
    SANDBOX_DISK_MB = {
        "sandbox.disk_mb", None, Integer, "10240",
        "Disk that a sandbox of `base` may fill, in MiB, at least 64.",
    },
    SANDBOX_PIDS = {
        "sandbox.pids", None, Integer, "512",
        "Processes and threads that a sandbox may have, at least 32.",
    },
    SANDBOX_MAX_LIFETIME_S = {
        "sandbox.max_lifetime_s", None, Integer, "86400",
        "Longest life of a sandbox from its start, in seconds, whatever timeout it asks for.",
    },
    SANDBOX_ALWAYS_SECURE = {
        "sandbox.always_secure", None, Boolean, "false",
        "Let every agent insist on its token. Otherwise one whose client left `secure` out on the older create path also \
         answers callers without any credential, as that path promises.",
    },
    LIMITS_SANDBOXES = {
        "limits.sandboxes", None, Integer, "0",
        "Most sandboxes that a team may have at once; 0 is no limit.",
    },
    LIMITS_CPU_COUNT = {
        "limits.cpu_count", None, Integer, "0",
        "Most cores of all sandboxes of a team together; 0 is no limit.",
    },
    LIMITS_MEMORY_MB = {
        "limits.memory_mb", None, Integer, "0",
        "Most memory of all sandboxes of a team together, in MiB, as far as they may use it; 0 is no limit.",
    },
    LIMITS_CREATES_PER_MINUTE = {
        "limits.creates_per_minute", None, Integer, "0",
        "Sandboxes that a team may ask for per minute, also all at once; 0 is no limit.",
    },
    LIMITS_REQUESTS_PER_SECOND = {
        "limits.requests_per_second", None, Integer, "0",
        "Requests to the API that a team may make per second, also all at once; 0 is no limit.",
    },
    CAPACITY_MEMORY_FLOOR_MB = {
        "capacity.memory_floor_mb", None, Integer, "256",
        "Memory of this host that creates leave available, in MiB; 0 starts sandboxes until the host has none.",
    },
    CAPACITY_DISK_FLOOR_MB = {
        "capacity.disk_floor_mb", None, Integer, "1024",
        "Space on the file system of the data directory that creates leave free, in MiB; 0 fills it.",
    },
    CAPACITY_MAX_SANDBOXES = {
        "capacity.max_sandboxes", None, Integer, "0",
        "Most sandboxes at once, of all teams; 0 is as many as this host has room for.",
    },
    LOGS_RETENTION_S = {
        "logs.retention_s", None, Integer, "604800",
        "How long the log of a sandbox is kept after its end, in seconds.",
    },
    LOGS_MAX_ENTRIES = {
        "logs.max_entries", None, Integer, "10000",
        "Most entries of one sandbox's log, at least 1. The oldest go first.",
    },
    LOGS_MAX_KB = {
        "logs.max_kb", None, Integer, "4096",
        "Most of the database that one sandbox's log may take, in KiB, at least 16. The oldest entries go first.",
    },
    METRICS_RETENTION_S = {
        "metrics.retention_s", None, Integer, "86400",
        "How long the samples of what a sandbox uses are kept, in seconds. 1,000 sandboxes make 140 to 425 MB a day.",
    },
    UNLIMITED = {
        "unlimited", None, Boolean, "false",
        "Start even where no cgroup is usable. Sandboxes then run without limits of cpu, memory and processes.",
    },
}

/// Keys that a table of a single team may set too: `limits.sandboxes` of the team `research` is
/// `team.research.limits.sandboxes`. There is no flag and no variable for those.
pub(crate) const PER_TEAM: &[&Key] = &[
    SANDBOX_MAX_LIFETIME_S,
    LIMITS_SANDBOXES,
    LIMITS_CPU_COUNT,
    LIMITS_MEMORY_MB,
    LIMITS_CREATES_PER_MINUTE,
    LIMITS_REQUESTS_PER_SECOND,
];

/// The table whose tables are those of single teams.
pub(crate) const TEAM: &str = "team";

/// The reference of all keys, as the end of a help text.
pub(crate) fn reference() -> String {
    let mut text = String::from(
        "Configuration keys, for the file of --config (TOML; a dot stands for a table) and the environment.\n\
         A flag wins over the environment, the environment over the file, the file over the default.\n",
    );
    for key in ALL {
        let _ = write!(
            text,
            "\n  {} [env: {}] [default: {}]\n",
            key.name,
            key.env(),
            key.default
        );
        for line in wrap(key.meaning, 100) {
            let _ = writeln!(text, "      {line}");
        }
    }
    text.push_str("\nFor one team, in the file only, as team.<name>.<key>:\n");
    for key in PER_TEAM {
        let _ = writeln!(text, "  {}", key.name);
    }
    text.push_str("\nExit codes: 0 clean, 1 failure, 2 wrong usage or configuration.");
    text
}

/// Breaks a text at spaces into lines of at most `width` characters.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a first line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}
