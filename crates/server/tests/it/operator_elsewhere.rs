//! The operator of a service of several servers: any of them lists and kills the sandboxes of all, and no client can do what the
//! operator can.

use std::time::SystemTime;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use link::{Carried, OpenError, ServerLink};
use model::id::SandboxId;
use serde_json::{Value, json};
use server::settings::ServerSettings;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::platform::{KEY, OTHER_KEY, host, open, pause, send, team, user, within};
use crate::servers::{Two, two, two_on};
use crate::several::{Several, has};

const HEAD: &str = "x-ringfence-forward";

/// A sandbox in the operator's list of a server.
async fn entry(server: &Several, id: &SandboxId) -> Value {
    let (status, listed) = server.operator("GET", "/sandboxes", "").await;
    assert_eq!(status, 200, "{listed}");
    let entries = listed.as_array().expect("a list");
    let mut found = entries.iter().filter(|entry| entry["id"] == id.as_str());
    let entry = found.next().expect("it is listed").clone();
    assert_eq!(found.next(), None, "it is listed once");
    let (status, shown) = server.operator("GET", &format!("/sandboxes/{id}"), "").await;
    assert_eq!((status, &shown["server"]), (200, &entry["server"]));
    entry
}

/// Why a sandbox has ended, as its log says.
async fn end_reason(server: &Several, id: &SandboxId) -> String {
    let reading = async {
        loop {
            // Another server knows of it once the one that has ended it has written that, a moment later.
            let (_, entries) = server.operator("GET", &format!("/sandboxes/{id}/logs"), "").await;
            let ending = entries.as_array().into_iter().flatten().find_map(|entry| {
                let fields = &entry["fields"];
                (fields["event_type"] == "sandbox_ending").then(|| fields["reason"].as_str())
            });
            if let Some(reason) = ending {
                return reason.expect("a reason").to_owned();
            }
            pause().await;
        }
    };
    within(reading).await
}

/// The head of a request of the operator.
fn head(id: &SandboxId) -> String {
    let owner = json!({"credential": "operator", "team": team(1), "user": user(1)});
    let head = json!({
        "sandbox": id, "port": null, "peer": null, "is_loopback": true, "is_tls": false, "owner": owner, "is_operator": true,
    });
    head.to_string()
}

#[tokio::test]
async fn any_server_lists_and_kills_the_sandboxes_of_all() {
    let two = two().await;
    let ids = two.one_of_each().await;
    for (own, other) in [(0, 1), (1, 0)] {
        let name = format!("host {}", other + 1);
        let (mine, theirs) = (
            entry(&two.servers[own], &ids[own]).await,
            entry(&two.servers[own], &ids[other]).await,
        );
        assert_eq!(mine.get("server"), None, "{mine}");
        assert_eq!(theirs["server"], name.as_str(), "{theirs}");
        for entry in [&mine, &theirs] {
            assert_eq!(entry["node_name"], "a host", "{entry}");
            assert_eq!((&entry["state"], entry.get("is_node_away")), (&"running".into(), None));
        }
        // What is streamed is at the server of the node alone.
        let path = format!("/sandboxes/{}/access?command=exec", ids[other]);
        let (status, refused) = two.servers[own].operator("POST", &path, "").await;
        let message = refused["message"].as_str().expect("a message");
        assert_eq!(status, 503, "{message}");
        assert!(
            message.contains(&format!("of the server on {name} (https://127.0.0.1:")),
            "{message}"
        );
    }
    for (own, other) in [(0, 1), (1, 0)] {
        let path = format!("/sandboxes/{}", ids[other]);
        let (status, answer) = two.servers[own].operator("DELETE", &path, "").await;
        assert_eq!(status, 204, "{answer}");
        assert!(!has(&two.nodes[other], &ids[other]));
        assert_eq!(end_reason(&two.servers[own], &ids[other]).await, "operator");
        let (status, _) = two.servers[own].operator("DELETE", &path, "").await;
        assert_eq!(status, 404);
    }
    two.close().await;
}

#[tokio::test]
async fn no_client_asks_as_the_operator() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let unknown = format!("e2b_{}", "0".repeat(40));
    for server in &two.servers {
        for (id, node) in ids.iter().zip(&two.nodes) {
            let (path, head) = (format!("/sandboxes/{id}"), head(id));
            // Without a key, with one that is not known, and with that of another team.
            for (key, status) in [("", 401), (unknown.as_str(), 401), (OTHER_KEY, 404)] {
                let headers = [("host", "localhost"), ("x-api-key", key), (HEAD, &head), (HEAD, "x")];
                let refused = send(server.addr, "DELETE", &path, &headers, Bytes::new()).await;
                assert_eq!(refused.status, status, "{refused:?}");
            }
            // Traffic that is forwarded is for the sandbox, whatever its path and headers are.
            let of_sandbox = format!("3000-{id}.sandbox.test:3000");
            let headers = [("host", of_sandbox.as_str()), (HEAD, &head)];
            let reply = send(server.addr, "DELETE", &path, &headers, Bytes::new()).await;
            assert!(reply.text.starts_with(&format!("DELETE {path} HTTP/1.1")), "{reply:?}");
            assert!(has(node, id));
        }
    }
    // The sandbox's own team kills it as a client, also if it claims to be the operator.
    for (server, id) in two.servers.iter().zip([&ids[1], &ids[0]]) {
        let head = head(id);
        let headers = [("host", "localhost"), ("x-api-key", KEY), (HEAD, head.as_str())];
        let killed = send(
            server.addr,
            "DELETE",
            &format!("/sandboxes/{id}"),
            &headers,
            Bytes::new(),
        )
        .await;
        assert_eq!(killed.status, 204, "{killed:?}");
        assert_eq!(end_reason(server, id).await, "killed");
    }
    two.close().await;
}

