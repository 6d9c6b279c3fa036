//! Formats that others have defined and more than one crate reads or writes.
//!
//! What is read is untrusted everywhere: it comes from clients, images and sandboxes.
//!
//! Invariant: nothing here opens a file or decides what a value means, and time and memory are bounded by the size of the
//! input, or by a limit where the input only states a size.

pub mod accounts;
pub mod percent;
pub mod tar;
