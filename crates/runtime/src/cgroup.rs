//! Control groups: one type with three back ends.
//!
//! - **v2**: one tree with the memory, pids and cpu controllers; processes are born in their group.
//! - **hybrid**: controllers in v1 hierarchies, and a v2 tree without them beside. Processes are born in the v2
//!   group, which names them and kills them, and join the v1 groups, which limit them.
//! - **none**: no limits. Only with the operator's setting `unlimited`.
//!
//! The tree of a data directory is `ringfence-<hash>`, outside the service's own group, so that ending the service does
//! not end the sandboxes. Below it is one group per sandbox, named by [`Name`], with two children: `work` contains
//! everything that the sandbox runs and has its limits; `agent` contains only the agent. The sandbox's own group has
//! the limits plus a margin: what the agent uses for a client (files in memory, page cache, compression, descriptors
//! that it received) is charged to the sandbox and limited with it, and the margin lets the agent respond when the
//! workload has used up everything. Where version 1 has the limits, processes may be in inner groups, so there the
//! agent is in the sandbox's own group, and there is no `agent`. Each group costs a tenth of a millisecond of processor
//! time from its creation to its removal, so no unnecessary one is created.
//!
//! These names are the record by which sandboxes are found after a crash. Earlier versions named the group
//! `<id>.<slot>`, and still earlier ones created two separate groups, `<id>.<slot>.agent` without limits and
//! `<id>.<slot>.work`; their sandboxes are still found.

mod backend;
mod cpu;
mod files;
mod freezer;
mod limits;
pub(crate) mod meters;
pub(crate) mod open;
mod tree;

pub(crate) use self::backend::Backend;
pub(crate) use self::freezer::Freezer;
pub(crate) use self::tree::Tree;

#[cfg(test)]
mod tests;
