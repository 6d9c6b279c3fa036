//! Sandboxes that are paused in memory: on the host, with processes that compute.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use protocol::node::{Adopted, DialError, NodeApi, NodeError, ResumeSandbox, WantedState};
use rustix::process::Signal;

use super::{Host, TIMEOUT, disks, open, request, run, signal, wanted};

/// How long a process is observed that must not run. It used this much of a core before, and uses none if it is stopped.
const OBSERVED: Duration = Duration::from_millis(300);

/// The processes of a sandbox on the host: pid, and how long each has run, in nanoseconds.
fn processes(id: &SandboxId) -> Vec<(i32, u64)> {
    let group = format!("/{id}.0.");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        // One that has ended is there until the launcher asks for its exit code.
        let has_ended = read("stat")
            .rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with(['Z', 'X']));
        if !has_ended && read("cgroup").lines().any(|line| line.contains(&group)) {
            let ran = read("schedstat").split(' ').next().and_then(|text| text.parse().ok());
            found.extend(ran.map(|ran| (pid, ran)));
        }
    }
    found.sort_unstable();
    found
}

/// Asserts that no process of a sandbox runs, while this one does. The kernel may count the last microseconds of a process
/// after it has stopped.
fn stands_still(id: &SandboxId) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let before = processes(id);
        assert!(!before.is_empty());
        let begun = Instant::now();
        while begun.elapsed() < OBSERVED {
            std::hint::spin_loop();
        }
        let after = processes(id);
        if after == before {
            return;
        }
        assert!(Instant::now() < deadline, "{before:?} {after:?}");
    }
}

/// What the program inside has counted so far.
async fn count(host: &Host) -> u64 {
    let answer = run(&host.node, &host.id, "echo count $(cat n) end; exit 7").await;
    assert!(answer.contains("exit status 7"), "{answer}");
    // The output is base64 in JSON.
    let data = answer.split("\"stdout\":\"").nth(1).unwrap().split('"').next().unwrap();
    let text = String::from_utf8(base64(data)).unwrap();
    text.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text
        .bytes()
        .filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    let (mut bits, mut number, mut bytes) = (0, 0_u32, Vec::new());
    for digit in digits {
        number = number << 6 | u32::try_from(digit).unwrap();
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((number >> bits & 0xff) as u8);
        }
    }
    bytes
}

/// Waits until the program inside has counted on.
async fn goes_on(host: &Host, from: u64) -> u64 {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let now = count(host).await;
        if now > from {
            return now;
        }
        assert!(Instant::now() < deadline, "it does not count");
    }
}

/// A sandbox in which a program counts.
async fn counting(data_dir: &Path) -> Host {
    let host = open(data_dir).await;
    host.node.start(request(&host.id)).await.unwrap();
    let program = "i=0; while :; do i=$((i+1)); echo $i >n.new; mv n.new n; done";
    let answer = host
        .run(&format!(
            "echo 0 >n; (setsid sh -c '{program}' >/dev/null 2>&1 &) </dev/null"
        ))
        .await;
    assert!(answer.contains("exit status 0"), "{answer}");
    host
}

fn resume(host: &Host) -> ResumeSandbox {
    ResumeSandbox {
        id: host.id.clone(),
        kept: Kept::Memory,
        egress: EgressPolicy::default(),
    }
}

async fn pause(host: &Host) {
    let paused = host.node.pause(&host.id).await.unwrap();
    assert_eq!(paused.kept, Kept::Memory);
    assert!(paused.memory_bytes > 0);
}

/// The next platform, and whether it adopts the sandbox as paused.
async fn reopen(host: Host, data_dir: &Path, state: WantedState) -> (Host, Option<bool>) {
    host.node.release().await;
    let id = host.id.clone();
    drop(host);
    let host = open(data_dir).await;
    let adopted = host.node.reconcile(vec![wanted(&id, state)]).await.unwrap();
    let is_paused = adopted.first().map(|Adopted { is_paused, .. }| *is_paused);
    assert!(adopted.iter().all(|adopted| adopted.id == id));
    (host, is_paused)
}

