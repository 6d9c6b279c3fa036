//! `/files/compose`.

use std::os::unix::fs::MetadataExt;

use crate::client::Answer;
use crate::sandbox::Sandbox;

fn refused(answer: &Answer, status: u16, message: &str) {
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((answer.status, body["message"].as_str().unwrap()), (status, message));
}

#[tokio::test]
async fn files_become_one() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user");
    // More than one step of copying.
    let large = vec![b'x'; 20_000_000];
    std::fs::write(home.join("a"), &large).unwrap();
    std::fs::write(home.join("b"), "").unwrap();
    std::fs::write(home.join("c"), "end").unwrap();
    let answer = client
        .post(
            "/files/compose",
            r#"{"source_paths":["a","~/b","c","c"],"destination":"new/whole"}"#,
        )
        .await;
    let whole = home.join("new/whole");
    let expect = format!(r#"{{"path":"{}","name":"whole","type":"file"}}"#, whole.display());
    assert_eq!((answer.status, answer.text()), (200, expect.as_str()));
    assert!(std::fs::read(&whole).unwrap() == [&large[..], b"endend"].concat());
    let metadata = std::fs::metadata(&whole).unwrap();
    assert_eq!(
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o777),
        (1000, 1000, 0o644)
    );
    assert_eq!(std::fs::metadata(home.join("new")).unwrap().uid(), 1000);
    for gone in ["a", "b", "c"] {
        assert!(!home.join(gone).exists(), "{gone}");
    }

    // Over what is there, even if it is a source under another name.
    std::fs::write(home.join("x"), "1").unwrap();
    std::fs::write(home.join("y"), "2").unwrap();
    let alias = format!("{}/../user/x", home.display());
    let order = format!(r#"{{"source_paths":["y","{alias}"],"destination":"x"}}"#);
    assert_eq!(client.post("/files/compose", &order).await.status, 200);
    assert_eq!(std::fs::read_to_string(home.join("x")).unwrap(), "21");
}

#[tokio::test]
async fn what_cannot_be_composed() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user","accessToken":"t"}"#).await else {
        return;
    };
    assert_eq!(sandbox.client().await.post("/files/compose", "{}").await.status, 401);
    let mut client = sandbox.client().await.with("x-access-token", "t");
    assert_eq!(client.get("/files/compose").await.status, 405);
    let home = sandbox.path("home/user");
    std::fs::write(home.join("a"), "1").unwrap();
    std::fs::create_dir(home.join("dir")).unwrap();
    let pipe = home.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    for (order, status, message) in [
        ("{}", 400, "source_paths must not be empty"),
        (
            r#"{"source_paths":null,"destination":"x"}"#,
            400,
            "source_paths must not be empty",
        ),
        (r#"{"source_paths":["a"]}"#, 400, "destination is required"),
        (
            r#"{"source_paths":["a"],"destination":"~/a"}"#,
            400,
            "source path \"a\" cannot be the same as destination",
        ),
        (
            r#"{"source_paths":["a","dir"],"destination":"x"}"#,
            400,
            "source path is not a regular file: dir",
        ),
        (
            r#"{"source_paths":["pipe"],"destination":"x"}"#,
            400,
            "source path is not a regular file: pipe",
        ),
        (
            r#"{"source_paths":["a","none"],"destination":"x"}"#,
            404,
            "source file not found: none",
        ),
        (
            r#"{"source_paths":["a"],"destination":"x","username":"ghost"}"#,
            401,
            "error looking up user 'ghost': user: unknown user ghost",
        ),
    ] {
        refused(&client.post("/files/compose", order).await, status, message);
    }
    for order in ["", "[]", "{", r#"{"source_paths":"a"}"#] {
        let answer = client.post("/files/compose", order).await;
        assert_eq!(answer.status, 400, "{order}");
        assert!(answer.text().contains("invalid request body: "), "{}", answer.text());
    }
    let onto_directory = r#"{"source_paths":["a"],"destination":"dir"}"#;
    assert_eq!(client.post("/files/compose", onto_directory).await.status, 500);
    // Nothing is lost and nothing is left behind.
    assert_eq!(std::fs::read_to_string(home.join("a")).unwrap(), "1");
    let leftover = || {
        let names = std::fs::read_dir(&home)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        names
            .filter(|name| name.to_string_lossy().contains("e2b-compose"))
            .count()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while leftover() > 0 {
        assert!(std::time::Instant::now() < deadline);
        client.get("/health").await;
    }
}
