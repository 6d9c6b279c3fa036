//! Test programs that start sandboxes. They do not use libtest: a driver executes `/proc/self/exe` as its launcher and
//! as the agent, so such a program has subcommands besides its tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// A subcommand of the platform's binary: its name, which is the first argument, and its function.
pub type Subcommand = (&'static str, fn() -> ExitCode);

/// Runs the subcommand that the first argument names. Without one, runs the tests, which require root, and prints how
/// many passed.
pub fn main(subcommands: &[Subcommand], tests: impl FnOnce() -> Vec<bool>) -> ExitCode {
    let argument = std::env::args().nth(1).unwrap_or_default();
    if let Some((_, run)) = subcommands.iter().find(|(name, _)| *name == argument) {
        return run();
    }
    if !rustix::process::geteuid().is_root() {
        print("these tests create namespaces and mounts: run them as root");
        return ExitCode::FAILURE;
    }
    let outcomes = tests();
    let passed = outcomes.iter().filter(|passed| **passed).count();
    print(&format!("\n{passed} passed, {} failed", outcomes.len() - passed));
    if passed == outcomes.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs one test, prints its result and returns whether it passed.
pub fn passes(name: &str, test: impl FnOnce()) -> bool {
    let passed = catch_unwind(AssertUnwindSafe(test)).is_ok();
    print(&format!("test {name} ... {}", if passed { "ok" } else { "FAILED" }));
    passed
}

#[expect(clippy::print_stdout, reason = "the output of a test program")]
fn print(text: &str) {
    println!("{text}");
}
