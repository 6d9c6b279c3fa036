//! Messages of calls in gzip, both ways.

use std::io::{Read, Write};

use bytes::{Bytes, BytesMut};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use http::Method;
use http_body_util::BodyExt;
use protocol::connect::{self, Code, Codec, EndOfStream, Error, FLAG_COMPRESSED, FLAG_END};
use protocol::filesystem::{ListDirRequest, ListDirResponse};
use protocol::process::{
    Empty, ListRequest, ListResponse, ProcessInput, ProcessSelector, SendInputRequest, StreamInputRequest,
    StreamResponse,
};

use crate::client::{Answer, Client, full};
use crate::process::shell;
use crate::sandbox::Sandbox;

const CODECS: [Codec; 2] = [Codec::Json, Codec::Proto];
const LIST: &str = "/process.Process/List";

fn compress(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn decompress(bytes: &[u8]) -> Vec<u8> {
    let mut reader = GzDecoder::new(bytes);
    let mut out = Vec::new();
    reader.read_to_end(&mut out).unwrap();
    assert!(reader.into_inner().is_empty());
    out
}

/// Zeros in gzip.
fn bomb(length: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    for _ in 0..length >> 20 {
        encoder.write_all(&vec![b' '; 1 << 20]).unwrap();
    }
    encoder.finish().unwrap()
}

fn error(answer: &Answer) -> Error {
    serde_json::from_slice(&answer.body).unwrap()
}

/// Makes a streaming call with this body: returns the headers, the messages with whether each was compressed, and the
/// end.
async fn stream(
    client: &mut Client,
    codec: Codec,
    method: &str,
    body: impl Into<Bytes>,
) -> (http::HeaderMap, Vec<(bool, Bytes)>, EndOfStream) {
    let path = format!("/process.Process/{method}");
    let response = client
        .request(Method::POST, &path, codec.stream_content_type(), full(body))
        .await;
    assert_eq!(response.status(), 200);
    let headers = response.headers().clone();
    assert_eq!(headers["connect-accept-encoding"], "gzip");
    let mut buffer = BytesMut::from(&response.into_body().collect().await.unwrap().to_bytes()[..]);
    let mut messages = Vec::new();
    loop {
        let (flags, content) = connect::take_envelope(&mut buffer, 1 << 24).unwrap().unwrap();
        if flags == FLAG_END {
            assert!(buffer.is_empty());
            return (headers, messages, serde_json::from_slice(&content).unwrap());
        }
        assert!(flags == 0 || flags == FLAG_COMPRESSED);
        let content = match flags {
            0 => content,
            _ => decompress(&content).into(),
        };
        messages.push((flags == FLAG_COMPRESSED, content));
    }
}

#[tokio::test]
async fn requests_may_be_compressed() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut client = sandbox.client().await.with("content-encoding", "gzip");
        let request = |message: &[u8]| full(message.to_vec());
        let content_type = codec.unary_content_type();
        let plain = codec.encode(&ListRequest {});
        // One without bytes is empty, whatever the header says.
        for body in [compress(&plain), [compress(&plain), compress(b"")].concat()] {
            let answer = client.send(Method::POST, LIST, content_type, request(&body)).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.header("accept-encoding"), "gzip");
            assert_eq!(codec.decode::<ListResponse>(&answer.body).unwrap().processes, []);
        }
        let answer = client.send(Method::POST, LIST, content_type, request(b"")).await;
        assert_eq!(answer.status, if codec == Codec::Proto { 200 } else { 400 });
        let compressed = compress(&[b' '; 5000]);
        let mut wrong_sum = compressed.clone();
        let at = wrong_sum.len() - 6;
        wrong_sum[at] ^= 1;
        for broken in [
            b"{}".to_vec(),
            compressed[..compressed.len() - 1].to_vec(),
            compressed[..12].to_vec(),
            compressed[..5].to_vec(),
            wrong_sum,
            [compressed, b"rubbish".to_vec()].concat(),
        ] {
            let answer = client.send(Method::POST, LIST, content_type, request(&broken)).await;
            assert_eq!(error(&answer).code, Code::InvalidArgument, "{broken:?}");
            assert_eq!(error(&answer).message, "decompress message: invalid gzip");
        }
        let mut other = sandbox.client().await.with("content-encoding", "br");
        let answer = other.send(Method::POST, LIST, content_type, request(&plain)).await;
        assert_eq!((answer.status, error(&answer).code), (501, Code::Unimplemented));
        assert_eq!(answer.header("accept-encoding"), "gzip");
    }
}

