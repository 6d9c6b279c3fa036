//! The command line.
//!
//! Flags that are configuration keys stay text here: `config` checks them together with the environment and the file,
//! so that an invalid value is reported in the same way whatever its source. Secrets have no flag, because every user
//! of the host can read flags in the process list.

mod listen;
mod node;
mod sandbox;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use self::listen::{ListenArg, TlsArgs};
pub(crate) use self::node::{NodeArgs, NodeCommand, ServerArgs};
pub(crate) use self::sandbox::{
    CopyArgs, ExecArgs, ForwardArgs, ProcessArgs, SandboxCommand, SandboxOrder, ShellArgs, TopArgs, TopOrder,
};
use crate::bench::BenchArgs;
use crate::config::LogFormat;
use crate::config::keys::{self, Key};
use crate::config::reference;
use crate::output::Format;

/// Name of the team, the user and the keys of the first start.
pub(crate) const DEFAULT: &str = "default";

/// Self-hosted sandboxes for untrusted code. The whole platform is one binary.
#[derive(Debug, Parser)]
#[command(
    name = "ringfence",
    version = crate::version::text(),
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
    /// Data directory [env: RINGFENCE_DATA_DIR] [default: /var/lib/ringfence]
    #[arg(long, global = true, value_name = "DIR")]
    data_dir: Option<String>,
    /// Configuration file, TOML; its keys are listed by `ringfence up --help` [env: RINGFENCE_CONFIG]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Log format on stderr: text or json [env: RINGFENCE_LOG_FORMAT] [default: text]
    #[arg(long, global = true, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Log level: error, warn, info, debug or trace, or directives such as info,node=debug
    /// [env: RINGFENCE_LOG_LEVEL] [default: info for up, server and node; warn for up on a terminal and for the other
    /// commands]
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the platform in the foreground
    ///
    /// Serves the API and the traffic of sandboxes on one port. The first start creates the data directory, a team, a
    /// user and their keys, and writes the keys to <data-dir>/credentials.env. Prints one line to stdout when ready.
    /// SIGTERM or Ctrl-C stops the platform and leaves the sandboxes running: the next start adopts them. A second
    /// signal stops it immediately. Requires root.
    #[command(after_long_help = reference::reference())]
    Up(UpArgs),
    /// Run the platform in the foreground without a node of its own
    ///
    /// Serves the API and the traffic of sandboxes like `ringfence up`. The sandboxes run where `ringfence node` does, on this
    /// machine or on others, which connect to --nodes-listen; requests that need a node are answered 503 while it is
    /// away. Requires no root.
    #[command(after_long_help = reference::reference())]
    Server(ServerArgs),
    /// Run the sandboxes of this host for a server, and manage the nodes of a server
    ///
    /// Without a subcommand, runs the node in the foreground, which connects to the server that it has joined. It listens on no
    /// port, and has no database. SIGTERM or Ctrl-C stops the node and leaves the sandboxes running: the next start adopts them.
    /// Requires root.
    Node(NodeArgs),
    /// Turn a stopped platform into a server and a node, and keep its sandboxes running
    #[command(subcommand)]
    Split(SplitCommand),
    /// Terminate all sandboxes of a data directory and clean up the host
    ///
    /// A platform that runs on the data directory is stopped first, as with SIGTERM. Keys and templates are kept.
    /// Requires root.
    Down,
    /// Check whether this host meets the requirements, and show how to fix what is missing
    ///
    /// The exit code is 0 if `ringfence up` would work with the same flags, otherwise 1.
    Doctor {
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
        #[command(flatten)]
        listen: ListenArg,
        #[command(flatten)]
        tls: TlsArgs,
    },
    /// Create and list teams, the owners of sandboxes, templates and keys
    #[command(subcommand)]
    Team(TeamCommand),
    /// Create and list users, who own keys and injection rules; works while the platform runs
    #[command(subcommand)]
    User(UserCommand),
    /// Create, list and revoke API keys; works while the platform runs
    #[command(subcommand)]
    Key(KeyCommand),
    /// Create, list and revoke access keys, which sign requests; works while the platform runs
    #[command(subcommand)]
    AccessKey(AccessKeyCommand),
    /// Create, list and revoke access tokens of users; works while the platform runs
    #[command(subcommand)]
    Token(TokenCommand),
    /// Replace the master key, under which all secrets in the database are encrypted
    #[command(subcommand)]
    MasterKey(MasterKeyCommand),
    /// List, inspect, enter and kill sandboxes of all teams; requires a running platform
    #[command(subcommand)]
    Sandbox(SandboxCommand),
    /// Print the address of the dashboard, and a code by which the operator signs in; requires a running platform
    ///
    /// The code opens one session, which shows the sandboxes of all teams. Teams sign in with a key of theirs.
    Dashboard,
    /// Watch the sandboxes of all teams: what each uses, the largest first; requires a running platform
    ///
    /// Keys: q ends it; c, m, d, a and s sort by CPU, memory, disk, age and state, i and t by template and team; r reverses the
    /// order; arrows, Page Up, Page Down, Home and End scroll.
    Top(TopArgs),
    /// Build, list, inspect, delete, push and pull the templates of a team; requires a running platform
    ///
    /// The platform and the API key are those of E2B_API_URL and E2B_API_KEY, or of the data directory; for `push` and
    /// `pull` the platform is that of the data directory.
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Remove layers of templates that nothing uses, and show the space that builds take; requires a running platform
    ///
    /// The platform does the same at intervals. Layers that a template, a sandbox, a build or the build cache uses stay.
    Gc {
        /// Only show what would be removed
        #[arg(long)]
        dry_run: bool,
        /// Also remove results of steps and uploaded files that no build has used for an hour
        #[arg(long, conflicts_with = "dry_run")]
        cache: bool,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Back up a platform while it runs, and restore backups
    #[command(subcommand)]
    Backup(BackupCommand),
    /// Benchmark a running platform
    ///
    /// Times are those of single requests over kept-alive connections; no sample is discarded. The exit code is 1 if a
    /// request failed or the run was interrupted. All created sandboxes are deleted at the end, also after Ctrl-C.
    Bench(BenchArgs),
    /// Print the completions of a shell, such as for: source <(ringfence completions bash)
    ///
    /// The packages bring those of bash, zsh and fish.
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write the manual pages to a directory
    Manual {
        /// The directory, which is created if it does not exist
        directory: PathBuf,
    },
}

