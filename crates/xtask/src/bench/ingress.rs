//! `bench ingress`: requests, downloads and WebSockets through the platform to a server in a sandbox, compared with nginx
//! as reverse proxy before the same server on the host, and without a proxy.
//!
//! Goals: at least 60 % of the requests per second of nginx with p99 at most twice as long, at least 70 % of its rate for
//! large downloads, and 10,000 silent WebSockets in 200 MB. nginx has two workers and keeps upstream connections. Proxy,
//! server and client share the cores, so the processor time per request says more about a proxy than the rate.

mod load;
mod nginx;
mod open_files;
pub(super) mod serve;
mod websocket;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::ValueEnum;
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
use self::open_files::raise_open_files;
use super::client::{client_runtime, credentials};
use super::host::{self, Process};
use super::{conditions, times};

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
    /// Measurements to run, separated by commas
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "requests,downloads,websockets"
    )]
    what: Vec<What>,
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
    /// Number of messages that are sent one after the other on a WebSocket
    #[arg(long, value_name = "N", default_value_t = 5000)]
    messages: usize,
    /// Number of silent WebSockets. The platform must allow as many with `server.connections` and
    /// `server.connections_per_sandbox`, and have four times as many open files
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    idle: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Rate and duration of small requests, and the processor time of the proxy
    Requests,
    /// Rate of a large response
    Downloads,
    /// Duration of the echo of a message
    Websockets,
    /// Memory of the platform with silent WebSockets
    Idle,
}

/// A way to the server.
struct Way {
    name: &'static str,
    address: SocketAddr,
    host: String,
    /// None without a proxy.
    proxy: Option<Process>,
}

/// Runs the benchmark and returns its report.
///
/// # Errors
/// When the platform is not running, nginx is missing, or a request fails.
pub(super) fn run(args: &Args) -> Result<String> {
    let mut report = conditions::line();
    let (url, key) = credentials(&args.data_dir)?;
    let runtime = client_runtime()?;
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
    let way = |name, address, host, proxy| Way {
        name,
        address,
        host,
        proxy,
    };
    let listener = host::listener(platform.address.port()).context("the platform is not on this machine")?;
    let inside = format!("{PORT}-{}.sandbox.localhost", sandbox.id);
    let ways = [
        way("ringfence", platform.address, inside, Some(listener)),
        way("nginx", nginx.address, "localhost".to_owned(), Some(nginx.process)),
        way("no proxy", server.address, "localhost".to_owned(), None),
    ];
    let [ringfence, ..] = &ways;
    let mut report = String::new();
    for what in &args.what {
        report.push_str(&match what {
            What::Requests => requests(args, &ways).await?,
            What::Downloads => downloads(args, &ways).await?,
            What::Websockets => websockets(args, &ways).await?,
            What::Idle => idle(args, ringfence, listener).await?,
        });
        report.push('\n');
    }
    Ok(report)
}

async fn requests(args: &Args, ways: &[Way]) -> Result<String> {
    let mut rows = Vec::new();
    for round in 1..=args.rounds {
        let mut rates = Vec::new();
        for way in ways {
            let before = way.proxy.map(Process::processor_time).transpose()?;
            let load = load::requests(way.address, &way.host, args.connections, args.seconds).await?;
            let after = way.proxy.map(Process::processor_time).transpose()?;
            let used = before.zip(after).map(|(before, after)| after.saturating_sub(before));
            rates.push(load.rate());
            rows.push(request_row(&format!("{}, round {round}", way.name), load, used));
        }
        rows.push(ratio_row(round, &rates));
    }
    let what = format!(
        "{} connections, {} s per round, responses of {} bytes\n",
        args.connections,
        args.seconds,
        serve::SMALL.len()
    );
    let header = ["requests", "per second", "p50 ms", "p99 ms", "proxy us each", "n"];
    Ok(what + &table::columns(&header, rows))
}

/// `used` is the processor time of the proxy, which includes that of the time before the measurement.
fn request_row(name: &str, load: Load, used: Option<Duration>) -> Vec<String> {
    let mut row = vec![name.to_owned(), format!("{:.0}", load.rate())];
    let all = load.all;
    match Distribution::of(load.times) {
        Some(times) => {
            row.extend([times.p50_ms, times.p99_ms].map(|ms| format!("{ms:.2}")));
            let each = used.map(|used| used.as_secs_f64() * 1e6 / all as f64);
            row.push(each.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}")));
            row.push(times.n.to_string());
        }
        None => row.extend(["-", "-", "-", "0"].map(str::to_owned)),
    }
    row
}

async fn downloads(args: &Args, ways: &[Way]) -> Result<String> {
    let mut rows = Vec::new();
    for round in 1..=args.rounds {
        let mut rates = Vec::new();
        for way in ways {
            let rate = download(way.address, &way.host, args.download_mb).await?;
            rates.push(rate);
            rows.push(vec![format!("{}, round {round}", way.name), format!("{rate:.0}")]);
        }
        rows.push(ratio_row(round, &rates));
    }
    let what = format!("one download of {} MB at a time\n", args.download_mb);
    Ok(what + &table::columns(&["download", "MB/s"], rows))
}

async fn websockets(args: &Args, ways: &[Way]) -> Result<String> {
    let mut rows = Vec::new();
    for round in 1..=args.rounds {
        for way in ways {
            let times = websocket::echoes(way.address, &way.host, args.messages).await?;
            rows.push(times::row(&format!("{}, round {round}", way.name), times));
        }
    }
    let what = "echo of a short message on one WebSocket, one at a time\n".to_owned();
    Ok(what + &table::columns(&times::HEADER, rows))
}

async fn idle(args: &Args, way: &Way, platform: Process) -> Result<String> {
    raise_open_files()?;
    let held = websocket::hold(platform, way.address, &way.host, args.idle).await?;
    let mb = |kib: u64| format!("{:.1}", kib as f64 * 1024.0 / 1e6);
    let growth = held.open.saturating_sub(held.none);
    let rows = vec![
        vec!["none, after some were open".to_owned(), mb(held.none)],
        vec![format!("{} silent after one message each", args.idle), mb(held.open)],
        vec!["all closed after another message".to_owned(), mb(held.closed)],
        vec!["growth".to_owned(), mb(growth)],
        vec![
            "growth for 10,000".to_owned(),
            mb(growth * 10_000 / args.idle.max(1) as u64),
        ],
    ];
    Ok(table::columns(
        &["WebSockets through the platform", "resident MB"],
        rows,
    ))
}

/// The first rate as a share of the second.
fn ratio_row(round: usize, rates: &[f64]) -> Vec<String> {
    let ratio = match rates {
        [first, second, ..] => format!("{:.0} %", first / second * 100.0),
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
