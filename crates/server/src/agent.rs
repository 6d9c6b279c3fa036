//! Running commands and writing files in a sandbox that no client knows yet, through its agent.
//!
//! Everything that comes from there is untrusted, and bounded.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use model::id::SandboxId;
use protocol::agent::{self, OUTPUT_HEADER, UNTIL_EXIT};
use protocol::connect::{self, Codec, EndOfStream, FLAG_END};
use protocol::node::DialError;
use protocol::process::{self, ProcessConfig, StartRequest, StreamResponse};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use tokio_util::task::TaskTracker;

use crate::node::NodeHandle;

/// Maximum length of a message of the agent. Output arrives in smaller pieces.
const MESSAGE_MAX: usize = 4 << 20;
/// How much of the errors that a command writes is kept.
const STDERR_MAX: usize = 8 << 10;
/// How long a connection to the agent may take. It has just responded.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request to the agent failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    #[error("cannot connect to the agent")]
    Dial(#[source] DialError),
    #[error("the agent does not accept connections")]
    DialTimeout,
    #[error("the connection to the agent failed")]
    Connection(#[source] hyper::Error),
    #[error("the agent answered {0}")]
    Status(StatusCode),
    #[error("the agent sent an invalid message")]
    Message(#[source] connect::Error),
    #[error("the agent ended a stream early")]
    Truncated,
    #[error("cannot read what is sent to the agent, or keep what it sends")]
    Io(#[source] io::Error),
}

/// When a command counts as ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndsWith {
    /// The exit of its process. What the process has left in the background goes on, and its output is not waited for.
    Exit,
    /// The end of its output, which such processes may hold open.
    Output,
}

/// A command that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its exit code; -1 if a signal ended it.
    pub(crate) code: i32,
    /// The last part of what the command wrote to stderr.
    pub(crate) stderr: String,
}

/// Takes the output of a command.
pub(crate) trait Output: Send {
    /// Takes the next piece.
    ///
    /// # Errors
    /// To end the command.
    fn take(&mut self, piece: Bytes) -> impl Future<Output = io::Result<()>> + Send;

    /// Takes the next piece of what the command writes as errors, the last of which is kept in any case.
    fn take_error(&mut self, _piece: &[u8]) {}
}

/// The agent of one sandbox.
#[derive(Debug)]
pub(crate) struct Agent<'a> {
    pub(crate) node: &'a NodeHandle,
    pub(crate) id: &'a SandboxId,
    pub(crate) token: SecretString,
    /// Tracker of the tasks that drive connections.
    pub(crate) work: &'a TaskTracker,
}