/// Subcommands of `split`.
#[derive(Debug, Subcommand)]
pub(crate) enum SplitCommand {
    /// Copy the SQLite database of the data directory to the empty PostgreSQL database of database_url
    ///
    /// The platform must be stopped, as with SIGTERM, which leaves its sandboxes running. Start it with database_url afterwards.
    Database,
    /// Make the data directory that of a node, and another one that of its server
    ///
    /// The platform must be stopped, and its database must be PostgreSQL. The sandboxes stay where they are, and are those of the
    /// node. Keys, certificates and uploaded files go to the directory of the server. It can be repeated if it was interrupted.
    Node {
        /// Data directory of the server, which is created
        #[arg(value_name = "SERVER_DIR")]
        server_dir: PathBuf,
        /// Addresses of the port of nodes of all servers, https://<host>:<port>
        #[arg(value_name = "URL", required = true, num_args = 1..=16)]
        servers: Vec<String>,
    },
}

/// Flags of `up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    listen: ListenArg,
    /// Address and port on which metrics for Prometheus are served, such as 127.0.0.1:9464; port 0 selects a free port
    /// [env: RINGFENCE_METRICS_LISTEN] [default: none]
    #[arg(long, value_name = "ADDRESS")]
    metrics_listen: Option<String>,
    /// Domain of sandboxes, whose host names are <port>-<id>.<domain>
    /// [env: RINGFENCE_DOMAIN] [default: sandbox.localhost:<port of --listen>]
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    /// Build a template that comes with this program when the platform is ready, such as code-interpreter, unless the default
    /// team has it; can be repeated
    #[arg(long, value_name = "TEMPLATE")]
    pub(crate) with: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Subcommands of `team`.
