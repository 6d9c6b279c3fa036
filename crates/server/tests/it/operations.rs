//! Tests of every operation of the OpenAPI document with calls derived from the document: without credentials, for
//! another team, with invalid bodies, and on both sides of every bound. So new operations are tested automatically;
//! values that cannot be generated (an id in a path, a required key of a body) are provided by name, and an unknown
//! name fails the test.

mod document;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use self::document::{Document, Operation};
use super::platform::{KEY, OTHER_KEY, Reply, TestPlatform};

/// The request of a call.
#[derive(Default, Clone)]
struct Call {
    key: Option<&'static str>,
    ids: BTreeMap<String, String>,
    query: Vec<(String, String)>,
    headers: Vec<(String, String)>,
    body: Option<String>,
    content_type: Option<&'static str>,
}

async fn document(platform: &TestPlatform) -> Document {
    Document(platform.call_as(None, "GET", "/openapi.json", "").await.json)
}

/// A resource of the first team for a required parameter.
async fn thing(platform: &TestPlatform, parameter: &str) -> String {
    let made = async |path: &str| {
        let reply = platform.call("POST", path, r#"{"name":"n"}"#).await;
        reply.json["id"].as_str().expect("an id").to_owned()
    };
    match parameter {
        "sandboxID" | "sandbox_ids" => {
            let injection = r#","injections":[{"type":"github","token":"a token"}]"#;
            platform.create(injection).await
        }
        "ruleID" => {
            let body = json!({"name": unique(), "injection": {"type": "http", "base_url": "a.b"}});
            let reply = platform.call("POST", "/injection-rules", &body.to_string()).await;
            reply.json["ruleID"].as_str().expect("an id").to_owned()
        }
        "apiKeyID" => made("/api-keys").await,
        "accessTokenID" => made("/access-tokens").await,
        "templateID" => {
            let reply = platform
                .call(
                    "POST",
                    "/templates",
                    &json!({"alias": unique(), "dockerfile": "FROM e2bdev/base"}).to_string(),
                )
                .await;
            reply.json["templateID"].as_str().expect("an id").to_owned()
        }
        "snapshotID" => {
            let sandbox = platform.create("").await;
            let path = format!("/sandboxes/{sandbox}/snapshots");
            let reply = platform.call("POST", &path, "{}").await;
            reply.json["snapshotID"].as_str().expect("an id").to_owned()
        }
        "hash" => "f".repeat(64),
        "alias" => "own".to_owned(),
        "teamID" => super::platform::team(1).to_string(),
        "secretID" => {
            let body = json!({"name": uuid::Uuid::new_v4().to_string(), "value": "v"}).to_string();
            let reply = platform.call("POST", "/secrets", &body).await;
            reply.json["secretID"].as_str().expect("an id").to_owned()
        }
        "tag" => "default".to_owned(),
        "webhookID" => {
            let body = json!({
                "name": "n",
                "url": "https://example.com/hook",
                "events": ["sandbox.lifecycle.checkpointed"],
                "signatureSecret": "s",
            });
            let reply = platform.call("POST", "/events/webhooks", &body.to_string()).await;
            reply.json["id"].as_str().expect("an id").to_owned()
        }
        "metric" => "concurrent_sandboxes".to_owned(),
        // None exist yet.
        "volumeID" => nothing(parameter),
        // Of the template, and of the address to which files are uploaded: see `good`.
        "buildID" | "expires" | "token" => String::new(),
        _ => panic!("say here what the parameter {parameter} can be"),
    }
}

/// A new name.
fn unique() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// An unused id of the same form.
fn nothing(parameter: &str) -> String {
    match parameter {
        "sandboxID" | "sandbox_ids" => "inobody".to_owned(),
        "apiKeyID" | "accessTokenID" | "teamID" | "buildID" | "ruleID" | "volumeID" | "secretID" | "webhookID" => {
            "ffffffff-ffff-4fff-bfff-ffffffffffff".to_owned()
        }
        "hash" => "0".repeat(64),
        "metric" => "sandbox_start_rate".to_owned(),
        "templateID" | "snapshotID" | "alias" | "tag" => "nothing0000000000000".to_owned(),
        _ => panic!("say here what the parameter {parameter} can be"),
    }
}

/// The smallest body that is accepted.
fn least_body(document: &Document, schema: &Value) -> Map<String, Value> {
    let schema = document.resolve(schema);
    let mut required = schema["required"].as_array().cloned().unwrap_or_default();
    if schema["properties"].get("fromTemplate").is_some() {
        // One of two keys, which a schema cannot say.
        required.push(json!("fromTemplate"));
    }
    let has_tags = required.contains(&json!("tags"));
    required
        .iter()
        .map(|key| {
            let key = key.as_str().expect("a key");
            let value = match key {
                "templateID" => json!("base"),
                "timeout" => json!(60),
                "target" => json!("own"),
                "name" if has_tags => json!("own"),
                "tags" => json!(["a-tag"]),
                "dockerfile" => json!("FROM base"),
                "fromTemplate" => json!("base"),
                // Some names are unique.
                "name" | "alias" => json!(unique()),
                "value" => json!("v"),
                "url" => json!("https://example.com/hook"),
                "events" => json!(["sandbox.lifecycle.checkpointed"]),
                "signatureSecret" => json!("s"),
                "injection" => json!({"type": "http", "base_url": "a.b"}),
                "injections" => json!([]),
                "authorization_token" => json!("a token"),
                _ => panic!("say here what the key {key} can be"),
            };
            (key.to_owned(), value)
        })
        .collect()
}

/// A successful call, with new resources.
async fn good(platform: &TestPlatform, document: &Document, operation: &Operation) -> Call {
    let mut call = Call {
        key: Some(KEY),
        ..Call::default()
    };
    for parameter in &operation.parameters {
        let name = parameter["name"].as_str().expect("a name");
        if parameter["required"] != true {
            continue;
        }
        let value = thing(platform, name).await;
        match parameter["in"].as_str() {
            Some("path") => {
                call.ids.insert(name.to_owned(), value);
            }
            Some("query") => call.query.push((name.to_owned(), value)),
            place => panic!("say here how to send {name} in {place:?}"),
        }
    }
    if let Some(template) = call.ids.get("templateID").cloned() {
        if call.ids.contains_key("buildID") {
            let detail = platform.call("GET", &format!("/templates/{template}"), "").await.json;
            let build = detail["builds"][0]["buildID"].as_str().expect("a build");
            call.ids.insert("buildID".to_owned(), build.to_owned());
        }
        if call.query.iter().any(|(name, _)| name == "token") {
            let path = format!("/templates/{template}/files/{}", call.ids["hash"]);
            let url = platform.call("GET", &path, "").await.json["url"]
                .as_str()
                .expect("an address")
                .to_owned();
            let (_, query) = url.split_once('?').expect("parameters");
            let pairs = query.split('&').map(|pair| pair.split_once('=').expect("a pair"));
            call.query = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        }
    }
    if let Some(schema) = operation.body.as_ref().filter(|_| operation.needs_body) {
        call.body = Some(Value::from(least_body(document, schema)).to_string());
    }
    call
}

/// Calls an operation, and asserts that the response is described in the document.
async fn send(platform: &TestPlatform, document: &Document, operation: &Operation, call: &Call) -> Reply {
    let mut path = operation.path.clone();
    for (name, id) in &call.ids {
        path = path.replace(&format!("{{{name}}}"), id);
    }
    let mut separator = '?';
    for (name, value) in &call.query {
        path.push_str(&format!(
            "{separator}{name}={}",
            value.replace('%', "%25").replace(' ', "%20")
        ));
        separator = '&';
    }
    let mut headers = vec![("host", "localhost")];
    headers.extend(call.key.map(|key| ("x-api-key", key)));
    if call.body.is_some() {
        headers.push(("content-type", call.content_type.unwrap_or("application/json")));
    }
    headers.extend(call.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let body = call.body.clone().unwrap_or_default();
    let reply = platform.send(&operation.method, &path, &headers, body).await;

    let at = format!("{} answered {reply:?}", operation.id);
    let status = reply.status.as_str();
    let described = operation
        .responses
        .get(status)
        .unwrap_or_else(|| panic!("{at}: not described"));
    match described["content"].as_object() {
        None => assert!(reply.text.is_empty(), "{at}: a body that is not described"),
        Some(content) => {
            let (kind, media) = content.iter().next().expect("a media type");
            assert!(reply.header("content-type").starts_with(kind), "{at}");
            if kind == "application/json" {
                document.conforms(&media["schema"], &reply.json, &at);
            }
        }
    }
    if reply.status.as_u16() >= 400 {
        assert_eq!(reply.json["code"], reply.status.as_u16(), "{at}");
    }
    reply
}

#[tokio::test]
async fn every_operation_answers_as_documented() {
    let platform = TestPlatform::start().await;
    let document = document(&platform).await;
    for operation in document.operations() {
        let call = good(&platform, &document, &operation).await;
        let reply = send(&platform, &document, &operation, &call).await;
        // Running sandboxes cannot be resumed; `pause.rs` resumes paused ones. For operations that are not built, see
        // `not_built.rs`.
        let works = reply.status.is_success()
            || (operation.id == "resume_sandbox" && reply.status == 409)
            || (operation.is_not_built() && reply.status == 501);
        assert!(works, "{}: {reply:?}", operation.id);
    }
}

#[tokio::test]
async fn every_operation_requires_credentials() {
    let platform = TestPlatform::start().await;
    let document = document(&platform).await;
    let mut closed = 0;
    for operation in document.operations() {
        let good = good(&platform, &document, &operation).await;
        let anonymous = Call {
            key: None,
            ..good.clone()
        };
        if operation.is_open {
            assert_eq!(send(&platform, &document, &operation, &anonymous).await.status, 200);
            continue;
        }
        closed += 1;
        for key in [None, Some("e2b_"), Some("e2b_0000000000000000000000000000000000000009")] {
            for body in [good.body.clone(), good.body.as_ref().map(|_| "{".to_owned())] {
                let call = Call {
                    key,
                    body,
                    ..good.clone()
                };
                send(&platform, &document, &operation, &call).await.error(401);
            }
        }
        for value in ["Bearer sk_e2b_00", "Bearer x", "Basic eDp5"] {
            let mut call = anonymous.clone();
            call.headers.push(("authorization".to_owned(), value.to_owned()));
            send(&platform, &document, &operation, &call).await.error(401);
        }
    }
    assert!(closed > 10, "the document has lost its operations");
}

#[tokio::test]
async fn resources_of_other_teams_are_not_found() {
    let platform = TestPlatform::start().await;
    let document = document(&platform).await;
    for operation in document.operations().iter().filter(|operation| !operation.is_open) {
        let good = good(&platform, &document, operation).await;
        let foreign = Call {
            key: Some(OTHER_KEY),
            ..good.clone()
        };
        let mut missing = foreign.clone();
        let mut ids: Vec<String> = good.ids.values().cloned().collect();
        for (name, id) in &mut missing.ids {
            *id = nothing(name);
        }
        for (name, value) in &mut missing.query {
            ids.push(value.clone());
            *value = nothing(name);
        }
        let found = send(&platform, &document, operation, &foreign).await;
        let absent = send(&platform, &document, operation, &missing).await;
        let without = |reply: &Reply| {
            let all = ids.iter().chain(missing.ids.values());
            all.fold(reply.text.clone(), |text, id| text.replace(id, ""))
        };
        if !good.ids.is_empty() {
            // Logs and metrics outlive their sandbox, so those of unknown sandboxes are empty.
            let is_empty_list = operation.method == "GET" && found.status == 200;
            // Some resources do not exist yet for any team.
            let is_of_nobody =
                operation.is_not_built() && good.ids.keys().all(|name| name == "volumeID") && found.status == 501;
            assert!(
                is_empty_list || is_of_nobody || found.status == 404,
                "{}: {found:?}",
                operation.id
            );
            assert_eq!(
                (found.status, without(&found)),
                (absent.status, without(&absent)),
                "{}",
                operation.id
            );
        } else if operation.method == "GET" {
            let own = platform.create("").await;
            let found = send(&platform, &document, operation, &foreign).await;
            for id in ids.iter().chain([&own, &KEY.to_owned()]) {
                assert!(!found.text.contains(id.as_str()), "{}: {found:?}", operation.id);
            }
        }
        let mut named = good;
        named
            .headers
            .push(("x-team-id".to_owned(), super::platform::team(2).to_string()));
        send(&platform, &document, operation, &named).await.error(404);
    }
}

#[tokio::test]
async fn every_operation_refuses_invalid_bodies() {
    let platform = TestPlatform::start().await;
    let document = document(&platform).await;
    let mut taken = 0;
    for operation in document.operations() {
        let Some(schema) = &operation.body else { continue };
        taken += 1;
        let good = good(&platform, &document, &operation).await;
        let body = Value::from(least_body(&document, schema)).to_string();
        for (body, content_type) in [
            ("{", "application/json"),
            ("{\"a\":1,}", "application/json"),
            ("\u{0}", "application/json"),
            ("[]", "application/json"),
            ("null", "application/json"),
            (body.as_str(), "text/plain"),
            (body.as_str(), "application/x-www-form-urlencoded"),
        ] {
            let call = Call {
                body: Some(body.to_owned()),
                content_type: Some(content_type),
                ..good.clone()
            };
            send(&platform, &document, &operation, &call).await.error(400);
        }
        let call = Call {
            body: None,
            ..good.clone()
        };
        let reply = send(&platform, &document, &operation, &call).await;
        assert_eq!(reply.status == 400, operation.needs_body, "{}: {reply:?}", operation.id);
    }
    assert!(taken > 5, "the document has lost its bodies");
}

#[tokio::test]
async fn documented_bounds_are_enforced() {
    let platform = TestPlatform::start().await;
    let document = document(&platform).await;
    let mut tried = 0;
    for operation in document.operations() {
        let mut cases = Vec::new();
        for parameter in operation
            .parameters
            .iter()
            .filter(|parameter| parameter["in"] != "path")
        {
            let name = parameter["name"].as_str().expect("a name");
            for case in document.cases(&parameter["schema"], false) {
                let text = match &case.value {
                    Value::String(text) => text.clone(),
                    Value::Array(items) => {
                        let items: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
                        items.join(",")
                    }
                    other => other.to_string(),
                };
                cases.push((parameter["in"].as_str(), name, text, case.allowed));
            }
        }
        if let Some(schema) = &operation.body {
            for case in document.body_cases(schema, &least_body(&document, schema)) {
                cases.push((None, "", case.value.to_string(), case.allowed));
            }
        }
        // A parameter that is not a list may be given only once.
        for parameter in &operation.parameters {
            let name = parameter["name"].as_str().expect("a name");
            if parameter["in"] != "query" || document.resolve(&parameter["schema"])["type"] == "array" {
                continue;
            }
            tried += 1;
            let mut call = good(&platform, &document, &operation).await;
            call.query.retain(|(other, _)| other != name);
            call.query
                .extend([(name.to_owned(), "1".to_owned()), (name.to_owned(), "2".to_owned())]);
            let reply = send(&platform, &document, &operation, &call).await;
            assert!(
                reply.error(400).contains("more than once"),
                "{} {name}: {reply:?}",
                operation.id
            );
        }
        for (place, name, value, allowed) in cases {
            tried += 1;
            let mut call = good(&platform, &document, &operation).await;
            match place {
                Some("query") => {
                    call.query.retain(|(other, _)| other != name);
                    call.query.push((name.to_owned(), value.clone()));
                }
                Some("header") => call.headers.push((name.to_owned(), value.clone())),
                _ => call.body = Some(value.clone()),
            }
            let reply = send(&platform, &document, &operation, &call).await;
            // It says how `autoPause: true` is done, which is not in this body.
            let allowed = allowed && !value.contains(r#""autoPauseMemory":false"#);
            let at = format!("{} {name} {value}: {reply:?}", operation.id);
            assert_eq!(reply.status != 400, allowed, "{at}");
        }
    }
    assert!(tried > 100, "the document has lost its bounds");
}

#[tokio::test]
async fn documented_injections_are_accepted() {
    let platform = TestPlatform::start().await;
    let document = document(&platform).await;
    let rule = document
        .resolve(&json!({"$ref": "#/components/schemas/RuleInjection"}))
        .clone();
    let mut accepted = 0;
    for kind in rule["anyOf"].as_array().expect("alternatives") {
        let kind = document.resolve(kind);
        // The types of an operator are not listed.
        for word in kind["properties"]["type"]["enum"].as_array().into_iter().flatten() {
            let mut injection = kind["example"].clone();
            injection["type"] = word.clone();
            let rule = json!({"name": unique(), "injection": injection});
            let reply = platform.call("POST", "/injection-rules", &rule.to_string()).await;
            assert_eq!(reply.status, 201, "{reply:?}");
            for required in kind["required"].as_array().into_iter().flatten() {
                let mut without = rule.clone();
                let keys = without["injection"].as_object_mut().expect("an object");
                keys.remove(required.as_str().expect("a key"));
                let reply = platform.call("POST", "/injection-rules", &without.to_string()).await;
                assert_eq!(reply.status, 400, "{reply:?}");
            }
            accepted += 1;
        }
    }
    assert!(accepted >= 11, "the document has lost its types");
}
