//! The template `base`: what a sandbox contains without building or downloading anything.
//!
//! Two overlays. The root is based on a skeleton that is created here; `/usr` is based on the host's own `/usr`, with a
//! thin layer between that hides what is specific to the host. Overlayfs does not cross mounts, hence two. Nothing else
//! of the host is included except what packages put outside `/usr` and programs need (see `etc` and `packages`), as
//! copies.
//!
//! The copies must match `/usr`, so they are created anew when the host's packages change: a *version* is a directory
//! named by a key of its sources, and `current` is a link to one of them. A sandbox uses the version that was current
//! at its start for its whole life; a version that is no longer current is removed once none of the sandboxes is left
//! that existed when it was replaced.

mod accounts;
mod copy;
mod etc;
mod packages;
mod root;
mod sources;
mod system;
mod usr;
mod versions;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;

pub(crate) use etc::{hosts, resolver};
pub use system::version_of_host;
pub(crate) use versions::{CURRENT, Versions, packages_of};

/// Uid and gid of `user`, as in the images of the existing platform.
const USER: u32 = 1000;
/// Where the agent's binary appears inside a sandbox.
pub(crate) const AGENT: &str = "run/ringfence/agent";
/// Host name of every sandbox; `sudo` looks it up in `/etc/hosts`.
pub(crate) const HOST_NAME: &str = "sandbox";

/// Why this host's `/usr` cannot be used for `base`; `None` if it can.
pub(crate) fn unsupported_reason(host: &Path) -> Option<String> {
    for name in ["bin", "sbin", "lib"] {
        let target = fs::read_link(host.join(name)).unwrap_or_default();
        if target != Path::new("usr").join(name) && target != Path::new("/usr").join(name) {
            return Some(format!(
                "/{name} is not a link to usr/{name}; the base template needs a merged /usr"
            ));
        }
    }
    (!host.join("usr/bin/bash").exists()).then(|| "/usr/bin/bash is missing".to_owned())
}
