//! Life without a spawner, and with the next one.

use std::time::{Duration, Instant};

use protocol::connect::{Code, Codec};
use protocol::process::{ProcessConfig, StartRequest};

use protocol::agent::AgentEvent;

use crate::client::Client;
use crate::events::events;
use crate::sandbox::Sandbox;
use crate::sys;

fn echo() -> StartRequest {
    let config = ProcessConfig {
        cmd: "echo".to_owned(),
        args: vec!["hi".to_owned()],
        ..ProcessConfig::default()
    };
    StartRequest {
        process: Some(config),
        ..StartRequest::default()
    }
}

/// The sandbox's spawners, of which there is one once it was executed.
async fn spawners(sandbox: &Sandbox) -> Vec<i32> {
    loop {
        let spawners = sandbox.children("spawner");
        if !spawners.is_empty() {
            return spawners;
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

/// What the host is told until the news of the spawner's end.
async fn events_until_gone(host: &mut Client) -> Vec<AgentEvent> {
    let told = events(&host.get("/events").await.body);
    assert_eq!(told.last(), Some(&AgentEvent::SpawnerGone));
    told
}

#[tokio::test]
async fn a_killed_spawner_is_reported_and_replaced() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let program = sys::c_path(std::path::Path::new(env!("CARGO_BIN_EXE_ringfence-agent")));
    for _ in 0..2 {
        let mut host = sandbox.host().await;
        let watch = tokio::spawn(async move { events_until_gone(&mut host).await });
        let mut client = sandbox.client().await;
        let mut events = client.stream(Codec::Json, "Start", &echo()).await;
        events.started().await;
        assert_eq!(events.rest().await.out(), "hi\n");
        assert!(!watch.is_finished());

        for pid in spawners(&sandbox).await {
            sys::kill(pid, libc::SIGKILL);
        }
        // A start, an end, and this; what came after the last answer waited for this one.
        assert!(watch.await.unwrap().len() >= 3);
        assert_eq!(
            events_until_gone(&mut sandbox.host().await).await,
            [AgentEvent::SpawnerGone]
        );
        // Nobody inside may take its place, root included: a start that waits is not handed to them.
        let socket = protocol::agent::SPAWNER_SOCKET;
        let mut waiting = sandbox.client().await;
        let waiting = tokio::spawn(async move { waiting.stream(Codec::Json, "Start", &echo()).await.failed().await });
        for uid in [0, 1000] {
            let served = sys::is_served_inside(sandbox.agent, uid, socket, libc::SOCK_SEQPACKET, b"x");
            assert!(!served, "{uid}");
        }
        assert_eq!(waiting.await.unwrap().code, Code::Unavailable);
        sys::start_spawner(sandbox.agent, &program);
        // It connects in its own time, for which a start waits.
        let mut events = client.stream(Codec::Json, "Start", &echo()).await;
        events.started().await;
        let mut out = String::new();
        while let Ok(event) = events.next().await {
            out.push_str(&String::from_utf8_lossy(
                &event.data.unwrap_or_default().stdout.unwrap_or_default(),
            ));
        }
        assert_eq!(out, "hi\n");
        // Its children are the agent's, so nothing is left unreaped.
        assert_eq!(sandbox.children("spawner").len(), 1);
    }
}

#[tokio::test]
async fn starts_wait_for_the_next_spawner_but_not_forever() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for pid in spawners(&sandbox).await {
        sys::kill(pid, libc::SIGKILL);
    }
    assert_eq!(
        events_until_gone(&mut sandbox.host().await).await,
        [AgentEvent::SpawnerGone]
    );
    // Side by side: the second does not wait for the first to give up.
    let since = Instant::now();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..5 {
        let mut client = sandbox.client().await;
        waiting.spawn(async move { client.stream(Codec::Json, "Start", &echo()).await.failed().await });
    }
    for error in waiting.join_all().await {
        assert_eq!(error.code, Code::Unavailable);
        assert!(error.message.contains("spawner is gone"), "{}", error.message);
    }
    let waited = since.elapsed();
    assert!(
        (Duration::from_secs(5)..Duration::from_secs(40)).contains(&waited),
        "{waited:?}"
    );
    let told = events_until_gone(&mut sandbox.host().await).await;
    let failed = |event: &AgentEvent| matches!(event, AgentEvent::ProcessFailed { command, .. } if command == "echo");
    assert_eq!(told.len(), 6, "{told:?}");
    assert!(told[..5].iter().all(failed), "{told:?}");

    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..5 {
        let mut client = sandbox.client().await;
        waiting.spawn(async move {
            let mut events = client.stream(Codec::Proto, "Start", &echo()).await;
            events.started().await;
            events.rest().await.out().to_owned()
        });
    }
    let program = sys::c_path(std::path::Path::new(env!("CARGO_BIN_EXE_ringfence-agent")));
    sys::start_spawner(sandbox.agent, &program);
    assert_eq!(waiting.join_all().await, ["hi\n"; 5]);
}

#[tokio::test]
async fn a_spawner_that_dies_during_a_request_takes_nothing_with_it() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for pid in spawners(&sandbox).await {
        sys::kill(pid, libc::SIGSTOP);
    }
    let mut client = sandbox.client().await;
    let start = tokio::spawn(async move {
        let mut events = client.stream(Codec::Json, "Start", &echo()).await;
        events.started().await;
        events.rest().await.out().to_owned()
    });
    // The agent has one thread: a few answers later it has handed the request to the spawner, which does not move.
    let mut other = sandbox.client().await;
    for _ in 0..20 {
        assert_eq!(other.get("/health").await.status, 204);
        tokio::task::yield_now().await;
    }
    for pid in spawners(&sandbox).await {
        sys::kill(pid, libc::SIGKILL);
    }
    assert_eq!(other.get("/health").await.status, 204);
    assert_eq!(
        events_until_gone(&mut sandbox.host().await).await,
        [AgentEvent::SpawnerGone]
    );

    // It had not read the request, so the next one gets it.
    let program = sys::c_path(std::path::Path::new(env!("CARGO_BIN_EXE_ringfence-agent")));
    sys::start_spawner(sandbox.agent, &program);
    assert_eq!(start.await.unwrap(), "hi\n");
}