impl Agent<'_> {
    /// Starts a command as a user and returns once it runs. It goes on without its output being read.
    pub(crate) async fn begin(&self, user: &str, command: ProcessConfig) -> Result<(), AgentError> {
        let (response, _connection) = self.start(user, command, EndsWith::Output).await?;
        let mut body = response.into_body();
        let mut buffer = BytesMut::new();
        loop {
            if let Some((flags, payload)) =
                connect::take_envelope(&mut buffer, MESSAGE_MAX).map_err(AgentError::Message)?
            {
                if flags & FLAG_END == 0 {
                    return Ok(());
                }
                let end: EndOfStream = serde_json::from_slice(&payload).unwrap_or_default();
                return Err(end.error.map_or(AgentError::Truncated, AgentError::Message));
            }
            let frame = body.frame().await.ok_or(AgentError::Truncated)?;
            if let Ok(data) = frame.map_err(AgentError::Connection)?.into_data() {
                buffer.extend_from_slice(&data);
            }
        }
    }

    /// Runs a command as a user and returns once it has ended.
    pub(crate) async fn run(
        &self,
        user: &str,
        command: ProcessConfig,
        ends: EndsWith,
        output: &mut impl Output,
    ) -> Result<Ended, AgentError> {
        let (response, _connection) = self.start(user, command, ends).await?;
        let mut body = response.into_body();
        let mut buffer = BytesMut::new();
        let mut stderr = Vec::new();
        let mut code = None;
        loop {
            while let Some((flags, payload)) =
                connect::take_envelope(&mut buffer, MESSAGE_MAX).map_err(AgentError::Message)?
            {
                if flags & FLAG_END != 0 {
                    let end: EndOfStream = serde_json::from_slice(&payload).unwrap_or_default();
                    return match (end.error, code) {
                        (Some(error), _) => Err(AgentError::Message(error)),
                        (None, Some(code)) => Ok(Ended {
                            code,
                            stderr: String::from_utf8_lossy(&stderr).into_owned(),
                        }),
                        (None, None) => Err(AgentError::Truncated),
                    };
                }
                let response: StreamResponse = Codec::Proto.decode(&payload).map_err(AgentError::Message)?;
                let event = response.event.unwrap_or_default();
                if let Some(end) = event.end {
                    code = Some(end.exit_code);
                }
                let Some(data) = event.data else { continue };
                if let Some(piece) = data.stdout {
                    output.take(piece).await.map_err(AgentError::Io)?;
                }
                if let Some(piece) = data.stderr {
                    output.take_error(&piece);
                    stderr.extend_from_slice(&piece);
                    let excess = stderr.len().saturating_sub(STDERR_MAX);
                    stderr.drain(..excess);
                }
            }
            match body.frame().await {
                None => return Err(AgentError::Truncated),
                Some(frame) => {
                    if let Ok(data) = frame.map_err(AgentError::Connection)?.into_data() {
                        buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }

    /// Asks the agent to start a command. The process goes on when its connection ends.
    async fn start(
        &self,
        user: &str,
        command: ProcessConfig,
        ends: EndsWith,
    ) -> Result<(Response<Incoming>, AbortOnDropHandle<()>), AgentError> {
        let message = Codec::Proto.envelope(&StartRequest {
            process: Some(command),
            stdin: Some(false),
            ..StartRequest::default()
        });
        let mut request = self.request(&format!("{}Start", process::SERVICE));
        if ends == EndsWith::Exit {
            request = request.header(OUTPUT_HEADER, UNTIL_EXIT);
        }
        let request = request
            .header(header::CONTENT_TYPE, Codec::Proto.stream_content_type())
            .header("connect-protocol-version", "1")
            .header(header::AUTHORIZATION, basic(user))
            .body(Full::new(message))
            .expect("a valid request");
        let (response, connection) = self.send(request).await?;
        if response.status() != StatusCode::OK {
            return Err(AgentError::Status(response.status()));
        }
        Ok((response, connection))
    }

    /// Asks the agent whether it responds.
    pub(crate) async fn health(&self) -> Result<(), AgentError> {
        let request = Request::get("/health")
            .header(header::HOST, "localhost")
            .body(Full::new(Bytes::new()))
            .expect("a valid request");
        let (response, _connection) = self.send(request).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(AgentError::Status(status)),
        }
    }

    /// Writes a file as a user.
    pub(crate) async fn upload(&self, user: &str, path: &str, length: u64, content: Pieces) -> Result<(), AgentError> {
        let request = self
            .request(&format!("/files?path={path}&username={user}"))
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .header(header::CONTENT_LENGTH, length)
            .body(content)
            .expect("a valid request");
        let (response, _connection) = self.send(request).await?;
        match response.status() {
            StatusCode::OK => Ok(()),
            status => Err(AgentError::Status(status)),
        }
    }

    fn request(&self, path: &str) -> http::request::Builder {
        Request::post(path)
            .header(header::HOST, "localhost")
            .header("x-access-token", self.token.expose_secret())
    }

    /// Sends a request on a connection of its own, which ends when the second result is dropped.
    async fn send<B>(&self, request: Request<B>) -> Result<(Response<Incoming>, AbortOnDropHandle<()>), AgentError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let stream = tokio::time::timeout(DIAL_TIMEOUT, self.node.dial(self.id, agent::PORT)).await;
        let stream = stream.map_err(|_| AgentError::DialTimeout)?.map_err(AgentError::Dial)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(AgentError::Connection)?;
        let connection = AbortOnDropHandle::new(self.work.spawn(async move {
            // The response tells what went wrong.
            let _ = connection.await;
        }));
        let response = sender.send_request(request).await.map_err(AgentError::Connection)?;
        Ok((response, connection))
    }
}

/// A command of the login shell, as steps of builds and start commands are run.
pub(crate) fn login_shell(command: &str, envs: BTreeMap<String, String>, cwd: Option<String>) -> ProcessConfig {
    ProcessConfig {
        cmd: "/bin/bash".to_owned(),
        args: vec!["-l".to_owned(), "-c".to_owned(), command.to_owned()],
        envs,
        cwd,
    }
}

fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

/// A body that another task produces.
#[derive(Debug)]
pub(crate) struct Pieces(pub(crate) mpsc::Receiver<io::Result<Bytes>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0
            .poll_recv(cx)
            .map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}
