//! Outcomes of create requests and reasons for the end of sandboxes, those of the warm pool too, with their names in metrics and logs.

/// The outcome of a create request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CreateOutcome {
    /// The sandbox runs.
    Created,
    /// The stored answer to an idempotency key was returned.
    Repeated,
    /// The request was invalid.
    Refused,
    /// The team is at a limit.
    Limited,
    /// The host has no capacity.
    NoCapacity,
    /// The platform failed.
    Failed,
}

impl CreateOutcome {
    /// Every outcome.
    pub(crate) const ALL: [Self; 6] = [
        Self::Created,
        Self::Repeated,
        Self::Refused,
        Self::Limited,
        Self::NoCapacity,
        Self::Failed,
    ];

    /// The label value in metrics.
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
    /// A client killed the sandbox.
    Killed,
    /// The operator killed the sandbox.
    Operator,
    /// Its deadline passed.
    Expired,
    /// The sandbox was paused for as long as the operator keeps any.
    Retention,
    /// The sandbox ended by itself.
    Exited,
    /// The sandbox did not run any more when the platform started.
    Lost,
}

impl EndReason {
    /// Every reason.
    pub(crate) const ALL: [Self; 6] = [
        Self::Killed,
        Self::Operator,
        Self::Expired,
        Self::Retention,
        Self::Exited,
        Self::Lost,
    ];

    /// The name in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Operator => "operator",
            Self::Expired => "expired",
            Self::Retention => "retention",
            Self::Exited => "exited",
            Self::Lost => "lost",
        }
    }
}

/// Why a sandbox was paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PauseReason {
    /// A client requested the pause.
    Client,
    /// Its deadline passed.
    Timeout,
    /// The platform is being stopped.
    Shutdown,
    /// Its node drains, and the operator waits no longer.
    Drain,
}

impl PauseReason {
    /// Every reason.
    pub(crate) const ALL: [Self; 4] = [Self::Client, Self::Timeout, Self::Shutdown, Self::Drain];

    /// The name in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Timeout => "timeout",
            Self::Shutdown => "shutdown",
            Self::Drain => "drain",
        }
    }
}

/// Why a sandbox was resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResumeReason {
    /// A client requested the resume.
    Client,
    /// Traffic to the sandbox resumed it.
    Traffic,
    /// A command of the operator resumed it.
    Operator,
}

impl ResumeReason {
    /// Every reason.
    pub(crate) const ALL: [Self; 3] = [Self::Client, Self::Traffic, Self::Operator];

    /// The name in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Traffic => "traffic",
            Self::Operator => "operator",
        }
    }
}

/// A command with which the operator enters a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperatorCommand {
    /// Runs a command in it.
    Exec,
    /// Opens a terminal.
    Shell,
    /// Copies files.
    Copy,
    /// Forwards ports.
    Forward,
}

impl OperatorCommand {
    /// Every command.
    pub(crate) const ALL: [Self; 4] = [Self::Exec, Self::Shell, Self::Copy, Self::Forward];

    /// The name on the command line and in logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Shell => "shell",
            Self::Copy => "cp",
            Self::Forward => "forward",
        }
    }
}

/// What the warm pool had for a create request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolUse {
    /// A sandbox, which the request got.
    Hit,
    /// No sandbox was ready.
    Miss,
    /// A sandbox that could not be claimed: the request got another one.
    Failed,
}

impl PoolUse {
    /// Every use.
    pub(crate) const ALL: [Self; 3] = [Self::Hit, Self::Miss, Self::Failed];

    /// The label value in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Miss => "miss",
            Self::Failed => "failed",
        }
    }
}

/// Why a pooled sandbox ended that no request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolEnd {
    /// A request needed its capacity, or the host was short of memory.
    Evicted,
    /// Its template has another build now, or was deleted.
    Stale,
    /// Its template was not used for long.
    Unused,
    /// The sandbox was too old.
    Age,
    /// The sandbox took more memory than the pool may use.
    Memory,
    /// The sandbox ended by itself.
    Died,
    /// The operator ended the sandbox.
    Operator,
    /// Its node drains.
    Drained,
}

impl PoolEnd {
    /// Every reason.
    pub(crate) const ALL: [Self; 8] = [
        Self::Evicted,
        Self::Stale,
        Self::Unused,
        Self::Age,
        Self::Memory,
        Self::Died,
        Self::Operator,
        Self::Drained,
    ];

    /// The name in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Stale => "stale",
            Self::Unused => "unused",
            Self::Age => "age",
            Self::Memory => "memory",
            Self::Died => "died",
            Self::Operator => "operator",
            Self::Drained => "drained",
        }
    }
}

/// What became of spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpanOutcome {
    /// The receiver accepted them.
    Exported,
    /// Too many waited already, so these were dropped.
    QueueFull,
    /// The receiver did not accept them, so they were given up.
    Failed,
}

impl SpanOutcome {
    /// Every outcome.
    pub(crate) const ALL: [Self; 3] = [Self::Exported, Self::QueueFull, Self::Failed];

    /// The value of the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Exported => "exported",
            Self::QueueFull => "queue_full",
            Self::Failed => "failed",
        }
    }
}

/// What became of an attempt to make a copy of a paused sandbox in the blob store, or to have a node keep one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyOutcome {
    /// All of it is there.
    Complete,
    /// The attempt failed.
    Failed,
    /// The copy in the blob store lacks something, or something in it was changed.
    Damaged,
}

impl CopyOutcome {
    /// Every outcome.
    pub(crate) const ALL: [Self; 3] = [Self::Complete, Self::Failed, Self::Damaged];

    /// The value of the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Failed => "failed",
            Self::Damaged => "damaged",
        }
    }
}

/// What became of an attempt to send an event to a webhook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptOutcome {
    /// The receiver answered with 2xx.
    Received,
    /// The event was not received, and is sent again.
    Failed,
    /// The event was not received, and is given up.
    GivenUp,
}

impl AttemptOutcome {
    /// Every outcome.
    pub(crate) const ALL: [Self; 3] = [Self::Received, Self::Failed, Self::GivenUp];

    /// The value of the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::Failed => "failed",
            Self::GivenUp => "given_up",
        }
    }
}
