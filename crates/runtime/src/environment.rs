//! The environment of this process.

use std::ffi::CString;
use std::fs::File;
use std::io::Read as _;

use crate::sys;

/// The user's name, for the client of PostgreSQL.
const NAME: &str = "PGUSER";
/// The user's directory, for the client of PostgreSQL, and for what looks for files of the user's.
const HOME: &str = "HOME";

/// Removes a variable, also from what the kernel shows of the environment in `/proc`. Only while the process has one
/// thread: the environment is shared by all.
pub fn forget(name: &str) {
    if let Ok(name) = CString::new(name) {
        sys::forget_variable(&name);
    }
}

/// Says in the environment who the user of this process is and what the home is, where it does not say so already. Only while
/// the process has one thread: the environment is shared by all.
///
/// The client of PostgreSQL asks the C library otherwise, where the address has no user or no password. That library looks up a
/// user whom `/etc/passwd` does not have in the host's modules, which a static program cannot load: it ends by SIGSEGV.
/// Containers often run as such a user.
pub fn name_user() {
    let uid = rustix::process::geteuid().as_raw();
    let mut passwd = Vec::new();
    if let Ok(file) = File::open("/etc/passwd") {
        // What could be read of it counts.
        let _ = file.take(formats::accounts::FILE_MAX).read_to_end(&mut passwd);
    }
    let user = formats::accounts::users(&passwd).find(|user| user.uid == uid);
    let name = user.map_or_else(|| uid.to_string(), |user| user.name.to_owned());
    let home = user.map_or("/", |user| user.home);
    for (variable, value) in [(NAME, name.as_str()), (HOME, home)] {
        if let (Ok(variable), Ok(value)) = (CString::new(variable), CString::new(value)) {
            sys::set_variable_if_absent(&variable, &value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The test runs itself: the first process has the variable, and removes it while it has one thread of its own.
    const VARIABLE: &str = "RINGFENCE_TEST_FORGOTTEN";

    /// The test runs itself: the first process has neither variable, and names itself while it has one thread of its own.
    #[test]
    fn the_user_is_named_where_nothing_says_who_it_is() {
        const SELF: &str = "RINGFENCE_TEST_NAMES_ITSELF";
        if std::env::var(SELF).is_ok() {
            name_user();
            println!("{NAME}={:?} {HOME}={:?}", std::env::var(NAME), std::env::var(HOME));
            return;
        }
        let run = |home: Option<&str>, name: Option<&str>| {
            let mut command = Command::new(std::env::current_exe().expect("a program"));
            command
                .args([
                    "environment::tests::the_user_is_named_where_nothing_says_who_it_is",
                    "--exact",
                    "--test-threads=1",
                    "--nocapture",
                ])
                .env(SELF, "1")
                .env_remove(HOME)
                .env_remove(NAME);
            for (variable, value) in [(HOME, home), (NAME, name)] {
                if let Some(value) = value {
                    command.env(variable, value);
                }
            }
            let output = command.output().expect("run");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).expect("text")
        };
        let said = run(None, None);
        let uid = rustix::process::geteuid().as_raw();
        if uid == 0 {
            assert!(said.contains("PGUSER=Ok(\"root\") HOME=Ok(\"/root\")"), "{said}");
        }
        let said = run(Some("/elsewhere"), Some("anybody"));
        assert!(
            said.contains("PGUSER=Ok(\"anybody\") HOME=Ok(\"/elsewhere\")"),
            "{said}"
        );
    }

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
