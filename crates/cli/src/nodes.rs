//! `ringfence node token|list|show|drain|undrain|forget` on a server, through its operator socket, and `ringfence node join` on the host
//! that is to be its node.

mod drain;

use std::io::{IsTerminal as _, Read as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use http::Method;
use link::{Address, LinkError, Token};
use secrecy::zeroize::Zeroizing;
use server::operator::{OperatorNode, OperatorToken};

use self::drain::Until;
use crate::args::NodeCommand;
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::node_files::{self, Joined, Role};
use crate::operator::{answer, ask};
use crate::output::{self, Format};
use crate::{harden, node_identity, one_thread};

/// Longest token that is read from standard input, in bytes.
const TOKEN_MAX: u64 = 4096;

/// Runs a command.
///
/// # Errors
/// When no server runs on the data directory, or the request fails.
pub(crate) fn run(settings: &Config, command: &NodeCommand) -> Result<ExitCode> {
    let runtime = one_thread::runtime()?;
    runtime.block_on(async {
        if let NodeCommand::Join { servers, token } = command {
            return join(settings, servers, token.as_deref()).await;
        }
        let dir = DataDir::existing(&settings.data_dir)?;
        if !dir.path().join(node_files::SERVER).exists() {
            bail!(
                "{} is not the data directory of a server: run this where `ringfence server` runs",
                dir.path().display()
            );
        }
        match command {
            NodeCommand::Token { format } => token(&dir, *format).await,
            NodeCommand::List { format } => list(&dir, *format).await,
            NodeCommand::Show { id, format } => show(&dir, id, *format).await,
            NodeCommand::Drain { id, wait, within } => {
                check_id(id)?;
                let until = match (wait, within) {
                    (_, Some(seconds)) => Until::Left(Duration::from_secs((*seconds).into())),
                    (true, None) => Until::Empty,
                    (false, None) => Until::Begun,
                };
                drain::drain(&dir, id, until).await
            }
            NodeCommand::Undrain { id } => {
                check_id(id)?;
                drain::undrain(&dir, id).await
            }
            NodeCommand::Forget { id } => {
                check_id(id)?;
                answer(&dir, Method::DELETE, &format!("/nodes/{id}")).await?;
                output::line(&format!("forgot node {id}: its certificate is refused from now on"))
            }
            NodeCommand::Join { .. } => Ok(()),
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn token(dir: &DataDir, format: Format) -> Result<()> {
    let token: OperatorToken = ask(dir, Method::POST, "/node-tokens").await?;
    match format {
        Format::Json => output::json(&token),
        Format::Text => output::line(&token.token),
    }
}

async fn list(dir: &DataDir, format: Format) -> Result<()> {
    let nodes: Vec<OperatorNode> = ask(dir, Method::GET, "/nodes").await?;
    let header = [
        "ID",
        "NAME",
        "STATE",
        "SANDBOXES",
        "ADDRESS",
        "VERSION",
        "JOINED",
        "SEEN",
    ];
    let or_none = |text: Option<String>| text.map_or_else(|| "-".to_owned(), |text| output::printable(&text));
    output::list(format, nodes, &header, |node| {
        // Those of a node of another server are known while it drains.
        let left = node.left.map(|left| left.running + left.paused_in_memory);
        let sandboxes = node.sandboxes.map(u64::from).or(left);
        vec![
            node.id,
            output::printable(&node.name),
            state_of(&node.state, node.draining_at.is_some()),
            or_none(sandboxes.map(|count| count.to_string())),
            or_none(node.address),
            or_none(node.version),
            or_none(node.joined_at),
            or_none(node.seen_at),
        ]
    })
}

fn state_of(state: &str, is_draining: bool) -> String {
    let more = if is_draining { ", draining" } else { "" };
    format!("{state}{more}")
}

async fn show(dir: &DataDir, id: &str, format: Format) -> Result<()> {
    check_id(id)?;
    let node: OperatorNode = ask(dir, Method::GET, &format!("/nodes/{id}")).await?;
    if format == Format::Json {
        return output::json(&node);
    }
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    let lines = [
        ("id", Some(node.id)),
        ("name", Some(node.name)),
        ("state", Some(state_of(&node.state, node.draining_at.is_some()))),
        ("joined", node.joined_at),
        ("seen", node.seen_at),
        ("forgotten", node.forgotten_at),
        ("draining since", node.draining_at),
        ("left", node.left.map(drain::describe)),
        ("address", node.address),
        ("version", node.version),
        ("limits of sandboxes", node.is_limited.map(yes)),
        ("processes on disk", node.writes_processes.map(yes)),
        ("sandboxes", node.sandboxes.map(|count| count.to_string())),
        ("memory left", node.memory_available_bytes.map(mib)),
        ("disk left", node.disk_available_bytes.map(mib)),
    ];
    for (name, value) in lines {
        if let Some(value) = value {
            output::line(&format!("{name:<20} {}", output::printable(&value)))?;
        }
    }
    Ok(())
}

/// The id of a node is part of a path.
fn check_id(id: &str) -> Result<()> {
    if id.parse::<model::id::NodeId>().is_err() {
        bail!("{id:?} is not the ID of a node; see `ringfence node list`");
    }
    Ok(())
}

/// Makes this host the node of servers. Any of them can use up the token.
async fn join(settings: &Config, servers: &[String], token: Option<&str>) -> Result<()> {
    let servers = servers.iter().map(|server| server.parse().map_err(anyhow::Error::msg));
    let servers: Vec<Address> = servers.collect::<Result<_>>()?;
    let token = match token {
        Some(token) if token != "-" => Zeroizing::new(token.to_owned()),
        _ => {
            if std::io::stdin().is_terminal() {
                output::text("Token: ")?;
            }
            read_line()?
        }
    };
    let token = Token::parse(&token)?;
    harden::harden()?;
    let dir = DataDir::prepare(&settings.data_dir)?;
    node_files::require(&dir, Role::Node)?;
    let _lock = dir.lock()?;
    let name = node_identity::host_name();
    let mut failed = None;
    let mut joined = None;
    for server in &servers {
        match link::join(server, &token, &name).await {
            Ok(credentials) => {
                joined = Some(credentials);
                break;
            }
            // A server that was reached has the answer of all.
            Err(error @ LinkError::Connect { .. }) => {
                failed.get_or_insert(error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    let credentials = match (joined, failed) {
        (Some(credentials), _) => credentials,
        (None, Some(error)) => return Err(error.into()),
        (None, None) => bail!("no server is named"),
    };
    let id = node_files::keep(&dir, &Joined { servers, credentials })?;
    output::line(&format!(
        "joined as node {id}; start it with: ringfence node --data-dir '{}'",
        dir.path().display()
    ))
}

fn read_line() -> Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    let mut byte = [0];
    let mut input = std::io::stdin().lock().take(TOKEN_MAX);
    // Byte by byte, so that a terminal's line is enough.
    while input.read(&mut byte).context("read the token")? == 1 && byte != *b"\n" {
        text.push(char::from(byte[0]));
    }
    Ok(text)
}
