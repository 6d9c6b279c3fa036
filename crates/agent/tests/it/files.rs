//! `/files` both ways.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures_util::stream;
use http::Method;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use protocol::signature::Claim;

use crate::client::{Answer, Body, Client, full};
use crate::sandbox::Sandbox;

const RAW: &str = "application/octet-stream";
const FORM: &str = "multipart/form-data; boundary=XX";

fn part(name: &str, file_name: &str, content: &str) -> String {
    format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"{file_name}\r\n\r\n{content}\r\n")
}

async fn upload(client: &mut Client, path: &str, content_type: &str, body: impl Into<Bytes>) -> Answer {
    client.send(Method::POST, path, content_type, full(body)).await
}

/// `count` chunks of 64 KiB that tell where they are, of no announced length.
fn large(count: u32) -> Body {
    let chunk = |number: u32| Bytes::from(number.to_le_bytes().repeat(16 * 1024));
    let frames = (0..count).map(move |number| Ok(Frame::data(chunk(number))));
    BodyExt::boxed(StreamBody::new(stream::iter(frames)))
}

#[tokio::test]
async fn fifty_megabytes_both_ways_in_bounded_memory() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let path = sandbox.path("large");
    let url = format!("/files?path={}", path.display());
    let before = sandbox.memory("VmHWM");
    let answer = client.send(Method::POST, &url, RAW, large(800)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.text(),
        format!(r#"[{{"path":"{}","name":"large","type":"file"}}]"#, path.display())
    );
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 800 * 65536);

    let response = client.request(Method::GET, &url, "", full("")).await;
    assert_eq!(response.headers()["content-length"], (800 * 65536).to_string());
    let mut body = response.into_body();
    let mut position = 0;
    while let Some(frame) = body.frame().await {
        let data = frame.unwrap().into_data().unwrap();
        for (at, byte) in data.iter().enumerate().step_by(4096) {
            let at = position + at;
            assert_eq!(*byte, u32::try_from(at / 65536).unwrap().to_le_bytes()[at % 4]);
        }
        position += data.len();
    }
    assert_eq!(position, 800 * 65536);
    let growth = sandbox.memory("VmHWM") - before;
    assert!(growth < 8 * 1024, "{growth} kB");
}

#[tokio::test]
async fn transfers_that_stand_still_do_not_add_up() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    std::fs::write(sandbox.path("large"), vec![7; 20_000_000]).unwrap();
    let url = format!("/files?path={}", sandbox.path("large").display());
    let mut stalled = Vec::new();
    for _ in 0..200 {
        let mut client = sandbox.client().await;
        let response = client.request(Method::GET, &url, "", full("")).await;
        stalled.push((client, response));
    }
    let memory = sandbox.memory("RssAnon");
    assert!(memory < 64 * 1024, "{memory} kB");
    assert_eq!(sandbox.client().await.get(&url).await.body.len(), 20_000_000);
    for (_, response) in stalled {
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes().len(),
            20_000_000
        );
    }
}

/// A reader gets what is in the file at one moment; it may be nothing, right after the file was truncated.
#[tokio::test]
async fn small_files_are_read_whole_while_a_program_rewrites_them() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let path = sandbox.path("state");
    let url = format!("/files?path={}", path.display());
    std::fs::write(&path, "").unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let ended = ended.clone();
        move || {
            for length in [3, 2000, 100, 30_000].into_iter().cycle() {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                std::fs::write(&path, "a".repeat(length)).unwrap();
            }
        }
    });
    for client in [
        sandbox.client().await,
        sandbox.client().await.with("accept-encoding", "gzip"),
    ] {
        let mut client = client;
        let mut filled = 0;
        for _ in 0..5000 {
            let answer = client.get(&url).await;
            assert_eq!(answer.status, 200);
            filled += usize::from(!answer.body.is_empty());
        }
        assert!(filled > 0);
    }
    ended.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

