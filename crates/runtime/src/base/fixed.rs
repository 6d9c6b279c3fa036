//! What is the same in every sandbox, on every host.

/// Uid and gid of `user`, as in the images of the existing platform.
pub(super) const USER: u32 = 1000;
/// Where the agent's binary appears inside a sandbox.
pub(crate) const AGENT: &str = "run/ringfence/agent";
/// Host name of every sandbox; `sudo` looks it up in `/etc/hosts`.
pub(crate) const HOST_NAME: &str = "sandbox";
