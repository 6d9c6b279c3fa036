//! Decides what leaves sandboxes, and forwards it.

mod addresses;
mod dns;
mod settings;
mod sniff;

pub use self::settings::{EgressLimits, EgressSettings};
