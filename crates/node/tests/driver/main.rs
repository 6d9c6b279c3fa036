//! Tests the node with a driver whose sandboxes are plain child processes: the node must not assume namespaces, control
//! groups, disks or TCP sockets. Not a libtest binary: the driver executes `/proc/self/exe` as the agent, so this
//! program plays that part too.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test program of its own")]

mod process;
mod stub;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use model::capacity::{Bounds, PermitRequest, Purpose};
use model::id::SandboxId;
use model::network::EgressPolicy;
use model::resources::Resources;
use node::Node;
use protocol::agent::Init;
use protocol::node::{DialError, Image, NodeApi, NodeError, NodeEvent, NodeEvents, StartSandbox, Wanted, WantedState};
use runtime::driver::{Driver as _, Unsupported};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::process::{BROKEN, Processes, SANDBOXES_MAX};

/// Maximum wait for an asynchronous event.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The port on which the stub listens.
const PORT: u16 = 8080;
/// Event types after a start: the stub's first spawner ends, and its second refuses to start a process.
const STARTED: [&str; 3] = ["sandbox_start", "spawner_replaced", "process_start_failed"];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("agent") {
        return stub::run(Path::new(&arguments.next().unwrap()));
    }
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(node_needs_only_the_driver_traits(dir.path()));
    println!("test the node runs sandboxes of a driver without isolation ... ok");
    let dir = tempfile::tempdir().unwrap();
    runtime.block_on(a_start_asks_for_its_permit_before_anything_is_begun(dir.path()));
    println!("test a start asks for its permit before anything is begun ... ok");
    ExitCode::SUCCESS
}

fn request(id: &SandboxId) -> StartSandbox {
    StartSandbox {
        id: id.clone(),
        template: "base0000000000000000".parse().unwrap(),
        image: Image::Base,
        resources: Resources::default(),
        init: Init::default(),
        egress: EgressPolicy::default(),
        memory: None,
        owner: None,
        deadline: None,
        permit: None,
    }
}

struct TestPlatform {
    driver: Arc<Processes>,
    node: Arc<Node>,
    events: NodeEvents,
}

impl TestPlatform {
    /// Opens the next platform on this directory and returns the sandboxes that it adopts.
    async fn open(dir: &Path, wanted: &[&SandboxId]) -> (Self, Vec<SandboxId>) {
        let driver = Processes::open(dir);
        let node = Node::with_driver(driver.clone(), 0, Bounds::default(), None).unwrap();
        let mut events = node.subscribe().await.unwrap();
        assert!(matches!(events.next().await, Some(NodeEvent::Snapshot(_))));
        let state = WantedState::Running;
        let wanted = wanted.iter().map(|id| Wanted {
            id: (*id).clone(),
            state,
            egress: EgressPolicy::default(),
            deadline: None,
        });
        let adopted = node.reconcile(wanted.collect()).await.unwrap();
        let adopted = adopted.into_iter().map(|adopted| adopted.id).collect();
        (Self { driver, node, events }, adopted)
    }

    async fn start(&self, id: &SandboxId) -> Result<(), NodeError> {
        let started = self.node.start(request(id)).await?;
        assert_eq!(started.agent_version, protocol::agent::VERSION);
        Ok(())
    }

    /// The next events, which must all be of this sandbox: log entries by their event types.
    async fn events_of(&mut self, id: &SandboxId, count: usize) -> Vec<String> {
        let mut events = Vec::new();
        while events.len() < count {
            let event = tokio::time::timeout(TIMEOUT, self.events.next()).await.unwrap();
            let (of, event) = match event.unwrap() {
                NodeEvent::Log(entry) => (entry.id, entry.fields["event_type"].clone()),
                NodeEvent::Ending(id) => (id, "ending".to_owned()),
                NodeEvent::Exited(id) => (id, "exited".to_owned()),
                other => panic!("{other:?}"),
            };
            assert_eq!(of, *id, "{event}");
            events.push(event);
        }
        events
    }