#[tokio::test]
async fn downloads() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    std::fs::write(sandbox.path("home/user/a b.json"), "0123456789").unwrap();
    std::fs::write(sandbox.path("home/user/empty"), "").unwrap();
    let answer = client.get("/files?path=a+b.json").await;
    assert_eq!((answer.status, answer.text()), (200, "0123456789"));
    assert_eq!(answer.header("content-type"), "application/json");
    assert_eq!(answer.header("content-disposition"), "inline; filename=\"a b.json\"");
    assert_eq!(
        (answer.header("vary"), answer.header("accept-ranges")),
        ("Accept-Encoding", "bytes")
    );
    let modified = answer.header("last-modified").to_owned();
    let empty = client.get("/files?path=empty").await;
    assert_eq!((empty.status, empty.header("content-length")), (200, "0"));
    // A file of the kernel has no size, and content all the same.
    assert!(
        client
            .get("/files?path=/proc/self/status")
            .await
            .text()
            .starts_with("Name:")
    );

    let mut ranged = sandbox.client().await.with("range", "bytes=2-4");
    let answer = ranged.get("/files?path=a%20b.json").await;
    assert_eq!(
        (answer.status, answer.text(), answer.header("content-range")),
        (206, "234", "bytes 2-4/10")
    );
    let answer = ranged.get("/files?path=empty").await;
    assert_eq!((answer.status, answer.header("content-range")), (416, "bytes */0"));
    let mut ranged = ranged.with("if-range", "Mon, 01 Jan 2001 00:00:00 GMT");
    assert_eq!(ranged.get("/files?path=a%20b.json").await.text(), "0123456789");
    let mut ranged = ranged.with("if-range", &modified);
    assert_eq!(ranged.get("/files?path=a%20b.json").await.text(), "234");
    let mut known = sandbox.client().await.with("if-modified-since", &modified);
    let answer = known.get("/files?path=a%20b.json").await;
    assert_eq!((answer.status, answer.text()), (304, ""));

    let home = sandbox.path("home/user").display().to_string();
    for (query, status, message) in [
        ("path=none", 404, format!("path '{home}/none' does not exist")),
        ("path=", 400, format!("path '{home}' is a directory")),
        ("", 400, format!("path '{home}' is a directory")),
        (
            "path=~root/x",
            400,
            "error expanding and resolving path '~root/x': failed to expand path '~root/x' for user 'user': \
             cannot expand user-specific home dir"
                .to_owned(),
        ),
        (
            "path=x&username=ghost",
            401,
            "error looking up user 'ghost': user: unknown user ghost".to_owned(),
        ),
        (
            "path=x&username=",
            401,
            "error looking up user '': user: unknown user ".to_owned(),
        ),
        (
            "path=/dev/null",
            400,
            "path '/dev/null' is not a regular file".to_owned(),
        ),
    ] {
        let answer = client.get(&format!("/files?{query}")).await;
        let expect = format!("{{\"code\":{status},\"message\":\"{message}\"}}\n");
        assert_eq!((answer.status, answer.text()), (status, expect.as_str()));
        assert_eq!(answer.header("content-type"), "application/json; charset=utf-8");
    }
    assert_eq!(client.get("/files?path=empty/below").await.status, 500);
    assert_eq!(
        client.send(Method::DELETE, "/files?path=x", "", full("")).await.status,
        405
    );
}

#[tokio::test]
async fn a_pipe_does_not_hold_the_agent() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let pipe = sandbox.path("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let url = format!("/files?path={}", pipe.display());
    let mut client = sandbox.client().await;
    // More often than there are threads for files.
    for _ in 0..6 {
        assert_eq!(client.get(&url).await.status, 400);
        assert_eq!(upload(&mut client, &url, RAW, "x").await.status, 500);
    }
}

