//! The blob store: layers and uploaded files as objects of an S3 bucket.
//!
//! ```text
//!   <prefix>/owner                      whose objects these are: see [`Blobs::claim`]
//!   <prefix>/layers/<id>.tar.zst        a layer, named by the hash of its content
//!   <prefix>/files/<team>/<hash>.tar    an archive that a team uploaded, with its checksum at its end: see [`checked`]
//!   <prefix>/parcels/<sandbox>/<hash>   a chunk of copies of a paused sandbox, encrypted, named by a keyed hash of its content
//!   <prefix>/parcels/<sandbox>/<id>.manifest  what a copy is made of, encrypted, written last
//!   <prefix>/probe-<random>             what a start writes and deletes to check the settings
//! ```
//!
//! An object is complete or not there: content of more than one part is uploaded in parts, which the bucket shows to
//! nobody before the last request. The ids of such uploads are in files until they end, so that those of a platform that
//! was killed are aborted by the next one.
//!
//! Requests are bounded: [`CONNECT`] to connect, [`STALL`] without progress, [`RETRIES`] attempts, and content has one
//! part of [`PART`] bytes in memory while the next is read. An object has at most [`OBJECT_MAX`] bytes.
//!
//! Invariant: this is the only crate that knows the client of the store. Its errors have no text of a server but its
//! code, because servers repeat parts of signed requests, and no credentials.

pub mod checked;
mod error;
mod journal;
mod name;
mod settings;
mod store;

pub use error::BlobError;
pub use name::{CopyOf, Name};
pub use settings::S3Settings;
pub use store::{Blobs, CONNECT, Claim, Content, OBJECT_MAX, Object, PART, RETRIES, STALL};
