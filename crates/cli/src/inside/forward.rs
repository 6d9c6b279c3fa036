//! `ringfence sandbox forward`: ports of this host that lead into a sandbox.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Duration;

use super::entered::Inside;
use crate::args::ForwardArgs;
use crate::data_dir::DataDir;
use crate::output;
use crate::signals::AllSignals;

/// Connections at a time; more wait.
const CONNECTIONS: usize = 64;
/// Bytes that are read at a time, in each direction.
const BUFFER: usize = 32 << 10;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Forwards the ports until a signal arrives.
///
/// # Errors
/// When the sandbox cannot be entered, or a port of this host cannot be listened on.
pub(super) async fn run(dir: &DataDir, args: &ForwardArgs) -> Result<ExitCode> {
    let mut signals = AllSignals::listen()?;
    let inside = Inside::enter(dir, &args.id, "forward", args.resume).await?;
    let mut listeners = Vec::with_capacity(args.ports.len());
    for &(local, remote) in &args.ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, local)).await;
        let listener = listener.with_context(|| format!("listen on 127.0.0.1:{local}"))?;
        listeners.push((listener, remote));
    }
    // Once all of them work, so that a reader may connect to any.
    for (listener, remote) in &listeners {
        output::line(&format!("{} -> {}:{remote}", listener.local_addr()?, inside.id))?;
    }
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    let accepts = listeners
        .iter()
        .map(|(listener, remote)| accept(&inside, listener, *remote, &permits));
    tokio::select! {
        _ = futures_util::future::join_all(accepts) => {}
        _ = signals.next() => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Accepts connections forever.
async fn accept(inside: &Inside<'_>, listener: &TcpListener, port: u16, permits: &Arc<Semaphore>) {
    let mut relays = FuturesUnordered::new();
    loop {
        let next = async {
            let permit = Arc::clone(permits).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, client) = tokio::select! {
            next = next => match next {
                (Ok(permit), Ok((client, _))) => (permit, client),
                (Err(_), _) => return,
                (Ok(_), Err(error)) => {
                    output::error(&anyhow::Error::new(error).context("accept a connection"));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            Some(()) = relays.next() => continue,
        };
        relays.push(relay(inside, port, client, permit));
    }
}

async fn relay(inside: &Inside<'_>, port: u16, mut client: TcpStream, permit: OwnedSemaphorePermit) {
    match inside.stream(port).await {
        Ok(stream) => {
            let mut stream = TokioIo::new(stream);
            // Small messages are sent one at a time and waited for.
            let _ = client.set_nodelay(true);
            // Either end may go away at any time, which is no error.
            let _ = copy_bidirectional_with_sizes(&mut client, &mut stream, BUFFER, BUFFER).await;
        }
        // The client sees that its connection ends; the operator, why.
        Err(error) => output::error(&error),
    }
    drop(permit);
}
