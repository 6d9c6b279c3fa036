//! Test programs that make sandboxes. They are no libtest binaries: a driver executes `/proc/self/exe` as its launcher and
//! as the agent, so such a program has parts to play besides running its tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// A part of the platform's binary: its name, which is the first argument, and what it does.
pub type Subcommand = (&'static str, fn() -> ExitCode);

/// Plays the part that this program was started for. Without one, runs the tests, which need root, and says how many
/// passed.
pub fn main(parts: &[Subcommand], tests: impl FnOnce() -> Vec<bool>) -> ExitCode {
    let asked = std::env::args().nth(1).unwrap_or_default();
    if let Some((_, play)) = parts.iter().find(|(name, _)| *name == asked) {
        return play();
    }
    if !rustix::process::geteuid().is_root() {
        tell("these tests make namespaces and mounts: run them as root");
        return ExitCode::FAILURE;
    }
    let outcomes = tests();
    let passed = outcomes.iter().filter(|passed| **passed).count();
    tell(&format!("\n{passed} passed, {} failed", outcomes.len() - passed));
    if passed == outcomes.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs one test, and says whether it passed.
pub fn passes(name: &str, test: impl FnOnce()) -> bool {
    let passed = catch_unwind(AssertUnwindSafe(test)).is_ok();
    tell(&format!("test {name} ... {}", if passed { "ok" } else { "FAILED" }));
    passed
}

#[expect(clippy::print_stdout, reason = "what a test program says")]
fn tell(text: &str) {
    println!("{text}");
}
