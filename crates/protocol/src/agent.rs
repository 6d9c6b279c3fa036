//! The protocol between the host and the agent inside a sandbox.
//!
//! The agent serves clients on TCP port [`PORT`], where every route is gated by the sandbox's access token, and the
//! host on a control channel that nothing inside the sandbox can open: the connection it inherits at its start
//! ([`BOOT_FD`]) and, after a restart of the platform, the abstract unix socket [`CONTROL_SOCKET`], on which it
//! serves only peers outside its pid namespace. Both sides speak HTTP/1.1 there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// TCP port of the agent inside the sandbox; clients have it built in.
pub const PORT: u16 = 49983;
/// Agent version reported to clients. SDKs choose request formats by it, so it names the level of the agent protocol
/// that is really implemented, not the version of this program.
pub const VERSION: &str = "0.6.13";
/// Header in which the agent reports its [`VERSION`] when it answers [`INIT_PATH`].
pub const VERSION_HEADER: &str = "x-envd-version";
/// Path on the control channel that accepts an [`Init`].
pub const INIT_PATH: &str = "/init";
/// Header of a `Start` request: with the value [`UNTIL_EXIT`], the response ends with the exit of the process. What the
/// process has left running goes on, and its later output is discarded. Otherwise the end is that of the output, which
/// they may hold open.
pub const OUTPUT_HEADER: &str = "ringfence-output";
/// Value of [`OUTPUT_HEADER`].
pub const UNTIL_EXIT: &str = "until-exit";
/// Path on the control channel that returns the stream of [`AgentEvent`]s.
pub const EVENTS_PATH: &str = "/events";
/// Paths that only the host may request from the agent, implemented by this agent or not. Neither the agent nor the
/// ingress serves them to clients.
pub const CONTROL_PATHS: [&str; 8] = [
    INIT_PATH,
    "/freeze",
    "/unfreeze",
    "/collapse",
    "/fsfreeze",
    "/fsthaw",
    "/upgrade",
    EVENTS_PATH,
];
/// Abstract unix socket (without the leading NUL byte) on which the agent listens for its host.
pub const CONTROL_SOCKET: &str = "ringfence/control";
/// Abstract unix socket (without the leading NUL byte) on which the agent receives a new spawner from its host.
pub const SPAWNER_SOCKET: &str = "ringfence/spawner";
/// What the host asks for when a sandbox is written to disk with its processes, or continues.
///
/// The host connects to an abstract unix socket of the agent, for packets, sends one of the requests, and reads
/// [`quiet::DONE`] or the text of an error. The agent then closes the connection.
pub mod quiet {
    /// The name of the socket (without the leading NUL byte).
    pub const SOCKET: &str = "ringfence/quiet";
    /// Give up all connections, the spawner and the kernel's side of the `/proc` files; accept nothing but
    /// [`CONTINUE`].
    pub const QUIET: &[u8] = b"quiet";
    /// Like [`QUIET`], but connections of clients are kept: the sandbox is copied, and goes on.
    pub const STILL: &[u8] = b"still";
    /// Accept connections again. The kernel's side of the `/proc` files may be attached.
    pub const CONTINUE: &[u8] = b"continue";
    /// Like [`CONTINUE`], for a copy of a sandbox that was [`STILL`]: the copy gives up the connections of clients,
    /// which belong to the sandbox that was copied.
    pub const CONTINUE_ALONE: &[u8] = b"alone";
    /// Answer of an agent that has carried out the instruction.
    pub const DONE: &[u8] = b"done";
}
/// File in which programs of a sandbox find the values of the request that their environment cannot have, because they
/// may have been started before it: relative to the root of the file system. It is there before the request is
/// answered.
pub const SANDBOX_FILE: &str = "run/ringfence/sandbox.json";
/// The name of a file until it is complete, in the same directory.
pub const UNFINISHED_FILE: &str = ".ringfence-ca.tmp";
/// The longest [`Init::ca_bundle`], in bytes.
pub const CA_BUNDLE_MAX: usize = 64 * 1024;
/// The line in a bundle of certificates after which those that the agent has added to those of the image begin.
pub const TRUST_BEGIN: &str = "# Begin of the certificate of this sandbox's egress gateway\n";
/// File descriptor of the control connection that the agent inherits.
pub const BOOT_FD: i32 = 3;
/// File descriptor of the agent's (and, in the spawner, of the spawner's) end of the spawner socket pair.
pub const SPAWNER_FD: i32 = 4;

