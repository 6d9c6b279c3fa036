//! The binary as a spawner: until its first request it waits without the C library, and then it is like any other program.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::command;

/// What a spawner ignores: what a process of its sandbox could end it with by accident.
const IGNORED: [Signal; 7] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::PIPE,
    Signal::USR1,
    Signal::USR2,
];
/// Numbers of the system calls `poll` and `ppoll`, as `/proc` shows them.
const POLLS: [&str; 2] = ["7 ", "271 "];

/// Starts a spawner with these arguments, and its socket as descriptor 4.
fn start(arguments: &str) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut shell = command(Path::new("/bin/sh"));
    let script = format!("exec \"$0\" {arguments} 4<&0 </dev/null");
    let started = shell
        .args(["-c", &script, env!("CARGO_BIN_EXE_ringfence")])
        .stdin(OwnedFd::from(theirs))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    (started, ours)
}

fn of(spawner: &Child, file: &str) -> String {
    fs::read_to_string(format!("/proc/{}/{file}", spawner.id())).unwrap()
}

fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether it waits for a request, and is not a shell any more.
fn waits(spawner: &Child) -> bool {
    let call = of(spawner, "syscall");
    of(spawner, "cmdline").split('\0').nth(1) == Some("spawner") && POLLS.iter().any(|poll| call.starts_with(poll))
}

fn has_heap(spawner: &Child) -> bool {
    of(spawner, "maps").contains("[heap]")
}

/// The signals that it ignores, a bit each; the lowest is for number 1.
fn ignored(spawner: &Child) -> u64 {
    let status = of(spawner, "status");
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(bits.trim(), 16).unwrap()
}

#[test]
fn it_waits_without_the_c_library_and_goes_on_with_it() {
    let (mut spawner, mut socket) = start("spawner");
    until("it waits", || waits(&spawner));
    assert!(!has_heap(&spawner), "{}", of(&spawner, "maps"));
    let bits = IGNORED.iter().fold(0, |bits, signal| bits | 1 << (signal.as_raw() - 1));
    assert_eq!(ignored(&spawner) & bits, bits);
    let pid = Pid::from_child(&spawner);
    for signal in IGNORED {
        rustix::process::kill_process(pid, signal).unwrap();
    }
    // What was stopped while it waited waits again.
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    until("it is stopped", || of(&spawner, "status").contains("State:\tT"));
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    until("it waits again", || {
        of(&spawner, "status").contains("State:\tS") && !of(&spawner, "syscall").starts_with("running")
    });
    assert!(!has_heap(&spawner), "a signal is no request");

    // A request without its descriptors: the answer is that it failed.
    socket.write_all(&[0]).unwrap();
    let mut answer = [0; 64];
    assert!(socket.read(&mut answer).unwrap() > 0);
    assert!(has_heap(&spawner));
    until("it waits for the next", || waits(&spawner));
    assert_eq!(ignored(&spawner) & bits, bits);
    drop(socket);
    assert!(spawner.wait().unwrap().success());
}

#[test]
fn it_ends_with_its_agent_and_without_a_socket() {
    let (mut spawner, socket) = start("spawner");
    until("it waits", || waits(&spawner));
    drop(socket);
    assert!(spawner.wait().unwrap().success());
    let mut alone = command(Path::new(env!("CARGO_BIN_EXE_ringfence")))
        .arg("spawner")
        .spawn()
        .unwrap();
    assert!(!alone.wait().unwrap().success(), "nothing is open as its socket");
}

#[test]
fn what_only_begins_like_it_is_a_word_of_the_command_line() {
    for word in ["s", "spawne", "spawners", "Spawner", "''", "spawner\u{7f}"] {
        let (mut other, socket) = start(word);
        assert_eq!(other.wait().unwrap().code(), Some(2), "{word}");
        drop(socket);
    }
}
