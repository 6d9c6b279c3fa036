//! The `base` image: what a sandbox has when nobody built or downloaded anything.
//!
//! Two overlays. The root stands on a skeleton that is made here; `/usr` stands on the host's own `/usr`, with a thin
//! layer between that hides what is the host's own. Overlay does not cross mounts, hence two. Nothing else of the host
//! is in it but what packages put outside `/usr` and programs need (see `etc` and `packages`), as copies.
//!
//! The copies have to fit the `/usr` that they stand beside, so they are made anew when the host's packages change:
//! a *version* lies in a directory named by a key of what it was made from, and `current` is a link to one. A
//! sandbox stands on the version that was current at its start, for its whole life; a version that is not current any
//! more is removed once none of the sandboxes is left that were there when it was replaced.

mod accounts;
mod copy;
mod etc;
mod packages;
mod root;
mod sources;
mod usr;
mod versions;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;

pub(crate) use versions::{CURRENT, Versions};

/// Uid and gid of `user`, as in the images of the existing platform.
const USER: u32 = 1000;
/// Where the agent's binary appears inside a sandbox.
pub(crate) const AGENT: &str = "run/ringfence/agent";
/// Host name of every sandbox; `sudo` wants to find it in `/etc/hosts`.
pub(crate) const HOST_NAME: &str = "sandbox";

/// Why this host's `/usr` cannot be a base, or nothing.
pub(crate) fn unfit(host: &Path) -> Option<String> {
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
