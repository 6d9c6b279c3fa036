//! What the host is told of processes.

use http::Method;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::agent::AgentEvent;
use protocol::connect::Codec;
use protocol::process::{ProcessConfig, Pty, StartRequest};

use crate::client::{Client, full};
use crate::sandbox::Sandbox;

/// The events in whole lines.
pub(crate) fn events(lines: &[u8]) -> Vec<AgentEvent> {
    lines
        .split_inclusive(|byte| *byte == b'\n')
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

/// The host's open stream of events.
pub(crate) struct Told {
    body: Incoming,
    /// What was read and not returned, up to the middle of a line.
    read: Vec<u8>,
}

impl Told {
    pub(crate) async fn open(host: &mut Client) -> Self {
        let response = host.request(Method::GET, "/events", "", full("")).await;
        assert_eq!(response.status(), 200);
        Self {
            body: response.into_body(),
            read: Vec::new(),
        }
    }

    /// The next event; none when the agent cut the stream.
    pub(crate) async fn next(&mut self) -> Option<AgentEvent> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                return events(&self.read.drain(..=end).collect::<Vec<u8>>()).pop();
            }
            let data = self.body.frame().await?.ok()?.into_data().unwrap();
            self.read.extend_from_slice(&data);
        }
    }
}

fn shell(script: &str, pty: bool) -> StartRequest {
    let config = ProcessConfig {
        cmd: "/bin/sh".to_owned(),
        args: vec!["-c".to_owned(), script.to_owned()],
        envs: [("TOKEN".to_owned(), "secret-of-the-environment".to_owned())].into(),
        ..ProcessConfig::default()
    };
    StartRequest {
        process: Some(config),
        pty: pty.then(Pty::default),
        ..StartRequest::default()
    }
}

/// Runs something to its end and returns its pid.
async fn run(client: &mut Client, request: &StartRequest) -> u32 {
    let mut events = client.stream(Codec::Proto, "Start", request).await;
    let pid = events.started().await;
    events.rest().await;
    pid
}

#[tokio::test]
async fn starts_and_ends_are_told_without_what_was_said() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut host = sandbox.host().await;
    let mut told = Told::open(&mut host).await;
    let mut client = sandbox.client().await;
    let script = "printf 12345; printf 123 >&2; : secret-argument; exit 3";
    let pid = run(&mut client, &shell(script, false)).await;
    let start = told.next().await.unwrap();
    let expected = AgentEvent::ProcessStart {
        pid,
        command: "printf".to_owned(),
        user: "user".to_owned(),
        pty: false,
    };
    assert_eq!(start, expected);
    match told.next().await.unwrap() {
        AgentEvent::ProcessEnd {
            pid: of_end,
            command,
            exit_code: 3,
            status,
            stdout_bytes: 5,
            stderr_bytes: 3,
            pty_bytes: 0,
            ..
        } => assert_eq!((of_end, &*command, &*status), (pid, "printf", "exit status 3")),
        other => panic!("{other:?}"),
    }

    let pid = run(&mut client.user("root"), &shell("kill -9 $$; secret", true)).await;
    let start = told.next().await.unwrap();
    assert!(
        matches!(&start, AgentEvent::ProcessStart { command, user, pty: true, .. } if command == "kill" && user == "root"),
        "{start:?}"
    );
    let end = told.next().await.unwrap();
    assert!(
        matches!(&end, AgentEvent::ProcessEnd { pid: of_end, exit_code: -1, status, .. }
            if *of_end == pid && status == "signal: killed"),
        "{end:?}"
    );
    assert!(!format!("{start:?}{end:?}").contains("secret"));
}

#[tokio::test]
async fn events_wait_for_the_next_host() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let pid = run(&mut client, &shell("true", false)).await;
    let mut first_host = sandbox.host().await;
    let mut first = Told::open(&mut first_host).await;
    assert!(matches!(first.next().await, Some(AgentEvent::ProcessStart { pid: told, .. }) if told == pid));
    assert!(matches!(first.next().await, Some(AgentEvent::ProcessEnd { pid: told, .. }) if told == pid));
    // A platform that stops without a word leaves a connection that nobody reads. The next one takes over.
    let mut second_host = sandbox.host().await;
    let mut second = Told::open(&mut second_host).await;
    let pid = run(&mut client, &shell("true", false)).await;
    assert!(matches!(second.next().await, Some(AgentEvent::ProcessStart { pid: told, .. }) if told == pid));
    assert_eq!(first.next().await, None);
    assert!(matches!(second.next().await, Some(AgentEvent::ProcessEnd { pid: told, .. }) if told == pid));
}

#[tokio::test]
async fn what_nobody_reads_is_counted() {
    const RUNS: u32 = 300;
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    for _ in 0..RUNS {
        run(&mut client, &shell("true", false)).await;
    }
    let mut host = sandbox.host().await;
    let mut told = Told::open(&mut host).await;
    let mut kept = 0;
    let dropped = loop {
        match told.next().await.unwrap() {
            AgentEvent::ProcessStart { .. } | AgentEvent::ProcessEnd { .. } => kept += 1,
            AgentEvent::Dropped { count } => break count,
            other => panic!("{other:?}"),
        }
    };
    assert!(kept > 100, "{kept}");
    // The very last end may be on its way still.
    assert!(
        [2 * RUNS, 2 * RUNS - 1].map(u64::from).contains(&(kept + dropped)),
        "{kept} + {dropped}"
    );
    // From here on nothing is missing, once that one came.
    let pid = run(&mut client, &shell("true", false)).await;
    let next = loop {
        match told.next().await.unwrap() {
            AgentEvent::ProcessEnd { pid: of_end, .. } if of_end != pid => {}
            other => break other,
        }
    };
    assert!(
        matches!(next, AgentEvent::ProcessStart { pid: told, .. } if told == pid),
        "{next:?}"
    );
}