#[derive(Debug, Subcommand)]
pub(crate) enum TeamCommand {
    /// Create a team with a user `default`, and print its ID
    Create {
        /// Name of the team, unique on this platform
        name: String,
    },
    /// List teams
    List {
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
}

/// Which rows of a table are listed, and how.
#[derive(Debug, Args)]
pub(crate) struct OfTeam {
    /// List only those of this team
    #[arg(long, value_name = "TEAM")]
    pub(crate) team: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
}

/// The owner and the name of a new key.
#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// Team of the key
    #[arg(long, value_name = "TEAM", default_value = DEFAULT)]
    pub(crate) team: String,
    /// User of the key
    #[arg(long, value_name = "USER", default_value = DEFAULT)]
    pub(crate) user: String,
    /// Name of the key
    #[arg(long, value_name = "NAME", default_value = "unnamed")]
    pub(crate) name: String,
}

/// Subcommands of `user`.
#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// Create a user of a team, and print its ID
    Create {
        /// Name of the user, unique in the team
        name: String,
        /// Team of the user
        #[arg(long, value_name = "TEAM", default_value = DEFAULT)]
        team: String,
    },
    /// List users
    List(OfTeam),
}

/// Subcommands of `access-key`.
#[derive(Debug, Subcommand)]
pub(crate) enum AccessKeyCommand {
    /// Create a pair of access key and secret key, and print it; the secret key cannot be shown again
    Create(KeyArgs),
    /// List access keys, without their secret keys
    List {
        /// List only those of this team
        #[arg(long, value_name = "TEAM")]
        team: Option<String>,
        /// List only those of users with this name
        #[arg(long, value_name = "USER")]
        user: Option<String>,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Revoke an access key; requests that are signed with it are refused immediately
    Revoke {
        /// The access key
        id: String,
    },
}

/// Subcommands of `key`.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create an API key and print it; it cannot be shown again, because only its hash is stored
    Create(KeyArgs),
    /// List API keys and access keys, without their secrets
    List(OfTeam),
    /// Revoke a key; requests with this key are refused immediately
    Revoke {
        /// ID of the key, see `key list`
        id: String,
    },
}

/// Subcommands of `token`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create an access token and print it; it cannot be shown again, because only its hash is stored
    Create {
        /// Team whose user `default` the token belongs to
        #[arg(long, value_name = "TEAM", default_value = DEFAULT)]
        team: String,
        /// Name of the token
        #[arg(long, value_name = "NAME", default_value = "unnamed")]
        name: String,
    },
    /// List access tokens, without their secrets
    List(OfTeam),
    /// Revoke an access token; requests with this token are refused immediately
    Revoke {
        /// ID of the token, see `token list`
        id: String,
    },
}

/// Subcommands of `master-key`.
#[derive(Debug, Subcommand)]
pub(crate) enum MasterKeyCommand {
    /// Encrypt all secrets with a new master key; the platform must be stopped, sandboxes keep running
    ///
    /// The new key is random and replaces the file of the old one. If the command is interrupted, both keys are kept, the
    /// platform can start, and the same command completes the change. Tokens of sandboxes stay the same.
    Rotate {
        /// File with the new key, 64 hexadecimal characters; it must be configured afterwards
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Give up all secrets that the master key does not open, because their key is lost
    ///
    /// Access keys are revoked, injection rules and injections of sandboxes are deleted, and sandboxes get new tokens. The
    /// platform must be stopped.
    Forget,
}

/// Subcommands of `backup`.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Write a backup to a new directory; requires a running platform
    ///
    /// It has the database, keys, templates, snapshots and sandboxes that are paused on disk. What runs or is paused in memory
    /// is not part of it. Treat it like the data directory: it has the master key.
    Create {
        /// The directory, which must not exist
        to: PathBuf,
        /// Leave out layers that the platform has lost or that are damaged, and name them
        #[arg(long)]
        skip_missing: bool,
    },
    /// Restore a backup to a data directory that does not exist or is empty; requires root
    Restore {
        /// The backup
        from: PathBuf,
    },
    /// Check whether a backup is complete and undamaged
    Check {
        /// The backup
        from: PathBuf,
    },
}

