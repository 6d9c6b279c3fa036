//! Tests that need a process of their own. What another test clones meanwhile has open what its process has, until it
//! executes its program; and what a test clones without executing anything could wait for a lock that another thread has.

use std::process::Command;

/// Set in the process of one test.
const IS_ALONE: &str = "RINGFENCE_TEST_IS_ALONE";

/// Whether the calling test is the only one of its process. Otherwise it was run in such a process, and has passed there.
///
/// `test` is its path in this crate.
pub(crate) fn is_alone(test: &str) -> bool {
    if std::env::var_os(IS_ALONE).is_some() {
        return true;
    }
    let test = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--test-threads=1"])
        .env(IS_ALONE, "yes")
        .output()
        .unwrap();
    assert!(test.status.success(), "{test:?}");
    assert!(String::from_utf8_lossy(&test.stdout).contains("1 passed"), "{test:?}");
    false
}
