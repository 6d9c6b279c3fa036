//! A connection to the agent of a sandbox, for one request after the other.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::upgrade::Upgraded;
use protocol::connect::{self, Codec, Message};
use tokio::task::JoinSet;

use crate::output;
use crate::requests;

/// Largest body of a response that is read as a whole, in bytes: a folder with some 200,000 entries.
const ANSWER_MAX: usize = 32 << 20;
/// Most fields of a response, such as entries of a folder. An empty one is two bytes long, and takes a hundred times as much
/// once it is decoded.
const FIELDS_MAX: usize = 250_000;
/// How much of an error is shown.
const ERROR_MAX: usize = 500;
/// How long a call may take that only asks. Those of a sandbox whose processors are all taken are slow.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The body of a request.
pub(super) type RequestBody = UnsyncBoxBody<Bytes, io::Error>;

/// A connection to an agent.
#[derive(Debug)]
pub(super) struct Agent {
    requests: SendRequest<RequestBody>,
    token: HeaderValue,
    user: Option<HeaderValue>,
    _connection: JoinSet<()>,
}

impl Agent {
    /// Begins to speak HTTP on a stream.
    pub(super) async fn connect(stream: Upgraded, token: HeaderValue, user: Option<&str>) -> Result<Self> {
        let (requests, connection) = http1::handshake(stream).await.context("connect to the agent")?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Its errors are also those of requests and bodies.
            let _ = connection.await;
        });
        let basic = |user: &str| HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(format!("{user}:"))));
        Ok(Self {
            requests,
            token,
            user: user.map(basic).transpose()?,
            _connection: task,
        })
    }

    /// Sends a request, and returns the response whatever its status is.
    pub(super) async fn send(
        &mut self,
        method: Method,
        path: &str,
        content_type: &'static str,
        headers: &[(&'static str, &'static str)],
        body: RequestBody,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header("x-access-token", self.token.clone())
            .header(header::CONTENT_TYPE, content_type);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(user) = &self.user {
            request = request.header(header::AUTHORIZATION, user.clone());
        }
        self.requests.ready().await.context("connection to the agent lost")?;
        let response = self.requests.send_request(request.body(body)?).await;
        response.context("connection to the agent lost")
    }

    /// Makes a call with one request and one response.
    pub(super) async fn call<Q: Message, A: Message>(&mut self, method: &str, message: &Q) -> Result<A, CallError> {
        let work = async {
            let body = whole(Codec::Proto.encode(message));
            let content_type = Codec::Proto.unary_content_type();
            let response = self.send(Method::POST, method, content_type, PROTOCOL, body).await?;
            let status = response.status();
            let body = requests::whole(response.into_body(), ANSWER_MAX).await?;
            if status == StatusCode::OK {
                if fields(&body).is_none_or(|count| count > FIELDS_MAX) {
                    return Err(CallError::Failed(anyhow!(
                        "the agent sent an invalid or too large message"
                    )));
                }
                return Codec::Proto.decode(&body).map_err(CallError::Refused);
            }
            match serde_json::from_slice::<connect::Error>(&body) {
                Ok(error) => Err(CallError::Refused(error)),
                Err(_) => Err(CallError::Failed(refusal(status, &body))),
            }
        };
        let timeout = || CallError::Failed(anyhow!("the agent does not answer"));
        tokio::time::timeout(CALL_TIMEOUT, work)
            .await
            .map_err(|_| timeout())
            .flatten()
    }
}

/// Headers of each call.
pub(super) const PROTOCOL: &[(&str, &str)] = &[("connect-protocol-version", "1")];

/// Why a call failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The agent has refused it.
    Refused(connect::Error),
    /// There is no valid response.
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for CallError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<CallError> for anyhow::Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(error) => anyhow!(shown(&error.message)),
            CallError::Failed(error) => error,
        }
    }
}

/// A body that is sent as a whole.
pub(super) fn whole(bytes: Bytes) -> RequestBody {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// The error of a response that is no success and not one of a call.
pub(super) fn refusal(status: StatusCode, body: &[u8]) -> anyhow::Error {
    #[derive(serde::Deserialize)]
    struct Told {
        message: String,
    }
    match serde_json::from_slice::<Told>(body) {
        Ok(told) => anyhow!(shown(&told.message)),
        Err(_) => anyhow!("the agent answered {status}"),
    }
}

/// A text of the sandbox, cut and without control characters.
pub(super) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(ERROR_MAX).collect();
    output::printable(&cut)
}

/// The number of fields of a message, without those of messages in it; none if it is not a message.
fn fields(mut bytes: &[u8]) -> Option<usize> {
    let mut count = 0;
    while !bytes.is_empty() {
        let (tag, rest) = varint(bytes)?;
        bytes = match tag & 7 {
            0 => varint(rest)?.1,
            1 => rest.get(8..)?,
            2 => {
                let (length, rest) = varint(rest)?;
                rest.get(usize::try_from(length).ok()?..)?
            }
            5 => rest.get(4..)?,
            _ => return None,
        };
        count += 1;
    }
    Some(count)
}

/// A number at the beginning, and what follows it.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (index, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use protocol::filesystem::{EntryInfo, ListDirResponse};

    use super::*;

    #[test]
    fn fields_are_counted_before_they_are_decoded() {
        let named = EntryInfo {
            name: "n".repeat(300),
            size: 1 << 40,
            ..EntryInfo::default()
        };
        let entries = vec![named, EntryInfo::default(), EntryInfo::default()];
        let body = Codec::Proto.encode(&ListDirResponse { entries });
        assert_eq!(fields(&body), Some(3));
        assert_eq!(fields(b""), Some(0));
        assert_eq!(fields(b"\x08\x01\x0a\x00"), Some(2));
        // Cut, longer than a number may be, of no type.
        for bad in [
            &b"\x0a\x05a"[..],
            &b"\x0a"[..],
            &[0xff; 11][..],
            &b"\x0b"[..],
            &b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"[..],
        ] {
            assert_eq!(fields(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn what_the_agent_says_is_text() {
        assert_eq!(shown("a\u{1b}[2J\u{202e}b\n"), "a\\u{1b}[2J\\u{202e}b\\n");
        assert_eq!(shown(&"x".repeat(1000)).len(), ERROR_MAX);
    }
}
