//! Errors of a request or a body behind the error type of the HTTP library.

use std::error::Error;

pub(super) type BoxError = Box<dyn Error + Send + Sync>;
