//! Sandboxes whose processes are kept on disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::id::SandboxId;
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use protocol::node::{
    Adopted, AdoptedState, Boot, NodeApi, NodeError, NodeEvent, PauseSandbox, PausedSandbox, ResumeSandbox, WantedState,
};

use tokio_util::sync::CancellationToken;

use super::pause::{count, counting, counting_in, goes_on, processes, stands_still};
use super::{Host, disks, open, request, run, wanted};

/// The CRIU that `criu_program` of `scripts/common.sh` installs.
pub(super) fn criu() -> PathBuf {
    let path = std::env::var_os("RINGFENCE_CRIU")
        .expect("RINGFENCE_CRIU names a CRIU: `criu_program` of scripts/common.sh installs one");
    PathBuf::from(path)
}

fn to_disk(host: &Host) -> PauseSandbox {
    PauseSandbox {
        id: host.id.clone(),
        keep: Kept::Checkpoint,
        is_written_next: false,
    }
}

pub(super) async fn pause(host: &Host) -> PausedSandbox {
    host.node.pause(to_disk(host), CancellationToken::new()).await.unwrap()
}

/// Stops the processes, which are written next.
async fn stop(host: &Host) {
    let request = PauseSandbox {
        keep: Kept::Memory,
        is_written_next: true,
        ..to_disk(host)
    };
    assert_eq!(
        host.node.pause(request, CancellationToken::new()).await.unwrap().kept,
        Kept::Memory
    );
    stands_still(&host.id);
}

pub(super) async fn resume(host: &Host, kept: Kept) -> Result<(), NodeError> {
    let start = request(&host.id);
    let request = ResumeSandbox {
        id: host.id.clone(),
        kept,
        egress: EgressPolicy::default(),
        boot: Some(Boot {
            template: start.template,
            resources: start.resources,
            init: start.init,
            owner: None,
        }),
        deadline: None,
    };
    host.node.resume(request).await.map(drop)
}

/// The directory of what is kept of the sandbox.
fn kept_of(data_dir: &Path, id: &SandboxId) -> PathBuf {
    let entries = fs::read_dir(data_dir.join("kept")).unwrap();
    let mut found = entries.map(|entry| entry.unwrap().path());
    found
        .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(id.as_str()))
        .unwrap()
}

/// What a sandbox sees of itself, in one piece: the output of two programs may come in two.
const SEEN: &str = "printf %s \"$(head -1 /proc/meminfo; cut -d: -f2- /proc/self/cgroup)\"";

/// Groups of sandboxes in the cgroup tree of version 2.
fn has_groups(id: &SandboxId) -> bool {
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let unified = info.lines().find(|line| line.contains(" - cgroup2 ")).unwrap();
    let unified = Path::new(unified.split(' ').nth(4).unwrap());
    let trees = fs::read_dir(unified).unwrap().flatten();
    let mut trees = trees.filter(|tree| tree.file_name().to_str().unwrap().starts_with("ringfence-"));
    trees.any(|tree| {
        let mut groups = fs::read_dir(tree.path()).unwrap().flatten();
        groups.any(|group| group.file_name().to_str().unwrap().starts_with(&format!("{id}.")))
    })
}

/// The parent of a restored agent is the init of the host, and until that has waited for it, its group cannot be removed.
pub(super) async fn until_without_groups(id: &SandboxId) {
    let gone = async {
        while has_groups(id) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(60), gone).await;
    assert!(gone.is_ok(), "groups of {id} are there after a minute");
}

/// The log entry that says why its processes were not written.
async fn why_in_memory(host: &mut Host) -> String {
    loop {
        if let NodeEvent::Log(entry) = host.event().await
            && entry.fields["event_type"] == "kept_in_memory"
        {
            return entry.fields["reason"].clone();
        }
    }
}

pub(super) async fn continues_where_it_was(data_dir: &Path) {
    let mut host = counting(data_dir).await;
    let answer = run(&host.node, &host.id, SEEN).await;
    let mut counted = goes_on(&host, 0).await;
    for cycle in 0..4 {
        let paused = pause(&host).await;
        if paused.kept != Kept::Checkpoint {
            panic!("its processes stay in memory: {}", why_in_memory(&mut host).await);
        }
        assert_eq!(paused.memory_bytes, 0);
        assert!(paused.disk_bytes > 0);
        // Nothing of it is on the host but its disk and its checkpoint.
        assert_eq!(processes(&host.id), []);
        until_without_groups(&host.id).await;
        assert!(kept_of(data_dir, &host.id).join("image").is_dir());
        if cycle % 2 == 1 {
            host.node.release().await;
            drop(host);
            host = open(data_dir).await;
            let state = WantedState::Paused(Kept::Checkpoint);
            let adopted = host.node.reconcile(vec![wanted(&host.id, state)]).await.unwrap();
            let state = AdoptedState::Paused(Kept::Checkpoint);
            let id = host.id.clone();
            assert_eq!(adopted, [Adopted { id, state }]);
        }
        resume(&host, Kept::Checkpoint).await.unwrap();
        // The checkpoint is not what the sandbox is any more.
        assert!(!kept_of(data_dir, &host.id).join("image").exists());
        let now = count(&host).await;
        assert!(now >= counted, "{now} {counted}");
        counted = goes_on(&host, now).await;
        // What it sees of itself is what it saw.
        let again = run(&host.node, &host.id, SEEN).await;
        let output = |answer: &str| {
            let parts = answer.split("\"stdout\":\"").skip(1);
            parts
                .map(|part| part.split('"').next().unwrap().to_owned())
                .collect::<String>()
        };
        assert_eq!(output(&again), output(&answer));
    }
    host.node.kill(&host.id).await.unwrap();
    host.node.release().await;
    assert_eq!(disks(data_dir), 0);
}

