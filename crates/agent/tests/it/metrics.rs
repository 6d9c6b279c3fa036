//! `/metrics`.

use std::time::Instant;

use protocol::connect::Codec;
use protocol::process::{ProcessConfig, StartRequest};
use serde_json::Value;

use crate::client::Client;
use crate::sandbox::Sandbox;

async fn metrics(client: &mut Client) -> Value {
    let answer = client.get("/metrics").await;
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, "application/json")
    );
    serde_json::from_slice(&answer.body).unwrap()
}

#[tokio::test]
async fn what_the_sandbox_uses() {
    let begun = Instant::now();
    let Some(sandbox) = Sandbox::ready(r#"{"accessToken":"t","cpuCount":1,"memoryMb":512}"#).await else {
        return;
    };
    assert_eq!(sandbox.client().await.get("/metrics").await.status, 401);
    let mut client = sandbox.client().await.with("x-access-token", "t");
    assert_eq!(client.post("/metrics", "").await.status, 405);
    let before = metrics(&mut client).await;
    assert_eq!(
        (&before["cpu_count"], &before["mem_total"], &before["mem_total_mib"]),
        (&1.into(), &536_870_912.into(), &512.into())
    );
    assert!(before["ts"].as_i64().unwrap() > 1_700_000_000);
    let number = |report: &Value, name: &str| report[name].as_u64().unwrap();
    assert!(number(&before, "disk_used") <= number(&before, "disk_total"));
    assert!(number(&before, "disk_total") > 1 << 20);
    assert!(number(&before, "mem_used") > 0);

    // Half a second of work by a process and by a child of it that is over, and 68 MiB of memory: the agent may use a little less by
    // then than before.
    let work = "head -c 200000000 /dev/zero | tr a b >/dev/null; x=$(head -c 71303168 /dev/zero | tr '\\0' x); \
                echo ready; read stop";
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), work.to_owned()],
            ..ProcessConfig::default()
        }),
        ..StartRequest::default()
    };
    let mut other = sandbox.client().await.with("x-access-token", "t");
    let mut events = other.stream(Codec::Json, "Start", &request).await;
    events.started().await;
    events.until("ready").await;
    let after = metrics(&mut client).await;
    let used = after["cpu_used_pct"].as_f64().unwrap();
    // A share of the time since the report before, which is part of this.
    let worked_s = used / 100.0 * begun.elapsed().as_secs_f64();
    assert!(worked_s > 0.1 && used <= 100.0, "{worked_s} s {after}");
    assert!(
        number(&after, "mem_used") >= number(&before, "mem_used") + (64 << 20),
        "{before} {after}"
    );
    assert_eq!(number(&after, "mem_used_mib"), number(&after, "mem_used") >> 20);
}
