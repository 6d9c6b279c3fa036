//! `ringfence sandbox`: operator commands for the sandboxes of all teams, through the operator socket.
//!
//! The commands use the platform and not the database, because only the platform has current usage figures and can kill
//! a sandbox.

use std::process::ExitCode;

use anyhow::Result;
use http::Method;
use server::operator::{OperatorLogEntry, OperatorSandbox, OperatorUsage};

use crate::args::{SandboxCommand, SandboxOrder};
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::inside;
use crate::one_thread;
use crate::operator::{self, answer, ask};
use crate::output::{self, Format, mib};

/// The columns of the list.
const HEADER: [&str; 12] = [
    "ID", "TEAM", "TEMPLATE", "STATE", "CPU", "MEMORY", "CACHE", "DISK", "STARTED", "ENDS", "NODE", "SERVER",
];
/// The first column about nodes, which a platform in one process has none of.
const NODES_FROM: usize = 10;

/// Runs the command.
///
/// # Errors
/// When no platform runs on the data directory, or the request fails.
pub(crate) fn run(config: &Config, command: &SandboxCommand) -> Result<ExitCode> {
    let dir = DataDir::existing(&config.data_dir)?;
    let runtime = one_thread::runtime()?;
    let done = runtime.block_on(async {
        if let Some(done) = Box::pin(inside::run(&dir, command)).await {
            return done;
        }
        match command {
            SandboxCommand::List { team, sort, format } => list(&dir, team.as_deref(), *sort, *format).await,
            SandboxCommand::Show { id, format } => show(&dir, id, *format).await,
            SandboxCommand::Kill { ids } => return kill(&dir, ids).await,
            SandboxCommand::Logs {
                id,
                limit,
                level,
                format,
            } => logs(&dir, id, *limit, level, *format).await,
            // Run above.
            SandboxCommand::Exec(_) | SandboxCommand::Shell(_) | SandboxCommand::Cp(_) | SandboxCommand::Forward(_) => {
                Ok(())
            }
        }?;
        Ok(ExitCode::SUCCESS)
    });
    // A thread that waits for input or a file is not waited for.
    runtime.shutdown_background();
    done
}

async fn list(dir: &DataDir, team: Option<&str>, order: SandboxOrder, format: Format) -> Result<()> {
    let mut sandboxes: Vec<OperatorSandbox> = ask(dir, Method::GET, "/sandboxes").await?;
    sandboxes.retain(|sandbox| team.is_none_or(|team| sandbox.team == team));
    sort(&mut sandboxes, order);
    let with_nodes = has_nodes(&sandboxes);
    let header = if with_nodes { &HEADER[..] } else { &HEADER[..NODES_FROM] };
    output::list(format, sandboxes, header, |sandbox| row(&sandbox, with_nodes))
}

/// Whether some sandbox has a node that is a process of its own.
fn has_nodes(sandboxes: &[OperatorSandbox]) -> bool {
    sandboxes.iter().any(|sandbox| sandbox.node.is_some())
}

/// The largest first; sandboxes that were not measured yet come last.
fn sort(sandboxes: &mut [OperatorSandbox], order: SandboxOrder) {
    let by = |measure: fn(&OperatorUsage) -> f64| {
        move |a: &OperatorSandbox, b: &OperatorSandbox| {
            let of = |sandbox: &OperatorSandbox| sandbox.usage.as_ref().map_or(-1.0, measure);
            of(b).total_cmp(&of(a))
        }
    };
    #[expect(clippy::cast_precision_loss, reason = "only compared, and no host has 2^53 bytes")]
    match order {
        SandboxOrder::Started => sandboxes.sort_by(|a, b| a.started_at.cmp(&b.started_at)),
        SandboxOrder::Cpu => {
            // Of one core, so that sandboxes of different sizes compare.
            sandboxes.sort_by(|a, b| {
                let of = |sandbox: &OperatorSandbox| {
                    let percent = sandbox.usage.as_ref().map_or(-1.0, |usage| usage.cpu_percent);
                    percent * f64::from(sandbox.cpu_count)
                };
                of(b).total_cmp(&of(a))
            });
        }
        SandboxOrder::Memory => {
            sandboxes.sort_by(by(|usage| (usage.memory_used_bytes + usage.memory_cache_bytes) as f64))
        }
        SandboxOrder::Disk => {
            let of = |sandbox: &OperatorSandbox| {
                let used = sandbox.usage.as_ref().map(|usage| usage.disk_used_bytes);
                // Those without either come last.
                sandbox.kept_bytes.or(used).map_or(-1.0, |bytes| bytes as f64)
            };
            sandboxes.sort_by(|a, b| of(b).total_cmp(&of(a)));
        }
    }
}

