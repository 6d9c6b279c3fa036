//! What is kept of a paused sandbox as encrypted chunks and a manifest ([`protocol::parcel`]), for a place that must neither
//! read nor change it.
//!
//! Files are cut at multiples of a length, so a block that has changed changes one chunk; blocks of zeroes are left out. The name
//! of a chunk is a hash of its content under a key of the sandbox, so what an earlier parcel has is not sent again, and
//! nobody without the key learns which content it is. What comes back is the content of that name or is refused.

pub(crate) mod keys;
pub(crate) mod manifest;
pub(crate) mod pieces;
