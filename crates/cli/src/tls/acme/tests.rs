//! Tests of times, files and the hook. The protocol is tested against an ACME server, in `conformance/acme`.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::hook::Action;
use super::*;

fn validity(days: i64) -> Validity {
    let not_before: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    Validity {
        not_before,
        not_after: not_before + SignedDuration::from_hours(24 * days),
    }
}

#[test]
fn renewal_is_due_after_two_thirds_of_the_life() {
    for (days, jitter, at) in [
        (90, 0.0, "2026-03-02T00:00:00Z"),
        (90, 1.0, "2026-02-28T04:48:00Z"),
        (6, 0.0, "2026-01-05T00:00:00Z"),
    ] {
        let difference = due(validity(days), jitter).duration_since(at.parse().unwrap());
        assert!(
            difference.abs() < SignedDuration::from_secs(1),
            "{days} {jitter}: {difference}"
        );
    }
}

#[test]
fn pauses_double_up_to_a_part_of_what_is_left() {
    let minutes = |failures, limited, left: Option<i64>| {
        pause(failures, limited, left.map(SignedDuration::from_mins), 0.5).as_secs() / 60
    };
    let row: Vec<u64> = (1..=11).map(|failures| minutes(failures, false, None)).collect();
    assert_eq!(row, [1, 2, 4, 8, 16, 32, 64, 128, 256, 360, 360]);
    assert_eq!(minutes(u32::MAX, false, None), 360);
    assert_eq!(minutes(11, false, Some(30 * 24 * 60)), 360);
    assert_eq!(minutes(11, false, Some(8 * 60)), 60);
    assert_eq!(minutes(11, false, Some(3)), 1);
    assert_eq!(minutes(11, false, Some(-3)), 1);
    assert_eq!(minutes(1, true, Some(3)), 60);
    let seconds = |jitter| pause(1, false, None, jitter).as_secs();
    assert_eq!((seconds(0.0), seconds(1.0)), (48, 72));
}

/// Writes an executable file, in a process of its own: what another thread starts would have the file open for a moment, and
/// one that is open for writing cannot be executed.
#[expect(
    clippy::disallowed_methods,
    reason = "a test starts the program that writes its file"
)]
fn write_executable(path: &Path, text: &str) {
    let made = std::process::Command::new("/bin/sh")
        .args(["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .arg(text)
        .status()
        .unwrap();
    assert!(made.success());
}

/// A hook with this text, and a file that it can write to.
struct Script {
    temp: tempfile::TempDir,
    hook: Hook,
}

impl Script {
    fn new(text: &str, timeout: Duration) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("hook");
        let text = text.replace("OUT", temp.path().join("out").to_str().unwrap());
        write_executable(&path, &format!("#!/bin/sh\n{text}\n"));
        Self {
            temp,
            hook: Hook { path, timeout },
        }
    }

    fn out(&self) -> String {
        std::fs::read_to_string(self.temp.path().join("out")).unwrap_or_default()
    }

    async fn run(&self) -> Result<(), String> {
        let run = self.hook.run(Action::Present, "_acme-challenge.a.test.", "va-_lue");
        run.await.map_err(|error| format!("{error:#}"))
    }
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_hook_gets_its_arguments_and_nothing_of_ours() {
    let script = Script::new("echo \"$#:$*:$PWD\" > OUT; env | sort >> OUT; cat >> OUT", LONG);
    script.run().await.unwrap();
    let out = script.out();
    let mut lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.remove(0), "3:present _acme-challenge.a.test. va-_lue:/");
    // What a shell sets by itself.
    lines.retain(|line| !["PWD=/", "OLDPWD=/", "SHLVL=0", "SHLVL=1", "_=/usr/bin/env"].contains(line));
    assert_eq!(
        lines,
        [
            "LANG=C.UTF-8",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ]
    );
    script
        .hook
        .run(Action::Cleanup, "_acme-challenge.a.test.", "va-_lue")
        .await
        .unwrap();
    assert!(script.out().starts_with("3:cleanup "));
}

#[tokio::test]
async fn a_hook_that_fails_says_why_in_one_line_of_bounded_length() {
    let script = Script::new("printf 'no such zone\\n\\033[1mretry\\n' >&2; exit 3", LONG);
    let error = script.run().await.unwrap_err();
    assert!(error.contains("present _acme-challenge.a.test."), "{error}");
    assert!(error.ends_with("exit status: 3: no such zone; [1mretry"), "{error}");
    // The value is no secret, but the record is enough.
    assert!(!error.contains("va-_lue"), "{error}");

    let script = Script::new(
        "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo the end >&2; exit 1",
        LONG,
    );
    let error = script.run().await.unwrap_err();
    assert!(error.ends_with("; the end") && error.len() < 2000, "{}", error.len());

    let script = Script::new("exit 0", LONG);
    std::fs::set_permissions(&script.hook.path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let problem = script.hook.problem().unwrap();
    assert!(problem.ends_with("is not executable"), "{problem}");
    script.run().await.unwrap_err();
    std::fs::remove_file(&script.hook.path).unwrap();
    assert!(script.hook.problem().unwrap().contains("No such file"));
}

#[tokio::test]
async fn a_hook_that_does_not_end_is_killed_with_its_children() {
    let mut timeout = Duration::from_secs(1);
    let script = loop {
        let script = Script::new("sleep 1000 & echo $! > OUT; echo waiting >&2; wait", timeout);
        let error = script.run().await.unwrap_err();
        assert!(error.contains(&format!("did not end within {timeout:?}")), "{error}");
        // On a busy machine it may be killed before it has come to that.
        if error.ends_with(": waiting") {
            break script;
        }
        timeout *= 2;
        assert!(timeout < LONG, "{error}");
    };
    let child = script.out().trim().to_owned();
    let begun = Instant::now();
    while runs(&child) {
        assert!(begun.elapsed() < LONG, "{child}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether a process exists and is not a zombie.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

#[tokio::test]
async fn what_a_hook_leaves_behind_is_not_waited_for() {
    let script = Script::new("sleep 600 & echo $! > OUT; exit 0", LONG);
    let begun = Instant::now();
    script.run().await.unwrap();
    assert!(begun.elapsed() < LONG);
    let child = script.out().trim().parse().unwrap();
    let child = rustix::process::Pid::from_raw(child).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn each_directory_has_files_of_its_own() {
    let acme = |directory: &str| Acme {
        directory: directory.to_owned(),
        contact: Vec::new(),
        domains: vec!["a.test".to_owned()],
        hook: Hook {
            path: PathBuf::from("/hook"),
            timeout: LONG,
        },
        dns_wait: Duration::ZERO,
        ca: None,
    };
    let [one, other] =
        ["https://acme.test:14000/dir", "https://acme.test:14000/../staging"].map(|url| acme(url).place());
    assert!(one.starts_with("tls/acme/acme.test-") && one.len() == 27, "{one}");
    assert!(other.starts_with("tls/acme/acme.test-") && other != one, "{other}");
    assert!(acme("https://[::1]/dir").place().starts_with("tls/acme/-"));
}