fn row(sandbox: &OperatorSandbox, with_nodes: bool) -> Vec<String> {
    let used = |measure: fn(&OperatorUsage) -> String| sandbox.usage.as_ref().map_or("-".to_owned(), measure);
    let mut cells = vec![
        sandbox.id.clone(),
        sandbox.team.clone(),
        sandbox.template.clone(),
        state(sandbox),
        used(|usage| format!("{:.0}%", usage.cpu_percent)),
        used(|usage| mib(usage.memory_used_bytes)),
        used(|usage| mib(usage.memory_cache_bytes)),
        match sandbox.kept_bytes {
            // What it takes of the host's disk is all that it uses.
            Some(bytes) => mib(bytes),
            None => used(|usage| mib(usage.disk_used_bytes)),
        },
        sandbox.started_at.clone(),
        sandbox.end_at.clone(),
    ];
    if with_nodes {
        let node = sandbox.node_name.as_ref().or(sandbox.node.as_ref());
        for name in [node, sandbox.server.as_ref()] {
            cells.push(name.map_or("-".to_owned(), Clone::clone));
        }
    }
    cells
}

/// The state of a sandbox. What is known of one whose node is away is what was known last.
pub(crate) fn state(sandbox: &OperatorSandbox) -> String {
    if sandbox.is_node_away {
        return format!("{} (node away)", sandbox.state);
    }
    sandbox.state.clone()
}

async fn show(dir: &DataDir, id: &str, format: Format) -> Result<()> {
    let sandbox: OperatorSandbox = ask(dir, Method::GET, &path(id, "")?).await?;
    if format == Format::Json {
        return output::json(&sandbox);
    }
    let state = state(&sandbox);
    let mut lines = vec![
        ("id", sandbox.id),
        ("team", sandbox.team),
        ("template", sandbox.template),
        ("state", state),
        ("started", sandbox.started_at),
        ("ends", sandbox.end_at),
        ("cores", sandbox.cpu_count.to_string()),
        ("memory", format!("{} MiB", sandbox.memory_mb)),
        ("disk", format!("{} MiB", sandbox.disk_mb)),
    ];
    if let Some(id) = sandbox.node {
        let name = sandbox.node_name.map(|name| format!("{name} ({id})"));
        lines.push(("node", name.unwrap_or(id)));
    }
    if let Some(server) = sandbox.server {
        lines.push(("server", server));
    }
    if let Some(kept) = sandbox.kept {
        lines.push(("kept", kept));
    }
    if let Some(bytes) = sandbox.kept_bytes {
        lines.push(("kept on disk", mib(bytes)));
    }
    if let Some(why) = sandbox.resume_error {
        lines.push(("not resumed", why));
    }
    if let Some(usage) = sandbox.usage {
        lines.push(("measured", usage.at));
        lines.push(("cpu used", format!("{:.1}% of its cores", usage.cpu_percent)));
        lines.push(("memory used", mib(usage.memory_used_bytes)));
        lines.push(("page cache", mib(usage.memory_cache_bytes)));
        lines.push(("disk used", mib(usage.disk_used_bytes)));
        lines.push(("received", mib(usage.received_bytes)));
        lines.push(("sent", mib(usage.sent_bytes)));
    }
    let text: String = lines
        .into_iter()
        // The reason comes from the node, and the names from members of the team.
        .map(|(name, value)| format!("{name:<12} {}\n", output::printable(&value)))
        .collect();
    output::text(&text)
}

