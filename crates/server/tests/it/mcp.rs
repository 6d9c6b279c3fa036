//! The documentation endpoint, as raw requests. `conformance/mcp` tests it with the official clients.

#![expect(clippy::needless_pass_by_value, reason = "JSON is written where a helper takes it")]

use docs::catalogue;
use serde_json::{Value, json};
use server::settings::McpSettings;

use super::platform::{Reply, TestPlatform};

const VERSIONS: [&str; 2] = ["2025-06-18", "2025-03-26"];
const TOOLS: [&str; 4] = [
    "search_docs_svc",
    "list_docs_svc",
    "get_doc_content_svc",
    "query_docs_filesystem_svc",
];

/// Sends a body with the headers that every client sends, and some more. No key and no `Accept`.
async fn post(platform: &TestPlatform, headers: &[(&str, &str)], body: impl Into<bytes::Bytes>) -> Reply {
    let mut all = vec![("host", "localhost:3000"), ("content-type", "application/json")];
    all.extend(headers);
    // The server builds it at the first search, on threads that get what nothing else needs: little, beside other tests.
    let _ = docs::search_index();
    platform.send("POST", "/mcp", &all, body).await
}

fn request(method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
}

fn tool(name: &str, arguments: Value) -> Value {
    request("tools/call", json!({"name": name, "arguments": arguments}))
}

async fn call(platform: &TestPlatform, body: &Value) -> Reply {
    post(platform, &[("mcp-protocol-version", VERSIONS[0])], body.to_string()).await
}

/// The text of a tool's result, and whether the tool failed.
fn text(reply: &Reply) -> (&str, bool) {
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.header("content-type"), "application/json");
    let result = &reply.json["result"];
    assert_eq!(result["content"].as_array().map(Vec::len), Some(1), "{reply:?}");
    assert_eq!(result["content"][0]["type"], "text");
    let text = result["content"][0]["text"].as_str().expect("a text");
    (text, result["isError"].as_bool().expect("a boolean"))
}

/// Asserts a JSON-RPC error, and returns its message.
fn error(reply: &Reply, status: u16, code: i32, id: Value) -> &str {
    assert_eq!(reply.status, status, "{reply:?}");
    assert_eq!(reply.header("content-type"), "application/json");
    assert_eq!(reply.json["jsonrpc"], "2.0", "{reply:?}");
    assert_eq!(reply.json["error"]["code"], code, "{reply:?}");
    assert_eq!(reply.json["id"], id, "{reply:?}");
    assert!(reply.json.get("result").is_none(), "{reply:?}");
    reply.json["error"]["message"].as_str().expect("a message")
}

