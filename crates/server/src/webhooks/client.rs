//! Sends one event to a receiver.
//!
//! Each attempt looks up the host once, judges all of its addresses, and connects to one of those that were judged: no name
//! is looked up again in between. Of the answer only the head is read. Everything takes a bounded time.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use rustls::pki_types::CertificateDer;
use tokio::net::TcpStream;

use super::receiver::{ReceiverRules, ReceiverUrl};
use crate::exchange::{self, AskError, Sender};

/// How long an attempt may take once the addresses of the host are known.
const EXCHANGE_BOUND: Duration = Duration::from_secs(10);
/// How long looking up a host may take. The C library gives up by itself, and its thread is taken until then.
pub(super) const LOOKUP_BOUND: Duration = Duration::from_secs(45);
/// How long a connection to one of several addresses may take.
const CONNECT_BOUND: Duration = Duration::from_secs(4);
/// How many addresses of a host are tried.
const TRIED_MAX: usize = 3;

/// Why an event was not received, if there was no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendError {
    /// The host has no addresses, or they could not be looked up.
    Lookup,
    /// The URL or an address of the host is not allowed.
    Refused,
    /// No connection was made.
    Connect,
    /// The certificate is not valid, or there is no TLS.
    Tls,
    /// There was no answer in time.
    Timeout,
    /// What came back is not an answer.
    Answer,
}

impl SendError {
    /// One word for the log of the webhook. Stable.
    pub(super) fn word(self) -> &'static str {
        match self {
            // One word for both: a tenant must not learn which names there are in the network of the host.
            Self::Lookup | Self::Refused => "address",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Answer => "answer",
        }
    }
}

impl From<AskError> for SendError {
    fn from(error: AskError) -> Self {
        match error {
            AskError::Tls => Self::Tls,
            AskError::Answer => Self::Answer,
        }
    }
}

/// The client of receivers.
pub(super) struct EventClient {
    rules: Arc<ReceiverRules>,
    sender: Sender,
}

impl std::fmt::Debug for EventClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventClient")
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}

impl EventClient {
    /// A client that trusts these issuers beside those of the host.
    pub(super) fn new(rules: Arc<ReceiverRules>, authorities: Vec<CertificateDer<'static>>) -> Self {
        Self {
            rules,
            sender: Sender::new(authorities),
        }
    }

    /// Sends a body with these headers, and returns the status of the answer.
    pub(super) async fn send(&self, url: &str, headers: HeaderMap, body: Bytes) -> Result<StatusCode, SendError> {
        let url = self.rules.parse(url).map_err(|_| SendError::Refused)?;
        let addresses = lookup(&url).await?;
        self.rules
            .check_addresses(&url.host, &addresses)
            .map_err(|_| SendError::Refused)?;
        let exchange = self.exchange(&url, &addresses, headers, body);
        match tokio::time::timeout(EXCHANGE_BOUND, exchange).await {
            Ok(result) => result,
            Err(_) => Err(SendError::Timeout),
        }
    }

    async fn exchange(
        &self,
        url: &ReceiverUrl,
        addresses: &[IpAddr],
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<StatusCode, SendError> {
        let stream = connect(url.port, addresses).await?;
        let target = url.path.parse().map_err(|_| SendError::Refused)?;
        let authority = HeaderValue::from_str(&url.authority).map_err(|_| SendError::Refused)?;
        let request = exchange::post(target, authority, "application/json", headers, body);
        let tls = url.is_tls.then_some(url.host.as_str());
        let answered = self.sender.ask(stream, tls, request).await?;
        Ok(answered.answer.status())
    }
}

/// The addresses of a host, looked up once.
async fn lookup(url: &ReceiverUrl) -> Result<Vec<IpAddr>, SendError> {
    if let Some(address) = url.address() {
        return Ok(vec![address]);
    }
    let found = tokio::net::lookup_host((url.host.as_str(), url.port));
    let found: io::Result<Vec<IpAddr>> = match tokio::time::timeout(LOOKUP_BOUND, found).await {
        Ok(found) => found.map(|found| found.map(|address| address.ip()).collect()),
        Err(_) => return Err(SendError::Lookup),
    };
    found.ok().filter(|found| !found.is_empty()).ok_or(SendError::Lookup)
}

async fn connect(port: u16, addresses: &[IpAddr]) -> Result<TcpStream, SendError> {
    let mut last = SendError::Connect;
    for address in addresses.iter().take(TRIED_MAX) {
        let connected = TcpStream::connect(SocketAddr::new(*address, port));
        match tokio::time::timeout(CONNECT_BOUND, connected).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(_)) => last = SendError::Connect,
            Err(_) => last = SendError::Timeout,
        }
    }
    Err(last)
}
