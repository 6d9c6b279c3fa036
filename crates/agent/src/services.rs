//! The services of the agent. Each service owns its state and is given what it needs; none knows the others' routes.

pub(crate) mod control;
pub(crate) mod events;
pub(crate) mod figures;
pub(crate) mod files;
pub(crate) mod filesystem;
pub(crate) mod metrics;
pub(crate) mod process;
pub(crate) mod socket_memory;