/// Sends a request to a server as another server does, on a stream about a sandbox.
async fn forward(to: &Several, about: &SandboxId, method: &str, path: &str, head: &str) -> u16 {
    let own = "00000000-0000-4000-8000-000000000009".parse().expect("an id");
    let tasks = (TaskTracker::new(), CancellationToken::new());
    let authority = std::sync::Arc::clone(&to.authority);
    let link = ServerLink::new(authority, own, host(2).id, to.address(), SystemTime::now, tasks);
    let path_of_stream = format!("/1/sandboxes/{about}");
    let opening = async {
        loop {
            match link.open(&path_of_stream, Carried::Api).await {
                // It took too long, and nothing was begun.
                Err(OpenError::Unreachable { .. }) => {}
                opened => return opened,
            }
        }
    };
    let stream = within(opening).await.expect("a stream");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("handshake");
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "x")
        .header(HEAD, head);
    let request = request.body(Full::new(Bytes::new())).expect("a request");
    let response = within(sender.send_request(request)).await.expect("a response");
    let status = response.status().as_u16();
    let _ = within(response.into_body().collect()).await;
    status
}

#[tokio::test]
async fn the_head_of_the_operator_kills_its_sandbox_or_reads_templates_and_opens_nothing_else() {
    let two = two().await;
    let [_, first] = two.one_of_each().await;
    let [_, second] = two.one_of_each().await;
    let server = &two.servers[1];
    let (path, head) = (format!("/sandboxes/{first}"), head(&first));
    for (method, asked) in [
        ("GET", "/sandboxes".to_owned()),
        ("GET", path.clone()),
        ("GET", format!("{path}/logs")),
        ("POST", format!("{path}/access?command=exec")),
        ("POST", "/backup".to_owned()),
        ("DELETE", format!("/sandboxes/{second}")),
        ("DELETE", format!("/v2{path}")),
        ("POST", path.clone()),
    ] {
        let status = forward(server, &first, method, &asked, &head).await;
        assert_eq!(status, 400, "{method} {asked}");
    }
    let with_port = head.replace(r#""port":null"#, r#""port":3000"#);
    assert_eq!(forward(server, &first, "DELETE", &path, &with_port).await, 400);
    // Without a sandbox it reads templates.
    let mut of_templates: Value = serde_json::from_str(&head).expect("a head");
    of_templates["sandbox"] = Value::Null;
    let of_templates = of_templates.to_string();
    for (method, asked, status) in [
        ("GET", "/template?team=nobody", 404),
        ("POST", "/template?team=nobody", 400),
        ("GET", "/sandboxes", 400),
        ("GET", "/metrics", 400),
        ("POST", "/collections", 400),
        ("DELETE", path.as_str(), 400),
    ] {
        let answered = forward(server, &first, method, asked, &of_templates).await;
        assert_eq!(answered, status, "{method} {asked}");
    }
    // What a server reads that does not know the field yet: a request of the team.
    let mut of_team: Value = serde_json::from_str(&head).expect("a head");
    of_team["is_operator"] = false.into();
    assert_eq!(
        forward(server, &first, "DELETE", &path, &of_team.to_string()).await,
        204
    );
    assert_eq!(end_reason(server, &first).await, "killed");
    // It is not forwarded on, wherever it is meanwhile.
    assert_eq!(forward(server, &second, "DELETE", &path, &head).await, 404);
    let (path, head) = (format!("/sandboxes/{second}"), self::head(&second));
    assert_eq!(forward(server, &second, "DELETE", &path, &head).await, 204);
    assert_eq!(end_reason(server, &second).await, "operator");
    two.close().await;
}

fn as_they_are(_: &mut ServerSettings) {}

/// Nothing listens there.
fn out_of_reach(settings: &mut ServerSettings) {
    if let Some(servers) = &mut settings.servers {
        servers.address = Some("https://127.0.0.1:1".parse().expect("an address"));
    }
}

#[tokio::test]
async fn a_server_or_a_node_that_is_away_is_named() {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    let two = two_on([store.clone(), store], directory, [as_they_are, out_of_reach]).await;
    let ids = two.one_of_each().await;
    let path = format!("/sandboxes/{}", ids[1]);
    assert_eq!(entry(&two.servers[0], &ids[1]).await["server"], "host 2");
    let (status, refused) = two.servers[0].operator("DELETE", &path, "").await;
    let message = refused["message"].as_str().expect("a message");
    assert_eq!(status, 503, "{message}");
    let named =
        "is on node a host of the server on host 2 (https://127.0.0.1:1), which does not answer, so it was not killed";
    assert!(message.contains(named), "{message}");
    assert!(has(&two.nodes[1], &ids[1]));
    // Its node loses the connection, and its server lists it nevertheless, as does the other one.
    let Two {
        servers,
        nodes,
        connected,
    } = two;
    let [of_first, of_second] = connected;
    let credentials = of_second.credentials.clone();
    drop(of_second);
    let looking = async {
        while entry(&servers[1], &ids[1]).await["is_node_away"] != true {
            pause().await;
        }
    };
    within(looking).await;
    assert_eq!(entry(&servers[1], &ids[0]).await.get("is_node_away"), None);
    // It comes back at the server that can be reached, where both are killed.
    let [first, second] = servers;
    nodes[1].adopts_all.store(true, std::sync::atomic::Ordering::SeqCst);
    let again = first.connect(&nodes[1], &credentials).await;
    let killing = async {
        while first.operator("DELETE", &path, "").await.0 != 204 {
            pause().await;
        }
    };
    within(killing).await;
    assert!(!has(&nodes[1], &ids[1]));
    drop((of_first, again));
    for server in [first, second] {
        server.close().await;
    }
}
