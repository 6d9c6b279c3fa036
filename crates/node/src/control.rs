//! The host's end of an agent's control channel.
//!
//! Every byte from an agent is untrusted: responses are bounded in size and time, and only a status, a version and the
//! event stream (see `events`) are taken from them.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use protocol::agent::{EVENTS_PATH, INIT_PATH, Init, VERSION_HEADER, is_version};
use tokio::net::UnixStream;
use tokio_util::task::AbortOnDropHandle;

/// How long an agent may take to respond before its sandbox counts as broken. It takes milliseconds; the bound is for a
/// host that is short of memory or processor time.
pub(crate) const AGENT_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of an agent's response, in bytes.
const RESPONSE_MAX: usize = 4096;

/// An open control connection.
#[derive(Debug)]
pub(crate) struct Control {
    requests: SendRequest<Full<Bytes>>,
    _connection: AbortOnDropHandle<()>,
}

impl Control {
    /// Starts HTTP/1.1 on a connected stream socket.
    pub(crate) async fn open(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        let io = TokioIo::new(UnixStream::from_std(socket)?);
        let (requests, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(16 * 1024)
            .handshake(io)
            .await
            .map_err(io::Error::other)?;
        // The handle is part of the returned value and aborts the task when it is dropped.
        #[expect(clippy::disallowed_methods, reason = "aborted by its handle")]
        let connection = tokio::task::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self {
            requests,
            _connection: AbortOnDropHandle::new(connection),
        })
    }

    async fn send(&mut self, method: Method, path: &str, body: Vec<u8>) -> io::Result<hyper::Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "agent")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))
            .map_err(io::Error::other)?;
        self.requests.ready().await.map_err(io::Error::other)?;
        self.requests.send_request(request).await.map_err(io::Error::other)
    }

    /// Sends a request and reads the whole response.
    async fn request(&mut self, method: Method, path: &str, body: Vec<u8>) -> io::Result<hyper::Response<Bytes>> {
        let (head, body) = self.send(method, path, body).await?.into_parts();
        let body = Limited::new(body, RESPONSE_MAX)
            .collect()
            .await
            .map_err(io::Error::other)?
            .to_bytes();
        Ok(hyper::Response::from_parts(head, body))
    }

    /// Gives the agent its identity and returns the level of the agent protocol that it reports.
    pub(crate) async fn init(&mut self, init: &Init) -> io::Result<String> {
        let body = serde_json::to_vec(init)?;
        let response = tokio::time::timeout(AGENT_TIMEOUT, self.request(Method::POST, INIT_PATH, body)).await??;
        if response.status() != StatusCode::NO_CONTENT {
            return Err(io::Error::other(format!(
                "the agent responded {} to {INIT_PATH}",
                response.status()
            )));
        }
        let version = response
            .headers()
            .get(VERSION_HEADER)
            .and_then(|value| value.to_str().ok());
        match version {
            Some(version) if is_version(version) => Ok(version.to_owned()),
            _ => Err(io::Error::other("the agent reported no valid version")),
        }
    }

    /// Opens the stream of agent events, one JSON object per line, starting with the first that has not been read yet.
    /// The connection cannot be used for anything else until the stream has ended.
    pub(crate) async fn events(&mut self) -> io::Result<Incoming> {
        let request = self.send(Method::GET, EVENTS_PATH, Vec::new());
        let response = tokio::time::timeout(AGENT_TIMEOUT, request).await??;
        if response.status() == StatusCode::OK {
            Ok(response.into_body())
        } else {
            Err(io::Error::other(format!(
                "the agent responded {} to {EVENTS_PATH}",
                response.status()
            )))
        }
    }
}