#[tokio::test]
async fn streamed_requests_may_be_compressed() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut client = sandbox.client().await.with("connect-content-encoding", "gzip");
        let plain = codec.envelope(&shell("echo compressed"));
        let message = &plain[connect::ENVELOPE_HEADER..];
        // A message may be compressed and need not be.
        for body in [connect::wrap(FLAG_COMPRESSED, &compress(message)), plain.clone()] {
            let (headers, messages, end) = stream(&mut client, codec, "Start", body).await;
            assert_eq!(end.error, None);
            assert!(!headers.contains_key("connect-content-encoding"));
            assert!(messages.iter().all(|(compressed, _)| !compressed));
            let output = messages.iter().filter_map(|(_, message)| {
                let event = codec.decode::<StreamResponse>(message).unwrap().event.unwrap();
                event.data?.stdout
            });
            assert_eq!(output.collect::<Vec<_>>().concat(), b"compressed\n");
        }
        for (body, code) in [
            (connect::wrap(FLAG_COMPRESSED, message), Code::InvalidArgument),
            (connect::wrap(FLAG_COMPRESSED, &bomb(17 << 20)), Code::InvalidArgument),
            (connect::wrap(3, &compress(message)), Code::InvalidArgument),
        ] {
            let (_, messages, end) = stream(&mut client, codec, "Start", body).await;
            assert_eq!((messages.len(), end.error.unwrap().code), (0, code));
        }
        let mut other = sandbox.client().await.with("connect-content-encoding", "zstd");
        let (_, _, end) = stream(&mut other, codec, "Start", plain.clone()).await;
        assert_eq!(end.error.unwrap().code, Code::Unimplemented);
        let mut undeclared = sandbox.client().await;
        let body = connect::wrap(FLAG_COMPRESSED, &compress(message));
        let (_, _, end) = stream(&mut undeclared, codec, "Start", body).await;
        assert_eq!(end.error.unwrap().code, Code::Internal);

        // And where the request is a stream.
        let mut request = shell("read x; read y; echo $x $y");
        request.tag = Some(format!("{codec:?}"));
        request.stdin = Some(true);
        let mut starter = sandbox.client().await;
        let mut events = starter.stream(codec, "Start", &request).await;
        let pid = events.started().await;
        let select = StreamInputRequest {
            start: Some(protocol::process::StreamInputStart {
                process: Some(ProcessSelector {
                    pid: Some(pid),
                    tag: None,
                }),
            }),
            ..StreamInputRequest::default()
        };
        let typed = |text: &str| StreamInputRequest {
            data: Some(protocol::process::StreamInputData {
                input: Some(ProcessInput {
                    stdin: Some(Bytes::from(text.to_owned())),
                    pty: None,
                }),
            }),
            ..StreamInputRequest::default()
        };
        let body = [
            connect::wrap(FLAG_COMPRESSED, &compress(&codec.encode(&select))),
            codec.envelope(&typed("one\n")),
            connect::wrap(FLAG_COMPRESSED, &compress(&codec.encode(&typed("two\n")))),
        ]
        .concat();
        let (_, messages, end) = stream(&mut client, codec, "StreamInput", body).await;
        assert_eq!((messages.len(), end.error), (1, None));
        assert_eq!(events.rest().await.out(), "one two\n");
    }
}

