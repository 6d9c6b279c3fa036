//! What the host and the agent inside a sandbox say to each other.
//!
//! The agent serves clients on TCP port [`PORT`], where every route is gated by the sandbox's access token, and the
//! host on a control channel that nothing inside the sandbox can open: the connection it inherits at its start
//! ([`BOOT_FD`]) and, after a restart of the platform, the abstract unix socket [`CONTROL_SOCKET`], on which it
//! serves only peers outside its pid namespace. Both sides speak HTTP/1.1 there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// TCP port of the agent inside the sandbox; clients have it built in.
pub const PORT: u16 = 49983;
/// Agent level reported to clients. SDKs choose request formats by it, so it names the level of the agent protocol
/// that is really implemented, not the version of this program.
pub const VERSION: &str = "0.6.13";
/// Abstract unix socket (without the leading NUL byte) on which the agent listens for its host.
pub const CONTROL_SOCKET: &str = "ringfence/control";
/// Abstract unix socket (without the leading NUL byte) on which the agent takes a new spawner from its host.
pub const SPAWNER_SOCKET: &str = "ringfence/spawner";
/// File descriptor of the control connection that the agent inherits.
pub const BOOT_FD: i32 = 3;
/// File descriptor of the agent's (and, in the spawner, of the spawner's) end of the spawner socket pair.
pub const SPAWNER_FD: i32 = 4;

/// Body of `POST /init` on the control channel. Absent fields leave what is set, except the token: absent clears it.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Init {
    /// Environment of every process; replaces the map of an earlier call as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Token that clients must present; none opens the agent to everyone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// RFC 3339 time of the call; an older one than the last accepted changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// User of requests that name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Directory that an empty path stands for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// Id of the sandbox; becomes `E2B_SANDBOX_ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Id of the template; becomes `E2B_TEMPLATE_ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
    /// Whether those who present no credential at all are admitted beside those with the token; a wrong credential is
    /// refused either way. Goes with the token and is set with it: absent means no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open_to_anonymous: bool,
    /// Processors that the sandbox may use; without it, metrics tell the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<u32>,
    /// Memory that the sandbox may use, in MiB; without it, metrics tell the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
}

impl std::fmt::Debug for Init {
    /// Neither the token nor the values of the environment: both are secrets of the caller.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Init")
            .field("sandbox_id", &self.sandbox_id)
            .field("template_id", &self.template_id)
            .field("timestamp", &self.timestamp)
            .field("default_user", &self.default_user)
            .finish_non_exhaustive()
    }
}
