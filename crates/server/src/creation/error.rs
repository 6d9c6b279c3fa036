//! Why a create request did not lead to a sandbox.

use store::error::StoreError;

use crate::admission::AdmissionError;
use crate::admission::quota::InvalidLifetime;
use crate::admission::rate::Level;
use crate::injections::RefusedInjections;
use crate::outcome::CreateOutcome;
use crate::sandboxes::create::CreateError;
use crate::sandboxes::header_rules::RulesError;
use crate::sandboxes::idempotency::ClaimError;
use crate::templates::TemplateError;

/// Why a create request did not lead to a sandbox.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreationError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("no id for a sandbox")]
    Random(#[from] getrandom::Error),
    #[error("the idempotency key")]
    Key(#[source] ClaimError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error("template {template:?} was built on another node")]
    BuiltElsewhere { template: String },
    #[error("the build of template {template:?} cannot be read")]
    Unreadable { template: String },
    #[error(transparent)]
    Lifetime(#[from] InvalidLifetime),
    /// What is wrong with the settings, for the client.
    #[error("{0}")]
    Invalid(String),
    /// The rate limit of the team is reached.
    #[error("the team has created too many sandboxes in the last minute")]
    TooOften(Level),
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Create(#[from] CreateError),
}

impl From<RulesError> for CreationError {
    fn from(error: RulesError) -> Self {
        match error {
            RulesError::Store(error) => Self::Store(error),
            RulesError::Invalid(why) => Self::Invalid(format!("network: {why}")),
        }
    }
}

impl From<RefusedInjections> for CreationError {
    fn from(error: RefusedInjections) -> Self {
        match error {
            RefusedInjections::Store(error) => Self::Store(error),
            RefusedInjections::Invalid(why) => Self::Invalid(why),
        }
    }
}

impl CreationError {
    /// The outcome under which the request is counted.
    pub(super) fn outcome(&self) -> CreateOutcome {
        match self {
            Self::Key(ClaimError::Mismatch | ClaimError::InProgress)
            | Self::Template(
                TemplateError::Unknown { .. }
                | TemplateError::McpGateway
                | TemplateError::UnknownTag { .. }
                | TemplateError::NotBuilt { .. },
            )
            | Self::BuiltElsewhere { .. }
            | Self::Unreadable { .. }
            | Self::Lifetime(_)
            | Self::Invalid(_) => CreateOutcome::Refused,
            Self::TooOften(_) | Self::Admission(AdmissionError::OverQuota(_)) => CreateOutcome::Limited,
            Self::Admission(AdmissionError::NoCapacity { .. }) | Self::Create(CreateError::Draining) => {
                CreateOutcome::NoCapacity
            }
            Self::Store(_)
            | Self::Random(_)
            | Self::Key(ClaimError::Store(_))
            | Self::Template(TemplateError::Store(_))
            | Self::Create(_) => CreateOutcome::Failed,
        }
    }
}
