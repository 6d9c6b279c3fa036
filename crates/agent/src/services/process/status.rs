//! A raw wait status, in the words that clients know.

use protocol::process::EndEvent;

/// The end event of a process that was reaped with this status.
pub(crate) fn end_event(status: i32) -> EndEvent {
    if libc::WIFSIGNALED(status) {
        let core = if libc::WCOREDUMP(status) { " (core dumped)" } else { "" };
        let text = format!("signal: {}{core}", signal_name(libc::WTERMSIG(status)));
        return EndEvent {
            exit_code: -1,
            exited: false,
            error: Some(text.clone()),
            status: text,
        };
    }
    let code = libc::WEXITSTATUS(status);
    let text = format!("exit status {code}");
    EndEvent {
        exit_code: code,
        exited: true,
        error: (code != 0).then(|| text.clone()),
        status: text,
    }
}

/// Whether a status is that of a SIGKILL, or of a shell whose program got one.
pub(crate) fn is_kill(status: i32) -> bool {
    const SHELLS: i32 = 128;
    (libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL)
        || (libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == SHELLS + libc::SIGKILL)
}

fn signal_name(number: i32) -> String {
    let name = match number {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        let check = |status: i32, code: i32, exited: bool, text: &str, error: Option<&str>| {
            let end = end_event(status);
            assert_eq!(
                (end.exit_code, end.exited, end.status.as_str(), end.error.as_deref()),
                (code, exited, text, error)
            );
        };
        check(0, 0, true, "exit status 0", None);
        check(3 << 8, 3, true, "exit status 3", Some("exit status 3"));
        check(255 << 8, 255, true, "exit status 255", Some("exit status 255"));
        check(9, -1, false, "signal: killed", Some("signal: killed"));
        check(
            6 | 0x80,
            -1,
            false,
            "signal: aborted (core dumped)",
            Some("signal: aborted (core dumped)"),
        );
        for (status, kill) in [(9, true), (137 << 8, true), (15, false), (9 << 8, false), (0, false)] {
            assert_eq!(is_kill(status), kill, "{status}");
        }
        check(34, -1, false, "signal: signal 34", Some("signal: signal 34"));
    }
}