#[tokio::test]
async fn initialize_answers_with_a_supported_version() {
    let platform = TestPlatform::start().await;
    for (asked, answered) in [
        ("2025-06-18", "2025-06-18"),
        ("2025-03-26", "2025-03-26"),
        ("2024-11-05", "2025-06-18"),
        ("2026-07-28", "2025-06-18"),
    ] {
        let params = json!({"protocolVersion": asked, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let body = request("initialize", params).to_string();
        // The header is not required yet, and what it says then is not decisive.
        for headers in [&[] as &[(&str, &str)], &[("mcp-protocol-version", asked)]] {
            let reply = post(&platform, headers, body.clone()).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let result = &reply.json["result"];
            assert_eq!(
                (&reply.json["id"], &result["protocolVersion"]),
                (&json!(7), &json!(answered))
            );
            assert_eq!(result["capabilities"], json!({"tools": {}}));
            assert_eq!(result["serverInfo"]["name"], "ringfence");
            assert_eq!(result["serverInfo"]["version"], env!("CARGO_PKG_VERSION"));
            assert!(reply.headers.get("mcp-session-id").is_none());
        }
    }
    for params in [json!({}), json!({"protocolVersion": 1})] {
        let reply = post(&platform, &[], request("initialize", params).to_string()).await;
        assert!(error(&reply, 200, -32602, json!(7)).contains("protocolVersion"));
    }
}

#[tokio::test]
async fn requests_are_answered_under_both_versions() {
    let platform = TestPlatform::start().await;
    for version in VERSIONS {
        let headers = [("mcp-protocol-version", version)];
        let reply = post(&platform, &headers, request("ping", json!({})).to_string()).await;
        assert_eq!((reply.status.as_u16(), &reply.json["result"]), (200, &json!({})));
        let reply = post(&platform, &headers, request("tools/list", json!({})).to_string()).await;
        let tools = reply.json["result"]["tools"].as_array().expect("tools").clone();
        let names: Vec<&str> = tools.iter().filter_map(|tool| tool["name"].as_str()).collect();
        assert_eq!(names, TOOLS);
        for (tool, required) in tools
            .iter()
            .zip([json!(["query"]), json!([]), json!(["path"]), json!(["command"])])
        {
            assert_eq!(tool["inputSchema"]["type"], "object");
            assert_eq!(tool["inputSchema"]["required"], required);
            assert_eq!(tool["annotations"]["readOnlyHint"], true);
            assert!(tool["description"].as_str().is_some_and(|text| !text.is_empty()));
        }
        // Ids of both kinds come back as they are, and params may be absent.
        for id in [json!("x"), json!(0), json!(-3), json!(u64::MAX)] {
            let body = json!({"jsonrpc": "2.0", "id": id, "method": "ping"});
            assert_eq!(post(&platform, &headers, body.to_string()).await.json["id"], id);
        }
    }
}

#[tokio::test]
async fn every_tool_answers() {
    let platform = TestPlatform::start().await;
    let reply = call(&platform, &tool("list_docs_svc", json!({}))).await;
    let (list, failed) = text(&reply);
    assert!(!failed);
    for page in catalogue().pages() {
        for part in [page.title, page.description] {
            assert!(list.contains(part), "{part}");
        }
        let route = if page.route == "/" { "" } else { page.route };
        assert!(
            list.contains(&format!(
                "Route: {}\n   URL: http://localhost:3000/docs{route}",
                page.route
            )),
            "{list}"
        );
        let reply = call(&platform, &tool("get_doc_content_svc", json!({"path": page.route}))).await;
        assert_eq!(text(&reply), (page.body, false));
    }
    // Without arguments at all.
    let body = request("tools/call", json!({"name": "list_docs_svc"}));
    assert_eq!(text(&call(&platform, &body).await), (list, false));

    let search = async |arguments: Value| {
        let reply = call(&platform, &tool("search_docs_svc", arguments)).await;
        let (text, failed) = text(&reply);
        assert!(!failed);
        text.matches("\n   Route: ").count()
    };
    let pages = catalogue().pages().len();
    assert_eq!(search(json!({"query": "sandbox"})).await, pages.min(10));
    assert_eq!(search(json!({"query": "sandbox", "limit": 2})).await, 2);
    assert_eq!(search(json!({"query": "sandbox", "limit": 0})).await, 1);
    assert_eq!(search(json!({"query": "sandbox", "limit": -1})).await, 1);
    assert!(search(json!({"query": "sandbox", "limit": 5000})).await <= 50);
    assert_eq!(search(json!({"query": "xyzzyplugh"})).await, 0);

    let reply = call(
        &platform,
        &tool(
            "query_docs_filesystem_svc",
            json!({"command": "rg -C 1 'egress.deny' /"}),
        ),
    )
    .await;
    let (found, failed) = text(&reply);
    assert!(!failed && found.contains("/configuration.md:"), "{found}");

    // What a tool refuses is for the model to read.
    for (name, arguments, why) in [
        ("get_doc_content_svc", json!({"path": "/nothing/here"}), "no such page"),
        (
            "get_doc_content_svc",
            json!({"path": "/network.md"}),
            "did you mean /network",
        ),
        (
            "query_docs_filesystem_svc",
            json!({"command": "rm -rf /"}),
            "no such command",
        ),
        (
            "query_docs_filesystem_svc",
            json!({"command": "cat /etc/passwd"}),
            "no such file",
        ),
    ] {
        let reply = call(&platform, &tool(name, arguments)).await;
        let (message, failed) = text(&reply);
        assert!(failed && message.contains(why), "{message}");
    }
}

#[tokio::test]
async fn the_six_refusals() {
    let platform = TestPlatform::start().await;
    let version = ("mcp-protocol-version", VERSIONS[0]);
    let body = tool("list_docs_svc", json!({})).to_string();
    // Mirror headers that agree are accepted.
    let agreeing = [version, ("mcp-method", "tools/call"), ("mcp-name", "list_docs_svc")];
    assert!(!text(&post(&platform, &agreeing, body.clone()).await).1);
    // 1. and 2.: the header differs from the body.
    for header in [
        ("mcp-method", "tools/list"),
        ("mcp-method", "TOOLS/CALL"),
        ("mcp-name", "search_docs_svc"),
        ("mcp-name", ""),
    ] {
        let reply = post(&platform, &[version, header], body.clone()).await;
        assert!(error(&reply, 400, -32020, json!(7)).contains(header.0), "{reply:?}");
    }
    let initialize = request("initialize", json!({"protocolVersion": VERSIONS[0]})).to_string();
    let reply = post(&platform, &[("mcp-method", "ping")], initialize).await;
    error(&reply, 400, -32020, json!(7));
    let nameless = request("tools/call", json!({})).to_string();
    error(
        &post(&platform, &[version, ("mcp-name", "list_docs_svc")], nameless).await,
        400,
        -32020,
        json!(7),
    );
    // The name is about calls of tools only.
    let ping = request("ping", json!({})).to_string();
    assert_eq!(
        post(&platform, &[version, ("mcp-name", "x")], ping.clone())
            .await
            .status,
        200
    );
    // 3.: the version is unsupported, or missing.
    for wrong in ["2024-11-05", "2026-07-28", "", "2025-06-18, 2025-03-26"] {
        let reply = post(&platform, &[("mcp-protocol-version", wrong)], ping.clone()).await;
        error(&reply, 400, -32022, json!(7));
        assert_eq!(reply.json["error"]["data"]["supported"], json!(VERSIONS));
    }
    assert!(error(&post(&platform, &[], ping.clone()).await, 400, -32020, json!(7)).contains("is required"));
    let twice = [version, version];
    error(&post(&platform, &twice, ping).await, 400, -32020, Value::Null);
    let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
    error(&post(&platform, &[], initialized).await, 400, -32020, Value::Null);
    // 4.: a required argument is missing, or of another type.
    for (name, argument) in [(TOOLS[0], "query"), (TOOLS[2], "path"), (TOOLS[3], "command")] {
        for arguments in [
            json!({}),
            json!({argument: null}),
            json!({argument: 5}),
            json!({argument: " "}),
        ] {
            let reply = call(&platform, &tool(name, arguments)).await;
            assert!(error(&reply, 200, -32602, json!(7)).contains(argument), "{reply:?}");
        }
        let reply = call(&platform, &request("tools/call", json!({"name": name}))).await;
        error(&reply, 200, -32602, json!(7));
        let reply = call(
            &platform,
            &request("tools/call", json!({"name": name, "arguments": []})),
        )
        .await;
        error(&reply, 200, -32602, json!(7));
    }
    // 5.: the method is unknown.
    for method in ["resources/list", "prompts/list", "tools/lists", "server/discover", ""] {
        error(
            &call(&platform, &request(method, json!({}))).await,
            200,
            -32601,
            json!(7),
        );
    }
    // 6.: the tool is unknown.
    for name in [
        "search_docs",
        "search_docs_",
        "search_docs_xyz",
        "SEARCH_DOCS_SVC",
        "rm",
        "",
    ] {
        let reply = call(&platform, &tool(name, json!({"query": "x"}))).await;
        assert!(
            error(&reply, 200, -32602, json!(7)).contains("unknown tool"),
            "{reply:?}"
        );
    }
    let reply = call(&platform, &request("tools/call", json!({"arguments": {}}))).await;
    assert!(error(&reply, 200, -32602, json!(7)).contains("params.name"));
}

#[tokio::test]
async fn notifications_and_responses_have_no_answer() {
    let platform = TestPlatform::start().await;
    let version = ("mcp-protocol-version", VERSIONS[0]);
    for body in [
        json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}),
        json!({"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "nothing"}}),
        json!({"jsonrpc": "2.0", "id": 1, "result": {}}),
        json!({"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "x"}}),
    ] {
        let reply = post(&platform, &[version], body.to_string()).await;
        assert_eq!((reply.status.as_u16(), reply.text.as_str()), (202, ""), "{body}");
    }
    let body = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
    let reply = post(&platform, &[version, ("mcp-method", "ping")], body).await;
    error(&reply, 400, -32020, Value::Null);
    let reply = call(&platform, &request("notifications/initialized", json!({}))).await;
    error(&reply, 200, -32600, json!(7));
}

#[tokio::test]
async fn invalid_messages_are_refused() {
    let platform = TestPlatform::start().await;
    let version = ("mcp-protocol-version", VERSIONS[0]);
    for body in [
        &b""[..],
        b"{",
        b"\xff\xfe",
        b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"p\xc3\"}",
        b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\\ud800\"}",
        b"{} {}",
    ] {
        error(&post(&platform, &[version], body).await, 400, -32700, Value::Null);
    }
    for (body, id) in [
        (json!(null), Value::Null),
        (json!("ping"), Value::Null),
        (json!({}), Value::Null),
        (json!({"jsonrpc": "1.0", "id": 7, "method": "ping"}), json!(7)),
        (json!({"id": 7, "method": "ping"}), json!(7)),
        (json!({"jsonrpc": "2.0", "id": null, "method": "ping"}), Value::Null),
        (json!({"jsonrpc": "2.0", "id": 1.5, "method": "ping"}), Value::Null),
        (json!({"jsonrpc": "2.0", "id": [], "method": "ping"}), Value::Null),
        (json!({"jsonrpc": "2.0", "id": 7}), json!(7)),
        (json!({"jsonrpc": "2.0", "id": 7, "method": 5}), json!(7)),
        (json!({"jsonrpc": "2.0", "result": {}}), Value::Null),
    ] {
        error(&post(&platform, &[version], body.to_string()).await, 400, -32600, id);
    }
}

#[tokio::test]
async fn batches_exist_under_one_version_only() {
    let platform = TestPlatform::start().await;
    let old = [("mcp-protocol-version", "2025-03-26")];
    let ping = |id: u32| json!({"jsonrpc": "2.0", "id": id, "method": "ping"});
    let notice = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let batch = json!([
        ping(1),
        notice,
        tool("rm", json!({})),
        5,
        request("initialize", json!({})),
        ping(2)
    ]);
    let reply = post(&platform, &old, batch.to_string()).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let answers: Vec<(Value, Value)> = reply
        .json
        .as_array()
        .expect("a batch")
        .iter()
        .map(|answer| (answer["id"].clone(), answer["error"]["code"].clone()))
        .collect();
    let expected = [
        (json!(1), json!(null)),
        (json!(7), json!(-32602)),
        (json!(null), json!(-32600)),
        (json!(7), json!(-32600)),
        (json!(2), json!(null)),
    ];
    assert_eq!(answers, expected);
    let reply = post(&platform, &old, json!([notice, notice]).to_string()).await;
    assert_eq!((reply.status.as_u16(), reply.text.as_str()), (202, ""));

    let most: Vec<Value> = (0..16).map(ping).collect();
    let reply = post(&platform, &old, Value::from(most.clone()).to_string()).await;
    assert_eq!(
        (reply.status.as_u16(), reply.json.as_array().map(Vec::len)),
        (200, Some(16))
    );
    let more: Vec<Value> = (0..17).map(ping).collect();
    for body in [json!([]), Value::from(more)] {
        error(&post(&platform, &old, body.to_string()).await, 400, -32600, Value::Null);
    }
    let one = json!([ping(1)]).to_string();
    let reply = post(&platform, &[("mcp-protocol-version", "2025-06-18")], one.clone()).await;
    assert!(error(&reply, 400, -32600, Value::Null).contains("2025-03-26"));
    error(&post(&platform, &[], one.clone()).await, 400, -32020, Value::Null);
    error(
        &post(&platform, &[("mcp-protocol-version", "1")], one.clone()).await,
        400,
        -32022,
        Value::Null,
    );
    let reply = post(&platform, &[old[0], ("mcp-method", "tools/list")], one).await;
    error(&reply, 400, -32020, json!(1));
}

#[tokio::test]
async fn bodies_are_bounded() {
    let platform = TestPlatform::start().await;
    let version = ("mcp-protocol-version", VERSIONS[0]);
    let sized = |bytes: usize| {
        let body = json!({"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"x": ""}}).to_string();
        body.replace("\"\"", &format!("\"{}\"", "a".repeat(bytes - body.len())))
    };
    assert_eq!(post(&platform, &[version], sized(64 * 1024)).await.status, 200);
    post(&platform, &[version], sized(64 * 1024 + 1)).await.error(413);
    // With the object of the message and that of the parameters.
    let nested = |levels: usize| {
        let params = format!("{{\"x\":{}{}}}", "[".repeat(levels - 2), "]".repeat(levels - 2));
        format!("{{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"ping\",\"params\":{params}}}")
    };
    assert_eq!(post(&platform, &[version], nested(32)).await.status, 200);
    error(&post(&platform, &[version], nested(33)).await, 400, -32600, Value::Null);
    error(
        &post(&platform, &[version], nested(30_000)).await,
        400,
        -32700,
        Value::Null,
    );
    for (argument, name, most) in [
        ("query", TOOLS[0], 1024),
        ("path", TOOLS[2], 1024),
        ("command", TOOLS[3], 4096),
    ] {
        let of = |bytes: usize| tool(name, json!({argument: "x".repeat(bytes)}));
        text(&call(&platform, &of(most)).await);
        error(&call(&platform, &of(most + 1)).await, 200, -32602, json!(7));
    }
}

#[tokio::test]
async fn other_methods_and_types_are_refused() {
    let platform = TestPlatform::start().await;
    for method in ["GET", "DELETE", "PUT", "PATCH"] {
        let reply = platform
            .send(
                method,
                "/mcp",
                &[("host", "localhost"), ("accept", "text/event-stream")],
                "",
            )
            .await;
        reply.error(405);
        assert!(reply.header("allow").contains("POST"), "{reply:?}");
    }
    let ping = request("ping", json!({})).to_string();
    let send = async |content_type: Option<&str>| {
        let mut headers = vec![("host", "localhost"), ("mcp-protocol-version", VERSIONS[0])];
        headers.extend(content_type.map(|value| ("content-type", value)));
        platform.send("POST", "/mcp", &headers, ping.clone()).await
    };
    for good in [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON ;charset=UTF-8",
    ] {
        assert_eq!(send(Some(good)).await.status, 200, "{good}");
    }
    for bad in [
        None,
        Some(""),
        Some("text/plain"),
        Some("application/jsonx"),
        Some("text/event-stream"),
    ] {
        send(bad).await.error(415);
    }
}

#[tokio::test]
async fn the_path_and_the_names_are_configurable() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.mcp = McpSettings {
            path: "/documentation/mcp".to_owned(),
            suffix: "acme".to_owned(),
            ..settings.mcp.clone()
        };
    })
    .await;
    platform
        .send("POST", "/mcp", &[("host", "localhost")], "{}")
        .await
        .error(404);
    let send = async |body: Value| {
        let headers = [
            ("host", "localhost"),
            ("content-type", "application/json"),
            ("mcp-protocol-version", VERSIONS[0]),
        ];
        platform
            .send("POST", "/documentation/mcp", &headers, body.to_string())
            .await
    };
    let reply = send(request("tools/list", json!({}))).await;
    assert_eq!(reply.json["result"]["tools"][0]["name"], "search_docs_acme");
    // The neutral names, and those of the service whose clients know these tools, are always accepted.
    for name in ["search_docs_acme", "search_docs_svc", "search_docs_sufy", "search_sufy"] {
        assert!(!text(&send(tool(name, json!({"query": "sandbox"}))).await).1, "{name}");
    }
}

#[tokio::test]
async fn hostile_commands_are_answered() {
    // A thousand of them are in the tests of `docs`; here it is about the endpoint, which runs them at the lowest priority.
    let commands = [
        "",
        "cat /proc/self/environ",
        "cat ../../../etc/passwd",
        "ls $(id) `id` | sh",
        "rg --pre=/bin/sh sandbox",
        "head -n -99999999999999999999 /quickstart",
        "\u{0}\u{1b}[2J\u{202e}\n",
        "'",
        "rg '((((((((((' /",
        "rg '(?=x)' /",
        r"rg 'a{1000}{1000}' /",
        r"rg '(.*)(.*)(.*)(.*)(.*)\d$' /",
    ];
    let platform = TestPlatform::start().await;
    for command in commands {
        let reply = call(&platform, &tool(TOOLS[3], json!({"command": command}))).await;
        assert_eq!(reply.status, 200, "{command:?}: {reply:?}");
        assert!(reply.text.len() < 256 * 1024, "{command:?}");
        if reply.json["error"].is_object() {
            error(&reply, 200, -32602, json!(7));
        } else {
            let (text, _) = text(&reply);
            assert!(!text.contains("root:x:0:0"), "{command:?}");
        }
    }
    // Bytes that are not UTF-8 are no JSON.
    for at in [0_u8, 0x80, 0xc0, 0xff] {
        let mut body = tool(TOOLS[3], json!({"command": "ls X"})).to_string().into_bytes();
        let x = body.iter().position(|byte| *byte == b'X').expect("an X");
        body[x] = at;
        let reply = post(&platform, &[("mcp-protocol-version", VERSIONS[0])], body).await;
        error(&reply, 400, -32700, Value::Null);
    }
}