#[tokio::test]
async fn raw_uploads() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let answer = upload(&mut client, "/files?path=new/dir/file.txt", RAW, "first content").await;
    let path = sandbox.path("home/user/new/dir/file.txt");
    let expect = format!(r#"[{{"path":"{}","name":"file.txt","type":"file"}}]"#, path.display());
    assert_eq!((answer.status, answer.text()), (200, expect.as_str()));
    assert_eq!(answer.header("content-type"), "application/json");
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o777),
        (1000, 1000, 0o644)
    );
    let directory = std::fs::metadata(sandbox.path("home/user/new")).unwrap();
    assert_eq!((directory.uid(), directory.mode() & 0o777), (1000, 0o755));

    // The mode of what is there stays, the owner does not.
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!(
        upload(&mut client, "/files?path=new/dir/file.txt&username=root", RAW, "x")
            .await
            .status,
        200
    );
    let rooted = format!("/files?path={}&username=root", path.display());
    assert_eq!(upload(&mut client, &rooted, RAW, "second").await.status, 200);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o600));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "second");

    for (query, content_type, status, message) in [
        ("", RAW, 400, "path query parameter is required for raw body upload"),
        (
            "?path=",
            RAW,
            400,
            "path query parameter is required for raw body upload",
        ),
        (
            "?path=x",
            "text/plain",
            400,
            "unsupported content type: text/plain, expected multipart/form-data or application/octet-stream",
        ),
        (
            "?path=x",
            "",
            400,
            "unsupported content type: , expected multipart/form-data or application/octet-stream",
        ),
        ("?path=/usr", RAW, 400, "path is a directory: /usr"),
        (
            "?path=x&username=ghost",
            RAW,
            401,
            "error looking up user 'ghost': user: unknown user ghost",
        ),
    ] {
        let answer = upload(&mut client, &format!("/files{query}"), content_type, "x").await;
        let expect = format!("{{\"code\":{status},\"message\":\"{message}\"}}\n");
        assert_eq!((answer.status, answer.text()), (status, expect.as_str()));
    }
    let below = upload(&mut client, "/files?path=new/dir/file.txt/below", RAW, "x").await;
    assert_eq!(below.status, 500);
    assert!(
        below.text().contains(&format!(
            "error ensuring directories: path is a file: {}",
            path.display()
        )),
        "{}",
        below.text()
    );
    let mut compressed = sandbox.client().await.with("content-encoding", "br");
    let answer = upload(&mut compressed, "/files?path=x", RAW, "x").await;
    assert_eq!(answer.status, 400);
    assert!(
        answer
            .text()
            .contains("error decompressing request body: unsupported Content-Encoding: br")
    );
}

#[tokio::test]
async fn a_full_disk_says_so() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let answer = upload(&mut client, "/files?path=/dev/full", RAW, vec![0; 1000]).await;
    assert_eq!(answer.status, 507);
    assert!(
        answer
            .text()
            .contains("attempted to write 1000 bytes: not enough disk space available"),
        "{}",
        answer.text()
    );
    // The connection lives, however much was still on its way.
    assert_eq!(
        client
            .send(Method::POST, "/files?path=/dev/full", RAW, large(40))
            .await
            .status,
        507
    );
    assert_eq!(client.get("/health").await.status, 204);
}

#[tokio::test]
async fn forms() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let home = sandbox.path("home/user").display().to_string();
    let written = |names: &[&str]| {
        let entry = |name: &&str| {
            let base = name.rsplit('/').next().unwrap();
            format!(r#"{{"path":"{home}/{name}","name":"{base}","type":"file"}}"#)
        };
        format!("[{}]", names.iter().map(entry).collect::<Vec<_>>().join(","))
    };
    let form = part("file", "; filename=\"a/one.txt\"", "1")
        + &part("note", "", "ignored")
        + &part("file", "; filename=\"two.txt\"", "")
        + "--XX--\r\n";
    let answer = upload(&mut client, "/files", FORM, form).await;
    assert_eq!(
        (answer.status, answer.text()),
        (200, written(&["a/one.txt", "two.txt"]).as_str())
    );
    assert_eq!(
        std::fs::read_to_string(sandbox.path("home/user/a/one.txt")).unwrap(),
        "1"
    );
    assert_eq!(std::fs::read_to_string(sandbox.path("home/user/two.txt")).unwrap(), "");

    // The query wins over the part's name, and a part needs none then.
    for file_name in ["", "; filename=\"other\""] {
        let form = part("file", file_name, "text") + "--XX--";
        let answer = upload(&mut client, "/files?path=three", FORM, form).await;
        assert_eq!((answer.status, answer.text()), (200, written(&["three"]).as_str()));
    }
    let twice = part("file", "; filename=\"x\"", "first") + &part("file", "; filename=\"./x\"", "second") + "--XX--";
    let answer = upload(&mut client, "/files", FORM, twice).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer
            .text()
            .contains(&format!("you cannot upload multiple files to the same path '{home}/x'"))
    );
    assert_eq!(std::fs::read_to_string(sandbox.path("home/user/x")).unwrap(), "first");
    // One that cannot be written ends it: what came before stays, what comes after is not begun.
    std::fs::create_dir(sandbox.path("home/user/taken")).unwrap();
    let files = ["before", "taken", "after"].map(|name| part("file", &format!("; filename=\"{name}\""), name));
    let answer = upload(&mut client, "/files", FORM, files.concat() + "--XX--").await;
    assert_eq!(
        (answer.status, answer.text().trim_end()),
        (
            400,
            format!(r#"{{"code":400,"message":"path is a directory: {home}/taken"}}"#).as_str()
        )
    );
    assert_eq!(
        std::fs::read_to_string(sandbox.path("home/user/before")).unwrap(),
        "before"
    );
    assert!(!sandbox.path("home/user/after").exists());
    for (content_type, body) in [
        (FORM, "nonsense".to_owned()),
        (FORM, part("file", "", "x")),
        ("multipart/form-data", String::new()),
    ] {
        let answer = upload(&mut client, "/files?path=y", content_type, body).await;
        assert_eq!(answer.status, 500, "{}", answer.text());
    }
}

