//! The host's end of an agent's control channel.
//!
//! Every byte from an agent is treated as hostile: answers are bounded in size and time, and all that is taken from
//! them is a status, a version and, with more care in `events`, what goes into the sandbox's log.

use std::io;
use std::os::fd::OwnedFd;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use protocol::agent::{EVENTS_PATH, INIT_PATH, Init, VERSION_HEADER, is_version};
use tokio::net::UnixStream;
use tokio_util::task::AbortOnDropHandle;

use crate::AGENT_TIMEOUT;

/// Largest answer of an agent that is read, in bytes.
const ANSWER_MAX: usize = 4096;

/// An open control connection.
#[derive(Debug)]
pub(crate) struct Control {
    requests: SendRequest<Full<Bytes>>,
    _connection: AbortOnDropHandle<()>,
}

impl Control {
    /// Speaks HTTP/1.1 on a connected stream socket.
    pub(crate) async fn open(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        let io = TokioIo::new(UnixStream::from_std(socket)?);
        let (requests, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(16 * 1024)
            .handshake(io)
            .await
            .map_err(io::Error::other)?;
        // Owned by this value: dropped with it.
        #[expect(clippy::disallowed_methods, reason = "the handle ends it")]
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

    /// Sends a request and reads all of the answer.
    async fn ask(&mut self, method: Method, path: &str, body: Vec<u8>) -> io::Result<hyper::Response<Bytes>> {
        let (head, body) = self.send(method, path, body).await?.into_parts();
        let body = Limited::new(body, ANSWER_MAX)
            .collect()
            .await
            .map_err(io::Error::other)?
            .to_bytes();
        Ok(hyper::Response::from_parts(head, body))
    }

    /// Hands the sandbox's identity to its agent and returns the level of the agent protocol that it reports.
    pub(crate) async fn init(&mut self, init: &Init) -> io::Result<String> {
        let body = serde_json::to_vec(init)?;
        let answer = tokio::time::timeout(AGENT_TIMEOUT, self.ask(Method::POST, INIT_PATH, body)).await??;
        if answer.status() != StatusCode::NO_CONTENT {
            return Err(io::Error::other(format!(
                "the agent answered {} to {INIT_PATH}",
                answer.status()
            )));
        }
        let version = answer
            .headers()
            .get(VERSION_HEADER)
            .and_then(|value| value.to_str().ok());
        match version {
            Some(version) if is_version(version) => Ok(version.to_owned()),
            _ => Err(io::Error::other("the agent reported no version")),
        }
    }

    /// What happens in the sandbox, line by line, from what was not told yet on. The connection is of no other use until
    /// that has ended.
    pub(crate) async fn events(&mut self) -> io::Result<Incoming> {
        let asked = self.send(Method::GET, EVENTS_PATH, Vec::new());
        let answer = tokio::time::timeout(AGENT_TIMEOUT, asked).await??;
        if answer.status() == StatusCode::OK {
            Ok(answer.into_body())
        } else {
            Err(io::Error::other(format!(
                "the agent answered {} to {EVENTS_PATH}",
                answer.status()
            )))
        }
    }
}