    /// Sends a line to the stub and returns the reply.
    async fn send_line(&self, id: &SandboxId, line: &str) -> String {
        let mut stream = self.node.dial(id, PORT).await.unwrap();
        stream.write_all(line.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn wait_until_left(&self, sandboxes: &[&SandboxId]) {
        let ids: Vec<&str> = sandboxes.iter().map(|id| id.as_str()).collect();
        let deadline = Instant::now() + TIMEOUT;
        while self.driver.entries("sandboxes") != ids || self.driver.entries("disks").len() != ids.len() {
            assert!(Instant::now() < deadline, "{:?}", self.driver);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn node_needs_only_the_driver_traits(dir: &Path) {
    let [one, two, three] = &["ione", "itwo", "ithree"].map(|id| id.parse::<SandboxId>().unwrap());
    let (mut first, adopted) = TestPlatform::open(dir, &[]).await;
    assert_eq!(adopted, []);
    assert!(!first.node.is_limited());

    // Started, and given a new spawner over a second control connection.
    first.start(one).await.unwrap();
    assert_eq!(first.events_of(one, 3).await, STARTED);
    assert_eq!(first.send_line(one, "ping\n").await, "ping\n");
    assert_eq!(first.node.dial(one, 1).await.unwrap_err(), DialError::PortClosed);
    assert_eq!(first.node.dial(two, PORT).await.unwrap_err(), DialError::Gone);
    assert_eq!(first.node.samples().await.unwrap(), []);
    assert_eq!(first.node.capacity().await.unwrap().left.disk_available_bytes, 2);

    // What an isolation lacks, it says.
    let running = first.driver.find().unwrap().remove(0).alive.unwrap();
    for error in [
        running.freeze().unwrap_err(),
        running.usage().unwrap_err(),
        running.sync().unwrap_err(),
    ] {
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
        assert!(error.get_ref().unwrap().is::<Unsupported>(), "{error}");
    }
    drop(running);

    // A rejected start does not affect existing sandboxes, and a failed one leaves nothing.
    let broken = BROKEN.parse().unwrap();
    assert!(first.start(&broken).await.is_err());
    assert!(first.start(one).await.is_err());
    first.wait_until_left(&[one]).await;
    first.start(two).await.unwrap();
    assert_eq!(SANDBOXES_MAX, 2);
    assert!(matches!(first.start(three).await, Err(NodeError::Capacity(_))));
    first.wait_until_left(&[one, two]).await;
    assert_eq!(first.events_of(two, 3).await, STARTED);

    // A sandbox that ends by itself is reported, and one that is killed is not.
    assert_eq!(first.send_line(two, "exit\n").await, "");
    let mut end = first.events_of(two, 3).await;
    end.sort();
    assert_eq!(end, ["ending", "exited", "sandbox_end"]);
    first.wait_until_left(&[one]).await;
    first.start(three).await.unwrap();
    assert_eq!(first.events_of(three, 3).await, STARTED);
    first.node.kill(three).await.unwrap();
    assert_eq!(first.events_of(three, 1).await, ["sandbox_end"]);
    assert_eq!(first.node.dial(three, PORT).await.unwrap_err(), DialError::Gone);
    assert!(matches!(first.node.kill(three).await, Err(NodeError::NotFound(_))));
    first.wait_until_left(&[one]).await;

    // The next platform finds existing sandboxes and removes the unwanted ones.
    first.start(two).await.unwrap();
    first.node.release().await;
    let (mut second, adopted) = TestPlatform::open(dir, &[one, three]).await;
    assert_eq!(adopted, std::slice::from_ref(one));
    second.wait_until_left(&[one]).await;
    assert_eq!(
        second.events_of(one, 2).await,
        ["sandbox_adopted", "process_start_failed"]
    );
    assert_eq!(second.send_line(one, "ping\n").await, "ping\n");
    second.node.remove_everything().await.unwrap();
    assert!(!dir.join("sandboxes").exists());
}

async fn a_start_asks_for_its_permit_before_anything_is_begun(dir: &Path) {
    const FLOOR_MB: u32 = 100;
    let [one, two, three] = &["ione", "itwo", "ithree"].map(|id| id.parse::<SandboxId>().unwrap());
    let driver = Processes::open(dir);
    let own = Bounds {
        memory_floor_mb: FLOOR_MB,
        ..Bounds::default()
    };
    let node = Node::with_driver(driver.clone(), 0, own, None).unwrap();
    let start = |id: &SandboxId, of: &SandboxId, max_sandboxes| {
        node.start(StartSandbox {
            permit: Some(PermitRequest {
                id: of.clone(),
                number: 1,
                purpose: Purpose::Wanted,
                bounds: Bounds {
                    max_sandboxes: Some(max_sandboxes),
                    ..Bounds::default()
                },
                reads_again: true,
            }),
            ..request(id)
        })
    };
    let refused = |why: &str| Err(NodeError::Capacity(why.to_owned()));
    let is_left = |ids: &[&str]| {
        assert_eq!(driver.entries("sandboxes"), ids);
        assert_eq!(driver.entries("disks").len(), ids.len());
    };

    // Its own floor. The next start gets the only place, so a refusal leaves no permit.
    driver
        .memory_bytes
        .store((u64::from(FLOOR_MB) << 20) - 1, Ordering::Relaxed);
    let short = refused("99 MiB of memory are available, and 100 MiB are reserved");
    assert_eq!(start(one, one, 1).await, short);
    is_left(&[]);
    driver.memory_bytes.store(u64::from(FLOOR_MB) << 20, Ordering::Relaxed);
    start(two, two, 1).await.unwrap();
    is_left(&["itwo"]);

    // The limit of the server that asks.
    assert_eq!(start(one, one, 1).await, refused("sandbox limit reached (1 of 1)"));
    is_left(&["itwo"]);
    // A permit of another sandbox would outlast the start.
    let mixed = start(one, three, 2).await;
    assert!(matches!(mixed, Err(NodeError::Failed(_))), "{mixed:?}");
    is_left(&["itwo"]);
    start(one, one, 2).await.unwrap();
    is_left(&["ione", "itwo"]);

    // A start that is given up is made all the same, as without a permit, and counts as a sandbox.
    node.kill(two).await.unwrap();
    let given_up = tokio::time::timeout(Duration::ZERO, start(three, three, 2)).await;
    assert!(given_up.is_err(), "{given_up:?}");
    let until = Instant::now() + TIMEOUT;
    while node.kill(three).await.is_err() {
        assert!(Instant::now() < until, "{driver:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Nothing is left of either.
    let again = start(two, two, 2).await;
    again.unwrap();
    assert_eq!(start(three, three, 2).await, refused("sandbox limit reached (2 of 2)"));
    node.remove_everything().await.unwrap();
}
