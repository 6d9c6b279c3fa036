//! The host name in the first bytes of a connection: TLS server name or HTTP host.
//!
//! The name is a claim of a hostile client. The gateway connects to addresses of that name, never to others because of it,
//! so a false name leads to the servers of that name. The same holds for what is not visible here: the requests after the
//! first one, and the inner name of an encrypted ClientHello, whose outer name is the one that is found. What servers of an
//! allowed name do with a hidden one is up to them; the resolver answers no queries for the keys of encrypted ClientHellos.
//!
//! What two readers could understand differently has no name. An answer never changes if more bytes follow.

mod http;
mod name;
mod tls;

use name::End;
use tls::{MAX_HELLO, MAX_RECORDS};

/// Bytes after which there is an answer in any case: a ClientHello and the headers of its records. An HTTP request is
/// limited to the same size; usual servers accept 8 KiB.
pub(super) const MAX_BYTES: usize = MAX_HELLO + tls::HANDSHAKE_HEADER + MAX_RECORDS * tls::RECORD_HEADER;

/// What the first bytes of a connection say about its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sniffed {
    /// More bytes are necessary. Never the answer to [`MAX_BYTES`].
    Incomplete,
    /// A domain name, in lower case and without a dot at the end.
    Name(String),
    /// Another protocol, no name, an address in place of a name, or a malformed or ambiguous request.
    NoName,
}

/// The host name in the first bytes that a client sends.
pub(super) fn sniff(bytes: &[u8]) -> Sniffed {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let found = match bytes.first() {
        None => Err(End::Incomplete),
        Some(&tls::HANDSHAKE) => tls::server_name(bytes),
        Some(_) => http::host(bytes),
    };
    match found {
        Ok(name) => Sniffed::Name(name),
        Err(End::Incomplete) if bytes.len() < MAX_BYTES => Sniffed::Incomplete,
        Err(End::Incomplete | End::NoName) => Sniffed::NoName,
    }
}

/// Whether a connection begins with a TLS handshake.
pub(super) fn is_tls(bytes: &[u8]) -> bool {
    bytes.first() == Some(&tls::HANDSHAKE)
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