#[tokio::test]
async fn answers_are_compressed_for_those_who_want_it_and_when_it_pays() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    std::fs::create_dir(sandbox.path("many")).unwrap();
    for number in 0..500 {
        std::fs::write(sandbox.path(&format!("many/file{number}")), "").unwrap();
    }
    let script = "head -c 100000 /dev/zero; head -c 100000 /dev/urandom | tee noise >&2";
    for codec in CODECS {
        let list = |name: &str| {
            codec.encode(&ListDirRequest {
                path: sandbox.path(name).display().to_string(),
                depth: 1,
            })
        };
        for (accepted, directory, compressed) in [
            ("gzip", "many", true),
            ("br, gzip;q=0.5", "many", true),
            ("gzip", "home/user", false),
            ("gzip;q=0", "many", false),
            ("identity, gzip", "many", false),
            ("br", "many", false),
        ] {
            let mut client = sandbox.client().await.with("accept-encoding", accepted);
            let path = "/filesystem.Filesystem/ListDir";
            let body = full(list(directory));
            let answer = client.send(Method::POST, path, codec.unary_content_type(), body).await;
            assert_eq!(
                answer.header("content-encoding"),
                if compressed { "gzip" } else { "" },
                "{accepted} {directory}"
            );
            assert_eq!(answer.header("content-length"), answer.body.len().to_string());
            let content = if compressed {
                decompress(&answer.body)
            } else {
                answer.body.to_vec()
            };
            assert!(!compressed || answer.body.len() < content.len() / 2);
            let entries = codec.decode::<ListDirResponse>(&content).unwrap().entries;
            assert_eq!(entries.len(), if directory == "many" { 500 } else { 0 });
        }

        let mut client = sandbox.client().await.with("connect-accept-encoding", "br, gzip");
        let mut request = shell(script);
        request.process.as_mut().unwrap().cwd = Some(sandbox.directory.path().display().to_string());
        let (headers, messages, end) = stream(&mut client, codec, "Start", codec.envelope(&request)).await;
        assert_eq!(end.error, None);
        assert_eq!(headers["connect-content-encoding"], "gzip");
        let (mut zeros, mut noise) = (0, Vec::new());
        for (compressed, message) in &messages {
            let Some(data) = codec.decode::<StreamResponse>(message).unwrap().event.unwrap().data else {
                assert!(!compressed, "too small");
                continue;
            };
            if let Some(stdout) = data.stdout {
                zeros += stdout.len();
                assert_eq!(*compressed, message.len() >= 1024);
            } else {
                noise.extend_from_slice(&data.stderr.unwrap());
                // Base64 is another matter.
                assert!(codec == Codec::Json || !compressed);
            }
        }
        assert_eq!(zeros, 100_000);
        assert!(noise == std::fs::read(sandbox.path("noise")).unwrap());
    }
}

#[tokio::test]
async fn what_decompresses_to_too_much_is_refused_in_bounded_memory() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    // A message of 15 MiB is none too long, and is not JSON only when it is read.
    let mut client = sandbox.client().await.with("content-encoding", "gzip");
    let fits = bomb(15 << 20);
    let answer = client.send(Method::POST, LIST, "application/json", full(fits)).await;
    assert_eq!(error(&answer).code, Code::InvalidArgument);
    assert!(
        error(&answer).message.starts_with("unmarshal message"),
        "{}",
        answer.text()
    );

    let before = sandbox.memory("VmHWM");
    let bomb = bomb(400 << 20);
    assert!(bomb.len() < 1 << 20);
    let mut calls = Vec::new();
    for _ in 0..8 {
        let mut client = sandbox.client().await.with("content-encoding", "gzip");
        let bomb = bomb.clone();
        calls.push(tokio::spawn(async move {
            client.send(Method::POST, LIST, "application/json", full(bomb)).await
        }));
    }
    for call in calls {
        let answer = call.await.unwrap();
        // Too much for one message, or for all of them.
        let refusal = (answer.status, error(&answer).code);
        let known = [(400, Code::InvalidArgument), (429, Code::ResourceExhausted)];
        assert!(known.contains(&refusal), "{refusal:?}");
    }
    // 64 MiB are there for all messages together, and a vector that grows is there twice.
    let growth = sandbox.memory("VmHWM").saturating_sub(before);
    assert!(growth < 96 * 1024, "{growth} kB");
    // None of it is held on to.
    let message = SendInputRequest::default();
    let error = client
        .send(Method::POST, LIST, "application/json", full(compress(b"{}")))
        .await;
    assert_eq!(error.status, 200);
    let mut plain = sandbox.client().await;
    let refused = plain
        .unary::<Empty>(Codec::Json, "SendInput", &message)
        .await
        .unwrap_err();
    assert_eq!(refused.code, Code::Unimplemented);
}
