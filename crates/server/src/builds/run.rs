//! Runs the steps of a build.

use super::context::BuildContext;
use super::recipe::{BuildFailure, BuildResult, Job};

/// Runs a build. Dropping the future cancels it.
pub(crate) async fn run(_context: &BuildContext, _job: &Job) -> Result<BuildResult, BuildFailure> {
    Err(BuildFailure::at("base", "this platform does not run builds yet"))
}
