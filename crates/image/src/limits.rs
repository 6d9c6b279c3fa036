//! Limits of the process, high enough for directories as deep as an image may have them.

use rustix::process::{Resource, Rlimit};

/// Directories are visited recursively, and a path has up to 2048 levels. Only pages that are used take memory.
pub(crate) const STACK: usize = 64 << 20;

/// Deep directories need a descriptor per level while they are removed.
pub(crate) fn raise_limits() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // The lower limit is enough for nearly all images.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}
