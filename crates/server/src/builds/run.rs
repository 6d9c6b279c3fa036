//! Runs the steps of a build.
//!
//! What it needs is in [`BuildContext`]: sandboxes are started, committed and killed through it, so that they are ended
//! after a build that was cancelled, and no layer of a build in progress is removed.

use super::context::BuildContext;
use super::recipe::{BuildFailure, BuildResult, Job};

/// Runs a build. Dropping the future cancels it.
pub(crate) async fn run(_context: &BuildContext, _job: &Job) -> Result<BuildResult, BuildFailure> {
    Err(BuildFailure::at("base", "this platform does not run builds yet"))
}
