//! What processes read.

use bytes::Bytes;
use protocol::connect::{Code, Codec};
use protocol::process::{
    CloseStdinRequest, Empty, ProcessInput, SendInputRequest, StartRequest, UpdateRequest, signal,
};

use crate::process::{CODECS, config, kill, pid, shell};
use crate::sandbox::Sandbox;

#[tokio::test]
async fn stdin() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    for codec in CODECS {
        for stdin in [None, Some(true)] {
            let mut client = sandbox.client().await;
            let request = StartRequest {
                process: Some(config("cat", &[])),
                stdin,
                ..StartRequest::default()
            };
            let mut events = client.stream(codec, "Start", &request).await;
            let process = pid(events.started().await);
            let input = |bytes: &[u8]| SendInputRequest {
                process: process.clone(),
                input: Some(ProcessInput {
                    stdin: Some(Bytes::copy_from_slice(bytes)),
                    pty: None,
                }),
            };
            other
                .unary::<Empty>(codec, "SendInput", &input(b"one\n"))
                .await
                .unwrap();
            assert_eq!(events.until("\n").await, "one\n");
            other.unary::<Empty>(codec, "SendInput", &input(b"two")).await.unwrap();
            let mut wrong = input(b"");
            wrong.input = Some(ProcessInput {
                stdin: None,
                pty: Some(Bytes::new()),
            });
            let error = other.unary::<Empty>(codec, "SendInput", &wrong).await.unwrap_err();
            assert!(
                error.message.starts_with("error writing to tty: tty not assigned"),
                "{error}"
            );
            assert_eq!(error.code, Code::Internal);
            wrong.input = None;
            let error = other.unary::<Empty>(codec, "SendInput", &wrong).await.unwrap_err();
            assert_eq!(error.code, Code::Unimplemented);
            let close = CloseStdinRequest {
                process: process.clone(),
            };
            other.unary::<Empty>(codec, "CloseStdin", &close).await.unwrap();
            let rest = events.rest().await;
            assert_eq!((rest.out(), rest.exit().0), ("two", 0));
        }
        // Closed or never there.
        for (stdin, close_first) in [(Some(false), false), (Some(true), true)] {
            let mut client = sandbox.client().await;
            let mut request = shell("exec sleep 1000");
            request.stdin = stdin;
            let mut events = client.stream(codec, "Start", &request).await;
            let process = pid(events.started().await);
            for _ in 0..2 * usize::from(close_first) {
                let close = CloseStdinRequest {
                    process: process.clone(),
                };
                other.unary::<Empty>(codec, "CloseStdin", &close).await.unwrap();
            }
            let input = Some(ProcessInput {
                stdin: Some(Bytes::from_static(b"x")),
                pty: None,
            });
            let message = SendInputRequest {
                process: process.clone(),
                input,
            };
            let error = other.unary::<Empty>(codec, "SendInput", &message).await.unwrap_err();
            assert_eq!(error.code, Code::Internal);
            assert_eq!(error.message, "error writing to stdin: stdin not enabled or closed");
            let resize = UpdateRequest {
                process: process.clone(),
                pty: Some(protocol::process::Pty::default()),
            };
            let error = other.unary::<Empty>(codec, "Update", &resize).await.unwrap_err();
            assert_eq!(error.message, "error resizing tty: tty not assigned to process");
            other
                .unary::<Empty>(
                    codec,
                    "Update",
                    &UpdateRequest {
                        process: process.clone(),
                        pty: None,
                    },
                )
                .await
                .unwrap();
            kill(&mut other, process, signal::KILL).await.unwrap();
            events.rest().await;
        }
    }
}

#[tokio::test]
async fn input_waits_for_the_reader() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let mut request = shell("read line; echo got $line; wc -c");
    request.stdin = Some(true);
    let mut events = client.stream(Codec::Proto, "Start", &request).await;
    let process = pid(events.started().await);
    // A megabyte does not fit the pipe, so this stands until the process reads.
    let bytes: Vec<u8> = std::iter::repeat_n(b'x', 1 << 20).collect();
    let input = Some(ProcessInput {
        stdin: Some(Bytes::from(bytes)),
        pty: None,
    });
    let message = SendInputRequest {
        process: process.clone(),
        input,
    };
    let mut late = sandbox.client().await.with("connect-timeout-ms", "100");
    let mut sleeper_client = sandbox.client().await;
    let mut sleeping = shell("sleep 1000");
    sleeping.stdin = Some(true);
    let mut sleeper = sleeper_client.stream(Codec::Json, "Start", &sleeping).await;
    let sleeper_pid = pid(sleeper.started().await);
    let to_sleeper = SendInputRequest {
        process: sleeper_pid.clone(),
        input: message.input.clone(),
    };
    let error = late
        .unary::<Empty>(Codec::Proto, "SendInput", &to_sleeper)
        .await
        .unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);

    let mut other = sandbox.client().await;
    let first = ProcessInput {
        stdin: Some(Bytes::from_static(b"line\n")),
        pty: None,
    };
    let first = SendInputRequest {
        process: process.clone(),
        input: Some(first),
    };
    other.unary::<Empty>(Codec::Proto, "SendInput", &first).await.unwrap();
    other.unary::<Empty>(Codec::Proto, "SendInput", &message).await.unwrap();
    other
        .unary::<Empty>(Codec::Proto, "CloseStdin", &CloseStdinRequest { process })
        .await
        .unwrap();
    assert_eq!(events.rest().await.out(), "got line\n1048576\n");
    kill(&mut other, sleeper_pid, signal::KILL).await.unwrap();
}
