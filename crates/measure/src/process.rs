//! A process in a sandbox, as its client sees it: what to start, and the stream of its events.

use anyhow::{Context, Result};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::connect::{self, Codec, EndOfStream, FLAG_END};
use protocol::process::{ProcessConfig, StartRequest, StreamResponse};

/// Largest message of a stream that is taken, in bytes.
const MESSAGE_MAX: usize = 1 << 20;

/// A process to start.
#[derive(Debug, Clone, Copy)]
pub struct Command<'a> {
    /// The program.
    pub program: &'a str,
    /// Its arguments.
    pub args: &'a [&'a str],
    /// Whether it has a pipe for its input, which stays open; otherwise its input is empty.
    pub stdin: bool,
    /// How the stream is written. Most SDKs ask for JSON.
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

/// What a client is told of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It runs.
    Started,
    /// It wrote to its standard output.
    Output(Bytes),
    /// It ended; the code, which is -1 when a signal ended it.
    Ended(i32),
}

/// The events of a process.
#[derive(Debug)]
pub struct Events {
    body: Incoming,
    codec: Codec,
    buffer: BytesMut,
}

impl Events {
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
    /// When the stream breaks off, or ends with an error.
    pub async fn next(&mut self) -> Result<Option<Event>> {
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

    fn event(&self, flags: u8, payload: &[u8]) -> Result<Option<Event>> {
        if flags & FLAG_END != 0 {
            let end: EndOfStream = serde_json::from_slice(payload).context("read the end of the stream")?;
            return match end.error {
                Some(error) => Err(error.into()),
                None => Ok(None),
            };
        }
        let event = self.codec.decode::<StreamResponse>(payload)?.event.unwrap_or_default();
        Ok(if event.start.is_some() {
            Some(Event::Started)
        } else if let Some(end) = event.end {
            Some(Event::Ended(end.exit_code))
        } else {
            event.data.and_then(|data| data.stdout).map(Event::Output)
        })
    }
}
