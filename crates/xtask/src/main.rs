//! What developers generate: `cargo run -p xtask -- openapi` writes `api/openapi.json`. Never part of a release.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["openapi"] => write("api/openapi.json", &server::api::openapi::document()),
        _ => {
            complain("usage: cargo run -p xtask -- openapi");
            ExitCode::from(2)
        }
    }
}

/// Writes a file of the repository.
fn write(path: &str, text: &str) -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::fs::write(root.join(path), text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("write {path}: {error}"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "this is where a developer's tool speaks")]
fn complain(text: &str) {
    eprintln!("{text}");
}
