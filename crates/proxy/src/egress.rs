//! Decides what leaves sandboxes, and forwards it.

mod addresses;
mod dns;
mod sniff;
