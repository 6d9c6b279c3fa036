//! Sends one export to the receiver.
//!
//! Of the body of the answer a bounded part is read. Everything takes a bounded time. Nothing that the receiver writes reaches
//! the log.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use prost::Message as _;
use tokio::net::TcpStream;

use super::message::ExportResponse;
use super::settings::{Endpoint, Signal, TelemetrySettings};
use crate::exchange::{self, Answered, AskError, Sender};

/// How long an export may take, from looking up the host to the end of the answer.
const EXCHANGE_BOUND: Duration = Duration::from_secs(10);
/// How much of the body of an answer is read, in bytes. What is needed of it takes twenty.
const BODY_MAX: usize = 16 << 10;
/// Longest pause that a receiver may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// Why an export was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExportError {
    /// No connection was made: there is no address, or nothing listens.
    Connect,
    /// The certificate is not valid, or there is no TLS.
    Tls,
    /// There was no answer in time.
    Timeout,
    /// What came back is not an answer.
    Answer,
    /// The receiver answered with another status than 2xx.
    Status {
        status: StatusCode,
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
}

impl ExportError {
    /// Whether the same export may be accepted later, by the rules of the protocol.
    pub(super) fn is_temporary(self) -> bool {
        match self {
            Self::Connect | Self::Tls | Self::Timeout | Self::Answer => true,
            Self::Status { status, .. } => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        }
    }

    /// How long the receiver asks to wait.
    pub(super) fn retry_after(self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => retry_after,
            Self::Connect | Self::Tls | Self::Timeout | Self::Answer => None,
        }
    }
}

impl From<AskError> for ExportError {
    fn from(error: AskError) -> Self {
        match error {
            AskError::Tls => Self::Tls,
            AskError::Answer => Self::Answer,
        }
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::Tls => f.write_str("no TLS, or its certificate is not trusted"),
            Self::Timeout => write!(f, "no answer within {} s", EXCHANGE_BOUND.as_secs()),
            Self::Answer => f.write_str("the answer is not HTTP"),
            Self::Status { status, .. } => write!(f, "status {}", status.as_u16()),
        }
    }
}

/// The client of the receiver.
pub(super) struct ExportClient {
    endpoint: Endpoint,
    headers: HeaderMap,
    sender: Sender,
}

impl fmt::Debug for ExportClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportClient")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl ExportClient {
    pub(super) fn new(settings: TelemetrySettings) -> Self {
        Self {
            endpoint: settings.endpoint,
            headers: settings.headers,
            sender: Sender::new(settings.authorities),
        }
    }

    /// Sends an export, and returns how many of its spans or values the receiver did not want.
    pub(super) async fn send(&self, signal: Signal, body: Bytes) -> Result<u64, ExportError> {
        match tokio::time::timeout(EXCHANGE_BOUND, self.exchange(signal, body)).await {
            Ok(result) => result,
            Err(_) => Err(ExportError::Timeout),
        }
    }

    async fn exchange(&self, signal: Signal, body: Bytes) -> Result<u64, ExportError> {
        let endpoint = &self.endpoint;
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|_| ExportError::Connect)?;
        let (target, authority) = (endpoint.path(signal).clone(), endpoint.authority.clone());
        let request = exchange::post(target, authority, "application/x-protobuf", self.headers.clone(), body);
        let tls = endpoint.is_tls.then_some(endpoint.host.as_str());
        accepted(self.sender.ask(stream, tls, request).await?).await
    }
}

/// Reads as much of an answer as matters.
async fn accepted(answered: Answered) -> Result<u64, ExportError> {
    // The connection is cut when this returns, whatever of the answer is left.
    let Answered {
        answer,
        connection: _connection,
    } = answered;
    let status = answer.status();
    if !status.is_success() {
        return Err(ExportError::Status {
            status,
            retry_after: retry_after(answer.headers()),
        });
    }
    // It was accepted; what cannot be read does not change that.
    let body = Limited::new(answer.into_body(), BODY_MAX).collect().await;
    let answer = body.ok().and_then(|body| ExportResponse::decode(body.to_bytes()).ok());
    let rejected = answer.and_then(|answer| answer.partial_success);
    Ok(rejected.map_or(0, |partial| u64::try_from(partial.rejected).unwrap_or(0)))
}

/// The seconds that a receiver asks to wait. A date counts as nothing: the clocks of two hosts differ.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn what_the_protocol_repeats_is_temporary() {
        let of = |status: u16| ExportError::Status {
            status: StatusCode::from_u16(status).unwrap(),
            retry_after: None,
        };
        let temporary: Vec<u16> = (300..600).filter(|status| of(*status).is_temporary()).collect();
        assert_eq!(temporary, [429, 502, 503, 504]);
        assert!(ExportError::Connect.is_temporary() && ExportError::Timeout.is_temporary());
    }

    #[test]
    fn a_receiver_may_ask_for_a_bounded_pause() {
        for (text, want) in [
            ("7", Some(7)),
            ("0", Some(0)),
            ("86400", Some(300)),
            ("99999999999999999999999", None),
            ("-1", None),
            ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ] {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, HeaderValue::from_str(text).unwrap())]);
            assert_eq!(retry_after(&headers), want.map(Duration::from_secs), "{text}");
        }
    }
}
