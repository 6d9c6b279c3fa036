//! Why a build failed.

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildReason {
    /// For the user.
    pub message: String,
    /// The step that failed; none where no step did.
    pub step: Option<String>,
}
