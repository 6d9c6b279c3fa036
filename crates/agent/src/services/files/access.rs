//! Authorization of clients that read and write files, and the user for whom they do.

use http::StatusCode;
use protocol::signature::{Claim, Form};

use super::failure::Failure;
use crate::caller::Accounts;
use crate::settings::AgentSettings;
use crate::users::User;

/// Checks token or signature; neither when no token is set, or when everyone is admitted.
pub(super) fn authorize(
    settings: &AgentSettings,
    token: Option<&[u8]>,
    signature: Option<&str>,
    claim: &Claim<'_>,
) -> Result<(), Failure> {
    let refuse = |message| Err(Failure::new(StatusCode::UNAUTHORIZED, message));
    let Some(expected) = settings.token().filter(|_| !settings.admits(None)) else {
        return Ok(());
    };
    if token.is_some() {
        return if settings.admits(token) {
            Ok(())
        } else {
            refuse("access token present in header but does not match")
        };
    }
    let Some(signature) = signature else {
        return refuse("missing signature query parameter");
    };
    match (claim.form(expected, signature), claim.expiration) {
        (None, _) => refuse("invalid signature"),
        (Some(Form::Absolute), Some(expiration)) if expiration < crate::clock::now_s() => {
            refuse("signature is already expired")
        }
        // A relative expiration counts from a time that is not in the link, so it cannot be enforced.
        (Some(Form::Absolute | Form::Relative), _) => Ok(()),
    }
}

/// The user of that name, even of an empty one, or else the default user.
pub(super) fn find_user(accounts: &Accounts, name: Option<&str>) -> Result<User, Failure> {
    let name = name.map_or_else(|| accounts.default_name(), str::to_owned);
    accounts.users.find(&name).ok_or_else(|| {
        let message = format!("error looking up user '{name}': user: unknown user {name}");
        Failure::new(StatusCode::UNAUTHORIZED, message)
    })
}
