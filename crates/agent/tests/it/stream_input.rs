//! `StreamInput`: a request that lasts as long as the user types.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream;
use http::Method;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use protocol::connect::{self, Code, Codec, EndOfStream, Error, FLAG_END};
use protocol::process::{
    CloseStdinRequest, Empty, ProcessConfig, ProcessInput, ProcessSelector, Pty, PtySize, SendSignalRequest,
    StartRequest, StreamInputData, StreamInputRequest, StreamInputStart, signal,
};

use crate::client::{Body, Client, full};
use crate::sandbox::Sandbox;

const CODECS: [Codec; 2] = [Codec::Json, Codec::Proto];

fn shell(script: &str) -> StartRequest {
    StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), script.to_owned()],
            ..ProcessConfig::default()
        }),
        ..StartRequest::default()
    }
}

fn selector(pid: u32) -> Option<ProcessSelector> {
    Some(ProcessSelector {
        pid: Some(pid),
        tag: None,
    })
}

fn start(pid: u32) -> StreamInputRequest {
    StreamInputRequest {
        start: Some(StreamInputStart { process: selector(pid) }),
        ..StreamInputRequest::default()
    }
}

fn input(input: ProcessInput) -> StreamInputRequest {
    StreamInputRequest {
        data: Some(StreamInputData { input: Some(input) }),
        ..StreamInputRequest::default()
    }
}

fn stdin(bytes: impl Into<Bytes>) -> StreamInputRequest {
    input(ProcessInput {
        stdin: Some(bytes.into()),
        pty: None,
    })
}

fn body(frames: impl stream::Stream<Item = Bytes> + Send + Sync + 'static) -> Body {
    BodyExt::boxed(StreamBody::new(frames.map(|bytes| Ok(Frame::data(bytes)))))
}

/// Makes a call with this body, and returns its answer.
async fn call(client: &mut Client, codec: Codec, body: Body) -> Result<Empty, Error> {
    let content_type = codec.stream_content_type();
    let answer = client
        .send(Method::POST, "/process.Process/StreamInput", content_type, body)
        .await;
    assert_eq!((answer.status, answer.header("content-type")), (200, content_type));
    let mut buffer = BytesMut::from(&answer.body[..]);
    let (flags, first) = connect::take_envelope(&mut buffer, 1 << 20).unwrap().unwrap();
    if flags & FLAG_END != 0 {
        assert!(buffer.is_empty());
        return Err(serde_json::from_slice::<EndOfStream>(&first).unwrap().error.unwrap());
    }
    let (flags, end) = connect::take_envelope(&mut buffer, 1 << 20).unwrap().unwrap();
    assert_eq!((flags, &end[..], buffer.len()), (FLAG_END, b"{}".as_slice(), 0));
    Ok(codec.decode(&first).unwrap())
}

async fn call_with(client: &mut Client, codec: Codec, messages: &[StreamInputRequest]) -> Result<Empty, Error> {
    let envelopes: Vec<_> = messages.iter().map(|message| codec.envelope(message)).collect();
    call(client, codec, full(envelopes.concat())).await
}

#[tokio::test]
async fn input_arrives_as_it_is_sent() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut events = sandbox
            .client()
            .await
            .stream(codec, "Start", &shell("while read line; do echo got $line; done"))
            .await;
        let pid = events.started().await;
        let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
        let pieces = stream::poll_fn(move |ctx| receiver.poll_recv(ctx));
        let mut client = sandbox.client().await;
        let calling = tokio::spawn(async move { call(&mut client, codec, body(pieces)).await });
        sender.send(codec.envelope(&start(pid))).await.unwrap();
        for text in ["one", "two"] {
            let mut bytes = codec.envelope(&stdin(format!("{text}\n")));
            // Cut anywhere.
            let rest = bytes.split_off(7);
            for piece in [bytes, rest] {
                sender.send(piece).await.unwrap();
            }
            events.until(&format!("got {text}\n")).await;
        }
        let keepalive = StreamInputRequest {
            keepalive: Some(Empty {}),
            ..StreamInputRequest::default()
        };
        sender.send(codec.envelope(&keepalive)).await.unwrap();
        assert!(!calling.is_finished());
        drop(sender);
        assert_eq!(calling.await.unwrap(), Ok(Empty {}));

        // The end of the request is not the end of the input.
        let mut client = sandbox.client().await;
        let messages = [start(pid), stdin("three\n"), start(pid), stdin("four\n")];
        assert_eq!(call_with(&mut client, codec, &messages).await, Ok(Empty {}));
        events.until("got four\n").await;
        let close = CloseStdinRequest { process: selector(pid) };
        client.unary::<Empty>(codec, "CloseStdin", &close).await.unwrap();
        assert_eq!(events.rest().await.exit().0, 0);
    }
}

#[tokio::test]
async fn terminals_are_typed_into() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let request = StartRequest {
            pty: Some(Pty {
                size: Some(PtySize { cols: 80, rows: 24 }),
            }),
            ..shell("read line; echo got $line")
        };
        let mut events = sandbox.client().await.stream(codec, "Start", &request).await;
        let pid = events.started().await;
        let typed = input(ProcessInput {
            stdin: None,
            pty: Some(Bytes::from_static(b"hello\n")),
        });
        let mut client = sandbox.client().await;
        assert_eq!(call_with(&mut client, codec, &[start(pid), typed]).await, Ok(Empty {}));
        events.until("got hello").await;
        assert_eq!(events.rest().await.exit().0, 0);
    }
}

