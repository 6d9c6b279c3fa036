//! The template `base`: what a sandbox contains without building or downloading anything.
//!
//! Two overlays. The root is based on a skeleton that is created here; `/usr` is based on the host's own `/usr`, with a
//! thin layer between that hides what is specific to the host. Overlayfs does not cross mounts, hence two. Nothing else
//! of the host is included except what packages put outside `/usr` and programs need (see `etc` and `packages`), as
//! copies.
//!
//! Where the file system of `/usr` cannot be mounted with the ids of a sandbox, as in a container, a copy of it takes its place
//! (see `host`).
//!
//! The copies must match `/usr`, so they are created anew when the host's packages change: a *version* is a directory
//! named by a key of its sources, and `current` is a link to one of them. A sandbox uses the version that was current
//! at its start for its whole life; a version that is no longer current is removed once none of the sandboxes is left
//! that existed when it was replaced.

mod accounts;
mod copy;
mod etc;
mod fixed;
mod host;
mod packages;
mod root;
mod sources;
mod system;
mod usr;
mod versions;

#[cfg(test)]
mod tests;

pub(crate) use etc::{hosts, resolver};
pub(crate) use fixed::{AGENT, HOST_NAME};
pub(crate) use host::HOST;
pub use system::version_of_host;
pub(crate) use usr::unsupported_reason;
pub(crate) use versions::{CURRENT, Versions, megabytes, packages_of};
