//! Tests of the node with real sandboxes and the real agent, as root: log entries, measurement, adoption. Not a libtest
//! binary: the driver executes `/proc/self/exe` as its launcher and as the agent, so this program plays those parts
//! too.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test program of its own"
)]

mod checkpoints;
mod layers;
mod memory;
mod mounts;
mod pause;
mod snapshots;
mod teardown;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use model::id::SandboxId;
use model::log::Level;
use model::network::EgressPolicy;
use model::resources::Resources;
use node::{Node, NodeSettings};
use protocol::agent::Init;
use protocol::connect::Codec;
use protocol::node::{
    Adopted, AdoptedState, Image, Logger, NodeApi, NodeEvent, NodeEvents, SandboxLog, SandboxSample, Snapshot,
    StartSandbox, Wanted, WantedState,
};
use protocol::process::{ProcessConfig, StartRequest};
use runtime::settings::{CriuChoice, DriverSettings};
use rustix::process::{Pid, Signal};
use testkit::privileged::{self, Subcommand, passes};

const RESOURCES: Resources = Resources {
    cpu_count: 1,
    memory_mb: 64,
    disk_mb: 64,
    pids: 50,
};

/// Maximum wait for an asynchronous event. An agent gives a stopped spawner ten seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let parts: [Subcommand; 3] = [
        ("launcher", runtime::launcher::main),
        ("agent", agent::run),
        ("spawner", agent::spawner::run),
    ];
    privileged::main(&parts, run_all)
}

fn run_all() -> Vec<bool> {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let dir = dir.path();
    vec![
        passed(
            "a disk is copied at one moment, while the sandbox runs on",
            dir,
            snapshots::copies_a_disk_in_use(dir),
        ),
        passed(
            "a copy without a sandbox is removed by the next platform",
            dir,
            snapshots::copies_do_not_outlive_the_platform(dir),
        ),
        passed(
            "sandboxes go on from the memory of a snapshot, or start from its files",
            dir,
            memory::goes_on_in_others(dir),
        ),
        passed(
            "a sandbox whose processes are on disk continues where it was",
            dir,
            checkpoints::continues_where_it_was(dir),
        ),
        passed(
            "mounts are those of the list after a start and after a restore",
            dir,
            mounts::are_those_of_the_list(dir),
        ),
        passed(
            "what cannot be written stays in memory",
            dir,
            checkpoints::stays_in_memory(dir),
        ),
        passed(
            "what is written after its pause stands still until then",
            dir,
            checkpoints::is_written_while_it_stands_still(dir),
        ),
        passed(
            "an old checkpoint of a sandbox that runs is forgotten",
            dir,
            checkpoints::an_old_one_of_what_runs_is_forgotten(dir),
        ),
        passed(
            "a damaged checkpoint is refused, and the disk is kept",
            dir,
            checkpoints::damaged_checkpoints_are_refused(dir),
        ),
        passed(
            "a sandbox is logged and measured from start to end",
            dir,
            logs_and_measures_a_sandbox(dir),
        ),
        passed(
            "a sandbox is paused on its disk, and starts anew there",
            dir,
            pause::only_the_disk_is_kept(dir),
        ),
        passed(
            "a sandbox that is paused in memory stands still until it is resumed",
            dir,
            pause::stands_still_and_goes_on(dir),
        ),
        passed(
            "a sandbox that is paused in memory ends with its processes",
            dir,
            pause::ends_while_it_is_paused(dir),
        ),
        passed(
            "sandboxes become layers, and share them",
            dir,
            layers::sandboxes_become_layers(dir),
        ),
        passed(
            "what is left of ended sandboxes is gone before a node is",
            dir,
            teardown::is_over_before_the_node_is(dir),
        ),
        passed("twenty steps are merged", dir, layers::many_steps(dir)),
        passed("images need nothing of base", dir, layers::images_without_base(dir)),
        passed(
            "what cannot be a layer is refused",
            dir,
            layers::what_cannot_be_a_layer(dir),
        ),
    ]
}

/// Runs one test, and removes what it left: all of them use one data directory, and give their sandboxes the same names. The end
/// of a node does not wait until the kernel has let go of a sandbox that was just killed.
fn passed(name: &str, data_dir: &Path, test: impl Future<Output = ()>) -> bool {
    passes(name, || block_on(test))
        & passes("nothing of it is left", || {
            block_on(async {
                let host = open(data_dir).await;
                host.node.remove_everything().await.unwrap();
                checkpoints::until_without_groups(&host.id).await;
            });
        })
}

fn block_on(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work);
}

struct Host {
    node: Arc<Node>,
    events: NodeEvents,
    id: SandboxId,
}

