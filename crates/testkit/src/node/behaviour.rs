//! How the fake node responds to calls.

/// How the node responds to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// The call succeeds.
    Works,
    /// The call fails.
    Fails,
    /// The connection is lost before the call does anything, so that nobody knows what became of it.
    Lost,
    /// The call fails because the host has no capacity.
    Full,
    /// The call fails because the host does not support it.
    Unsupported,
    /// The call panics.
    Panics,
    /// The call does its work, and panics before it returns.
    PanicsAfterwards,
    /// A start reports the end of its sandbox before it returns.
    ExitsEarly,
    /// The call waits for [`super::FakeNode::go`], then succeeds.
    Waits,
    /// The call waits for [`super::FakeNode::go`], then fails.
    WaitsAndFails,
    /// The call fails because others are being restored: [`super::OWNER_LIMIT`] of the same owner, or as many as the host can.
    Busy {
        /// Whether the other sandboxes are of the same owner.
        is_own: bool,
    },
}
