//! Asking the platform for its sandboxes.

use anyhow::Result;
use http::Method;
use server::operator::OperatorSandbox;

use crate::args::TopArgs;
use crate::data_dir::DataDir;
use crate::operator;

/// The sandboxes that are to be shown.
pub(super) async fn look(dir: &DataDir, args: &TopArgs) -> Result<Vec<OperatorSandbox>> {
    let mut sandboxes: Vec<OperatorSandbox> = operator::ask(dir, Method::GET, "/sandboxes").await?;
    sandboxes.retain(|sandbox| args.team.as_ref().is_none_or(|team| sandbox.team == *team));
    Ok(sandboxes)
}