async fn open(data_dir: &Path) -> Host {
    let settings = NodeSettings {
        driver: DriverSettings {
            launchers: 1,
            disks_mb: vec![RESOURCES.disk_mb],
            criu: CriuChoice::At(checkpoints::criu()),
            ..DriverSettings::new(data_dir.to_owned())
        },
        process_rate: None,
        ..NodeSettings::new(data_dir.to_owned())
    };
    let node = Node::start(settings).await.unwrap();
    let mut events = node.subscribe().await.unwrap();
    assert_eq!(events.next().await, Some(NodeEvent::Snapshot(Snapshot::default())));
    Host {
        node,
        events,
        // Another run of these tests may be under way on this host.
        id: format!("inode{}", std::process::id()).parse().unwrap(),
    }
}

impl Host {
    /// The next event.
    async fn event(&mut self) -> NodeEvent {
        tokio::time::timeout(TIMEOUT, self.events.next())
            .await
            .unwrap()
            .unwrap()
    }

    /// The next event, which must be a log entry.
    async fn any_entry(&mut self) -> SandboxLog {
        match self.event().await {
            NodeEvent::Log(entry) => entry,
            other => panic!("not a log entry: {other:?}"),
        }
    }

    /// The next log entry, which must have this `event_type`.
    async fn entry(&mut self, event_type: &str) -> SandboxLog {
        let entry = self.any_entry().await;
        assert_eq!(entry.fields["event_type"], event_type, "{entry:?}");
        assert_eq!(entry.id, self.id);
        entry
    }

    async fn run(&self, script: &str) -> String {
        run(&self.node, &self.id, script).await
    }

    async fn sample(&self) -> SandboxSample {
        let mut samples = self.node.samples().await.unwrap();
        assert_eq!(samples.len(), 1);
        samples.remove(0)
    }

    /// The agent's pid on the host. It is not always the lowest of the sandbox, because pids begin anew.
    async fn agent(&self) -> i32 {
        self.part("agent", "").await
    }

    /// The spawner's pid on the host.
    async fn spawner(&self) -> i32 {
        self.part("spawner", "/work").await
    }

