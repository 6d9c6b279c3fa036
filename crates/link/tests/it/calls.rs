//! Calls and streams over a connection.

use std::sync::Arc;
use std::time::Duration;

use model::capacity::{Bounds, PermitRequest, Purpose};
use model::id::{BuildId, SandboxId};
use model::lifecycle::Kept;
use model::network::EgressPolicy;
use model::resources::Resources;
use model::secret::Secret;
use protocol::agent::Init;
use protocol::node::{
    Expired, ExpiredSandbox, Image, LayerStream, NodeApi as _, NodeDeadline, NodeError, NodeEvent, Overdue, PackMemory,
    PackSandbox, StartSandbox, UnpackMemory, UnpackSandbox,
};
use protocol::parcel::{ChunkId, Record};
use testkit::node::{Behaviour, FakeNode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::place::{BOUND, TestServer, until};

fn sandbox() -> SandboxId {
    "iabc".parse().unwrap()
}

/// A server inside the sandboxes of `node` that returns what it reads, and returns nothing at the end.
async fn echo(node: &FakeNode) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    *node.origin.lock() = Some(listener.local_addr().unwrap());
    node.running.lock().insert(sandbox());
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = socket.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
}

#[tokio::test]
async fn everything_crosses_the_link() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let node = FakeNode::new();
    echo(&node).await;
    let serving = place.connected(&node, &credentials).await;
    let remote = &place.session().node;

    assert!(remote.capacity().await.unwrap().left.memory_available_bytes > 0);
    let missing: SandboxId = "inone".parse().unwrap();
    assert_eq!(
        remote.set_egress(&missing, Default::default()).await,
        Err(NodeError::NotFound(missing))
    );
    let deadline = NodeDeadline {
        left: Duration::from_millis(1500),
        then: Overdue::Pause(Kept::Checkpoint),
    };
    remote.set_deadline(&sandbox(), deadline).await.unwrap();
    assert_eq!(node.deadlines.told.lock()[&sandbox()], deadline);
    let expired = ExpiredSandbox {
        id: sandbox(),
        ago: Duration::from_secs(1),
        outcome: Expired::Ended,
    };
    node.deadlines.expired.lock().push(expired.clone());
    assert_eq!(remote.expired().await, Ok(vec![expired]));
    remote.forget_expired(vec![sandbox()]).await.unwrap();
    assert_eq!(remote.expired().await, Ok(Vec::new()));
    let mut events = remote.subscribe().await.unwrap();
    assert!(matches!(events.next().await, Some(NodeEvent::Snapshot(_))));
    node.report(NodeEvent::Ending(sandbox())).await;
    assert_eq!(events.next().await, Some(NodeEvent::Ending(sandbox())));
    // What follows it, so that nothing else is on its way.
    assert!(matches!(events.next().await, Some(NodeEvent::DiskStops(_))));

    // More than a window in both directions, and an end of one half.
    let mut stream = remote.dial(&sandbox(), 80).await.unwrap();
    let sent: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let (mut read, mut write) = tokio::io::split(&mut stream);
    let writing = async {
        write.write_all(&sent).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let ((), count) = tokio::join!(writing, read.read_to_end(&mut received));
    assert_eq!(count.unwrap(), sent.len());
    assert!(received == sent);

    let layer = FakeNode::layer(1);
    assert_eq!(
        remote.export_layer(&layer).await.err(),
        Some(NodeError::NoLayer(layer.clone()))
    );
    node.layers.lock().insert(layer.clone(), 4096);
    let archive = remote.export_layer(&layer).await.unwrap();
    node.layers.lock().clear();
    assert_eq!(remote.import_layer(&layer, 4096, archive).await.unwrap().layer, layer);

    serving.abort();
    until(|| !remote.is_connected()).await;
    assert_eq!(remote.capacity().await, Err(NodeError::Away));
    assert_eq!(events.next().await, None);
    place.close().await;
}

/// The request of a start, and of the permit that it brings.
fn start(id: &SandboxId) -> StartSandbox {
    let permit = PermitRequest {
        id: id.clone(),
        number: u64::MAX,
        purpose: Purpose::Wanted,
        bounds: Bounds {
            max_sandboxes: Some(1),
            ..Bounds::default()
        },
        reads_again: true,
    };
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
        permit: Some(permit),
    }
}

