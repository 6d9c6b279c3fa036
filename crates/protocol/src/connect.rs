//! The Connect protocol as the agent's clients speak it: content types, envelopes, error codes, deadlines.
//!
//! Unary calls carry one bare message in a plain HTTP body. Server streams carry envelopes: a flag byte, a
//! big-endian 32-bit length and the message; the last envelope has [`FLAG_END`] and is JSON in both codecs. An
//! error of a stream, even one before its first message, travels in that envelope under HTTP status 200.
//!
//! Invariant: pure functions over bytes. Reading sockets, limits and time belong to the callers.

pub mod json;

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Envelope flag of a message in the compression that the headers name.
pub const FLAG_COMPRESSED: u8 = 0x01;
/// Envelope flag of the last envelope of a stream.
pub const FLAG_END: u8 = 0x02;
/// Bytes before the message in an envelope.
pub const ENVELOPE_HEADER: usize = 5;

/// A message with both encodings.
pub trait Message: prost::Message + Default + Serialize + DeserializeOwned {}

impl<M: prost::Message + Default + Serialize + DeserializeOwned> Message for M {}

/// Error code, in the vocabulary that Connect shares with gRPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    Canceled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl Code {
    /// HTTP status of a unary response with this code.
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::Canceled => 499,
            Self::InvalidArgument | Self::FailedPrecondition | Self::OutOfRange => 400,
            Self::DeadlineExceeded => 504,
            Self::NotFound => 404,
            Self::AlreadyExists | Self::Aborted => 409,
            Self::PermissionDenied => 403,
            Self::ResourceExhausted => 429,
            Self::Unimplemented => 501,
            Self::Unknown | Self::Internal | Self::DataLoss => 500,
            Self::Unavailable => 503,
            Self::Unauthenticated => 401,
        }
    }
}

/// The error of one call, as it goes over the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code:?}: {message}")]
pub struct Error {
    pub code: Code,
    /// Text for people; programs use the code.
    #[serde(default)]
    pub message: String,
}

impl Error {
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The JSON body of a unary error, the same for both codecs.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The payload of the last envelope.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndOfStream {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Error>,
}

/// Encoding of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Json,
    Proto,
}

impl Codec {
    /// The codec of a unary content type; parameters such as a charset are ignored.
    #[must_use]
    pub fn of_unary(content_type: &str) -> Option<Self> {
        match essence(content_type).as_str() {
            "application/json" => Some(Self::Json),
            "application/proto" => Some(Self::Proto),
            _ => None,
        }
    }

    /// The codec of a streaming content type.
    #[must_use]
    pub fn of_stream(content_type: &str) -> Option<Self> {
        match essence(content_type).as_str() {
            "application/connect+json" => Some(Self::Json),
            "application/connect+proto" => Some(Self::Proto),
            _ => None,
        }
    }

    /// Content type of unary bodies.
    #[must_use]
    pub fn unary_content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Proto => "application/proto",
        }
    }

    /// Content type of streamed bodies.
    #[must_use]
    pub fn stream_content_type(self) -> &'static str {
        match self {
            Self::Json => "application/connect+json",
            Self::Proto => "application/connect+proto",
        }
    }

    /// Reads one message.
    ///
    /// # Errors
    /// `invalid_argument` when the bytes are not such a message.
    pub fn decode<M: Message>(self, bytes: &[u8]) -> Result<M, Error> {
        let reason = match self {
            Self::Proto => match M::decode(bytes) {
                Ok(message) => return Ok(message),
                Err(error) => error.to_string(),
            },
            // A derived reader would also take an array for a struct, which the JSON mapping does not allow.
            Self::Json if bytes.trim_ascii_start().first() != Some(&b'{') => "not a JSON object".to_owned(),
            Self::Json => match serde_json::from_slice(bytes) {
                Ok(message) => return Ok(message),
                Err(error) => error.to_string(),
            },
        };
        Err(Error::new(
            Code::InvalidArgument,
            format!("unmarshal message: {reason}"),
        ))
    }

    /// Writes one message.
    #[must_use]
    pub fn encode<M: Message>(self, message: &M) -> Bytes {
        let mut out = BytesMut::new();
        self.encode_into(message, &mut out);
        out.freeze()
    }

    /// Writes one message as an envelope.
    #[must_use]
    pub fn envelope<M: Message>(self, message: &M) -> Bytes {
        let mut out = BytesMut::new();
        out.put_bytes(0, ENVELOPE_HEADER);
        self.encode_into(message, &mut out);
        finish_envelope(out, 0)
    }

    fn encode_into<M: Message>(self, message: &M, out: &mut BytesMut) {
        match self {
            Self::Proto => {
                // Reserving the exact length makes the only error of `encode` impossible.
                out.reserve(message.encoded_len());
                let _ = message.encode(out);
            }
            Self::Json => {
                // Messages have string keys and finite numbers only, so writing them to memory cannot fail.
                let _ = serde_json::to_writer(out.writer(), message);
            }
        }
    }
}

