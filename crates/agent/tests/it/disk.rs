//! Full disks, and what failed writes leave behind.

use std::path::PathBuf;

use bytes::Bytes;
use futures_util::stream;
use http::Method;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};

use crate::client::full;
use crate::sandbox::Sandbox;
use crate::sys;

const RAW: &str = "application/octet-stream";
/// The error about a full disk that is mounted at this path.
fn no_space(inside: &str) -> String {
    format!("not enough disk space available: no space left on the file system of '{inside}'")
}

/// A sandbox with a disk of a megabyte, its path inside and from here.
async fn small_disk() -> Option<(Sandbox, String, PathBuf)> {
    let sandbox = Sandbox::ready("{}").await?;
    let inside = sandbox.path("disk");
    std::fs::create_dir(&inside).unwrap();
    sys::mount_memory(sandbox.agent, &sys::c_path(&inside), c"size=1m,nr_inodes=8,mode=755");
    let inside = inside.display().to_string();
    let outside = PathBuf::from(format!("/proc/{}/root{inside}", sandbox.agent));
    Some((sandbox, inside, outside))
}

fn message(body: &str) -> String {
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    body["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_upload_that_does_not_fit_says_so() {
    let Some((sandbox, inside, outside)) = small_disk().await else {
        return;
    };
    let mut client = sandbox.client().await;
    let url = format!("/files?path={inside}/file");
    let large = vec![7; 3_000_000];
    let answer = client.send(Method::POST, &url, RAW, full(large.clone())).await;
    assert_eq!(answer.status, 507);
    assert_eq!(
        message(answer.text()),
        format!("attempted to write 3000000 bytes: {}", no_space(&inside))
    );
    // Uploads are no transactions: what fitted is there, and the next upload replaces it.
    assert!(std::fs::metadata(outside.join("file")).unwrap().len() <= 1 << 20);
    let pieces = large
        .chunks(50_000)
        .map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece))));
    let unknown = BodyExt::boxed(StreamBody::new(stream::iter(pieces.collect::<Vec<_>>())));
    let answer = client.send(Method::POST, &url, RAW, unknown).await;
    assert_eq!((answer.status, message(answer.text())), (507, no_space(&inside)));
    let answer = client.send(Method::POST, &url, RAW, full(vec![8; 1 << 20])).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(std::fs::read(outside.join("file")).unwrap() == vec![8; 1 << 20]);
    assert_eq!(
        client
            .send(Method::POST, &url, RAW, full(vec![9; (1 << 20) + 1]))
            .await
            .status,
        507
    );

    // Of a form, the files before the one that did not fit are there.
    assert_eq!(client.send(Method::POST, &url, RAW, full("")).await.status, 200);
    let part = |name: &str, content: &str| {
        format!(
            "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{inside}/{name}\"\r\n\r\n{content}\r\n"
        )
    };
    let form = [
        part("one", "first"),
        part("two", &"x".repeat(2_000_000)),
        "--XX--".to_owned(),
    ]
    .concat();
    let answer = client
        .send(Method::POST, "/files", "multipart/form-data; boundary=XX", full(form))
        .await;
    assert_eq!(answer.status, 507);
    assert!(
        message(answer.text()).ends_with(&no_space(&inside)),
        "{}",
        answer.text()
    );
    assert_eq!(std::fs::read(outside.join("one")).unwrap(), b"first");
}

#[tokio::test]
async fn a_disk_without_inodes_says_so() {
    let Some((sandbox, inside, outside)) = small_disk().await else {
        return;
    };
    let mut client = sandbox.client().await;
    let mut made = 0;
    let refusal = loop {
        let url = format!("/files?path={inside}/file{made}");
        let answer = client.send(Method::POST, &url, RAW, full("x")).await;
        if answer.status != 200 {
            break answer;
        }
        made += 1;
        assert!(made < 9);
    };
    assert_eq!(refusal.status, 507);
    assert!(
        message(refusal.text()).starts_with("not enough inodes available: "),
        "{}",
        refusal.text()
    );
    let url = format!("/files?path={inside}/new/directory/file");
    let answer = client.send(Method::POST, &url, RAW, full("x")).await;
    assert_eq!(answer.status, 507, "{}", answer.text());
    let exhausted = format!("not enough inodes available: the file system of '{inside}' holds as many files as it can");
    assert_eq!(message(answer.text()), exhausted);
    assert_eq!(message(refusal.text()), exhausted);
    assert!(!outside.join("new").exists());
    let order = format!(r#"{{"path":"{inside}/new"}}"#);
    let answer = client.post("/filesystem.Filesystem/MakeDir", &order).await;
    assert_eq!(message(answer.text()), format!("error creating directory: {exhausted}"));
    // What is there can still be written.
    let url = format!("/files?path={inside}/file0");
    assert_eq!(client.send(Method::POST, &url, RAW, full("y")).await.status, 200);
}

#[tokio::test]
async fn what_does_not_fit_when_composed_leaves_nothing_behind() {
    let Some((sandbox, inside, outside)) = small_disk().await else {
        return;
    };
    let mut client = sandbox.client().await;
    let sources = ["a", "b"].map(|name| sandbox.path(name));
    for source in &sources {
        std::fs::write(source, vec![1; 700_000]).unwrap();
    }
    let order = |destination: &str| {
        let [a, b] = sources.each_ref().map(|source| source.display().to_string());
        format!(r#"{{"source_paths":["{a}","{b}"],"destination":"{destination}"}}"#)
    };
    let answer = client.post("/files/compose", &order(&format!("{inside}/whole"))).await;
    assert_eq!((answer.status, message(answer.text())), (507, no_space(&inside)));
    assert!(sources.iter().all(|source| source.exists()));
    // The draft is removed behind the answer.
    while std::fs::read_dir(&outside).unwrap().next().is_some() {
        assert_eq!(client.get("/health").await.status, 204);
    }
    let elsewhere = sandbox.path("whole");
    let answer = client
        .post("/files/compose", &order(&elsewhere.display().to_string()))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(std::fs::metadata(elsewhere).unwrap().len(), 1_400_000);
}
