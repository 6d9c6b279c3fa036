//! The environment of this process.

use std::ffi::CString;

use crate::sys;

/// Removes a variable, also from what the kernel shows of the environment in `/proc`. Only while the process has one
/// thread: the environment is shared by all.
pub fn forget(name: &str) {
    if let Ok(name) = CString::new(name) {
        sys::forget_variable(&name);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The test runs itself: the first process has the variable, and removes it while it has one thread of its own.
    const VARIABLE: &str = "RINGFENCE_TEST_FORGOTTEN";

    #[test]
    fn a_forgotten_variable_is_nowhere() {
        let Ok(value) = std::env::var(VARIABLE) else {
            let test = Command::new(std::env::current_exe().expect("a program"))
                .args([
                    "environment::tests::a_forgotten_variable_is_nowhere",
                    "--exact",
                    "--test-threads=1",
                ])
                .env(VARIABLE, "a canary of the environment")
                .output()
                .expect("run");
            assert!(test.status.success(), "{test:?}");
            return;
        };
        let shown = || {
            let environment = std::fs::read("/proc/self/environ").expect("an environment");
            environment
                .windows(value.len())
                .any(|window| window == value.as_bytes())
        };
        assert!(shown());
        forget(VARIABLE);
        assert!(!shown());
        let child = Command::new("env").output().expect("run");
        assert!(!String::from_utf8_lossy(&child.stdout).contains(VARIABLE));
    }
}