fn essence(content_type: &str) -> String {
    let essence = content_type.split(';').next().unwrap_or_default();
    essence.trim().to_ascii_lowercase()
}

fn finish_envelope(mut out: BytesMut, flags: u8) -> Bytes {
    let length = u32::try_from(out.len() - ENVELOPE_HEADER).unwrap_or(u32::MAX);
    out[0] = flags;
    out[1..ENVELOPE_HEADER].copy_from_slice(&length.to_be_bytes());
    out.freeze()
}

/// The last envelope of a stream.
#[must_use]
pub fn end_of_stream(error: Option<&Error>) -> Bytes {
    let mut out = BytesMut::new();
    out.put_bytes(0, ENVELOPE_HEADER);
    let end = EndOfStream { error: error.cloned() };
    let _ = serde_json::to_writer((&mut out).writer(), &end);
    finish_envelope(out, FLAG_END)
}

/// Takes the next whole envelope out of `buffer`: its flags and its message. `None`: more bytes are needed.
///
/// # Errors
/// `invalid_argument` when the announced message is longer than `limit` bytes.
pub fn take_envelope(buffer: &mut BytesMut, limit: usize) -> Result<Option<(u8, Bytes)>, Error> {
    let Some((header, _)) = buffer.split_first_chunk::<ENVELOPE_HEADER>() else {
        return Ok(None);
    };
    let [flags, length @ ..] = *header;
    let length = u32::from_be_bytes(length) as usize;
    if length > limit {
        return Err(Error::new(
            Code::InvalidArgument,
            format!("message of {length} bytes is larger than the limit of {limit}"),
        ));
    }
    if buffer.len() < ENVELOPE_HEADER + length {
        return Ok(None);
    }
    buffer.advance(ENVELOPE_HEADER);
    Ok(Some((flags, buffer.split_to(length).freeze())))
}

/// Whether the message in an envelope of a request is compressed. `declared`: whether the headers name a compression.
///
/// # Errors
/// `internal` for a compressed message without one, as the protocol requires; `invalid_argument` for any other flag.
pub fn is_compressed(flags: u8, declared: bool) -> Result<bool, Error> {
    match flags {
        0 => Ok(false),
        FLAG_COMPRESSED if declared => Ok(true),
        FLAG_COMPRESSED => Err(Error::new(
            Code::Internal,
            "protocol error: sent compressed message without compression support",
        )),
        _ => Err(Error::new(
            Code::InvalidArgument,
            format!("protocol error: invalid envelope flags {flags:#04x}"),
        )),
    }
}

/// Wraps a message in an envelope with these flags.
#[must_use]
pub fn wrap(flags: u8, message: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(ENVELOPE_HEADER + message.len());
    out.put_bytes(0, ENVELOPE_HEADER);
    out.extend_from_slice(message);
    finish_envelope(out, flags)
}

/// Reads the only envelope in the body of a server-stream request: its flags and its message.
///
/// # Errors
/// `invalid_argument` for a cut envelope, `unimplemented` for none or several, and the error of [`take_envelope`].
pub fn only_envelope(body: Bytes, limit: usize) -> Result<(u8, Bytes), Error> {
    let mut buffer = BytesMut::from(body);
    if buffer.is_empty() {
        return Err(Error::new(Code::Unimplemented, "unary request has zero messages"));
    }
    let Some(envelope) = take_envelope(&mut buffer, limit)? else {
        return Err(Error::new(
            Code::InvalidArgument,
            "protocol error: incomplete envelope: unexpected end of the body",
        ));
    };
    if !buffer.is_empty() {
        return Err(Error::new(Code::Unimplemented, "unary request has multiple messages"));
    }
    Ok(envelope)
}

/// The deadline in a `Connect-Timeout-Ms` header. Zero and an absent header mean none.
///
/// # Errors
/// `invalid_argument` for anything but up to ten digits.
pub fn timeout(header: Option<&str>) -> Result<Option<Duration>, Error> {
    let Some(text) = header else { return Ok(None) };
    let digits = !text.is_empty() && text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u64>() {
        Ok(0) if digits => Ok(None),
        Ok(millis) if digits => Ok(Some(Duration::from_millis(millis))),
        _ => Err(Error::new(
            Code::InvalidArgument,
            format!("protocol error: invalid timeout: {text:?}"),
        )),
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
