//! The command line.
//!
//! Flags that are configuration keys arrive here as text: `config` checks them together with the environment and the
//! file, so that one wrong value is reported in one way wherever it was written. There is no flag for a secret,
//! because a process list shows flags to every user of the host.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::config::keys::{self, Key};
use crate::output::Format;

/// Self-hosted sandboxes for code that nobody reviewed. One binary is the whole platform.
#[derive(Debug, Parser)]
#[command(
    name = "ringfence",
    version,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = "Start with `ringfence doctor`, then `ringfence up`."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags of every command.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Where everything is kept [env: RINGFENCE_DATA_DIR] [default: /var/lib/ringfence]
    #[arg(long, global = true, value_name = "DIR")]
    data_dir: Option<String>,
    /// Configuration file, TOML; its keys are listed by `ringfence up --help` [env: RINGFENCE_CONFIG]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Format of the log on stderr: text or json [env: RINGFENCE_LOG_FORMAT] [default: text]
    #[arg(long, global = true, value_name = "FORMAT")]
    log_format: Option<String>,
    /// What is logged: error, warn, info, debug or trace, or directives such as info,node=debug
    /// [env: RINGFENCE_LOG_LEVEL] [default: info for up, warn for the other commands]
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
}

/// What the program is to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the platform in the foreground
    ///
    /// Serves the API and the traffic of sandboxes on one port, from one process. The first start makes the data
    /// directory, a team, a user and their keys, and writes the keys to <data-dir>/credentials.env. One line on stdout
    /// says when it is ready. SIGTERM or Ctrl-C ends it and leaves the sandboxes running: the next start adopts them.
    /// A second signal ends it at once. Needs root.
    #[command(after_long_help = keys::reference())]
    Up(UpArgs),
    /// End every sandbox of a data directory and clean up
    ///
    /// A platform that runs on the data directory is ended first, as SIGTERM would end it. Keys, templates and
    /// settings stay. Needs root.
    Down,
    /// Tell what this host offers, what each gap costs, and how to fix it
    ///
    /// The exit code is 0 if `ringfence up` would work with the same flags, else 1.
    Doctor {
        /// How the report is shown
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
        #[command(flatten)]
        listen: ListenArg,
        #[command(flatten)]
        tls: TlsArgs,
    },
    /// Make and list teams, the owners of sandboxes, templates and keys
    #[command(subcommand)]
    Team(TeamCommand),
    /// Make, list and revoke keys; works while the platform runs
    #[command(subcommand)]
    Key(KeyCommand),
    /// Make, list and revoke access tokens, with which users log in; works while the platform runs
    #[command(subcommand)]
    Token(TokenCommand),
    /// Measure a running platform with a client of its own
    ///
    /// Times are of single requests over kept connections and are not trimmed: the slowest one counts. The exit code
    /// is 1 if a request failed or the run was interrupted. Every sandbox that it made is deleted at the end, also
    /// after Ctrl-C.
    Bench(BenchArgs),
}

/// Flags of `up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    listen: ListenArg,
    /// Address and port of the metrics for Prometheus, such as 127.0.0.1:9464; port 0 takes a free one
    /// [env: RINGFENCE_METRICS_LISTEN] [default: none]
    #[arg(long, value_name = "ADDRESS")]
    metrics_listen: Option<String>,
    /// Domain under which sandboxes are reached as <port>-<id>.<domain>, used as written
    /// [env: RINGFENCE_DOMAIN] [default: sandbox.localhost:<port of --listen>]
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// HTTPS.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Speak HTTPS too, on the same port; without --tls-cert, with a certificate of an authority of the data
    /// directory's own [env: RINGFENCE_TLS] [default: false, or true with tls_cert]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tls: Option<String>,
    /// Certificates to show, PEM, the server's own first; read again at SIGHUP
    /// [env: RINGFENCE_TLS_CERT] [default: none]
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<String>,
    /// Private key of the first certificate, PEM
    /// [env: RINGFENCE_TLS_KEY] [default: none]
    #[arg(long, value_name = "FILE")]
    tls_key: Option<String>,
}

