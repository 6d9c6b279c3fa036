//! `ringfence dashboard`: where the dashboard is, and a code by which the operator signs in once.
//!
//! The code comes from the operator socket, so only who runs the platform gets one.

use std::process::ExitCode;

use anyhow::Result;
use http::Method;
use server::operator::OperatorCode;

use crate::config::Config;
use crate::credentials::Credentials;
use crate::data_dir::DataDir;
use crate::one_thread;
use crate::operator::ask;
use crate::output;

/// Runs the command.
///
/// # Errors
/// When no platform runs on the data directory, or it has no dashboard.
pub(crate) fn run(config: &Config) -> Result<ExitCode> {
    let dir = DataDir::existing(&config.data_dir)?;
    let runtime = one_thread::runtime()?;
    let code: OperatorCode = runtime.block_on(ask(&dir, Method::POST, "/dashboard/codes"))?;
    // The file is there for clients on this machine; without it, only the address is unknown.
    let address = Credentials::read(&dir).ok().flatten().and_then(|known| known.api_url);
    let address = address.map_or_else(
        || "/dashboard of the platform".to_owned(),
        |url| format!("{url}/dashboard"),
    );
    output::text(&format!(
        "Open {address}\nand sign in, once and within {} minutes, with:\n\n  {}\n\n\
         This shows the sandboxes of all teams. To see those of one team, sign in with a key of the team.\n",
        code.expires_in_s / 60,
        code.code,
    ))?;
    Ok(ExitCode::SUCCESS)
}
