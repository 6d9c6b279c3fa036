//! The commands about the sandboxes of all teams: `ringfence sandbox` and `ringfence top`.

use clap::{Args, Subcommand};

use crate::output::Format;

/// Subcommands of `sandbox`.
#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// List the sandboxes of all teams with their resource usage
    ///
    /// Of several servers on one database, any lists those on the nodes of all. The usage of those of other servers is what these
    /// have stored last, up to five minutes ago. Sandboxes of builds, and those that are kept ready, are listed by their own server
    /// alone.
    List {
        /// List only those of this team
        #[arg(long, value_name = "TEAM")]
        team: Option<String>,
        /// Sort order; usage is sorted largest first
        #[arg(long, value_enum, value_name = "ORDER", default_value_t = SandboxOrder::Started)]
        sort: SandboxOrder,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Show one sandbox
    Show {
        /// ID of the sandbox
        id: String,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Run a command in a sandbox, with the input, output and exit code of the command
    ///
    /// The exit code is that of the command, 128 and its number if a signal ended it, 126 if it could not be started, and 1 if
    /// there is no such sandbox or it cannot be entered. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on; the third kills
    /// the command. It has no terminal: use `shell` for programs that need one.
    Exec(ExecArgs),
    /// Open a terminal in a sandbox
    ///
    /// At the beginning of a line, ~. ends the shell and disconnects, ~? shows the keys, and ~~ sends one ~. The exit code is that of
    /// the shell, or 1 if the connection was lost.
    Shell(ShellArgs),
    /// Copy files and folders into or out of a sandbox
    ///
    /// One of both sides is ID:PATH, a path in the sandbox, from the user's home unless it begins with a slash; - is stdin or
    /// stdout. A folder is copied with all that it contains, and into DST if that is a folder. Links and special files are
    /// skipped and named: a copy follows no link on the host, whatever names a sandbox chooses. Contents and permission bits
    /// are kept, owners are not.
    Cp(CopyArgs),
    /// Forward ports of this host to a sandbox, until it is interrupted
    ///
    /// Every user of the host can connect to a port while it is forwarded. Up to 64 connections are open at a time; more wait.
    Forward(ForwardArgs),
    /// Kill sandboxes, and wait until their processes are gone
    ///
    /// Of several servers on one database, any kills those on the nodes of all; sandboxes of builds, and those that are kept ready,
    /// are killed at their own server.
    Kill {
        /// IDs of the sandboxes
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Show the log of a sandbox, oldest entry first; also after its end, until the log expires
    Logs {
        /// ID of the sandbox
        id: String,
        /// Number of entries to show, the newest ones
        #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        limit: u32,
        /// Minimum level: debug, info, warn or error
        #[arg(long, value_name = "LEVEL", default_value = "debug", value_parser = ["debug", "info", "warn", "error"])]
        level: String,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
}

/// Sort orders of `sandbox list`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SandboxOrder {
    /// Oldest first.
    Started,
    /// By CPU usage in the last sample.
    Cpu,
    /// By memory, including page cache.
    Memory,
    /// By disk usage.
    Disk,
}

/// What all commands take that enter a sandbox.
#[derive(Debug, Args)]
pub(crate) struct EnterArgs {
    /// Resume the sandbox if it is paused, instead of refusing
    #[arg(long)]
    pub(crate) resume: bool,
    /// User in the sandbox [default: that of the template]
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
}

/// What commands take that start a process.
#[derive(Debug, Args)]
pub(crate) struct ProcessArgs {
    #[command(flatten)]
    pub(crate) enter: EnterArgs,
    /// Working directory in the sandbox [default: the home of the user]
    #[arg(short = 'd', long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// Environment variable of the command; can be repeated. A name alone takes the value from the environment of this program,
    /// which is not shown in the process list
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = variable)]
    pub(crate) env: Vec<(String, Option<String>)>,
}