#[tokio::test]
async fn a_start_brings_its_permit_across_the_link() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let node = FakeNode::new();
    let _serving = place.connected(&node, &credentials).await;
    let remote = &place.session().node;
    let (first, second) = (start(&sandbox()), start(&"inext".parse().unwrap()));
    remote.start(first.clone()).await.unwrap();
    assert_eq!(node.started.lock()[0].permit, first.permit);
    // The reason is that of the permit.
    let refused = NodeError::Capacity("sandbox limit reached (1 of 1)".to_owned());
    assert_eq!(remote.start(second.clone()).await, Err(refused));
    assert_eq!((node.ids().len(), node.counted()), (1, 1));

    // A start without one is that of the version before, in both directions.
    let mut before = serde_json::to_value(&second).unwrap();
    before.as_object_mut().unwrap().remove("permit").unwrap();
    let read: StartSandbox = serde_json::from_value(before.clone()).unwrap();
    assert_eq!(read.permit, None);
    assert_eq!(serde_json::to_value(&read).unwrap(), before);
}

#[tokio::test]
async fn parcels_cross_the_link_both_ways() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let node = FakeNode::new();
    let serving = place.connected(&node, &credentials).await;
    let remote = &place.session().node;
    let pack = |known: Vec<ChunkId>| PackSandbox {
        id: sandbox(),
        parcel: "p1".to_owned(),
        key: Secret::new("the-key".to_owned()),
        known,
    };
    let missing = remote.pack_sandbox(pack(Vec::new())).await.err();
    assert_eq!(missing, Some(NodeError::NotFound(sandbox())));
    node.paused.lock().insert(sandbox());
    let mut stream = remote.pack_sandbox(pack(Vec::new())).await.unwrap();
    let chunk = Record::read(&mut stream).await.unwrap();
    let Record::Chunk(id, content) = &chunk else {
        panic!("{chunk:?}");
    };
    assert_eq!(content.len(), 1 << 20);
    let manifest = Record::read(&mut stream).await.unwrap();
    assert!(Record::read(&mut stream).await.is_err());
    let mut stream = remote.pack_sandbox(pack(vec![*id])).await.unwrap();
    assert_eq!(Record::read(&mut stream).await.unwrap(), Record::Known(*id));

    node.paused.lock().clear();
    let request = |parcel: &str| UnpackSandbox {
        id: sandbox(),
        parcel: parcel.to_owned(),
        key: Secret::new("the-key".to_owned()),
        with_processes: true,
    };
    assert!(!format!("{:?} {:?}", pack(Vec::new()), request("p1")).contains("the-key"));
    let sent = |records: &[Record]| {
        let mut sent = Vec::new();
        for record in records {
            let (head, content) = record.clone().encode();
            sent.extend(head);
            sent.extend_from_slice(&content);
        }
        LayerStream::new(std::io::Cursor::new(sent))
    };
    let all = [manifest.clone(), chunk.clone()];
    let refused = remote.unpack_sandbox(request("p2"), sent(&all)).await;
    assert!(matches!(refused, Err(NodeError::Refused(_))), "{refused:?}");
    // Its end is that of the stream, and not of a connection.
    let cut = remote.unpack_sandbox(request("p1"), sent(&all[..1])).await;
    assert!(matches!(cut, Err(NodeError::Unavailable(_))), "{cut:?}");
    assert!(!node.paused.lock().contains(&sandbox()));
    let unpacked = remote.unpack_sandbox(request("p1"), sent(&all)).await.unwrap();
    assert_eq!((unpacked.kept, unpacked.disk_bytes), (Kept::Filesystem, 1 << 20));
    assert!(unpacked.without_processes.is_some() && node.paused.lock().contains(&sandbox()));

    let build: BuildId = "11111111-2222-4333-8444-555555555555".parse().unwrap();
    let pack = PackMemory {
        build: build.clone(),
        parcel: "p1".to_owned(),
        key: Secret::new("the-key".to_owned()),
        known: vec![*id],
    };
    let missing = remote.pack_memory(pack.clone()).await.err();
    assert!(matches!(missing, Some(NodeError::Unavailable(_))), "{missing:?}");
    node.memories.lock().insert(build.clone(), Image::Base);
    let mut stream = remote.pack_memory(pack.clone()).await.unwrap();
    assert_eq!(Record::read(&mut stream).await.unwrap(), Record::Known(*id));
    let manifest = Record::read(&mut stream).await.unwrap();
    node.memories.lock().clear();
    let request = |parcel: &str| UnpackMemory {
        build: build.clone(),
        parcel: parcel.to_owned(),
        key: Secret::new("the-key".to_owned()),
    };
    assert!(!format!("{pack:?} {:?}", request("p1")).contains("the-key"));
    let all = [manifest, chunk.clone()];
    let refused = remote.unpack_memory(request("p2"), sent(&all)).await;
    assert!(matches!(refused, Err(NodeError::Refused(_))), "{refused:?}");
    assert!(node.memories.lock().is_empty());
    let kept = remote.unpack_memory(request("p1"), sent(&all)).await.unwrap();
    assert_eq!((&kept.build, kept.bytes), (&build, 1 << 20));
    assert!(node.memories.lock().contains_key(&build));

    assert_eq!(remote.away_for(), None);
    serving.abort();
    until(|| remote.away_for().is_some()).await;
    place.close().await;
}

