//! How creates and sandboxes end, in the words that metrics and logs have for it.

/// How a create ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CreateOutcome {
    /// A sandbox runs.
    Created,
    /// An earlier answer was given again.
    Repeated,
    /// The client's request was not acceptable.
    Refused,
    /// The team is at a limit.
    Limited,
    /// The host has no room.
    NoCapacity,
    /// The platform failed.
    Failed,
}

impl CreateOutcome {
    /// All of them.
    pub(crate) const ALL: [Self; 6] = [
        Self::Created,
        Self::Repeated,
        Self::Refused,
        Self::Limited,
        Self::NoCapacity,
        Self::Failed,
    ];

    /// The word for it in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Repeated => "repeated",
            Self::Refused => "refused",
            Self::Limited => "limited",
            Self::NoCapacity => "no_room",
            Self::Failed => "failed",
        }
    }
}

/// Why a sandbox ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// A client asked for it.
    Killed,
    /// The operator asked for it.
    Operator,
    /// Its deadline came.
    Expired,
    /// It ended by itself.
    Exited,
    /// It was gone when the platform started.
    Lost,
}

impl EndReason {
    /// All of them.
    pub(crate) const ALL: [Self; 5] = [Self::Killed, Self::Operator, Self::Expired, Self::Exited, Self::Lost];

    /// The word for it in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Operator => "operator",
            Self::Expired => "expired",
            Self::Exited => "exited",
            Self::Lost => "lost",
        }
    }
}