/// Arguments of `sandbox exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// Leave stdin alone: the command has none
    #[arg(short, long)]
    pub(crate) no_stdin: bool,
    /// ID of the sandbox
    pub(crate) id: String,
    /// The command and its arguments, which no shell interprets
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Arguments of `sandbox shell`.
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// ID of the sandbox
    pub(crate) id: String,
    /// The program for the terminal [default: a login shell, bash or sh]
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Arguments of `sandbox cp`.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    pub(crate) enter: EnterArgs,
    /// Most that is copied out of a sandbox, in MiB [default: the size of its disk, which only sparse files exceed]
    #[arg(long, value_name = "MIB")]
    pub(crate) max_size: Option<u64>,
    /// Show no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// What is copied: PATH, ID:PATH, or - for stdin
    #[arg(value_name = "SRC")]
    pub(crate) source: String,
    /// Where it is copied to: PATH, ID:PATH, or - for stdout
    #[arg(value_name = "DST")]
    pub(crate) target: String,
}

/// Arguments of `sandbox forward`.
#[derive(Debug, Args)]
pub(crate) struct ForwardArgs {
    /// Resume the sandbox if it is paused, instead of refusing
    #[arg(long)]
    pub(crate) resume: bool,
    /// ID of the sandbox
    pub(crate) id: String,
    /// Port of this host, on 127.0.0.1, and port in the sandbox; one number stands for both, and 0 for any free port of this host
    #[arg(required = true, value_name = "LOCAL:REMOTE", value_parser = ports)]
    pub(crate) ports: Vec<(u16, u16)>,
}

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Show only those of this team
    #[arg(long, value_name = "TEAM")]
    pub(crate) team: Option<String>,
    /// Sort order at the beginning
    #[arg(long, value_enum, value_name = "ORDER", default_value_t = TopOrder::Cpu)]
    pub(crate) sort: TopOrder,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub(crate) interval: u16,
    /// Print all sandboxes once, as text without control sequences
    #[arg(long, conflicts_with = "batch")]
    pub(crate) once: bool,
    /// Print all sandboxes again and again, as text without control sequences
    #[arg(long)]
    pub(crate) batch: bool,
    /// Print all sandboxes once, as JSON
    #[arg(long, conflicts_with_all = ["once", "batch"])]
    pub(crate) json: bool,
}

/// Sort orders of `top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TopOrder {
    /// By CPU usage in the last sample, the largest first.
    Cpu,
    /// By memory, including page cache, the largest first.
    Memory,
    /// By disk usage, the largest first.
    Disk,
    /// By what went both ways over the network, the largest first.
    Network,
    /// The oldest first.
    Age,
    /// By state.
    State,
    /// By template.
    Template,
    /// By team.
    Team,
}

/// Reads `NAME=VALUE` or `NAME`.
fn variable(text: &str) -> Result<(String, Option<String>), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (text, None),
    };
    if name.is_empty() {
        return Err("expected NAME=VALUE or NAME".to_owned());
    }
    Ok((name.to_owned(), value))
}

/// Reads `LOCAL:REMOTE` or one port for both.
fn ports(text: &str) -> Result<(u16, u16), String> {
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let port = |text: &str| text.parse::<u16>().map_err(|_| format!("{text:?} is not a port"));
    match (port(local)?, port(remote)?) {
        (_, 0) => Err("port 0 is no port of a sandbox".to_owned()),
        both => Ok(both),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_two() {
        assert_eq!(ports("80"), Ok((80, 80)));
        assert_eq!(ports("8080:80"), Ok((8080, 80)));
        assert_eq!(ports("0:80"), Ok((0, 80)));
        for bad in ["", "0", "80:", ":80", "80:0", "1:2:3", "70000", "x"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn variables_have_a_name() {
        assert_eq!(variable("A=b=c"), Ok(("A".to_owned(), Some("b=c".to_owned()))));
        assert_eq!(variable("A"), Ok(("A".to_owned(), None)));
        assert!(variable("").is_err() && variable("=b").is_err());
    }
}