/// A message queue cannot be written, and an open file without a name could not be restored whose name was that long.
pub(super) async fn stays_in_memory(data_dir: &Path) {
    let host = counting(data_dir).await;
    let counted = goes_on(&host, 0).await;
    host.run("touch /dev/mqueue/queue").await;
    let paused = pause(&host).await;
    assert_eq!(paused.kept, Kept::Memory);
    assert!(!processes(&host.id).is_empty());
    let kept = kept_of(data_dir, &host.id);
    assert!(!kept.join("image").exists() && !kept.join("image.new").exists());
    resume(&host, Kept::Memory).await.unwrap();
    goes_on(&host, counted).await;
    host.run("rm /dev/mqueue/queue").await;
    let open = "name=/tmp/$(printf %0250d 0); setsid sh -c \"exec 3>$name; rm $name; exec sleep 100\" >/dev/null 2>&1 & \
        until pgrep -fx 'sleep 100' >/dev/null; do :; done";
    host.run(open).await;
    assert_eq!(pause(&host).await.kept, Kept::Memory);
    assert!(!kept.join("image").exists() && !kept.join("image.new").exists());
    resume(&host, Kept::Memory).await.unwrap();
    goes_on(&host, counted).await;
    // The next time nothing is in the way.
    host.run("pkill -x sleep; while pgrep -x sleep >/dev/null; do :; done")
        .await;
    assert_eq!(pause(&host).await.kept, Kept::Checkpoint);
    resume(&host, Kept::Checkpoint).await.unwrap();
    host.node.kill(&host.id).await.unwrap();
    host.node.release().await;
}

/// How often it is tried to interrupt what may be complete before, on a busy machine.
const ATTEMPTS: u32 = 10;

/// Pauses a sandbox in memory first, and writes it from there: until that is complete it stands still, whatever
/// happens.
pub(super) async fn is_written_while_it_stands_still(data_dir: &Path) {
    // What is stopped in the middle of `vfork` cannot be written before it goes on. Whoever interrupts CRIU early on a busy
    // host may leave a process there.
    let mut host = counting_in("bash", data_dir).await;
    let mut counted = goes_on(&host, 0).await;
    for wait_ms in [None, Some(10), Some(25), Some(60)] {
        stop(&host).await;
        let cancel = CancellationToken::new();
        let (written, ()) = tokio::join!(host.node.pause(to_disk(&host), cancel.clone()), async {
            // Interrupts it at a moment that may be any, or before it can be complete.
            if let Some(wait_ms) = wait_ms {
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            }
            cancel.cancel();
        });
        let kept = match written {
            Err(NodeError::Cancelled) => Kept::Memory,
            written => written.unwrap().kept,
        };
        match kept {
            Kept::Memory => stands_still(&host.id),
            _ => assert_eq!((wait_ms.is_some(), processes(&host.id)), (true, Vec::new())),
        }
        resume(&host, kept).await.unwrap();
        counted = goes_on(&host, counted).await;
    }
    // What cannot be written.
    host.run("touch /dev/mqueue/queue").await;
    stop(&host).await;
    assert_eq!(pause(&host).await.kept, Kept::Memory);
    stands_still(&host.id);
    resume(&host, Kept::Memory).await.unwrap();
    counted = goes_on(&host, counted).await;
    host.run("rm /dev/mqueue/queue").await;
    // The end of the platform interrupts it, too. The next one is told that it is paused in memory.
    let mut attempts = 0;
    loop {
        stop(&host).await;
        let (written, ()) = tokio::join!(host.node.pause(to_disk(&host), CancellationToken::new()), async {
            // At a moment that may be any before it is complete.
            tokio::time::sleep(Duration::from_millis(5)).await;
            host.node.release().await;
        });
        let kept = match written {
            Err(NodeError::Cancelled) => Kept::Memory,
            written => written.unwrap().kept,
        };
        if kept == Kept::Memory {
            stands_still(&host.id);
        }
        host = is_found_as(kept, host, data_dir).await;
        if kept == Kept::Memory {
            stands_still(&host.id);
            break;
        }
        // On a busy machine it may be complete before.
        attempts += 1;
        assert!(attempts < ATTEMPTS, "it is never interrupted");
        assert_eq!(processes(&host.id), []);
        resume(&host, kept).await.unwrap();
        counted = goes_on(&host, counted).await;
    }
    // It can be written from there. Nobody has heard of that when the platform ends.
    assert_eq!(pause(&host).await.kept, Kept::Checkpoint);
    assert_eq!(processes(&host.id), []);
    host.node.release().await;
    host = is_found_as(Kept::Checkpoint, host, data_dir).await;
    resume(&host, Kept::Checkpoint).await.unwrap();
    goes_on(&host, counted).await;
    // A kill while it is written.
    let mut attempts = 0;
    loop {
        stop(&host).await;
        let (written, killed) = tokio::join!(host.node.pause(to_disk(&host), CancellationToken::new()), async {
            // At a moment that may be any before it is complete.
            tokio::time::sleep(Duration::from_millis(10)).await;
            host.node.kill(&host.id).await
        });
        killed.unwrap();
        assert_eq!(processes(&host.id), []);
        host.node.release().await;
        assert_eq!(disks(data_dir), 0);
        match written {
            Err(NodeError::NotFound(_)) => break,
            written => assert_eq!(written.unwrap().kept, Kept::Checkpoint),
        }
        attempts += 1;
        assert!(attempts < ATTEMPTS, "it is never interrupted");
        until_without_groups(&host.id).await;
        drop(host);
        host = counting_in("bash", data_dir).await;
        goes_on(&host, 0).await;
    }
}

