//! Client side of a process in a sandbox: the start request and the event stream.

use anyhow::{Context, Result};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::connect::{self, Codec, EndOfStream, FLAG_END};
use protocol::process::{ProcessConfig, StartRequest, StreamResponse};

/// Size limit of a message of the stream, in bytes.
const MESSAGE_MAX: usize = 1 << 20;

/// A start request for a process.
#[derive(Debug, Clone, Copy)]
pub struct Command<'a> {
    /// The program.
    pub program: &'a str,
    /// Arguments of the program.
    pub args: &'a [&'a str],
    /// Whether its standard input is a pipe that stays open; otherwise it is empty.
    pub stdin: bool,
    /// The encoding of the stream. Most SDKs use JSON.
    pub codec: Codec,
}

impl<'a> Command<'a> {
    /// A program without input, in JSON.
    #[must_use]
    pub fn new(program: &'a str, args: &'a [&'a str]) -> Self {
        Self {
            program,
            args,
            stdin: false,
            codec: Codec::Json,
        }
    }

    /// The body of the request.
    pub(crate) fn message(&self) -> Bytes {
        self.codec.envelope(&StartRequest {
            process: Some(ProcessConfig {
                cmd: self.program.to_owned(),
                args: self.args.iter().map(|&arg| arg.to_owned()).collect(),
                ..ProcessConfig::default()
            }),
            stdin: Some(self.stdin),
            ..StartRequest::default()
        })
    }
}

/// An event of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// The process was started.
    Started,
    /// Standard output.
    Output(Bytes),
    /// The process ended, with its exit code; -1 if it was ended by a signal.
    Ended(i32),
}

/// The event stream of a process.
#[derive(Debug)]
pub struct ProcessEvents {
    body: Incoming,
    codec: Codec,
    buffer: BytesMut,
}

impl ProcessEvents {
    pub(crate) fn new(body: Incoming, codec: Codec) -> Self {
        Self {
            body,
            codec,
            buffer: BytesMut::new(),
        }
    }

    /// The next event; none after the last. Errors and keepalives of the stream are not events.
    ///
    /// # Errors
    /// When the stream is interrupted, or ends with an error.
    pub async fn next(&mut self) -> Result<Option<ProcessEvent>> {
        loop {
            while let Some((flags, payload)) = connect::take_envelope(&mut self.buffer, MESSAGE_MAX)? {
                if let Some(event) = self.event(flags, &payload)? {
                    return Ok(Some(event));
                }
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame.context("read the stream")?.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
            }
        }
    }

    fn event(&self, flags: u8, payload: &[u8]) -> Result<Option<ProcessEvent>> {
        if flags & FLAG_END != 0 {
            let end: EndOfStream = serde_json::from_slice(payload).context("read the end of the stream")?;
            return match end.error {
                Some(error) => Err(error.into()),
                None => Ok(None),
            };
        }
        let event = self.codec.decode::<StreamResponse>(payload)?.event.unwrap_or_default();
        Ok(if event.start.is_some() {
            Some(ProcessEvent::Started)
        } else if let Some(end) = event.end {
            Some(ProcessEvent::Ended(end.exit_code))
        } else {
            event.data.and_then(|data| data.stdout).map(ProcessEvent::Output)
        })
    }
}