impl TlsArgs {
    fn flags(&self) -> [(&'static Key, &Option<String>); 3] {
        [
            (keys::TLS, &self.tls),
            (keys::TLS_CERT, &self.tls_cert),
            (keys::TLS_KEY, &self.tls_key),
        ]
    }
}

/// The address of the platform.
#[derive(Debug, Args)]
pub(crate) struct ListenArg {
    /// Address and port of the API and of sandbox traffic; port 0 takes a free one
    /// [env: RINGFENCE_LISTEN] [default: 127.0.0.1:3000]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
}

/// What is to be done with teams.
#[derive(Debug, Subcommand)]
pub(crate) enum TeamCommand {
    /// Make a team with a user `default`, and print its ID
    Create {
        /// Name of the team, unique on this platform
        name: String,
    },
    /// List teams
    List {
        /// How the list is shown
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
}

/// What is to be done with keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make an API key and print it: this once, since only its hash is kept
    Create {
        /// Team that the key acts for
        #[arg(long, value_name = "TEAM", default_value = crate::accounts::DEFAULT)]
        team: String,
        /// Name to recognise the key by
        #[arg(long, value_name = "NAME", default_value = "unnamed")]
        name: String,
    },
    /// List API keys and access keys, without their secrets
    List {
        /// Only those of this team
        #[arg(long, value_name = "TEAM")]
        team: Option<String>,
        /// How the list is shown
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// End a key: requests that present it are refused from now on
    Revoke {
        /// ID of the key as `key list` shows it
        id: String,
    },
}

/// What is to be done with access tokens.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make an access token and print it: this once, since only its hash is kept
    Create {
        /// Team whose user `default` the token speaks for
        #[arg(long, value_name = "TEAM", default_value = crate::accounts::DEFAULT)]
        team: String,
        /// Name to recognise the token by
        #[arg(long, value_name = "NAME", default_value = "unnamed")]
        name: String,
    },
    /// List access tokens, without their secrets
    List {
        /// Only those of this team
        #[arg(long, value_name = "TEAM")]
        team: Option<String>,
        /// How the list is shown
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// End an access token: requests that present it are refused from now on
    Revoke {
        /// ID of the token as `token list` shows it
        id: String,
    },
}

impl Cli {
    /// The flags that are configuration keys.
    pub(crate) fn flags(&self) -> Vec<(&'static Key, String)> {
        let mut flags = vec![
            (keys::DATA_DIR, &self.common.data_dir),
            (keys::LOG_FORMAT, &self.common.log_format),
            (keys::LOG_LEVEL, &self.common.log_level),
        ];
        match &self.command {
            Command::Up(up) => {
                flags.push((keys::LISTEN, &up.listen.listen));
                flags.push((keys::METRICS_LISTEN, &up.metrics_listen));
                flags.push((keys::DOMAIN, &up.domain));
                flags.extend(up.tls.flags());
            }
            Command::Doctor { listen, tls, .. } => {
                flags.push((keys::LISTEN, &listen.listen));
                flags.extend(tls.flags());
            }
            Command::Down | Command::Team(_) | Command::Key(_) | Command::Token(_) | Command::Bench(_) => {}
        }
        flags
            .into_iter()
            .filter_map(|(key, value)| Some((key, value.clone()?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_of_a_key_shows_its_variable_and_default() {
        let mut command = Cli::command();
        let mut up = command.find_subcommand_mut("up").unwrap().clone();
        for global in command.get_arguments() {
            up = up.arg(global.clone());
        }
        for key in keys::ALL {
            let Some(flag) = key.flag else { continue };
            let argument = up
                .get_arguments()
                .find(|argument| argument.get_long().is_some_and(|long| format!("--{long}") == flag))
                .unwrap_or_else(|| panic!("{flag} is no flag of up"));
            let help = argument.get_help().unwrap().to_string();
            assert!(help.contains(&format!("[env: {}]", key.env())), "{help}");
            let default = key.default.replace("port of listen", "port of --listen");
            assert!(help.contains(&format!("[default: {default}")), "{help}");
        }
    }

    #[test]
    fn no_flag_takes_a_secret() {
        assert_eq!(keys::DATABASE_URL.flag, None);
        let help = format!("{:?}", Cli::command().render_long_help().to_string());
        assert!(!help.contains("--api-key"));
    }
}
