//! The documentation of the product, embedded at build time, so that a server documents the version that runs.
//!
//! Invariant: pure functions over the embedded pages. No I/O and no HTTP; what a caller can make expensive is bounded.

mod catalogue;
pub mod command;
mod markdown;
mod nearest;
mod search;
#[cfg(test)]
mod source;
pub mod web;

pub use self::catalogue::{Catalogue, Page, catalogue};
pub use self::markdown::anchor;
pub use self::nearest::nearest_routes;
pub use self::search::{Answer, Hit, Missing, QUERY_MAX_BYTES, SearchIndex, search_index};
