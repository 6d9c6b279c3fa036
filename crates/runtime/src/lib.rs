//! Runs sandboxes on one Linux host: start, end, and find them again after a crash.
//!
//! Invariants:
//!
//! - The kernel's objects are the record. A sandbox is found by the name of its cgroup, its mounts exist only in its
//!   own mount namespace, its loop device clears itself: when its processes are gone, all that remains is an empty
//!   cgroup and one file for its disk, and both carry the id of the sandbox's disk in their names. What is to outlive the
//!   processes is noted in the data directory before they end (`kept.rs`).
//! - Nothing on the create path executes a program or sleeps.
//! - This crate knows no teams, keys or database; to it, ids are only names.
//! - Crates above it use the traits of `driver` and the storage below it, and know nothing about the kind of isolation.
//! - It is the only host-side crate with raw system calls; all `unsafe` is in files called `sys.rs`.

#![cfg_attr(
    test,
    expect(clippy::disallowed_methods, reason = "tests start programs of their own")
)]

#[cfg(test)]
mod alone;
mod archive;
pub mod backup;
pub mod base;
mod boot_id;
mod bpf;
pub mod cancel;
mod cgroup;
mod cgroup_view;
mod checkpoint;
mod commit;
mod confine;
pub mod container;
mod dial;
mod disk;
pub mod driver;
pub mod egress;
pub mod environment;
mod figures;
pub mod files;
pub mod growth;
mod holders;
pub mod identity;
pub mod isolation;
mod kept;
mod kernel;
pub mod launcher;
mod launchers;
mod layers;
mod mapped;
mod memories;
mod modules;
mod mounting;
mod mounts;
mod netlink;
mod netns;
mod open_files;
pub mod page_out;
mod parcel;
mod place;
pub mod probe;
mod process;
mod process_counter;
mod processors;
mod rebase;
mod registry;
pub mod rootfs;
pub mod schedule;
pub mod seccomp;
pub mod settings;
mod setup;
mod skeleton;
mod slot;
mod slots;
pub mod sockets;
mod spawners;
pub mod storage;
pub mod stored;
mod sys;
pub mod usage;
mod wire;
