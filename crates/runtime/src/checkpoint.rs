//! Checkpoints: the processes of a sandbox on disk, written and restored by CRIU, a separate program that is found at run time.
//!
//! A sandbox is written while all of its processes are frozen and its agent is quiet (`protocol::agent::quiet`), and its
//! processes are ended only when the checkpoint and the disk are complete and written out. A restore is a start (`launcher`)
//! in which CRIU makes the processes. CRIU runs as the first user of the sandbox's id range (`preload`), because what it
//! makes belongs to that user then, as in every other sandbox.
//!
//! Facts about CRIU that this relies on:
//!
//! - With the network namespace left empty (`--empty-ns net`), connections within the sandbox survive: the script step
//!   `setup-namespaces` sets up the interfaces before sockets are restored.
//! - Of ids, only the map of the user namespace is in terms of the host (`ids`).
//! - `--manage-cgroups=ignore`: what it restores is in the groups in which it runs, so memory is charged to the workload.
//! - A tree that is frozen by version 2 can be written only with `--freeze-cgroup` on a group above all processes.

mod about;
pub(crate) mod agents;
pub(crate) mod criu;
pub(crate) mod dump;
pub(crate) mod facts;
pub(crate) mod ghosts;
pub(crate) mod host;
pub(crate) mod ids;
pub(crate) mod jail;
pub(crate) mod lost;
pub(crate) mod mounts;
mod preload;
pub(crate) mod program;
pub(crate) mod rpc;
pub(crate) mod save;
pub(crate) mod sums;
pub(crate) mod sys;
mod threads;
mod vetted;

pub(crate) use self::about::{ABOUT, About};
