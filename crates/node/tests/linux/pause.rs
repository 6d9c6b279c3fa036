//! Paused sandboxes, in memory and on disk: on the host, with processes that compute.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use protocol::node::{
    Adopted, AdoptedState, Boot, DialError, NodeApi, NodeError, PauseSandbox, ResumeSandbox, StartSandbox, WantedState,
};
use rustix::process::Signal;

use tokio_util::sync::CancellationToken;

use super::{Host, TIMEOUT, disks, open, request, run, signal, wanted};

/// How long a process is observed that must not run. It used this much of a core before, and uses none if it is stopped.
const OBSERVED: Duration = Duration::from_millis(300);

/// The processes of a sandbox on the host: pid, and how long each has run, in nanoseconds.
pub(super) fn processes(id: &SandboxId) -> Vec<(i32, u64)> {
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
pub(super) fn stands_still(id: &SandboxId) {
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
pub(super) async fn count(host: &Host) -> u64 {
    let answer = run(&host.node, &host.id, "echo count $(cat n) end; exit 7").await;
    assert!(answer.contains("exit status 7"), "{answer}");
    output(&answer)
        .split(' ')
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

/// What a program wrote to its standard output, from the body of the response.
pub(super) fn output(answer: &str) -> String {
    // The output is base64 in JSON, in one piece or several.
    let pieces = answer.split("\"stdout\":\"").skip(1);
    let bytes = pieces.flat_map(|piece| base64(piece.split('"').next().unwrap()));
    String::from_utf8(bytes.collect()).unwrap()
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
pub(super) async fn goes_on(host: &Host, from: u64) -> u64 {
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
pub(super) async fn counting(data_dir: &Path) -> Host {
    counting_in("sh", data_dir).await
}

/// The program is one of this shell: `sh` starts programs with `vfork`, and `bash` with `fork`.
pub(super) async fn counting_in(shell: &str, data_dir: &Path) -> Host {
    let host = open(data_dir).await;
    host.node.start(request(&host.id)).await.unwrap();
    let program = "i=0; while :; do i=$((i+1)); echo $i >n.new; mv n.new n; done";
    let answer = host
        .run(&format!(
            "echo 0 >n; (setsid {shell} -c '{program}' >/dev/null 2>&1 &) </dev/null"
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
        boot: None,
        deadline: None,
    }
}

fn keep(host: &Host, keep: Kept) -> PauseSandbox {
    PauseSandbox {
        id: host.id.clone(),
        keep,
        is_written_next: false,
    }
}

async fn pause(host: &Host) {
    let paused = host
        .node
        .pause(keep(host, Kept::Memory), CancellationToken::new())
        .await
        .unwrap();
    assert_eq!(paused.kept, Kept::Memory);
    assert!(paused.memory_bytes > 0 && paused.disk_bytes > 0);
}

/// How a sandbox is started anew on its disk.
fn boot(host: &Host) -> ResumeSandbox {
    let StartSandbox {
        template,
        resources,
        init,
        ..
    } = request(&host.id);
    ResumeSandbox {
        kept: Kept::Filesystem,
        boot: Some(Boot {
            template,
            resources,
            init,
            owner: None,
        }),
        ..resume(host)
    }
}

/// Pauses it so that nothing of it is on the host but its disk.
async fn pause_to_disk(host: &Host, data_dir: &Path) {
    let paused = host
        .node
        .pause(keep(host, Kept::Filesystem), CancellationToken::new())
        .await
        .unwrap();
    assert_eq!((paused.kept, paused.memory_bytes), (Kept::Filesystem, 0));
    assert!(paused.disk_bytes > 0);
    nothing_but_a_disk(host, data_dir).await;
}

async fn nothing_but_a_disk(host: &Host, data_dir: &Path) {
    assert_eq!(processes(&host.id), []);
    assert_eq!(disks(data_dir), 1);
    assert_eq!(host.node.samples().await.unwrap(), []);
    let refused = host.node.dial(&host.id, protocol::agent::PORT).await;
    assert_eq!(refused.unwrap_err(), DialError::Gone);
    let mounted = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounted.contains(host.id.as_str()));
    assert_eq!(groups(&host.id), 0);
    let backing = fs::read_dir("/sys/block").unwrap().flatten();
    let attached = backing.filter(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        file.starts_with(data_dir.to_str().unwrap()) && !file.contains("spare-")
    });
    assert_eq!(attached.count(), 0);
}

/// Number of control groups of a sandbox.
fn groups(id: &SandboxId) -> usize {
    fn count(dir: &Path, begin: &str, depth: usize) -> usize {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        below
            .map(|entry| {
                let is_of_it = entry.file_name().to_string_lossy().starts_with(begin);
                let deeper = if depth > 0 {
                    count(&entry.path(), begin, depth - 1)
                } else {
                    0
                };
                usize::from(is_of_it) + deeper
            })
            .sum()
    }
    count(Path::new("/sys/fs/cgroup"), &format!("{id}."), 4)
}

async fn starts_anew(host: &Host, data_dir: &Path, written: &str) {
    let resumed = host.node.resume(boot(host)).await.unwrap();
    assert_eq!(resumed.agent_version.as_deref(), Some(protocol::agent::VERSION));
    assert!(!resumed.stages.is_empty());
    // Its files are there, those of the template included, and none of its processes.
    let check = format!(
        "[ \"$(cat kept)\" = {written} ] && [ -e /etc/group ] && ! pgrep -x yes; echo $? >result; exit $((7 + $(cat result)))"
    );
    let answer = run(&host.node, &host.id, &check).await;
    assert!(answer.contains("exit status 7"), "{answer}");
    assert_eq!(host.node.samples().await.unwrap().len(), 1);
    assert_eq!(disks(data_dir), 1);
}

async fn write(host: &Host, what: &str) {
    let answer = run(
        &host.node,
        &host.id,
        &format!("echo {what} >kept; (setsid yes >/dev/null 2>&1 &) </dev/null; exit 7"),
    )
    .await;
    assert!(answer.contains("exit status 7"), "{answer}");
}

pub(crate) async fn only_the_disk_is_kept(data_dir: &Path) {
    let host = open(data_dir).await;
    host.node.start(request(&host.id)).await.unwrap();
    write(&host, "first").await;
    pause_to_disk(&host, data_dir).await;
    // Again is no error, and how to start it has to be said.
    pause_to_disk(&host, data_dir).await;
    let refused = host
        .node
        .resume(ResumeSandbox {
            boot: None,
            ..boot(&host)
        })
        .await;
    assert!(matches!(refused, Err(NodeError::Failed(_))), "{refused:?}");
    starts_anew(&host, data_dir, "first").await;

    // One that is paused in memory gives that up.
    write(&host, "second").await;
    pause(&host).await;
    pause_to_disk(&host, data_dir).await;

    // It survives the platform, and one that was starting it: what that has done is ended.
    let kept = AdoptedState::Paused(Kept::Filesystem);
    let mut host = host;
    for state in [
        WantedState::Paused(Kept::Filesystem),
        WantedState::RunningOrPaused(Kept::Filesystem),
        // The row that says so was lost with the power of the host.
        WantedState::Running,
    ] {
        let adopted;
        (host, adopted) = reopen(host, data_dir, state).await;
        assert_eq!(adopted, Some(kept), "{state:?}");
        nothing_but_a_disk(&host, data_dir).await;
    }
    starts_anew(&host, data_dir, "second").await;
    let (host, adopted) = reopen(host, data_dir, WantedState::Paused(Kept::Filesystem)).await;
    assert_eq!(adopted, Some(kept));
    nothing_but_a_disk(&host, data_dir).await;
    starts_anew(&host, data_dir, "second").await;
    // One that was not ended yet runs on.
    let (host, adopted) = reopen(host, data_dir, WantedState::RunningOrPaused(Kept::Filesystem)).await;
    assert_eq!(adopted, Some(AdoptedState::Running));
    write(&host, "third").await;
    pause(&host).await;
    let (host, adopted) = reopen(host, data_dir, WantedState::RunningOrPaused(Kept::Filesystem)).await;
    assert_eq!(adopted, Some(AdoptedState::Running));
    pause_to_disk(&host, data_dir).await;
    starts_anew(&host, data_dir, "third").await;

    // A start that fails leaves it paused.
    pause_to_disk(&host, data_dir).await;
    let image = fs::read_dir(data_dir.join("disks"))
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let image = image
        .into_iter()
        .find(|path| path.extension().is_some_and(|name| name == "img"))
        .unwrap();
    fs::rename(&image, data_dir.join("away")).unwrap();
    let refused = host.node.resume(boot(&host)).await;
    assert!(matches!(refused, Err(NodeError::Failed(_))), "{refused:?}");
    fs::rename(data_dir.join("away"), &image).unwrap();
    starts_anew(&host, data_dir, "third").await;

    // It ends as a whole, running and paused.
    pause_to_disk(&host, data_dir).await;
    host.node.kill(&host.id).await.unwrap();
    let again = host.node.kill(&host.id).await;
    assert_eq!(again.unwrap_err(), NodeError::NotFound(host.id.clone()));
    let refused = host.node.resume(boot(&host)).await;
    assert_eq!(refused.unwrap_err(), NodeError::NotFound(host.id.clone()));
    until_nothing_is_left(data_dir).await;
    start_again(&host).await;
    pause_to_disk_and_start(&host).await;
    host.node.kill(&host.id).await.unwrap();
    until_nothing_is_left(data_dir).await;
    // What nobody wants any more is removed.
    start_again(&host).await;
    pause_to_disk(&host, data_dir).await;
    host.node.release().await;
    drop(host);
    let host = open(data_dir).await;
    assert_eq!(host.node.reconcile(Vec::new()).await.unwrap(), []);
    until_nothing_is_left(data_dir).await;
    host.node.release().await;
}

/// Starts a sandbox with the name of one that has ended. The driver gives the name back a moment after the disk is removed.
async fn start_again(host: &Host) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match host.node.start(request(&host.id)).await {
            Err(error) if error.to_string().contains("exists already") && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            started => return drop(started.unwrap()),
        }
    }
}

async fn pause_to_disk_and_start(host: &Host) {
    host.node
        .pause(keep(host, Kept::Filesystem), CancellationToken::new())
        .await
        .unwrap();
    host.node.resume(boot(host)).await.unwrap();
}

async fn until_nothing_is_left(data_dir: &Path) {
    let deadline = Instant::now() + TIMEOUT;
    let notes = || fs::read_dir(data_dir.join("kept")).unwrap().count();
    while disks(data_dir) > 0 || notes() > 0 {
        assert!(Instant::now() < deadline, "a disk remains");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The next platform, and what it adopts the sandbox as.
async fn reopen(host: Host, data_dir: &Path, state: WantedState) -> (Host, Option<AdoptedState>) {
    host.node.release().await;
    let id = host.id.clone();
    drop(host);
    let host = open(data_dir).await;
    let adopted = host.node.reconcile(vec![wanted(&id, state)]).await.unwrap();
    let state = adopted.first().map(|Adopted { state, .. }| *state);
    assert!(adopted.iter().all(|adopted| adopted.id == id));
    (host, state)
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
    let (host, adopted) = reopen(host, data_dir, WantedState::Paused(kept)).await;
    assert_eq!(adopted, Some(AdoptedState::Paused(Kept::Memory)));
    stands_still(&host.id);
    let (host, adopted) = reopen(host, data_dir, WantedState::RunningOrPaused(kept)).await;
    assert_eq!(adopted, Some(AdoptedState::Paused(Kept::Memory)));
    stands_still(&host.id);

    host.node.resume(resume(&host)).await.unwrap();
    let after = goes_on(&host, before).await;
    assert_eq!(host.node.samples().await.unwrap().len(), 1);
    // Again is no error either.
    host.node.resume(resume(&host)).await.unwrap();
    let (host, adopted) = reopen(host, data_dir, WantedState::RunningOrPaused(kept)).await;
    assert_eq!(adopted, Some(AdoptedState::Running));
    let after = goes_on(&host, after).await;
    // One that should run is stopped only if something else did that.
    pause(&host).await;
    let (host, adopted) = reopen(host, data_dir, WantedState::Running).await;
    assert_eq!(adopted, Some(AdoptedState::Running));
    let after = goes_on(&host, after).await;
    // And one that should be paused runs for no longer.
    let (host, adopted) = reopen(host, data_dir, WantedState::Paused(kept)).await;
    assert_eq!(adopted, Some(AdoptedState::Paused(Kept::Memory)));
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
    let (gone, again) = (
        host.node
            .pause(keep(&host, Kept::Memory), CancellationToken::new())
            .await,
        host.node.resume(resume(&host)).await,
    );
    assert_eq!(gone.unwrap_err(), NodeError::NotFound(host.id.clone()));
    assert_eq!(again.unwrap_err(), NodeError::NotFound(host.id.clone()));
    host.node.release().await;
}

pub(crate) async fn ends_while_it_is_paused(data_dir: &Path) {
    let mut host = counting(data_dir).await;
    pause(&host).await;
    // As the kernel does when it is out of memory.
    signal(host.agent().await, Signal::KILL);
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
        let (host, adopted) = reopen(host, data_dir, state).await;
        assert_eq!(adopted, None);
        assert_eq!(disks(data_dir), 0);
        host.node.release().await;
    }
}