#[tokio::test]
async fn metadata_goes_with_the_file() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox
        .client()
        .await
        .with("x-metadata-Author", "me")
        .with("x-metadata-b", "2");
    let path = sandbox.path("file").display().to_string();
    let url = format!("/files?path={path}");
    let answer = upload(&mut client, &url, RAW, "x").await;
    let plain = format!(r#"[{{"path":"{path}","name":"file","type":"file"}}]"#);
    let full = format!(r#"[{{"path":"{path}","name":"file","type":"file","metadata":{{"author":"me","b":"2"}}}}]"#);
    // Some file systems have no user attributes.
    assert!(answer.text() == full || answer.text() == plain, "{}", answer.text());
    let answer = upload(&mut sandbox.client().await, &url, RAW, "x").await;
    assert_eq!(answer.text(), plain);
    let mut wrong = sandbox.client().await.with("x-metadata-k", &"v".repeat(4096));
    let answer = upload(&mut wrong, &url, RAW, "x").await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("invalid metadata: "), "{}", answer.text());
}

#[tokio::test]
async fn signed_urls() {
    let Some(sandbox) = Sandbox::ready(r#"{"accessToken":"secret","defaultUser":"user"}"#).await else {
        return;
    };
    std::fs::write(sandbox.path("home/user/f"), "content").unwrap();
    let mut client = sandbox.client().await;
    let url = |claim: &Claim<'_>, signature: &str| {
        let expiration = claim
            .expiration
            .map(|at| format!("&signature_expiration={at}"))
            .unwrap_or_default();
        let signature = signature.replace('+', "%2B").replace('/', "%2F");
        format!(
            "/files?path={}&username={}&signature={signature}{expiration}",
            claim.path, claim.username
        )
    };
    let claim = Claim {
        path: "f",
        operation: "read",
        username: "user",
        expiration: None,
    };
    let refused = |answer: &Answer, message: &str| {
        let expect = format!("{{\"code\":401,\"message\":\"{message}\"}}\n");
        assert_eq!((answer.status, answer.text()), (401, expect.as_str()));
    };
    assert_eq!(client.get(&url(&claim, &claim.sign("secret"))).await.text(), "content");
    let future = Claim {
        expiration: Some(4_000_000_000),
        ..claim
    };
    assert_eq!(
        client.get(&url(&future, &future.sign("secret"))).await.text(),
        "content"
    );
    let past = Claim {
        expiration: Some(1),
        ..claim
    };
    refused(
        &client.get(&url(&past, &past.sign("secret"))).await,
        "signature is already expired",
    );
    refused(
        &client.get(&url(&past, &future.sign("secret"))).await,
        "invalid signature",
    );
    refused(
        &client.get(&url(&claim, &claim.sign("other"))).await,
        "invalid signature",
    );
    refused(&client.get("/files?path=f").await, "missing signature query parameter");
    let answer = client
        .get(&format!(
            "{}&signature_expiration=soon",
            url(&claim, &claim.sign("secret"))
        ))
        .await;
    assert_eq!(answer.status, 400);

    // A link to read does not write.
    let link = url(&claim, &claim.sign("secret"));
    refused(&upload(&mut client, &link, RAW, "x").await, "invalid signature");
    let write = Claim {
        operation: "write",
        ..claim
    };
    assert_eq!(
        upload(&mut client, &url(&write, &write.sign("secret")), RAW, "new")
            .await
            .status,
        200
    );

    // The hexadecimal form: 300 seconds from whenever it was made, or from 1970, are no end.
    for (expiration, hash) in [
        (
            Some(300),
            "188895a128a370c0435f37a2f4401dbea107644cedb405ae9ac979c985afd83f",
        ),
        (None, "1eae62cf270a67bfbf05dd12ba351d50037c1286c39aacaa20e4a5ab3e851b01"),
    ] {
        let relative = Claim { expiration, ..claim };
        let link = url(&relative, &format!("v1_{hash}"));
        assert_eq!(client.get(&link).await.text(), "new");
        refused(&upload(&mut client, &link, RAW, "x").await, "invalid signature");
        let shorter = url(&past, &format!("v1_{hash}"));
        refused(&client.get(&shorter).await, "invalid signature");
        let shouted = url(&relative, &format!("v1_{}", hash.to_ascii_uppercase()));
        refused(&client.get(&shouted).await, "invalid signature");
    }
    // A form with many files and neither signature nor token.
    let form = part("file", "; filename=\"a\"", "1") + &part("file", "; filename=\"b\"", "2") + "--XX--\r\n";
    refused(
        &upload(&mut client, "/files?username=user", FORM, form).await,
        "missing signature query parameter",
    );

    let mut right = sandbox.client().await.with("x-access-token", "secret");
    assert_eq!(right.get("/files?path=f").await.text(), "new");
    let mut wrong = sandbox.client().await.with("x-access-token", "wrong");
    refused(
        &wrong.get(&link).await,
        "access token present in header but does not match",
    );
}

