//! The error of a request or a body, of which the library that serves HTTP only knows that it is one.

use std::error::Error;

pub(super) type BoxError = Box<dyn Error + Send + Sync>;
