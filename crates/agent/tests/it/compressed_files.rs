//! `/files` in gzip, both ways.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use futures_util::stream;
use http::Method;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};

use crate::client::{Answer, Client, full};
use crate::sandbox::Sandbox;

const RAW: &str = "application/octet-stream";

fn compress(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn decompress(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    MultiGzDecoder::new(bytes).read_to_end(&mut out).unwrap();
    out
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

async fn upload(client: &mut Client, path: &str, content_type: &str, body: Vec<u8>) -> Answer {
    client.send(Method::POST, path, content_type, full(body)).await
}

#[tokio::test]
async fn downloads_are_compressed_for_those_who_prefer_it() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let text = |length: usize| b"a line of text\n".repeat(length / 15);
    // Compressed where that pays on the whole, whatever the file begins or ends with.
    for (name, content, media_type, pays) in [
        (
            "mixed",
            [noise(700_000), vec![7; 3_000_000], b"end".to_vec()].concat(),
            "application/octet-stream",
            true,
        ),
        (
            "noise-behind",
            [text(4_000_000), noise(3_000_000)].concat(),
            "application/octet-stream",
            true,
        ),
        ("sparse.json", vec![0; 5_000_000], "application/json", true),
        ("text", text(2000), "application/octet-stream", true),
        ("noise", noise(3_000_000), "application/octet-stream", false),
        (
            "text-before",
            [text(300_000), noise(6_000_000)].concat(),
            "application/octet-stream",
            false,
        ),
        (
            "text-behind",
            [noise(6_000_000), text(300_000)].concat(),
            "application/octet-stream",
            false,
        ),
        ("empty", Vec::new(), "text/plain; charset=utf-8", false),
        ("small.json", text(1000), "application/json", false),
    ] {
        std::fs::write(sandbox.path(name), &content).unwrap();
        let url = format!("/files?path={}", sandbox.path(name).display());
        for (accepted, compressed) in [
            ("gzip, deflate", pays),
            ("gzip, identity;q=0.5", pays),
            // Who refuses identity gets gzip, for better or worse.
            ("gzip;q=0.1, identity;q=0", true),
            ("gzip;q=0.5, identity", false),
            ("gzip;q=0", false),
        ] {
            let mut client = sandbox.client().await.with("accept-encoding", accepted);
            let answer = client.get(&url).await;
            let coding = if compressed { "gzip" } else { "" };
            assert_eq!(
                (answer.status, answer.header("content-encoding")),
                (200, coding),
                "{name} {accepted}"
            );
            assert_eq!(answer.header("vary"), "Accept-Encoding");
            assert_eq!(answer.header("content-disposition"), format!("inline; filename={name}"));
            if compressed {
                if pays {
                    assert_eq!(answer.header("content-type"), media_type);
                }
                for absent in ["content-length", "last-modified", "accept-ranges"] {
                    assert_eq!(answer.header(absent), "", "{absent}");
                }
                assert!(decompress(&answer.body) == content);
                // What does not shrink hardly grows.
                assert!(answer.body.len() < content.len() + content.len() / 50 + 64);
            } else {
                assert_eq!(answer.header("content-length"), content.len().to_string());
                assert_eq!(answer.header("accept-ranges"), "bytes");
                assert!(answer.body == content);
            }
        }
    }
    // A file of the kernel, which has no size.
    let mut client = sandbox.client().await.with("accept-encoding", "gzip");
    let answer = client.get("/files?path=/proc/self/status").await;
    assert!(decompress(&answer.body).starts_with(b"Name:"));
    // The head of the same answer.
    let answer = client
        .send(Method::HEAD, "/files?path=/proc/self/status", "", full(""))
        .await;
    assert_eq!((answer.status, answer.header("content-encoding")), (200, "gzip"));
    assert!(answer.body.is_empty());
}

#[tokio::test]
async fn codings_that_cannot_be_had() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    std::fs::write(sandbox.path("f"), "0123456789").unwrap();
    let url = format!("/files?path={}", sandbox.path("f").display());
    let message = |text: &str| format!("{{\"code\":406,\"message\":\"{text}\"}}\n");
    let none = message("error parsing Accept-Encoding: no acceptable encoding found, supported: [gzip]");
    for refusing in ["identity;q=0", "*;q=0", "br, identity;q=0"] {
        let mut client = sandbox.client().await.with("accept-encoding", refusing);
        let answer = client.get(&url).await;
        assert_eq!((answer.status, answer.text()), (406, none.as_str()), "{refusing}");
        // What is wrong with the path is said first.
        assert_eq!(client.get("/files?path=/no/where").await.status, 404);
        assert_eq!(client.get("/files?path=/usr").await.status, 400);
    }
    let conditional = message("identity encoding not acceptable for Range or conditional request");
    for (name, value, status, body) in [
        ("range", "bytes=2-4", 206, "234"),
        ("if-modified-since", "Mon, 01 Jan 2001 00:00:00 GMT", 200, "0123456789"),
        ("if-none-match", "\"x\"", 200, "0123456789"),
        ("if-range", "\"x\"", 200, "0123456789"),
    ] {
        let mut client = sandbox.client().await.with(name, value).with("accept-encoding", "gzip");
        let answer = client.get(&url).await;
        assert_eq!((answer.status, answer.text()), (status, body), "{name}");
        assert_eq!(answer.header("content-encoding"), "");
        let mut client = client.with("accept-encoding", "gzip, identity;q=0");
        let answer = client.get(&url).await;
        assert_eq!((answer.status, answer.text()), (406, conditional.as_str()), "{name}");
    }
    // Several ranges may be answered with everything.
    let mut client = sandbox.client().await.with("range", "bytes=0-1,4-5");
    let answer = client.get(&url).await;
    assert_eq!((answer.status, answer.text()), (200, "0123456789"));
}