/// Whether a reported version may be passed on to clients, whose SDKs parse it and fail on anything else: three numbers
/// separated by dots.
#[must_use]
pub fn is_version(reported: &str) -> bool {
    /// Allowed digits of one number.
    const DIGITS: std::ops::RangeInclusive<usize> = 1..=6;
    reported.split('.').count() == 3
        && reported
            .split('.')
            .all(|part| DIGITS.contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Body of `POST /init` on the control channel: the identity of the sandbox. Absent fields leave the current value,
/// except the token: absent clears it.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Init {
    /// Environment of every process; replaces the whole map of an earlier call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Token that clients must present; without one the agent is open to everyone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// RFC 3339 time of the call; a call older than the last accepted one changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// User for requests that do not name one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Directory that an empty path refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// Metadata of the sandbox. Absent for one that has no owner yet, or never gets one: it has no [`SANDBOX_FILE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Id of the sandbox; becomes `E2B_SANDBOX_ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Id of the template; becomes `E2B_TEMPLATE_ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
    /// Whether every client is admitted, whatever token it presents: clients of a sandbox that is not secured may send
    /// tokens of other sandboxes. Set together with the token: absent means no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open_to_anonymous: bool,
    /// CA certificates in PEM that the sandbox trusts, replacing those of an earlier call: the egress gateway's, which
    /// must be valid for as long as the sandbox may live, and those of the operator. Private keys never leave the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_bundle: Option<String>,
    /// Whether the agent answers before it has installed these certificates. Processes that are started meanwhile wait
    /// for that. Installing them takes milliseconds, which need not be part of a start.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ca_bundle_deferred: bool,
    /// Processors that the sandbox may use; if absent, metrics report the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<u32>,
    /// Memory that the sandbox may use, in MiB; if absent, metrics report the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
}

impl std::fmt::Debug for Init {
    /// Omits the token and the environment: both are secrets of the caller.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Init")
            .field("sandbox_id", &self.sandbox_id)
            .field("template_id", &self.template_id)
            .field("timestamp", &self.timestamp)
            .field("default_user", &self.default_user)
            .finish_non_exhaustive()
    }
}

/// An agent event: one line of JSON in the response to `GET /events` on the control channel, which ends when there is
/// no spawner.
///
/// Contains no arguments and no environment variables of processes: both carry secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum AgentEvent {
    /// A process was started for a client.
    ProcessStart {
        /// Pid of the process inside the sandbox.
        pid: u32,
        /// Name of the program; for a script passed to a shell, of its first command.
        command: String,
        /// Name of the user that the process runs as.
        user: String,
        /// Whether the process has a terminal.
        #[serde(default)]
        pty: bool,
    },
    /// A process that was started for a client has ended and its output was read.
    ProcessEnd {
        /// Pid of the process inside the sandbox, as at its start.
        pid: u32,
        /// Name of the program, as at its start.
        command: String,
        /// Exit status; -1 when a signal ended the process.
        exit_code: i32,
        /// Status text, as in the response to the client.
        status: String,
        /// Bytes that the process wrote to its standard output.
        stdout_bytes: u64,
        /// Bytes that the process wrote to its standard error.
        stderr_bytes: u64,
        /// Bytes that the process wrote to its terminal.
        pty_bytes: u64,
        /// Milliseconds from start to end.
        duration_ms: u64,
    },
    /// A process that a client asked for could not be started.
    ProcessFailed {
        /// Name of the program that was requested.
        command: String,
        /// The reason, without anything of the request.
        reason: String,
    },
    /// All processes of the workload were killed because its sockets held memory of the host that no limit counts, and
    /// no platform was running to end the sandbox.
    SocketMemory {
        /// Lower bound of the bytes that the sockets held: counting stops above the limit.
        bytes: u64,
    },
    /// Events were dropped here because they were not read in time.
    Dropped {
        /// Number of dropped events.
        count: u64,
    },
    /// Sent periodically, so that the agent notices when the host no longer reads.
    Heartbeat,
    /// The sandbox has no spawner; the last line of a response.
    SpawnerGone,
    /// An event of a later version, which this one ignores.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_three_numbers() {
        for (version, ok) in [
            (VERSION, true),
            ("1.2.3", true),
            ("999999.0.0", true),
            ("", false),
            ("0.6", false),
            ("0.6.x", false),
            ("0..1", false),
            ("0.6.13.1", false),
            ("0.6.13\0", false),
            ("1.2.3\" onload=", false),
            ("1.2.3333333", false),
        ] {
            assert_eq!(is_version(version), ok, "{version}");
        }
    }
}
