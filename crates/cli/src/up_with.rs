//! `ringfence up --with`: templates that come with the program, built once the platform is ready.
//!
//! A build is what `ringfence template add` does, as a program of its own: an ordinary client of the platform, whose log is
//! not that of the platform. The platform serves meanwhile, and goes on if a build fails.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;
use tokio::task::JoinSet;

/// This program, whatever became of the file that it was started from.
const PROGRAM: &str = "/proc/self/exe";
/// How much of what a build said is logged when it has failed, in bytes.
const SAID_MAX: usize = 2000;

/// Builds what the default team does not have, one after another. It ends when what is returned is dropped.
pub(crate) fn start(data_dir: &Path, templates: &[String]) -> JoinSet<()> {
    let (data_dir, templates) = (data_dir.to_owned(), templates.to_vec());
    let mut building = JoinSet::new();
    building.spawn(async move {
        for template in templates {
            build(&data_dir, &template).await;
        }
    });
    building
}

fn command(data_dir: &PathBuf) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("template").arg("--data-dir").arg(data_dir);
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn build(data_dir: &PathBuf, template: &str) {
    let args = ["add", "--unless-present", "--format", "json", template];
    tracing::info!(template, "building, unless it is there");
    match command(data_dir).args(args).output().await {
        Ok(done) if done.status.success() => tracing::info!(template, "the template is there"),
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            let from = said.len().saturating_sub(SAID_MAX);
            let end = said
                .char_indices()
                .find(|(at, _)| *at >= from)
                .map_or("", |(at, _)| &said[at..]);
            tracing::error!(
                template,
                "the build failed, run `ringfence template add {template}`: {}",
                end.trim_end()
            );
        }
        Err(error) => tracing::error!(template, "the build was not started: {error}"),
    }
}
