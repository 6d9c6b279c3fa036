//! Messages of the service `process.Process`: starting processes in the sandbox and interacting with them.
//!
//! Field numbers and JSON names are fixed by the clients. A oneof is written as optional fields, which is the same
//! bytes on the wire; the receiver checks that one is set. Zero values are left out of JSON.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::connect::json;

/// Path prefix of the service's methods.
pub const SERVICE: &str = "/process.Process/";

/// What to run.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[prost(skip_debug)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessConfig {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub cmd: String,
    #[prost(string, repeated, tag = "2")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Variables that are added to the environment; they win over every other source.
    #[prost(btree_map = "string, string", tag = "3")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

impl fmt::Debug for ProcessConfig {
    /// Omits arguments and environment: both carry secrets of the caller.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessConfig")
            .field("cmd", &self.cmd)
            .field("cwd", &self.cwd)
            .finish_non_exhaustive()
    }
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PtySize {
    #[prost(uint32, tag = "1")]
    #[serde(deserialize_with = "json::number", skip_serializing_if = "json::is_default")]
    pub cols: u32,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "json::number", skip_serializing_if = "json::is_default")]
    pub rows: u32,
}

/// A terminal.
#[derive(Clone, Copy, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pty {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<PtySize>,
}

/// A live process.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessInfo {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<ProcessConfig>,
    #[prost(uint32, tag = "2")]
    #[serde(deserialize_with = "json::number", skip_serializing_if = "json::is_default")]
    pub pid: u32,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Selects a process by pid or by tag.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessSelector {
    #[prost(uint32, optional, tag = "1")]
    #[serde(deserialize_with = "json::optional_number", skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    #[prost(string, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Input for a process: its stdin or its terminal.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[prost(skip_debug)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessInput {
    #[prost(bytes = "bytes", optional, tag = "1")]
    #[serde(with = "json::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub stdin: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "2")]
    #[serde(with = "json::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub pty: Option<Bytes>,
}

impl fmt::Debug for ProcessInput {
    /// Omits the bytes: they may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessInput").finish_non_exhaustive()
    }
}

/// Request of `Start`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartRequest {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessConfig>,
    /// Run in a terminal of this size; stdin is then ignored.
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Whether stdin is a pipe; absent means yes, for clients older than the field.
    #[prost(bool, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// Request of `Connect`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConnectRequest {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
}

/// Request of `List`.
#[derive(Clone, Copy, PartialEq, Message, Serialize, Deserialize)]
pub struct ListRequest {}

/// Response of `List`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ProcessInfo>,
}

/// Request of `Update`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

/// Request of `SendInput`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SendInputRequest {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<ProcessInput>,
}

/// One message of the request of `StreamInput`; exactly one field is set.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamInputRequest {
    /// Selects the process that the following input is for. May be sent again.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StreamInputStart>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<StreamInputData>,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

/// Selects the process that input is for.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamInputStart {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
}

/// A piece of input. Its field number is two in the clients' contract, not one.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamInputData {
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<ProcessInput>,
}

/// Request of `SendSignal`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SendSignalRequest {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
    /// A signal number; only [`signal::KILL`] and [`signal::TERM`] are supported.
    #[prost(int32, tag = "2")]
    #[serde(with = "signal", skip_serializing_if = "json::is_default")]
    pub signal: i32,
}

/// The enum `Signal`: numbers in binary, names in JSON.
pub mod signal {
    use serde::{Deserializer, Serializer};

    use super::json;

    pub const KILL: i32 = 9;
    pub const TERM: i32 = 15;

    const NAMES: &[(&str, i32)] = &[
        ("SIGNAL_UNSPECIFIED", 0),
        ("SIGNAL_SIGKILL", KILL),
        ("SIGNAL_SIGTERM", TERM),
    ];

    /// The name of a signal number, or the number.
    #[must_use]
    pub fn name(number: i32) -> String {
        let known = NAMES.iter().find(|(_, known)| *known == number);
        known.map_or_else(|| number.to_string(), |(name, _)| (*name).to_owned())
    }

    /// Writes the name.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
        json::enumeration_name(*number, to, NAMES)
    }

    /// Reads a name or a number.
    ///
    /// # Errors
    /// When it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        json::enumeration(from, NAMES)
    }
}

/// Request of `CloseStdin`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CloseStdinRequest {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessSelector>,
}

/// Response of methods without a result, and payload of events without data.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct Empty {}

/// One message of the streams `Start` and `Connect`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StreamResponse {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<ProcessEvent>,
}

/// What happened to a process; exactly one field is set.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessEvent {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StartEvent>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataEvent>,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<EndEvent>,
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

/// The process was started.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartEvent {
    #[prost(uint32, tag = "1")]
    #[serde(deserialize_with = "json::number", skip_serializing_if = "json::is_default")]
    pub pid: u32,
}

/// Output; exactly one field is set.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataEvent {
    #[prost(bytes = "bytes", optional, tag = "1")]
    #[serde(with = "json::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub stdout: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "2")]
    #[serde(with = "json::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub stderr: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "3")]
    #[serde(with = "json::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub pty: Option<Bytes>,
}

/// The process has ended and its output is complete.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndEvent {
    /// Exit code, -1 when a signal ended it.
    #[prost(sint32, tag = "1")]
    #[serde(
        alias = "exit_code",
        deserialize_with = "json::number",
        skip_serializing_if = "json::is_default"
    )]
    pub exit_code: i32,
    /// Whether the process ended by itself, and not by a signal.
    #[prost(bool, tag = "2")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "json::is_default")]
    pub exited: bool,
    /// The end as text, such as `exit status 1` or `signal: killed`.
    #[prost(string, tag = "3")]
    #[serde(deserialize_with = "json::or_default", skip_serializing_if = "String::is_empty")]
    pub status: String,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[cfg(test)]
mod tests;
