//! What can go wrong with repositories.

/// Why a sandbox did not get its repositories.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RepositoryError {
    /// Because of the request; for the client.
    #[error("{0}")]
    Refused(String),
    #[error("cloning the repositories took longer than {limit_s} s")]
    TimedOut { limit_s: u32 },
    #[error("cannot fetch {url}: {why}")]
    Unreachable { url: String, why: String },
    #[error("the sandbox failed while its repositories were prepared")]
    Sandbox(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl RepositoryError {
    /// Every reason, as in metrics.
    pub(crate) const REASONS: [&str; 4] = ["refused", "timeout", "unreachable", "failed"];

    /// The reason in metrics.
    pub(crate) const fn reason(&self) -> &'static str {
        let [refused, timeout, unreachable, failed] = Self::REASONS;
        match self {
            Self::Refused(_) => refused,
            Self::TimedOut { .. } => timeout,
            Self::Unreachable { .. } => unreachable,
            Self::Sandbox(_) => failed,
        }
    }
}
