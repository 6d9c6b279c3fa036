//! The agent and its spawner alone, for this crate's tests. What is shipped is `ringfence agent`.

use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("agent") => agent::run(),
        Some("spawner") => agent::spawner::run(),
        _ => ExitCode::from(2),
    }
}