/// Subcommands of `template`.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// Build a template from a Dockerfile, an image or an archive, and wait until it is ready
    ///
    /// A file `template.toml` in the directory of the Dockerfile has what the flags do not say: `name`, `cpu`, `memory`,
    /// `start_cmd` and `ready_cmd`.
    Build(Box<BuildArgs>),
    /// Build a template that comes with this program, such as code-interpreter, and wait until it is ready
    ///
    /// Packages are fetched from mirrors of Debian, Python and Node, by the sandboxes of the build.
    Add(Box<AddArgs>),
    /// List the templates of the team
    List {
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Show one template with its builds
    Show {
        /// Name or ID of the template
        name: String,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Files of templates.
    #[command(flatten)]
    Transfer(TransferCommand),
    /// Delete templates
    Delete {
        /// Names or IDs of the templates
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// Flags of `template build`.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// Name of the template, [namespace/]name[:tag]; without one it only has an ID
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Build from an image of a registry
    #[arg(long, value_name = "REF", conflicts_with_all = ["file", "from_archive"])]
    pub(crate) from_image: Option<String>,
    /// Dockerfile to build from [default: PATH/Dockerfile]
    #[arg(short, long, value_name = "FILE", conflicts_with = "from_archive")]
    pub(crate) file: Option<PathBuf>,
    /// Build from a file: a root file system as .tar, .tar.gz or .tar.zst, or an image of `docker save` or in OCI format
    #[arg(long, value_name = "FILE")]
    pub(crate) from_archive: Option<PathBuf>,
    /// Make a file, as for --from-archive, the build argument BASE of the Dockerfile, for `FROM $BASE`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["from_image", "from_archive"])]
    pub(crate) base_archive: Option<PathBuf>,
    /// Value of an ARG of the Dockerfile, or of the environment if there is only a name; not for secrets
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(crate) build_arg: Vec<String>,
    /// Stage of the Dockerfile to build [default: the last one]
    #[arg(long, value_name = "STAGE")]
    pub(crate) target: Option<String>,
    /// Command that sandboxes run from their start on [default: CMD or ENTRYPOINT of the Dockerfile]
    #[arg(long, value_name = "COMMAND")]
    pub(crate) start_cmd: Option<String>,
    /// Command that says that a sandbox is ready by ending with 0
    #[arg(long, value_name = "COMMAND")]
    pub(crate) ready_cmd: Option<String>,
    /// Cores of its sandboxes: 1 or an even number [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) cpu: Option<u32>,
    /// Memory of its sandboxes in MiB, an even number [default: 1024]
    #[arg(long, value_name = "MB")]
    pub(crate) memory: Option<u32>,
    /// Send the platform what `docker login` has left for this registry, to fetch images of it; can be repeated
    #[arg(long, value_name = "HOST", conflicts_with = "from_archive")]
    pub(crate) registry_login: Vec<String>,
    /// Take nothing from earlier builds
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// Output format of the result; the log is written to stderr
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
    /// Directory with the files that the Dockerfile copies
    #[arg(default_value = ".")]
    pub(crate) path: PathBuf,
}

/// Flags of `template add`.
#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// The template: agents, code-interpreter, desktop or mcp-gateway
    pub(crate) template: String,
    /// Name for the template, [namespace/]name[:tag] [default: the one that its clients ask for]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Value of an ARG of its Dockerfile, such as BASE=IMAGE; not for secrets
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(crate) build_arg: Vec<String>,
    /// Build on a file in place of `base`: a root file system of the Debian family as .tar, .tar.gz or .tar.zst, or an image of `docker save` or in OCI format
    #[arg(long, value_name = "FILE")]
    pub(crate) base_archive: Option<PathBuf>,
    /// Cores of its sandboxes: 1 or an even number
    #[arg(long, value_name = "N")]
    pub(crate) cpu: Option<u32>,
    /// Memory of its sandboxes in MiB, an even number
    #[arg(long, value_name = "MB")]
    pub(crate) memory: Option<u32>,
    /// Take nothing from earlier builds
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// Build nothing if the team has a template with this name that is ready
    #[arg(long, conflicts_with = "no_cache")]
    pub(crate) unless_present: bool,
    /// Output format of the result; the log is written to stderr
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
}

/// Subcommands of `template` for files of templates.
#[derive(Debug, Subcommand)]
pub(crate) enum TransferCommand {
    /// Write a finished template to a file or a registry, with all its layers
    Push {
        /// Name or ID of the template, NAME[:TAG]
        name: String,
        /// The file, which must not exist, or oci://HOST/REPOSITORY:TAG
        to: PathBuf,
        /// The team that has the template
        #[arg(long, value_name = "TEAM", default_value = "default")]
        team: String,
        #[command(flatten)]
        registry: RegistryArgs,
    },
    /// Make a template of a file or of what is in a registry; if the team has one with this name, it gets another build
    Pull {
        /// Name of the template, NAME[:TAG]
        name: String,
        /// The file, or oci://HOST/REPOSITORY:TAG or oci://HOST/REPOSITORY@DIGEST; it may also come first
        from: PathBuf,
        /// The team that gets the template
        #[arg(long, value_name = "TEAM", default_value = "default")]
        team: String,
        /// Accept a template that lies above `base` of another distribution or version than this host has
        #[arg(long)]
        any_base: bool,
        #[command(flatten)]
        registry: RegistryArgs,
    },
}

/// Flags about the credentials for a registry.
#[derive(Debug, Args)]
pub(crate) struct RegistryArgs {
    /// User of the registry [default: what `docker login` left in its file]
    #[arg(long, value_name = "USER", requires = "registry_password_file")]
    pub(crate) registry_user: Option<String>,
    /// File with the password or the token of the user; - is stdin
    #[arg(long, value_name = "FILE", requires = "registry_user")]
    pub(crate) registry_password_file: Option<PathBuf>,
}

impl Cli {
    /// The format of the log, where the configuration says `configured`. That is the format of the service: people read
    /// what other commands print, unless the flag says otherwise.
    pub(crate) fn log_format(&self, configured: LogFormat) -> LogFormat {
        match self.command {
            Command::Up(_) => configured,
            _ if self.common.log_format.is_some() => configured,
            _ => LogFormat::Text,
        }
    }

    /// The flags that set configuration keys.
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
            Command::Server(server) => flags.extend(server.flags()),
            Command::Doctor { listen, tls, .. } => {
                flags.push((keys::LISTEN, &listen.listen));
                flags.extend(tls.flags());
            }
            // The others have no settings as flags.
            _ => {}
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
        for name in ["up", "server"] {
            let mut command = Cli::command();
            let mut serving = command.find_subcommand_mut(name).unwrap().clone();
            for global in command.get_arguments() {
                serving = serving.arg(global.clone());
            }
            for key in keys::ALL {
                // Only a server without a node of its own has nodes that connect.
                let of_servers = [keys::NODES_LISTEN.name, keys::NODES_ADDRESS.name];
                let is_others = name == "up" && of_servers.contains(&key.name);
                let Some(flag) = key.flag.filter(|_| !is_others) else {
                    continue;
                };
                let argument = serving
                    .get_arguments()
                    .find(|argument| argument.get_long().is_some_and(|long| format!("--{long}") == flag))
                    .unwrap_or_else(|| panic!("{flag} is no flag of {name}"));
                let help = argument.get_help().unwrap().to_string();
                assert!(help.contains(&format!("[env: {}]", key.env())), "{help}");
                let default = key.default.replace("port of listen", "port of --listen");
                assert!(help.contains(&format!("[default: {default}")), "{help}");
            }
        }
    }

    #[test]
    fn no_flag_takes_a_secret() {
        assert_eq!(keys::DATABASE_URL.flag, None);
        let help = format!("{:?}", Cli::command().render_long_help().to_string());
        assert!(!help.contains("--api-key"));
    }
}