    /// The pid on the host of a process of the platform in the sandbox, by its command line and the end of its group.
    async fn part(&self, name: &str, side: &str) -> i32 {
        let group = format!("/{}.0.", self.id);
        let is_it = |process: &Path| {
            let read = |file: &str| fs::read_to_string(process.join(file)).unwrap_or_default();
            let is_its_group = |line: &str| line.contains(&group) && line.ends_with(side);
            read("cmdline").split('\0').nth(1) == Some(name) && read("cgroup").lines().any(is_its_group)
        };
        let deadline = Instant::now() + TIMEOUT;
        loop {
            for entry in fs::read_dir("/proc").unwrap().flatten() {
                let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
                if let Some(pid) = pid.filter(|_| is_it(&entry.path())) {
                    return pid;
                }
            }
            assert!(Instant::now() < deadline, "no {name} is running");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Runs a script in a sandbox and returns the whole response body.
async fn run(node: &Node, id: &SandboxId, script: &str) -> String {
    let stream = node.dial(id, protocol::agent::PORT).await.unwrap();
    let (mut requests, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    let connection = tokio::task::spawn(connection);
    let config = ProcessConfig {
        cmd: "/bin/sh".to_owned(),
        args: vec!["-c".to_owned(), script.to_owned()],
        ..ProcessConfig::default()
    };
    let start = StartRequest {
        process: Some(config),
        ..StartRequest::default()
    };
    let request = hyper::Request::post("/process.Process/Start")
        .header("host", "sandbox")
        .header("content-type", Codec::Json.stream_content_type())
        .body(Full::new(Codec::Json.envelope(&start)))
        .unwrap();
    let answer = requests.send_request(request).await.unwrap();
    let body: Bytes = answer.into_body().collect().await.unwrap().to_bytes();
    connection.abort();
    String::from_utf8_lossy(&body).into_owned()
}

/// Waits for what happens after an answer, with a deadline.
async fn until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn signal(pid: i32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

async fn logs_and_measures_a_sandbox(data_dir: &Path) {
    let mut host = open(data_dir).await;
    host.node.start(request(&host.id)).await.unwrap();
    let entry = host.entry("sandbox_start").await;
    assert_eq!((entry.level, entry.logger), (Level::Info, Logger::Sandbox));
    assert_eq!(entry.fields["memory_mb"], "64");
    assert!(entry.at_us > 1_700_000_000_000_000);

    is_measured(&mut host).await;
    is_killed_for_memory(&mut host).await;
    // A spawner that was killed is replaced, and so is one that was stopped.
    gets_a_new_spawner(&mut host, Signal::KILL).await;
    gets_a_new_spawner(&mut host, Signal::STOP).await;
    let mut host = is_adopted_by_the_next_platform(host, data_dir).await;

    host.node.kill(&host.id).await.unwrap();
    assert_eq!(host.entry("sandbox_end").await.level, Level::Info);
    assert_eq!(host.node.samples().await.unwrap(), []);
}

/// Number of sandbox disks in the data directory.
fn disks(data_dir: &Path) -> usize {
    let entries = fs::read_dir(data_dir.join("disks")).unwrap();
    let images = entries.filter(|entry| {
        entry
            .as_ref()
            .unwrap()
            .path()
            .extension()
            .is_some_and(|name| name == "img")
    });
    images.count()
}

fn running(id: &SandboxId) -> Adopted {
    Adopted {
        id: id.clone(),
        state: AdoptedState::Running,
    }
}

fn wanted(id: &SandboxId, state: WantedState) -> Wanted {
    Wanted {
        id: id.clone(),
        state,
        egress: EgressPolicy::default(),
        deadline: None,
    }
}

fn request(id: &SandboxId) -> StartSandbox {
    StartSandbox {
        id: id.clone(),
        template: "base0000000000000000".parse().unwrap(),
        image: Image::Base,
        resources: RESOURCES,
        init: Init {
            default_user: Some("user".to_owned()),
            ..Init::default()
        },
        egress: EgressPolicy::default(),
        memory: None,
        owner: None,
        deadline: None,
        permit: None,
    }
}

async fn is_measured(host: &mut Host) {
    let before = host.sample().await;
    let answer = host
        .run("head -c 4000000 /dev/urandom > f; printf 1234; : secret")
        .await;
    assert!(answer.contains("exit status 0"), "{answer}");
    let entry = host.entry("process_start").await;
    assert_eq!((&*entry.fields["command"], &*entry.fields["user"]), ("head", "user"));
    assert_eq!(entry.logger, Logger::Process);
    let entry = host.entry("process_end").await;
    assert_eq!(
        (&*entry.fields["exit_code"], &*entry.fields["stdout_bytes"]),
        ("0", "4")
    );
    let after = host.sample().await;
    let both = format!("{before:?} {after:?}");
    assert!(after.at_us > before.at_us, "{both}");
    assert!(after.cpu_time_us > before.cpu_time_us, "{both}");
    assert!(
        after.memory_cache_bytes >= before.memory_cache_bytes + 3_000_000,
        "{both}"
    );
    assert!(after.memory_used_bytes < before.memory_used_bytes + 3_000_000, "{both}");
    assert!(after.disk_used_bytes >= before.disk_used_bytes + 4_000_000, "{both}");
    assert_eq!(after.memory_total_bytes, 64 << 20);
    let free = host.node.capacity().await.unwrap().left;
    assert!(free.memory_available_bytes > 0 && free.disk_available_bytes > 0);
}

async fn is_killed_for_memory(host: &mut Host) {
    let answer = host.run("exec tail /dev/zero").await;
    assert!(answer.contains("killed"), "{answer}");
    host.entry("process_start").await;
    let entry = host.entry("process_end").await;
    assert_eq!(entry.fields["process_result"], "signal: killed");
    assert_eq!(host.entry("out_of_memory").await.level, Level::Warn);
}

async fn gets_a_new_spawner(host: &mut Host, how: Signal) {
    let old = host.spawner().await;
    signal(old, how);
    if how == Signal::STOP {
        let answer = host.run("true").await;
        assert!(answer.contains("unavailable"), "{answer}");
        host.entry("process_start_failed").await;
    }
    assert_eq!(host.entry("spawner_replaced").await.level, Level::Warn);
    let deadline = Instant::now() + TIMEOUT;
    while Path::new(&format!("/proc/{old}")).exists() {
        assert!(Instant::now() < deadline, "the old spawner has not exited");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let answer = host.run("true").await;
    assert!(answer.contains("exit status 0"), "{answer}");
    host.entry("process_start").await;
    host.entry("process_end").await;
}

/// The next platform adopts the sandbox and receives events that happened without a platform.
async fn is_adopted_by_the_next_platform(mut host: Host, data_dir: &Path) -> Host {
    let (node, id) = (Arc::clone(&host.node), host.id.clone());
    let waiting = tokio::task::spawn(async move {
        run(&node, &id, "while [ ! -e go ]; do sleep 0.05; done; exit 7").await;
    });
    host.entry("process_start").await;
    host.node.release().await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    // The agent gets this request while no platform follows its events.
    run(&host.node, &host.id, "touch go").await;
    let id = host.id.clone();
    drop(host);

    let mut host = open(data_dir).await;
    let adopted = host
        .node
        .reconcile(vec![wanted(&id, WantedState::Running)])
        .await
        .unwrap();
    assert_eq!(adopted, [running(&id)]);
    host.entry("sandbox_adopted").await;
    let mut ends = Vec::new();
    while ends.len() < 2 {
        let entry = host.any_entry().await;
        if entry.fields["event_type"] == "process_end" {
            ends.push(entry.fields["exit_code"].clone());
        }
    }
    ends.sort();
    assert_eq!(ends, ["0", "7"]);
    host
}