/// The next platform, which is told that the sandbox is paused in memory, and finds this.
async fn is_found_as(kept: Kept, host: Host, data_dir: &Path) -> Host {
    drop(host);
    let host = open(data_dir).await;
    let state = WantedState::Paused(Kept::Memory);
    let adopted = host.node.reconcile(vec![wanted(&host.id, state)]).await.unwrap();
    let id = host.id.clone();
    let state = AdoptedState::Paused(kept);
    assert_eq!(adopted, [Adopted { id, state }]);
    host
}

/// A checkpoint that could not be removed when the pause it was written for failed: the sandbox went on, and has done more since.
/// Who finds both when the platform starts must not ever take it for what the sandbox is.
pub(super) async fn an_old_one_of_what_runs_is_forgotten(data_dir: &Path) {
    let host = counting(data_dir).await;
    let mut counted = goes_on(&host, 0).await;
    assert_eq!(pause(&host).await.kept, Kept::Checkpoint);
    let checkpoint = kept_of(data_dir, &host.id).join("image");
    let old = data_dir.join("old-checkpoint");
    fs::rename(&checkpoint, &old).unwrap();
    copy_files(&old, &checkpoint);
    resume(&host, Kept::Checkpoint).await.unwrap();
    counted = goes_on(&host, counted).await;
    host.node.release().await;
    drop(host);
    fs::rename(&old, &checkpoint).unwrap();

    let host = open(data_dir).await;
    let state = WantedState::Running;
    let adopted = host.node.reconcile(vec![wanted(&host.id, state)]).await.unwrap();
    assert_eq!(adopted, [super::running(&host.id)]);
    counted = goes_on(&host, counted).await;
    assert!(
        !checkpoint.exists(),
        "the old checkpoint is beside the disk of a sandbox that runs"
    );

    // Its processes stand still when the next platform starts: they are what was paused, and go on.
    let request = PauseSandbox {
        keep: Kept::Memory,
        ..to_disk(&host)
    };
    let paused = host.node.pause(request, CancellationToken::new()).await.unwrap();
    assert_eq!(paused.kept, Kept::Memory);
    host.node.release().await;
    drop(host);
    let host = open(data_dir).await;
    let state = WantedState::Paused(Kept::Memory);
    let adopted = host.node.reconcile(vec![wanted(&host.id, state)]).await.unwrap();
    let state = AdoptedState::Paused(Kept::Memory);
    let id = host.id.clone();
    assert_eq!(adopted, [Adopted { id, state }]);
    resume(&host, Kept::Memory).await.unwrap();
    goes_on(&host, counted).await;
    host.node.kill(&host.id).await.unwrap();
    host.node.release().await;
}

/// Copies the files of a checkpoint, which has no directories.
fn copy_files(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

pub(super) async fn damaged_checkpoints_are_refused(data_dir: &Path) {
    let host = counting(data_dir).await;
    goes_on(&host, 0).await;
    assert_eq!(pause(&host).await.kept, Kept::Checkpoint);
    let checkpoint = kept_of(data_dir, &host.id).join("image");
    let core = checkpoint.join("core-1.img");
    let whole = fs::read(&core).unwrap();
    fs::write(&core, &whole[..whole.len() / 2]).unwrap();
    resume(&host, Kept::Checkpoint).await.unwrap_err();
    assert_eq!(processes(&host.id), []);
    // It is as it was, and can be repaired.
    fs::write(&core, &whole).unwrap();
    resume(&host, Kept::Checkpoint).await.unwrap();
    goes_on(&host, 0).await;
    // Without a checkpoint it starts anew from its disk.
    assert_eq!(pause(&host).await.kept, Kept::Checkpoint);
    fs::remove_dir_all(&checkpoint).unwrap();
    resume(&host, Kept::Checkpoint).await.unwrap_err();
    resume(&host, Kept::Filesystem).await.unwrap();
    assert!(count(&host).await > 0);
    host.node.kill(&host.id).await.unwrap();
    host.node.release().await;
}
