//! `ringfence top`: what the sandboxes of all teams use, again and again.
//!
//! On a terminal the rows that fit are shown on the alternate screen, which is left on every way out; elsewhere, and with
//! `--once` or `--batch`, all rows are plain text. Names come from teams and are shown as text whatever they contain.

mod look;
mod rows;
mod screen;

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use self::look::look;
use crate::args::TopArgs;
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::one_thread;
use crate::{clock, output, terminal};

/// Runs the command.
///
/// # Errors
/// When no platform runs on the data directory, or it does not answer at the beginning.
pub(crate) fn run(config: &Config, args: &TopArgs) -> Result<ExitCode> {
    let dir = DataDir::existing(&config.data_dir)?;
    let runtime = one_thread::runtime()?;
    let done = runtime.block_on(async {
        if args.json {
            let mut sandboxes = look(&dir, args).await?;
            rows::sort(&mut sandboxes, args.sort, false);
            output::json(&sandboxes)?;
            return Ok(ExitCode::SUCCESS);
        }
        let is_seen = terminal::is_terminal(io::stdin()) && terminal::is_terminal(io::stdout());
        if args.batch || args.once || !is_seen {
            return print(&dir, args).await;
        }
        screen::run(&dir, args).await
    });
    // A thread that waits for keys is not waited for.
    runtime.shutdown_background();
    done
}

/// Prints all rows, once or until the reader has gone away.
async fn print(dir: &DataDir, args: &TopArgs) -> Result<ExitCode> {
    loop {
        let mut sandboxes = look(dir, args).await?;
        rows::sort(&mut sandboxes, args.sort, false);
        let mut text = rows::summary(&sandboxes);
        text.push('\n');
        text.push_str(&measure::table::columns(
            &rows::HEADER,
            rows::all(&sandboxes, clock::now_us()),
        ));
        if args.batch {
            text.push('\n');
        }
        if !output::is_read(&text)? || !args.batch {
            return Ok(ExitCode::SUCCESS);
        }
        tokio::time::sleep(Duration::from_secs(u64::from(args.interval))).await;
    }
}