#[tokio::test]
async fn an_open_agent_ignores_what_callers_present() {
    let init = r#"{"accessToken":"secret","openToAnonymous":true,"defaultUser":"user"}"#;
    let Some(sandbox) = Sandbox::ready(init).await else {
        return;
    };
    std::fs::write(sandbox.path("home/user/f"), "content").unwrap();
    let mut nobody = sandbox.client().await;
    assert_eq!(nobody.get("/envs").await.status, 200);
    assert_eq!(nobody.get("/files?path=f").await.text(), "content");
    assert_eq!(upload(&mut nobody, "/files?path=g", RAW, "x").await.status, 200);
    let mut right = sandbox.client().await.with("x-access-token", "secret");
    assert_eq!(right.get("/envs").await.status, 200);
    assert_eq!(right.get("/files?path=f").await.text(), "content");
    // Clients send the token of another sandbox, or of this one before it was made anew.
    for token in ["wrong", ""] {
        let mut wrong = sandbox.client().await.with("x-access-token", token);
        assert_eq!(wrong.get("/envs").await.status, 200);
        assert_eq!(wrong.post("/process.Process/List", "{}").await.status, 200);
        assert_eq!(wrong.get("/files?path=f").await.text(), "content");
        assert_eq!(upload(&mut wrong, "/files?path=g", RAW, "x").await.status, 200);
        assert_eq!(wrong.get("/health").await.status, 204);
    }
    for link in ["signature=v1_x", "signature=v1_x&signature_expiration=1"] {
        assert_eq!(nobody.get(&format!("/files?path=f&{link}")).await.text(), "content");
    }
    sandbox.host().await.post("/init", r#"{"accessToken":"secret"}"#).await;
    assert_eq!(nobody.get("/envs").await.status, 401);
    assert_eq!(nobody.get("/files?path=f").await.status, 401);
}
