//! Operations that clients know and that are not built yet.

use std::collections::BTreeSet;

use serde_json::Value;

use super::platform::{OTHER_KEY, TestPlatform};

/// The operations that are not built yet. To build one, delete it here and in `api/not_built.rs`; add one only when
/// clients get a new operation.
const REMAINS: &[&str] = &[
    "DELETE /volumes/{volumeID}",
    "GET /volumes",
    "GET /volumes/{volumeID}",
    "POST /volumes",
];

/// The operations that are not built according to the document.
fn described(document: &Value) -> BTreeSet<String> {
    let paths = document["paths"].as_object().expect("paths");
    let operations = paths.iter().flat_map(|(path, item)| {
        let item = item.as_object().expect("an item");
        item.iter()
            .filter(|(_, operation)| {
                operation["summary"]
                    .as_str()
                    .is_some_and(|text| text.starts_with("Not built yet: "))
            })
            .map(move |(method, _)| format!("{} {path}", method.to_uppercase()))
    });
    operations.collect()
}

#[tokio::test]
async fn unbuilt_operations_match_the_document() {
    let platform = TestPlatform::start().await;
    let document = platform.call_as(None, "GET", "/openapi.json", "").await.json;
    let listed: BTreeSet<String> = REMAINS.iter().map(|operation| (*operation).to_owned()).collect();
    assert_eq!(described(&document), listed);
}

#[tokio::test]
async fn unbuilt_operations_answer_501() {
    let platform = TestPlatform::start().await;
    for operation in REMAINS {
        let (method, path) = operation.split_once(' ').expect("a method");
        let path = path.replace(['{', '}'], "");
        for body in ["", "{}", "{"] {
            let body = if method == "GET" { "" } else { body };
            let reply = platform.call(method, &path, body).await;
            let message = reply.error(501);
            assert!(
                message.contains("not built") && message.contains(operation),
                "{reply:?}"
            );
            assert_eq!(reply.json["error_code"], "not_built", "{operation}");
        }
        // Without valid credentials 401.
        platform.call_as(None, method, &path, "").await.error(401);
        platform.call_as(Some(OTHER_KEY), method, &path, "").await.error(501);
    }
    // Other methods of the path are not allowed.
    platform.call("PATCH", "/volumes", "").await.error(405);
}
