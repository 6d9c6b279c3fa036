//! As whom a registry is used.

use std::fmt;

use anyhow::{Result, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;

/// User name and password.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The name of the user.
    pub username: String,
    /// The password, or a token in its place.
    pub password: String,
}

impl fmt::Debug for Login {
    /// Does not show the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

impl Login {
    /// As a header, which is not shown.
    ///
    /// # Errors
    /// When a character cannot be in a header.
    pub fn header(&self) -> Result<HeaderValue> {
        let Self { username, password } = self;
        secret(&format!("Basic {}", STANDARD.encode(format!("{username}:{password}"))))
    }
}

/// A header that is not shown.
///
/// # Errors
/// When a character cannot be in a header.
pub fn secret(text: &str) -> Result<HeaderValue> {
    let mut value = HeaderValue::from_str(text).map_err(|_| anyhow!("credentials with an unsupported character"))?;
    value.set_sensitive(true);
    Ok(value)
}
