//! `bench docs`: the documentation endpoint over HTTP.
//!
//! Goals: a search p99 <= 1 ms and 5,000 calls per second, client and server on the same cores, everything included.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::future::try_join_all;
use measure::client::{Client, Target};
use measure::table;
use serde_json::json;

use super::client::client_runtime;
use super::platform::{self, BenchPlatform, KEY, Rows};
use super::{conditions, times};
use crate::root::root;

/// Flags of `bench docs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Calls of each kind, one after the other
    #[arg(long, value_name = "N", default_value_t = 5000)]
    requests: usize,
    /// Number of kept-alive connections for the rate
    #[arg(long, value_name = "N", default_value_t = 8)]
    connections: usize,
    /// Duration of the measurement of the rate
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    seconds: u64,
    /// Directory for the database
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
}

/// Runs the benchmark and returns its report.
///
/// # Errors
/// When the server cannot be started, or a response is not the expected one.
pub(super) fn run(args: &Args) -> Result<String> {
    let mut report = conditions::line();
    let server = platform::runtime()?;
    let platform = server.block_on(async { BenchPlatform::start(Rows::new(&args.dir).await?).await })?;
    let client = client_runtime()?;
    let url = format!("http://{}", platform.address);
    let measured = client.block_on(measure(args, &url));
    server.block_on(platform.stop());
    report.push_str(&measured?);
    Ok(report)
}

async fn measure(args: &Args, url: &str) -> Result<String> {
    let target = Target::find(url, KEY, "base".to_owned(), "docs".to_owned()).await?;
    let questions = questions()?;
    let searches: Vec<Bytes> = questions
        .iter()
        .map(|text| call("search_docs_svc", &json!({"query": text})))
        .collect();
    let command = |command: &str| vec![call("query_docs_filesystem_svc", &json!({"command": command}))];
    let mut client = Client::new(target.clone());
    let mut rows = Vec::new();
    for (what, bodies) in [
        ("search, questions of a newcomer", searches.clone()),
        (
            "search, 50 results",
            vec![call(
                "search_docs_svc",
                &json!({"query": "sandbox network", "limit": 50}),
            )],
        ),
        ("list", vec![call("list_docs_svc", &json!({}))]),
        (
            "page",
            vec![call("get_doc_content_svc", &json!({"path": "/configuration"}))],
        ),
        ("rg -C 2 timeout", command("rg -C 2 timeout /")),
        (r"rg -i '\w+ing the \w+'", command(r"rg -i '\w+ing the \w+' /")),
    ] {
        let mut times = Vec::new();
        for body in bodies.iter().cycle().take(args.requests) {
            times.push(post(&mut client, body).await?);
        }
        rows.push(times::row(what, times));
    }
    let begun = Instant::now();
    let end = begun + Duration::from_secs(args.seconds);
    let clients = (0..args.connections).map(|first| search(target.clone(), &searches, first, end));
    let times: Vec<Duration> = try_join_all(clients).await?.into_iter().flatten().collect();
    let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
    rows.push(times::row(&format!("search, {} connections", args.connections), times));
    let mut text = table::columns(&times::HEADER, rows);
    text.push_str(&format!(
        "\nsearches per second over {} kept connections: {rate:.0}\n",
        args.connections
    ));
    Ok(text)
}

/// The questions that the search is tested with.
fn questions() -> Result<Vec<String>> {
    let path = root().join("conformance/mcp/questions.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let questions: Vec<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("text = \"")?.strip_suffix('"').map(str::to_owned))
        .collect();
    ensure!(!questions.is_empty(), "{} has no questions", path.display());
    Ok(questions)
}

fn call(tool: &str, arguments: &serde_json::Value) -> Bytes {
    let params = json!({"name": tool, "arguments": arguments});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
    body.to_string().into()
}

async fn post(client: &mut Client, body: &Bytes) -> Result<Duration> {
    let answer = client
        .post("/mcp", ("mcp-protocol-version", "2025-06-18"), body.clone())
        .await?;
    ensure!(
        answer.body.windows(15).any(|part| part == b"\"isError\":false"),
        "a call failed: {}",
        String::from_utf8_lossy(&answer.body)
    );
    Ok(answer.took)
}

async fn search(target: Target, bodies: &[Bytes], first: usize, end: Instant) -> Result<Vec<Duration>> {
    let mut client = Client::new(target);
    let mut times = Vec::new();
    let mut bodies = bodies.iter().cycle().skip(first);
    while Instant::now() < end {
        let body = bodies.next().context("no questions")?;
        times.push(post(&mut client, body).await?);
    }
    Ok(times)
}
