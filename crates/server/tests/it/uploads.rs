//! Uploads for builds: addresses, what is stored, and limits.

use std::time::Duration;

use protocol::node::HostCapacity;
use serde_json::json;
use server::settings::ServerSettings;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::builds::{request, text};
use super::platform::{BASE, OTHER_KEY, TestPlatform, within};

const HASH: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

#[tokio::test]
async fn files_are_uploaded_once() {
    let platform = TestPlatform::start_adjusted(|settings| settings.builds.file_bytes = 1000).await;
    let (template, _) = request(&platform, r#"{"name":"a"}"#).await;
    let path = format!("/templates/{template}/files/{HASH}");
    let first = platform.call("GET", &path, "").await;
    assert_eq!(
        (first.status.as_u16(), &first.json["present"]),
        (201, &json!(false)),
        "{first:?}"
    );
    let url = text(&first, "url");
    let target = url.strip_prefix("http://localhost").expect("this platform").to_owned();
    let put = async |target: &str, body: Vec<u8>| platform.send("PUT", target, &[("host", "localhost")], body).await;
    assert_eq!(put(&target, b"archive".to_vec()).await.status, 200);
    assert_eq!(platform.call("GET", &path, "").await.json["present"], true);
    // By any template of the team, and by no other team.
    let (second, _) = request(&platform, r#"{"name":"b"}"#).await;
    let again = platform
        .call("GET", &format!("/templates/{second}/files/{HASH}"), "")
        .await;
    assert_eq!(again.json["present"], true);
    platform.call_as(Some(OTHER_KEY), "GET", &path, "").await.error(404);
    let stored = platform.directory.path().join("builds/files");
    let team = std::fs::read_dir(&stored)
        .expect("files")
        .next()
        .expect("a team")
        .expect("a team")
        .path();
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(&team).expect("files");
        entries
            .map(|entry| entry.expect("a file").file_name().to_string_lossy().into_owned())
            .collect()
    };
    assert_eq!(names(), [format!("{HASH}.tar")]);
    assert_eq!(
        std::fs::read(team.join(format!("{HASH}.tar"))).expect("the file"),
        b"archive"
    );
    // Again, and larger than allowed; nothing is left of that.
    assert_eq!(put(&target, b"other".to_vec()).await.status, 200);
    put(&target, vec![0; 1001]).await.error(413);
    assert_eq!(
        std::fs::read(team.join(format!("{HASH}.tar"))).expect("the file"),
        b"other"
    );
    assert_eq!(names(), [format!("{HASH}.tar")]);

    put(&target.replace("token=", "token=0"), Vec::new()).await.error(403);
    put(&target.replace("expires=", "expires=9"), Vec::new())
        .await
        .error(403);
    put(&target.replace("aaaa", "bbbb"), Vec::new()).await.error(403);
    put(target.split("&token").next().expect("an address"), Vec::new())
        .await
        .error(400);
    put(target.split('?').next().expect("an address"), Vec::new())
        .await
        .error(400);
    platform.clock.advance(30 * 60 + 1);
    put(&target, Vec::new()).await.error(403);

    for bad in ["x", &HASH[1..], &HASH.to_uppercase()] {
        platform
            .call("GET", &format!("/templates/{template}/files/{bad}"), "")
            .await
            .error(400);
    }
    platform
        .call("GET", &format!("/templates/{BASE}/files/{HASH}"), "")
        .await
        .error(403);
}

/// Waits until something holds.
async fn until(holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(wait).await;
}

/// Begins an upload and returns the connection, on which it continues.
async fn begin_upload(platform: &TestPlatform, target: &str, head: &str, part: usize) -> TcpStream {
    let mut upload = TcpStream::connect(platform.addr).await.expect("connect");
    let head = format!("PUT {target} HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n");
    upload.write_all(head.as_bytes()).await.expect("send");
    upload.write_all(&vec![b'a'; part]).await.expect("send");
    upload
}

/// The number of uploads that have begun and not ended.
fn unfinished(platform: &TestPlatform) -> usize {
    let stored = platform.directory.path().join("builds/files");
    let teams = std::fs::read_dir(stored).into_iter().flatten().flatten();
    let files = teams.flat_map(|team| std::fs::read_dir(team.path()).into_iter().flatten().flatten());
    files
        .filter(|file| file.file_name().to_string_lossy().starts_with(".partial"))
        .count()
}

#[tokio::test]
async fn uploads_at_the_same_time_share_the_limit_of_the_team() {
    let platform = TestPlatform::start_adjusted(|settings| settings.builds.team_files_bytes = 2 << 20).await;
    let (template, _) = request(&platform, r#"{"name":"a"}"#).await;
    let address = async |number: usize| {
        let path = format!("/templates/{template}/files/{}", format!("{number:x}").repeat(64));
        let url = text(&platform.call("GET", &path, "").await, "url");
        url.strip_prefix("http://localhost").expect("this platform").to_owned()
    };
    let put = async |number: usize, size: usize| {
        let target = address(number).await;
        let headers = [("host", "localhost")];
        platform.send("PUT", &target, &headers, vec![b'b'; size]).await
    };
    // Half of it is announced, and a little of that sent.
    let announced = begin_upload(&platform, &address(1).await, "content-length: 1048576", 10).await;
    until(|| unfinished(&platform) == 1).await;
    // So this is too much with it, and that is not.
    assert!(put(2, (1 << 20) + 1).await.error(413).contains("of the team"));
    assert_eq!(put(2, 1000).await.status, 200);
    put(3, 1 << 20).await.error(413);

    // What is not announced is limited while it arrives.
    drop(announced);
    until(|| unfinished(&platform) == 0).await;
    let mut chunked = begin_upload(&platform, &address(4).await, "transfer-encoding: chunked", 0).await;
    let chunk = [&b"100000\r\n"[..], &vec![b'c'; 1 << 20], b"\r\n"].concat();
    chunked.write_all(&chunk).await.expect("send");
    // The second megabyte is more than is left; the answer may come before all of it was sent.
    let _ = chunked.write_all(&chunk).await;
    let mut answer = [0; 12];
    chunked.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 413");
    until(|| unfinished(&platform) == 0).await;
    assert_eq!(put(5, (2 << 20) - 1000).await.status, 200);
    put(6, 1).await.error(413);
}

#[tokio::test]
async fn uploads_leave_the_reserve_of_the_host() {
    let platform = TestPlatform::start_adjusted(|settings| settings.capacity.disk_floor_mb = 2000).await;
    let (template, _) = request(&platform, r#"{"name":"a"}"#).await;
    let path = format!("/templates/{template}/files/{HASH}");
    let url = text(&platform.call("GET", &path, "").await, "url");
    let target = url.strip_prefix("http://localhost").expect("this platform").to_owned();
    let put = async |size: usize| {
        platform
            .send("PUT", &target, &[("host", "localhost")], vec![0; size])
            .await
    };
    let free = |bytes: u64| {
        *platform.node.room.lock() = Some(HostCapacity {
            memory_available_bytes: u64::MAX,
            disk_available_bytes: (2000 << 20) + bytes,
        });
    };
    free(1000);
    assert_eq!(put(1000).await.status, 200);
    assert!(put(1001).await.error(503).contains("disk"));
    // An upload that was admitted, of which nothing is written yet.
    let head = "content-length: 900";
    let held = begin_upload(&platform, &target, head, 0).await;
    until(|| unfinished(&platform) == 1).await;
    put(101).await.error(503);
    assert_eq!(put(100).await.status, 200);
    drop(held);
}

#[tokio::test]
async fn an_upload_that_stops_ends() {
    let adjust = |settings: &mut ServerSettings| settings.builds.upload_stall = Duration::from_millis(200);
    let platform = TestPlatform::start_adjusted(adjust).await;
    let (template, _) = request(&platform, r#"{"name":"a"}"#).await;
    let path = format!("/templates/{template}/files/{HASH}");
    let url = text(&platform.call("GET", &path, "").await, "url");
    let target = url.strip_prefix("http://localhost").expect("this platform").to_owned();
    let mut held = begin_upload(&platform, &target, "content-length: 900", 100).await;
    let mut answer = [0; 1024];
    let length = within(held.read(&mut answer)).await.expect("an answer");
    let answer = String::from_utf8_lossy(&answer[..length]);
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    until(|| unfinished(&platform) == 0).await;
}
