//! `bench ingress`: requests and downloads through the platform to a server in a sandbox, compared with nginx as reverse
//! proxy before the same server on the host.
//!
//! Goals: at least 60 % of the requests per second of nginx with p99 at most twice as long, and at least 70 % of its rate
//! for large downloads. nginx has two workers and keeps upstream connections. Proxy, server and client share the cores.

mod load;
mod nginx;
pub(super) mod serve;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use measure::client::{Client, Sandbox, Target};
use measure::process::{Command, ProcessEvent};
use measure::stats::Distribution;
use measure::table;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use self::load::Load;
use self::nginx::Nginx;

/// Port of the server in the sandbox.
const PORT: u16 = 8000;

/// Flags of `bench ingress`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Data directory of the platform, which must run on this machine
    #[arg(long, value_name = "DIR", default_value = "/var/lib/ringfence")]
    data_dir: PathBuf,
    /// The nginx to compare with
    #[arg(long, value_name = "FILE", default_value = "/usr/sbin/nginx")]
    nginx: PathBuf,
    /// Number of concurrent client connections
    #[arg(long, value_name = "N", default_value_t = 32)]
    connections: usize,
    /// Duration of a round, in seconds
    #[arg(long, value_name = "S", default_value_t = 5)]
    seconds: u64,
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Size of the download, in MB
    #[arg(long, value_name = "MB", default_value_t = 1000)]
    download_mb: u64,
}

/// Measures.
///
/// # Errors
/// When the platform is not running, nginx is missing, or a request fails.
pub(super) fn run(args: &Args) -> Result<String> {
    let mut report = super::conditions::line();
    let (url, key) = super::credentials(&args.data_dir)?;
    let runtime = super::client_runtime()?;
    report.push_str(&runtime.block_on(measure(args, &url, &key))?);
    Ok(report)
}

async fn measure(args: &Args, url: &str, key: &str) -> Result<String> {
    let run = Uuid::new_v4().simple().to_string();
    let platform = Target::find(url, key, "base".to_owned(), run).await?;
    let mut client = Client::new(platform.clone());
    let sandbox = client.create().await?.sandbox;
    let measured = compare(args, &platform, &sandbox).await;
    // Also after errors; otherwise it would run until its timeout.
    let deleted = client.delete(&sandbox.id).await;
    let text = measured?;
    deleted?;
    Ok(text)
}

async fn compare(args: &Args, platform: &Target, sandbox: &Sandbox) -> Result<String> {
    upload(platform, sandbox).await.context("upload the server")?;
    let script = format!("chmod +x server && exec ./server bench serve-http --port {PORT}");
    let mut starter = Client::new(platform.clone());
    let arguments = ["-c", script.as_str()];
    let mut events = starter.start(sandbox, &Command::new("/bin/sh", &arguments)).await?;
    while let Some(event) = events.next().await? {
        if matches!(event, ProcessEvent::Output(_)) {
            break;
        }
    }
    let server = serve::Server::start()?;
    let nginx = Nginx::start(&args.nginx, server.address)?;
    let ways = [
        (
            "ringfence",
            platform.address,
            format!("{PORT}-{}.sandbox.localhost", sandbox.id),
        ),
        ("nginx", nginx.address, "localhost".to_owned()),
    ];
    let mut requests = Vec::new();
    let mut downloads = Vec::new();
    for round in 1..=args.rounds {
        let mut rates = Vec::new();
        for (name, address, host) in &ways {
            let load = load::requests(*address, host, args.connections, args.seconds).await?;
            rates.push(load.rate());
            requests.push(request_row(&format!("{name}, round {round}"), load));
        }
        requests.push(ratio_row(round, &rates));
        let mut rates = Vec::new();
        for (name, address, host) in &ways {
            let rate = download(*address, host, args.download_mb).await?;
            rates.push(rate);
            downloads.push(vec![format!("{name}, round {round}"), format!("{rate:.0}")]);
        }
        downloads.push(ratio_row(round, &rates));
    }
    let what = format!(
        "{} connections, {} s per round, responses of {} bytes; downloads of {} MB\n\n",
        args.connections,
        args.seconds,
        serve::SMALL.len(),
        args.download_mb
    );
    let requests = table::columns(&["requests", "per second", "p50 ms", "p99 ms", "n"], requests);
    let downloads = table::columns(&["download", "MB/s"], downloads);
    Ok(format!("{what}{requests}\n{downloads}"))
}

fn request_row(name: &str, load: Load) -> Vec<String> {
    let mut row = vec![name.to_owned(), format!("{:.0}", load.rate())];
    match Distribution::of(load.times) {
        Some(times) => {
            row.extend([times.p50_ms, times.p99_ms].map(|ms| format!("{ms:.2}")));
            row.push(times.n.to_string());
        }
        None => row.extend(["-", "-", "0"].map(str::to_owned)),
    }
    row
}

/// The first rate as a share of the second.
fn ratio_row(round: usize, rates: &[f64]) -> Vec<String> {
    let ratio = match rates {
        [first, second] => format!("{:.0} %", first / second * 100.0),
        _ => "-".to_owned(),
    };
    vec![format!("ratio, round {round}"), ratio]
}

/// MB/s of one download.
async fn download(address: SocketAddr, host: &str, mb: u64) -> Result<f64> {
    let time = load::download(address, host, mb * 1_000_000).await?;
    Ok(mb as f64 / time.as_secs_f64())
}

/// Uploads this program to the home directory of the sandbox's user.
async fn upload(platform: &Target, sandbox: &Sandbox) -> Result<()> {
    let program = std::fs::read(std::env::current_exe()?).context("read this program")?;
    let request = platform
        .agent_request(
            sandbox,
            Method::POST,
            "/files?path=%2Fhome%2Fuser%2Fserver&username=user",
        )
        .header(CONTENT_TYPE, "application/octet-stream")
        .body(Full::new(Bytes::from(program)))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(platform.connect().await?)).await?;
    let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    if status != StatusCode::OK {
        bail!("answered {status}: {}", String::from_utf8_lossy(&body));
    }
    Ok(())
}
