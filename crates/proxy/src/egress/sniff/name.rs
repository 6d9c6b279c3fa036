//! A name that was found in the first bytes of a connection, or why there is none.

use model::network::domain_name;

/// Why bytes have no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Incomplete,
    NoName,
}

/// A domain name in the first bytes of a connection. Not an address, also none in the forms that only some programs
/// take for one.
pub(super) fn name(bytes: &[u8]) -> Result<String, End> {
    let text = std::str::from_utf8(bytes).map_err(|_| End::NoName)?;
    domain_name(text).ok_or(End::NoName)
}