/// Ends each, and goes on after one that fails: who kills ten sandboxes wants the other nine gone.
async fn kill(dir: &DataDir, ids: &[String]) -> Result<ExitCode> {
    let mut failed = false;
    for id in ids {
        let killed = async { answer(dir, Method::DELETE, &path(id, "")?).await };
        match killed.await {
            Ok(_) => output::line(&format!("killed {id}"))?,
            Err(error) => {
                failed = true;
                output::error(&error);
            }
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn logs(dir: &DataDir, id: &str, limit: u32, level: &str, format: Format) -> Result<()> {
    let path = path(id, &format!("/logs?limit={limit}&level={level}"))?;
    let entries: Vec<OperatorLogEntry> = ask(dir, Method::GET, &path).await?;
    if format == Format::Json {
        return output::json(&entries);
    }
    let text: String = entries.into_iter().map(line).collect();
    output::text(&text)
}

/// An entry as one line. What comes from inside a sandbox must not steer the operator's terminal.
fn line(entry: OperatorLogEntry) -> String {
    let mut text = format!("{} {:<5} {}: {}", entry.at, entry.level, entry.logger, entry.message);
    for (name, value) in entry.fields {
        text.push_str(&format!(" {name}={value:?}"));
    }
    let mut safe = output::printable(&text);
    safe.push('\n');
    safe
}

fn path(id: &str, rest: &str) -> Result<String> {
    operator::check_id(id)?;
    Ok(format!("/sandboxes/{id}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_one_line_that_steers_no_terminal() {
        let entry = OperatorLogEntry {
            at: "2026-01-01T00:00:00Z".to_owned(),
            level: "warn".to_owned(),
            logger: "process".to_owned(),
            message: "evil\u{1b}[2J\nname\u{9b}".to_owned(),
            fields: [("cmd".to_owned(), "a\"b".to_owned())].into(),
        };
        let line = line(entry);
        assert_eq!(
            line,
            "2026-01-01T00:00:00Z warn  process: evil\\u{1b}[2J\\nname\\u{9b} cmd=\"a\\\"b\"\n"
        );
    }

    #[test]
    fn only_ids_go_into_a_path() {
        assert_eq!(path("iabc-1", "/logs").unwrap(), "/sandboxes/iabc-1/logs");
        for bad in ["", "a/b", "a?b", "a b", "..", "\u{e4}"] {
            assert!(path(bad, "").is_err(), "{bad}");
        }
    }

    fn sandbox(id: &str, cpu_count: u32, usage: Option<(f64, u64, u64)>) -> OperatorSandbox {
        OperatorSandbox {
            id: id.to_owned(),
            team: "default".to_owned(),
            template: "base".to_owned(),
            state: "running".to_owned(),
            started_at: format!("2026-01-0{cpu_count}"),
            end_at: String::new(),
            cpu_count,
            memory_mb: 1,
            disk_mb: 1,
            kept: None,
            kept_bytes: None,
            resume_error: None,
            node: None,
            node_name: None,
            server: None,
            is_node_away: false,
            usage: usage.map(|(cpu_percent, memory_used_bytes, disk_used_bytes)| OperatorUsage {
                at: String::new(),
                cpu_percent,
                memory_used_bytes,
                memory_cache_bytes: 0,
                disk_used_bytes,
                received_bytes: 0,
                sent_bytes: 0,
            }),
        }
    }

    #[test]
    fn nodes_are_shown_where_there_are_some() {
        let part = sandbox("i1", 1, None);
        assert!(!has_nodes(std::slice::from_ref(&part)));
        assert_eq!(row(&part, false).len(), NODES_FROM);
        assert_eq!(row(&part, true)[NODES_FROM..], ["-", "-"]);
        let other = OperatorSandbox {
            node: Some("0199d0a6".to_owned()),
            node_name: Some("worker".to_owned()),
            server: Some("second".to_owned()),
            ..part
        };
        assert!(has_nodes(std::slice::from_ref(&other)));
        assert_eq!(row(&other, true)[NODES_FROM..], ["worker", "second"]);
        assert_eq!(row(&other, true)[3], "running");
        let away = OperatorSandbox {
            server: None,
            is_node_away: true,
            ..other
        };
        assert_eq!(row(&away, true)[3..4], ["running (node away)"]);
        assert_eq!(row(&away, true)[NODES_FROM..], ["worker", "-"]);
    }

    #[test]
    fn the_largest_comes_first_and_the_unmeasured_last() {
        let mut all = [
            sandbox("new", 4, None),
            sandbox("small", 1, Some((90.0, 5, 7))),
            sandbox("large", 2, Some((60.0, 3, 9))),
        ];
        for (order, want) in [
            (SandboxOrder::Started, ["small", "large", "new"]),
            (SandboxOrder::Cpu, ["large", "small", "new"]),
            (SandboxOrder::Memory, ["small", "large", "new"]),
            (SandboxOrder::Disk, ["large", "small", "new"]),
        ] {
            sort(&mut all, order);
            assert_eq!(all.each_ref().map(|sandbox| sandbox.id.as_str()), want, "{order:?}");
        }
    }
}
