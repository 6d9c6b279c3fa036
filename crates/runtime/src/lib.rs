//! The primitive of one Linux host: start a sandbox, end it, find it again after a crash.
//!
//! What must stay true:
//!
//! - The kernel's objects are the record. A sandbox is found by its cgroup's name, its mounts exist in its own mount
//!   namespace only, its disk's loop device clears itself: when its processes are gone, so is all of it but an empty
//!   cgroup and one image file, and both carry the id of the sandbox's disk in their names.
//! - Nothing on the create path starts a program or waits for a clock.
//! - This crate knows no team, no key, no database; ids are names to it.
//! - What is above it knows the traits of `driver` and nothing of what isolates.
//! - It is the only host-side crate with raw system calls; all `unsafe` is in `sys.rs`.

#![cfg_attr(
    test,
    expect(clippy::disallowed_methods, reason = "tests start programs of their own")
)]

mod base;
mod cgroup;
mod cgroup_view;
mod confine;
pub mod container;
mod dial;
mod disk;
pub mod driver;
mod figures;
mod files;
pub mod growth;
mod holders;
pub mod identity;
pub mod launcher;
mod launchers;
mod netlink;
mod netns;
pub mod probe;
mod processors;
mod registry;
pub mod rootfs;
pub mod schedule;
pub mod seccomp;
mod setup;
mod slot;
mod slots;
mod sockets;
mod spawners;
mod sys;
pub mod usage;
mod wire;