pub(crate) async fn stands_still_and_goes_on(data_dir: &Path) {
    let host = counting(data_dir).await;
    let before = goes_on(&host, 0).await;
    pause(&host).await;
    stands_still(&host.id);
    // Nothing is asked of it, and nothing is measured.
    let refused = host.node.dial(&host.id, protocol::agent::PORT).await;
    assert_eq!(refused.unwrap_err(), DialError::Gone);
    assert_eq!(host.node.samples().await.unwrap(), []);
    // Again is no error.
    pause(&host).await;
    stands_still(&host.id);

    // The next platform leaves it as it is, and finds out by itself where the row does not say.
    let kept = Kept::Memory;
    let (host, is_paused) = reopen(host, data_dir, WantedState::Paused(kept)).await;
    assert_eq!(is_paused, Some(true));
    stands_still(&host.id);
    let (host, is_paused) = reopen(host, data_dir, WantedState::RunningOrPaused(kept)).await;
    assert_eq!(is_paused, Some(true));
    stands_still(&host.id);

    for other in [Kept::Image, Kept::Filesystem] {
        let request = ResumeSandbox {
            kept: other,
            ..resume(&host)
        };
        let refused = host.node.resume(request).await;
        assert!(matches!(refused, Err(NodeError::Unsupported(_))), "{refused:?}");
    }
    host.node.resume(resume(&host)).await.unwrap();
    let after = goes_on(&host, before).await;
    assert_eq!(host.node.samples().await.unwrap().len(), 1);
    // Again is no error either.
    host.node.resume(resume(&host)).await.unwrap();
    let (host, is_paused) = reopen(host, data_dir, WantedState::RunningOrPaused(kept)).await;
    assert_eq!(is_paused, Some(false));
    let after = goes_on(&host, after).await;
    // One that should run is stopped only if something else did that.
    pause(&host).await;
    let (host, is_paused) = reopen(host, data_dir, WantedState::Running).await;
    assert_eq!(is_paused, Some(false));
    let after = goes_on(&host, after).await;
    // And one that should be paused runs for no longer.
    let (host, is_paused) = reopen(host, data_dir, WantedState::Paused(kept)).await;
    assert_eq!(is_paused, Some(true));
    stands_still(&host.id);

    // A spawner that ended meanwhile is replaced afterwards.
    let spawner = host.spawner().await;
    signal(spawner, Signal::KILL);
    host.node.resume(resume(&host)).await.unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while !run(&host.node, &host.id, "exit 7").await.contains("exit status 7") {
        assert!(Instant::now() < deadline, "no process starts");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    goes_on(&host, after).await;

    // It ends at once, with all its processes.
    pause(&host).await;
    host.node.kill(&host.id).await.unwrap();
    assert_eq!(processes(&host.id), []);
    let (gone, again) = (host.node.pause(&host.id).await, host.node.resume(resume(&host)).await);
    assert_eq!(gone.unwrap_err(), NodeError::NotFound(host.id.clone()));
    assert_eq!(again.unwrap_err(), NodeError::NotFound(host.id.clone()));
    host.node.release().await;
}

pub(crate) async fn ends_while_it_is_paused(data_dir: &Path) {
    let mut host = counting(data_dir).await;
    pause(&host).await;
    // As the kernel does when it is out of memory.
    let agent = processes(&host.id).first().unwrap().0;
    signal(agent, Signal::KILL);
    loop {
        if host.event().await == protocol::node::NodeEvent::Exited(host.id.clone()) {
            break;
        }
    }
    assert_eq!(processes(&host.id), []);
    host.node.release().await;
    drop(host);

    // One whose processes have ended while no platform ran is lost, and its disk goes with it.
    for state in [
        WantedState::Paused(Kept::Memory),
        WantedState::RunningOrPaused(Kept::Memory),
    ] {
        let host = counting(data_dir).await;
        pause(&host).await;
        host.node.release().await;
        for (pid, _) in processes(&host.id) {
            let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
        let deadline = Instant::now() + TIMEOUT;
        while !processes(&host.id).is_empty() {
            assert!(Instant::now() < deadline, "processes remain");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let (host, is_paused) = reopen(host, data_dir, state).await;
        assert_eq!(is_paused, None);
        assert_eq!(disks(data_dir), 0);
        host.node.release().await;
    }
}
