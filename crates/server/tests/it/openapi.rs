//! The OpenAPI document: the committed file is current, and the served document equals it.

use std::path::Path;

use serde_json::Value;
use server::api::document;

use super::platform::{MAX_LIFETIME_S, TestPlatform};

#[test]
fn the_committed_document_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../api/openapi.json");
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == document(),
        "api/openapi.json is out of date: run `cargo run -p xtask -- openapi` and commit the file"
    );
}

#[tokio::test]
async fn the_served_document_has_the_configured_bounds() {
    let platform = TestPlatform::start().await;
    let reply = platform.call_as(None, "GET", "/openapi.json", "").await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), "application/json; charset=utf-8");
    let committed: Value = serde_json::from_str(&document()).expect("JSON");
    let mut served = reply.json;
    for schema in [
        "NewSandbox",
        "NewSandboxV1",
        "ConnectSandbox",
        "ConnectSandboxV1",
        "ResumeSandbox",
        "ForkSandbox",
    ] {
        let at = format!("/components/schemas/{schema}/properties/timeout/maximum");
        let maximum = served.pointer_mut(&at).expect("a maximum");
        assert_eq!(*maximum, MAX_LIFETIME_S, "{schema}");
        *maximum = committed.pointer(&at).expect("a maximum").clone();
    }
    assert_eq!(served, committed);
}
