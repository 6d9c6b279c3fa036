//! The primitive of one Linux host: start a sandbox, end it, find it again after a crash.
//!
//! What must stay true:
//!
//! - The kernel's objects are the record. A sandbox is found by its cgroup's name, its mounts exist in its own mount
//!   namespace only, its disk's loop device clears itself: when its processes are gone, so is all of it but an empty
//!   cgroup and one image file, and both carry the sandbox's slot in their names.
//! - Nothing on the create path starts a program or waits for a clock.
//! - This crate knows no team, no key, no database; ids are names to it.
//! - It is the only host-side crate with raw system calls; all `unsafe` is in `sys.rs`.

mod base;
pub mod cgroup;
mod confine;
pub mod container;
mod disk;
pub mod driver;
mod files;
pub mod launcher;
mod netlink;
pub mod netns;
pub mod probe;
pub mod seccomp;
mod setup;
pub mod slot;
mod spawners;
mod sys;
pub mod usage;
mod wire;