#[tokio::test]
async fn compressed_downloads_that_stand_still_do_not_add_up() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    // It shrinks to about half, which is still more than two sockets hold.
    let content: Vec<u8> = noise(1_000_000).chunks(40).flat_map(|line| line.repeat(2)).collect();
    let content = content.repeat(6);
    std::fs::write(sandbox.path("large"), &content).unwrap();
    let url = format!("/files?path={}", sandbox.path("large").display());
    let mut stalled = Vec::new();
    for _ in 0..40 {
        let mut client = sandbox.client().await.with("accept-encoding", "gzip");
        let response = client.request(Method::GET, &url, "", full("")).await;
        stalled.push((client, response));
    }
    let memory = sandbox.memory("RssAnon");
    assert!(memory < 64 * 1024, "{memory} kB");
    // Who insists has to come again.
    let mut client = sandbox.client().await.with("accept-encoding", "gzip, identity;q=0");
    assert_eq!(client.get(&url).await.status, 503);
    let mut compressed = 0;
    for (_, response) in stalled {
        let is_compressed = response.headers().contains_key("content-encoding");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        compressed += usize::from(is_compressed);
        assert!(if is_compressed {
            decompress(&body) == content
        } else {
            body == content
        });
    }
    assert_eq!(compressed, 32);
    assert!(decompress(&client.get(&url).await.body) == content);
}

#[tokio::test]
async fn uploads_are_decompressed() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let path = sandbox.path("up");
    let url = format!("/files?path={}", path.display());
    for coding in ["gzip", "GZIP"] {
        let mut client = sandbox.client().await.with("content-encoding", coding);
        let content = [noise(300_000), vec![0; 1_000_000]].concat();
        let answer = upload(&mut client, &url, RAW, compress(&content)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(std::fs::read(&path).unwrap() == content);
        // Several members are one file, an empty one is an empty file.
        let members = [compress(b"one "), compress(b""), compress(b"two")].concat();
        assert_eq!(upload(&mut client, &url, RAW, members).await.status, 200);
        assert_eq!(std::fs::read(&path).unwrap(), b"one two");
        assert_eq!(upload(&mut client, &url, RAW, compress(b"")).await.status, 200);
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        let form = "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\ncontent\r\n--XX--\r\n";
        let answer = upload(
            &mut client,
            &url,
            "multipart/form-data; boundary=XX",
            compress(form.as_bytes()),
        )
        .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(std::fs::read(&path).unwrap(), b"content");
        // Byte by byte.
        let pieces: Vec<_> = compress(b"piece by piece")
            .into_iter()
            .map(|byte| Ok(Frame::data(vec![byte].into())))
            .collect();
        let body = BodyExt::boxed(StreamBody::new(stream::iter(pieces)));
        assert_eq!(client.send(Method::POST, &url, RAW, body).await.status, 200);
        assert_eq!(std::fs::read(&path).unwrap(), b"piece by piece");
    }
    let mut client = sandbox.client().await.with("content-encoding", "identity");
    assert_eq!(upload(&mut client, &url, RAW, b"plain".to_vec()).await.status, 200);
    assert_eq!(std::fs::read(&path).unwrap(), b"plain");
}

