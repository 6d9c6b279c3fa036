//! The agent's memory, which no cgroup limits: idle, with many processes, and with much to carry.

use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use protocol::connect::Codec;
use protocol::process::{ConnectRequest, Empty, ProcessSelector, SendSignalRequest, signal};

use crate::client::full;
use crate::process::shell;
use crate::sandbox::Sandbox;

/// Private memory of an agent that nothing was asked of yet, in kB.
const IDLE: u64 = 1536;
/// Memory of an agent with a hundred processes and their listeners.
const HUNDRED: u64 = 20 * 1024;

#[tokio::test]
async fn a_hundred_processes_and_their_listeners_cost_little() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let idle = sandbox.memory("RssAnon");
    assert!(idle <= IDLE, "{idle} kB");
    let mut running = Vec::new();
    for _ in 0..100 {
        let mut starter = sandbox.client().await;
        let mut events = starter
            .stream(Codec::Json, "Start", &shell("echo here; exec sleep 1000"))
            .await;
        let pid = events.started().await;
        events.until("here").await;
        let process = Some(ProcessSelector {
            pid: Some(pid),
            tag: None,
        });
        let mut second = sandbox.client().await;
        let request = ConnectRequest {
            process: process.clone(),
        };
        let mut listener = second.stream(Codec::Proto, "Connect", &request).await;
        assert_eq!(listener.started().await, pid);
        running.push((process, events, listener, starter, second));
    }
    let busy = sandbox.memory("RssAnon");
    assert!(busy <= HUNDRED, "{busy} kB");
    eprintln!("idle {idle} kB, with a hundred processes and two hundred listeners {busy} kB");
    let mut client = sandbox.client().await;
    for (process, events, listener, ..) in running {
        let message = SendSignalRequest {
            process,
            signal: signal::KILL,
        };
        client
            .unary::<Empty>(Codec::Json, "SendSignal", &message)
            .await
            .unwrap();
        assert_eq!(events.rest().await.exit().2, "signal: killed");
        assert_eq!(listener.rest().await.exit().2, "signal: killed");
    }
}

#[tokio::test]
async fn output_of_any_length_passes_a_slow_client_whole() {
    const LENGTH: usize = 256 << 20;
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let script = format!("yes 0123456 | head -c {LENGTH}");
    let mut events = client.stream(Codec::Proto, "Start", &shell(&script)).await;
    events.started().await;
    let (mut seen, mut most) = (0, 0);
    let line = Bytes::from_static(b"0123456\n");
    let end = loop {
        let event = events.next().await.unwrap();
        if let Some(end) = event.end {
            break end;
        }
        let output = event.data.unwrap_or_default().stdout.unwrap_or_default();
        // In order, and nothing left out: every byte says where in a line it is.
        assert!(output.first().is_none_or(|byte| *byte == line[seen % 8]));
        assert!(
            output
                .last()
                .is_none_or(|byte| *byte == line[(seen + output.len() - 1) % 8])
        );
        let before = seen >> 20;
        seen += output.len();
        if before != seen >> 20 {
            // The pace of a client: now and then it does something else, and the process has to wait.
            if (seen >> 20) % 32 == 0 {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            most = most.max(sandbox.memory("RssAnon"));
        }
    };
    assert_eq!((seen, end.exit_code), (LENGTH, 0));
    assert!(most < 20 * 1024, "{most} kB");
}

#[tokio::test]
async fn a_file_of_ten_gigabytes_is_read_in_bounded_memory() {
    const SIZE: u64 = 10_000_000_000;
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let path = sandbox.path("sparse");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(SIZE).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"the end", SIZE - 7).unwrap();
    let url = format!("/files?path={}", path.display());
    let before = sandbox.memory("VmHWM");

    let mut client = sandbox
        .client()
        .await
        .with("range", &format!("bytes={}-", SIZE - 64_000_007));
    let response = client.request(Method::GET, &url, "", full("")).await;
    assert_eq!(response.status(), 206);
    assert_eq!(response.headers()["content-length"], "64000007");
    let mut body = response.into_body();
    let (mut length, mut last) = (0, Bytes::new());
    while let Some(frame) = body.frame().await {
        let data = frame.unwrap().into_data().unwrap();
        length += data.len();
        last = data.slice(data.len() - data.len().min(7)..);
    }
    assert_eq!((length, &last[..]), (64_000_007, &b"the end"[..]));

    let mut client = sandbox.client().await.with("range", "bytes=9999999996-9999999998");
    let answer = client.get(&url).await;
    assert_eq!(
        (answer.text(), answer.header("content-range")),
        (" en", "bytes 9999999996-9999999998/10000000000")
    );
    // The whole of it begins at once, and ends when the client leaves.
    let mut client = sandbox.client().await;
    let response = client.request(Method::GET, &url, "", full("")).await;
    assert_eq!(response.headers()["content-length"], SIZE.to_string());
    drop((response, client));
    assert_eq!(sandbox.client().await.get("/health").await.status, 204);
    let growth = sandbox.memory("VmHWM") - before;
    assert!(growth < 8 * 1024, "{growth} kB");
    // It is as sparse as it was.
    assert!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) < 1000);
}
