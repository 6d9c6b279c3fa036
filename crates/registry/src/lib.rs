//! A client of registries of OCI, as far as pulling images and moving templates need the same of it: requests, the tokens
//! that a registry asks for, and what is repeated.
//!
//! Each request has a connection of its own. What a registry sends is untrusted: everything is bounded in time and size.
//!
//! Invariant: credentials go to the registry and to the place that it names for tokens, and never from HTTPS to HTTP.

mod challenge;
mod client;
mod login;
mod repository;

pub mod name;

pub use client::{Client, Content, ContentBody, Failure, Found, Lookup, RequestSettings, Response, Url};
pub use login::{Login, secret};
pub use repository::{Access, Repository, Retries};