#[tokio::test]
async fn what_nobody_reads_holds_up_nothing_else() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let node = FakeNode::new();
    echo(&node).await;
    let _serving = place.connected(&node, &credentials).await;
    let remote = &place.session().node;
    // Each byte is a frame of its own, and comes back in one.
    let mut stuck = Vec::new();
    for _ in 0..24 {
        let mut stream = remote.dial(&sandbox(), 80).await.unwrap();
        let writing = async {
            loop {
                stream.write_all(&[1; 16]).await.unwrap();
            }
        };
        // Until it stalls, because nobody reads what comes back.
        let _ = tokio::time::timeout(Duration::from_millis(50), writing).await;
        stuck.push(stream);
    }
    for _ in 0..20 {
        let called = tokio::time::timeout(BOUND, remote.capacity()).await;
        called.expect("a call is not held up").unwrap();
    }
    let mut stream = remote.dial(&sandbox(), 80).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut read = [0; 5];
    let reading = tokio::time::timeout(BOUND, stream.read_exact(&mut read)).await;
    reading.expect("another stream is not held up").unwrap();
    assert_eq!(&read, b"hello");
    // What was cut by this side is over for the node, too: it has places for others.
    drop(stuck);
    for _ in 0..2000 {
        drop(remote.dial(&sandbox(), 80).await.unwrap());
    }
    remote.capacity().await.unwrap();
    place.close().await;
}

#[tokio::test]
async fn a_call_goes_on_when_its_connection_is_lost() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let node = FakeNode::new();
    node.running.lock().insert(sandbox());
    *node.kill.lock() = Behaviour::Waits;
    let (_, connection) = link::connect(&place.address, &credentials, &crate::place::hello())
        .await
        .unwrap();
    let calls = link::Calls::on(tokio::runtime::Handle::current());
    let (serving_node, tracked) = (Arc::clone(&node), calls.clone());
    let serving = tokio::spawn(async move { link::serve(serving_node, connection, &tracked).await });
    until(|| place.session().node.is_connected()).await;
    let remote = place.session().node;
    let killing = tokio::spawn(async move { remote.kill(&sandbox()).await });
    node.waiting.notified().await;
    serving.abort();
    assert!(matches!(killing.await.unwrap(), Err(NodeError::Unreachable(_))));
    assert!(node.running.lock().contains(&sandbox()));
    node.go.notify_one();
    tokio::time::timeout(BOUND, calls.ended()).await.unwrap();
    assert!(!node.running.lock().contains(&sandbox()));
    place.close().await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_is_gone_without_a_word_is_noticed() {
    // Both ends are open and nothing moves, as when a cable was cut.
    let remote = link::RemoteNode::default();
    let (near, _far) = tokio::io::duplex(1 << 20);
    let begun = tokio::time::Instant::now();
    let error = remote.carry(near, &tokio_util::sync::CancellationToken::new()).await;
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    assert!(begun.elapsed() <= Duration::from_secs(16));
    assert!(!remote.is_connected());
}

#[tokio::test]
async fn connections_are_carried_on_the_lanes_in_turn() {
    let lane = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().unwrap()
    };
    let lanes = [lane(), lane()];
    let handles: Vec<_> = lanes.iter().map(|lane| lane.handle().clone()).collect();
    let tasks = |lane: usize| handles[lane].metrics().num_alive_tasks();
    let authority = Arc::new(crate::place::authority());
    let place = TestServer::on(authority, 100, handles.clone()).await;
    // To join is a connection of its own.
    let credentials = place.joined().await;
    until(|| tasks(0) == 0).await;
    let node = FakeNode::new();
    node.running.lock().insert(sandbox());
    let serving = place.connected(&node, &credentials).await;
    assert_eq!((tasks(0), tasks(1) > 0), (0, true));
    place.session().node.kill(&sandbox()).await.unwrap();
    serving.abort();
    until(|| tasks(1) == 0).await;
    place.close().await;
    for lane in lanes {
        lane.shutdown_background();
    }
}
