//! The host's side: `/init`, and who may use it.

use protocol::connect::Codec;
use protocol::process::{ProcessConfig, StartRequest};

use crate::client::{Client, Rest};
use crate::sandbox::Sandbox;
use crate::sys;

#[tokio::test]
async fn init_sets_everything_up() {
    let Some(mut sandbox) = Sandbox::start() else { return };
    let mut boot = sandbox.boot().await;
    let init = r#"{"timestamp":"2026-01-01T00:00:00Z","envVars":{"A":"1"},"sandboxId":"sbx","templateId":"tpl"}"#;
    for _ in 0..2 {
        let answer = boot.post("/init", init).await;
        assert_eq!((answer.status, answer.header("x-envd-version")), (204, "0.6.13"));
        assert_eq!(answer.header("cache-control"), "no-store");
    }
    let mut client = sandbox.client().await;
    assert_eq!(client.get("/health").await.status, 204);
    let envs = client.get("/envs").await;
    assert_eq!(
        envs.text(),
        r#"{"A":"1","E2B_SANDBOX":"true","E2B_SANDBOX_ID":"sbx","E2B_TEMPLATE_ID":"tpl"}"#
    );
    for (name, content) in [
        (".E2B_SANDBOX", "true"),
        (".E2B_SANDBOX_ID", "sbx"),
        (".E2B_TEMPLATE_ID", "tpl"),
    ] {
        assert_eq!(
            client.get(&format!("/files?path=/run/e2b/{name}")).await.text(),
            content
        );
    }

    // Older than what was taken: authorised, and without effect.
    assert_eq!(
        boot.post("/init", r#"{"timestamp":"2025-01-01T00:00:00Z","accessToken":"t"}"#)
            .await
            .status,
        204
    );
    assert_eq!(client.get("/envs").await.status, 200);
    assert_eq!(boot.post("/init", "").await.status, 204);
    for bad in ["{", "[]", r#"{"envVars":[]}"#, r#"{"timestamp":"now"}"#] {
        assert_eq!(boot.post("/init", bad).await.status, 400, "{bad}");
    }
    // The host needs no token, unlike every other client.
    assert_eq!(boot.post("/init", r#"{"accessToken":"t"}"#).await.status, 204);
    assert_eq!(boot.get("/envs").await.status, 200);
    assert_eq!(client.get("/envs").await.status, 401);
}

#[tokio::test]
async fn what_a_request_gave_is_in_a_file_of_the_user() {
    let Some(mut sandbox) = Sandbox::start() else { return };
    let mut boot = sandbox.boot().await;
    // Kept ready: it has an id, and no owner.
    set(
        &mut boot,
        &serde_json::json!({"sandboxId": "sbx", "templateId": "tpl", "defaultUser": "user"}),
    )
    .await;
    let mut client = sandbox.client().await.user("user");
    let path = "/files?path=/run/ringfence/sandbox.json&username=";
    assert_eq!(client.get(&format!("{path}user")).await.status, 404);
    for secret in ["one", "two"] {
        set(
            &mut boot,
            &serde_json::json!({"envVars": {"KEY": secret}, "metadata": {"m": "2"}}),
        )
        .await;
        let rest = run(
            &mut client,
            "stat -c '%a %U' /run/ringfence/sandbox.json; cat /run/ringfence/*.json",
        )
        .await;
        let want = format!(
            "400 user\n{{\"envVars\":{{\"KEY\":\"{secret}\"}},\"metadata\":{{\"m\":\"2\"}},\"sandboxID\":\"sbx\",\"templateID\":\"tpl\"}}\n"
        );
        assert_eq!(rest.out(), want, "{}", rest.err());
    }
    // The user that it was for before does not keep it.
    set(&mut boot, &serde_json::json!({"defaultUser": "root"})).await;
    let rest = run(&mut client, "cat /run/ringfence/sandbox.json").await;
    assert!(rest.err().contains("Permission denied"), "{}{}", rest.out(), rest.err());
}

/// Sets the agent up as its host.
async fn set(boot: &mut Client, init: &serde_json::Value) {
    assert_eq!(boot.post("/init", &init.to_string()).await.status, 204);
}

/// Runs a script of the shell.
async fn run(client: &mut Client, script: &str) -> Rest {
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), script.to_owned()],
            ..ProcessConfig::default()
        }),
        stdin: Some(false),
        ..StartRequest::default()
    };
    let mut events = client.stream(Codec::Proto, "Start", &request).await;
    events.started().await;
    events.rest().await
}

#[tokio::test]
async fn control_routes_do_not_exist_for_clients() {
    let Some(sandbox) = Sandbox::ready(r#"{"accessToken":"t"}"#).await else {
        return;
    };
    for mut client in [
        sandbox.client().await,
        sandbox.client().await.with("x-access-token", "t"),
    ] {
        for path in [
            "/init",
            "/freeze",
            "/unfreeze",
            "/collapse",
            "/fsfreeze",
            "/fsthaw",
            "/upgrade",
            "/events",
        ] {
            assert_eq!(client.post(path, "{}").await.status, 404, "{path}");
            assert_eq!(client.get(path).await.status, 404, "{path}");
        }
    }
    let mut client = sandbox.client().await.with("x-access-token", "t");
    assert_eq!(client.get("//init").await.status, 404);
    assert_eq!(client.get("/nothing").await.status, 404);
    assert_eq!(client.post("/health", "").await.status, 405);
}

#[tokio::test]
async fn the_control_socket_serves_the_host_alone() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut host = sandbox.host().await;
    assert_eq!(host.post("/init", r#"{"envVars":{"B":"2"}}"#).await.status, 204);
    let ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    let control = protocol::agent::CONTROL_SOCKET;
    for uid in [0, 1000] {
        assert!(
            !sys::is_served_inside(sandbox.agent, uid, control, libc::SOCK_STREAM, ask),
            "{uid}"
        );
    }
}