#[tokio::test]
async fn broken_compressed_uploads() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let url = format!("/files?path={}", sandbox.path("up").display());
    std::fs::write(sandbox.path("up"), "before").unwrap();
    let mut client = sandbox.client().await.with("content-encoding", "gzip");
    for (body, reason) in [
        (b"this is no gzip".to_vec(), "gzip: invalid header"),
        (b"".to_vec(), "EOF"),
        (compress(b"x")[..5].to_vec(), "unexpected EOF"),
    ] {
        let answer = upload(&mut client, &url, RAW, body).await;
        let expect = format!(
            "{{\"code\":400,\"message\":\"error decompressing request body: failed to create gzip reader: {reason}\"}}\n"
        );
        assert_eq!((answer.status, answer.text()), (400, expect.as_str()));
    }
    // Nothing was touched for it.
    assert_eq!(std::fs::read(sandbox.path("up")).unwrap(), b"before");
    let whole = compress(&noise(100_000));
    let mut wrong_sum = whole.clone();
    let at = wrong_sum.len() - 6;
    wrong_sum[at] ^= 1;
    let mut wrong_middle = whole.clone();
    // The length of a stored block and its complement no longer agree.
    wrong_middle[11] ^= 0xff;
    for body in [
        whole[..whole.len() - 4].to_vec(),
        whole[..50_000].to_vec(),
        wrong_sum,
        wrong_middle,
        [whole, b"rubbish behind it".to_vec()].concat(),
    ] {
        let answer = upload(&mut client, &url, RAW, body).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(
            answer.text().contains("error decompressing request body: "),
            "{}",
            answer.text()
        );
    }
    let mut other = sandbox.client().await.with("content-encoding", "br");
    let answer = upload(&mut other, &url, RAW, b"x".to_vec()).await;
    assert!(
        answer
            .text()
            .contains("error decompressing request body: unsupported Content-Encoding: br, supported: [gzip]"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn what_decompresses_to_much_takes_no_memory() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let bomb = {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        for _ in 0..200 {
            encoder.write_all(&vec![0; 1 << 20]).unwrap();
        }
        encoder.finish().unwrap()
    };
    assert!(bomb.len() < 300_000);
    let before = sandbox.memory("VmHWM");
    let mut client = sandbox.client().await.with("content-encoding", "gzip");
    let url = format!("/files?path={}", sandbox.path("bomb").display());
    assert_eq!(upload(&mut client, &url, RAW, bomb.clone()).await.status, 200);
    assert_eq!(std::fs::metadata(sandbox.path("bomb")).unwrap().len(), 200 << 20);
    std::fs::remove_file(sandbox.path("bomb")).unwrap();
    // The disk's size is the limit.
    let answer = upload(&mut client, "/files?path=/dev/full", RAW, bomb).await;
    let full = "not enough disk space available: no space left on the file system of '/dev'";
    assert_eq!(
        (answer.status, answer.text()),
        (507, format!("{{\"code\":507,\"message\":\"{full}\"}}\n").as_str())
    );
    let growth = sandbox.memory("VmHWM") - before;
    assert!(growth < 8 * 1024, "{growth} kB");
}
