//! The types of injections that are not the name of a provider.

/// The type of a reference to a saved rule.
pub const SAVED: &str = "id";
/// The type of an injection with headers of its own.
pub const HTTP: &str = "http";
