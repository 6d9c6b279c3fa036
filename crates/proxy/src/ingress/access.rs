//! Authorization of requests to a sandbox by its tokens.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use model::sandbox::HostMask;
use protocol::agent;
use secrecy::{ExposeSecret as _, SecretString};
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

/// Header that carries the token of an agent.
const ACCESS_TOKEN_HEADER: &str = "x-access-token";
/// Header that carries the traffic token of a sandbox that is not public.
pub const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";

/// Access rules for the traffic of a running sandbox.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The token required for every port except that of the agent; none when the sandbox is public.
    pub traffic_token: Option<SecretString>,
    /// The token of its agent, which must not be forwarded to other programs inside, except for the code interpreter.
    pub access_token: Option<SecretString>,
    /// The host that requests have inside, except for the agent's port; none for the host of the client.
    pub mask_host: Option<HostMask>,
    /// Ports whose servers speak TLS.
    pub https_ports: Arc<[u16]>,
    /// Cancelled the moment the sandbox begins to end, before its processes are killed where that can be known: its
    /// streams are cut then.
    pub ending: CancellationToken,
}

impl Access {
    /// Whether a request with these headers may resume the sandbox: it has the token that its port requires. `is_secure`
    /// is whether the agent requires one. A signature of a file link is not enough, because only the agent can check it.
    #[must_use]
    pub fn may_resume(&self, headers: &HeaderMap, port: u16, is_secure: bool) -> bool {
        let (name, token) = match port {
            agent::PORT => (ACCESS_TOKEN_HEADER, self.access_token.as_ref().filter(|_| is_secure)),
            _ => (TRAFFIC_TOKEN_HEADER, self.traffic_token.as_ref()),
        };
        token.is_none_or(|token| headers.get(name).is_some_and(|sent| is_token(token, sent)))
    }
}

/// Whether a value is a token, compared in constant time.
pub(super) fn is_token(token: &SecretString, value: &HeaderValue) -> bool {
    token.expose_secret().as_bytes().ct_eq(value.as_bytes()).into()
}
