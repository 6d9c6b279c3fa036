//! Authentication of clients, and the user that they act for.

use http::Method;
use protocol::connect::{Code, Codec};
use protocol::process::{ListRequest, ListResponse, StartRequest};

use crate::client::full;
use crate::sandbox::Sandbox;

#[tokio::test]
async fn the_token_gate() {
    let Some(sandbox) = Sandbox::ready(r#"{"accessToken":"secret"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    assert_eq!(client.get("/health").await.status, 204);
    let refusal = client.get("/envs").await;
    assert_eq!(refusal.status, 401);
    assert_eq!(
        refusal.text().trim_end(),
        r#"{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}"#
    );
    for path in ["/process.Process/List", "/process.Process/Start", "/nothing", "/health"] {
        assert_eq!(client.post(path, "{}").await.status, 401, "{path}");
    }
    let mut wrong = sandbox.client().await.with("x-access-token", "secret2");
    assert_eq!(wrong.get("/envs").await.status, 401);
    let mut right = sandbox.client().await.with("x-access-token", "secret");
    assert_eq!(right.get("/envs").await.status, 200);
    assert!(
        right
            .unary::<ListResponse>(Codec::Json, "List", &ListRequest {})
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn unknown_users_are_refused_everywhere() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await.user("nobody-here");
    let health = client.get("/health").await;
    assert_eq!(health.status, 401);
    assert_eq!(
        health.text(),
        r#"{"code":"unauthenticated","message":"invalid username: 'nobody-here'"}"#
    );
    for codec in [Codec::Json, Codec::Proto] {
        let error = client
            .unary::<ListResponse>(codec, "List", &ListRequest {})
            .await
            .unwrap_err();
        assert_eq!(error.code, Code::Unauthenticated);
        let error = client
            .stream(codec, "Start", &StartRequest::default())
            .await
            .failed()
            .await;
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::Unauthenticated, "invalid username: 'nobody-here'")
        );
    }
    // What is no Basic authorization names no user.
    let mut bearer = sandbox.client().await.with("authorization", "Bearer x");
    assert_eq!(bearer.get("/health").await.status, 204);
    let mut broken = sandbox.client().await.with("authorization", "Basic %%%");
    assert_eq!(broken.get("/health").await.status, 204);

    sandbox.host().await.post("/init", r#"{"defaultUser":"gone"}"#).await;
    let error = sandbox
        .client()
        .await
        .stream(Codec::Json, "Start", &StartRequest::default())
        .await
        .failed()
        .await;
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::Unauthenticated, "invalid default user: 'gone'")
    );
}

#[tokio::test]
async fn browsers_may_call() {
    let Some(sandbox) = Sandbox::ready(r#"{"accessToken":"secret"}"#).await else {
        return;
    };
    let mut client = sandbox
        .client()
        .await
        .with("origin", "https://example.com")
        .with("access-control-request-method", "POST")
        .with("access-control-request-headers", "x-access-token");
    let preflight = client.send(Method::OPTIONS, "/files", "", full("")).await;
    assert_eq!(preflight.status, 204);
    assert_eq!(preflight.header("access-control-allow-origin"), "*");
    assert_eq!(preflight.header("access-control-allow-headers"), "x-access-token");
    assert_eq!(preflight.header("access-control-max-age"), "7200");
    client.headers.remove("access-control-request-method");
    let refused = client.get("/envs").await;
    assert_eq!(
        (refused.status, refused.header("access-control-allow-origin")),
        (401, "*")
    );
}

#[tokio::test]
async fn what_no_codec_reads() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let path = "/process.Process/List";
    let answer = client.send(Method::POST, path, "text/plain", full("{}")).await;
    assert_eq!(
        (answer.status, answer.header("accept-post")),
        (415, "application/json, application/proto")
    );
    assert_eq!(
        client
            .send(Method::POST, path, "application/connect+json", full("{}"))
            .await
            .status,
        415
    );
    assert_eq!(client.get(path).await.status, 405);
    assert_eq!(client.post("/process.Process/Nothing", "{}").await.status, 404);
    for bad in ["", "[]", "{", "nonsense"] {
        let answer = client.post(path, bad).await;
        assert_eq!(answer.status, 400, "{bad}");
        assert!(
            answer.text().starts_with(r#"{"code":"invalid_argument","message":""#),
            "{}",
            answer.text()
        );
    }
    let mut other = sandbox.client().await.with("connect-protocol-version", "2");
    assert_eq!(other.post(path, "{}").await.status, 400);
    let mut compressed = sandbox.client().await.with("content-encoding", "br");
    assert_eq!(compressed.post(path, "{}").await.status, 501);
    for codec in [Codec::Json, Codec::Proto] {
        for (body, code) in [
            (vec![], Code::Unimplemented),
            (vec![0, 0, 0, 0], Code::InvalidArgument),
            (vec![0, 0, 0, 0, 9, b'x'], Code::InvalidArgument),
            (vec![0, 0, 0, 0, 1, 0xff], Code::InvalidArgument),
            (vec![1, 0, 0, 0, 0], Code::Internal),
            (vec![0, 0xff, 0xff, 0xff, 0xff], Code::InvalidArgument),
        ] {
            assert_eq!(
                client
                    .raw_stream(codec, "Start", body.clone())
                    .await
                    .failed()
                    .await
                    .code,
                code,
                "{body:?}"
            );
        }
    }
    // Longer than any message may be; the connection need not survive it.
    let huge = vec![b' '; 17 << 20];
    let answer = client.send(Method::POST, path, "application/json", full(huge)).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer.text().contains("larger than the limit of 16777216 bytes"),
        "{}",
        answer.text()
    );
}