#[tokio::test]
async fn what_is_refused() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut events = sandbox.client().await.stream(codec, "Start", &shell("read x")).await;
        let pid = events.started().await;
        let mut client = sandbox.client().await;
        let nothing = StreamInputRequest::default();
        let typed = input(ProcessInput {
            stdin: None,
            pty: Some(Bytes::from_static(b"x")),
        });
        for (messages, code, text) in [
            (
                vec![stdin("x")],
                Code::InvalidArgument,
                "input before the process was named",
            ),
            (
                vec![start(1 << 30)],
                Code::NotFound,
                "process with pid 1073741824 not found",
            ),
            (vec![start(pid), nothing], Code::Unimplemented, "invalid event type"),
            (
                vec![start(pid), input(ProcessInput::default())],
                Code::Unimplemented,
                "invalid input type",
            ),
            (
                vec![start(pid), typed],
                Code::Internal,
                "error writing to tty: tty not assigned to process",
            ),
        ] {
            let error = call_with(&mut client, codec, &messages).await.unwrap_err();
            assert_eq!(error.code, code, "{}", error.message);
            assert!(error.message.starts_with(text), "{}", error.message);
        }
        let first = codec.envelope(&start(pid));
        for (tail, code) in [
            (vec![0, 0], Code::Unknown),
            (vec![0, 0, 0, 0, 9, b'x'], Code::Unknown),
            (vec![1, 0, 0, 0, 0], Code::Internal),
            (vec![2, 0, 0, 0, 0], Code::InvalidArgument),
            (vec![0, 0, 0, 0, 1, 0xff], Code::InvalidArgument),
            (vec![0, 0xff, 0xff, 0xff, 0xff], Code::InvalidArgument),
        ] {
            let bytes = [&first[..], &tail].concat();
            assert_eq!(
                call(&mut client, codec, full(bytes)).await.unwrap_err().code,
                code,
                "{tail:?}"
            );
        }
        // No message at all is nobody's input.
        assert_eq!(call_with(&mut client, codec, &[]).await, Ok(Empty {}));
        let mut late = sandbox.client().await.with("connect-timeout-ms", "100");
        let endless = stream::iter([codec.envelope(&start(pid))]).chain(stream::pending());
        let error = call(&mut late, codec, body(endless)).await.unwrap_err();
        assert_eq!(error.code, Code::DeadlineExceeded);
        assert_eq!(
            call_with(&mut client, codec, &[start(pid), stdin("\n")]).await,
            Ok(Empty {})
        );
        assert_eq!(events.rest().await.exit().0, 0);
        // Nothing of it holds on to the memory for messages: 64 MiB would be used up by five of these.
        for _ in 0..10 {
            let bytes = [&first[..], &[0, 1, 0, 0, 0], &vec![0; 15 << 20]].concat();
            assert!(call(&mut sandbox.client().await, codec, full(bytes)).await.is_err());
        }
    }
}

#[tokio::test]
async fn who_does_not_read_is_waited_for() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let codec = Codec::Proto;
    // Reads a little, then nothing until it is told to by a file.
    let go = sandbox.path("go");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &go,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let script = format!("read first < {}; wc -c", go.display());
    let mut events = sandbox.client().await.stream(codec, "Start", &shell(&script)).await;
    let pid = events.started().await;
    let before = sandbox.memory("VmHWM");
    let (sent, mut progress) = tokio::sync::watch::channel(0);
    let messages = std::iter::once(start(pid)).chain((0..800).map(|_| stdin(vec![b'x'; 65536])));
    let envelopes = messages.enumerate().map(move |(number, message)| {
        sent.send_replace(number);
        codec.envelope(&message)
    });
    let mut client = sandbox.client().await;
    let calling = tokio::spawn(async move { call(&mut client, codec, body(stream::iter(envelopes))).await });
    // It stands still long before the end.
    while tokio::time::timeout(Duration::from_millis(500), progress.changed())
        .await
        .is_ok()
    {}
    assert!(*progress.borrow() < 400, "{}", *progress.borrow());
    assert!(!calling.is_finished());
    std::fs::write(&go, "go\n").unwrap();
    assert_eq!(calling.await.unwrap(), Ok(Empty {}));
    let mut client = sandbox.client().await;
    let close = CloseStdinRequest { process: selector(pid) };
    client.unary::<Empty>(codec, "CloseStdin", &close).await.unwrap();
    assert_eq!(events.rest().await.out().trim(), (800 * 65536).to_string());
    let growth = sandbox.memory("VmHWM") - before;
    assert!(growth < 8 * 1024, "{growth} kB");

    // A process that ends takes its writers with it, even if another process still holds the pipe open.
    let mut events = sandbox
        .client()
        .await
        .stream(codec, "Start", &shell("sleep 1000 0<&0 >/dev/null 2>&1 & sleep 1000"))
        .await;
    let pid = events.started().await;
    let messages: Vec<_> = std::iter::once(start(pid))
        .chain((0..20).map(|_| stdin(vec![b'x'; 65536])))
        .collect();
    let mut client = sandbox.client().await;
    let calling = tokio::spawn(async move { call_with(&mut client, codec, &messages).await });
    let kill = SendSignalRequest {
        process: selector(pid),
        signal: signal::KILL,
    };
    sandbox
        .client()
        .await
        .unary::<Empty>(codec, "SendSignal", &kill)
        .await
        .unwrap();
    assert!(calling.await.unwrap().is_err());
    assert_eq!(events.rest().await.exit().0, -1);
}
