//! Terminals.

use bytes::Bytes;
use protocol::connect::{Code, Codec};
use protocol::process::{
    CloseStdinRequest, Empty, ProcessConfig, ProcessInput, ProcessSelector, Pty, PtySize, SendInputRequest,
    StartRequest, UpdateRequest,
};

use crate::sandbox::Sandbox;

fn request(script: &str) -> StartRequest {
    let args = ["-c", script].map(str::to_owned).to_vec();
    StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/sh".to_owned(),
            args,
            ..ProcessConfig::default()
        }),
        pty: Some(Pty {
            size: Some(PtySize { cols: 100, rows: 30 }),
        }),
        ..StartRequest::default()
    }
}

#[tokio::test]
async fn a_shell_in_a_terminal() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    for codec in [Codec::Json, Codec::Proto] {
        let mut client = sandbox.client().await.user("user");
        let script = "tty -s && stty size; id -u; ps -o sid= -p $$ | tr -d ' ' | sed s/$$/leader/; echo x > /dev/tty; \
                      stat -c %u $(tty); read line; echo \"[$line]\"; stty size; exit 5";
        let mut events = client.stream(codec, "Start", &request(script)).await;
        let process = Some(ProcessSelector {
            pid: Some(events.started().await),
            tag: None,
        });
        let seen = events.until("x\r\n1000\r\n").await;
        assert!(seen.starts_with("30 100\r\n1000\r\n"), "{seen}");
        assert!(seen.contains("leader"), "{seen}");

        let size = UpdateRequest {
            process: process.clone(),
            pty: Some(Pty {
                size: Some(PtySize { cols: 70_000, rows: 20 }),
            }),
        };
        other.unary::<Empty>(codec, "Update", &size).await.unwrap();
        let mut message = SendInputRequest {
            process: process.clone(),
            input: Some(ProcessInput {
                stdin: Some(Bytes::from_static(b"x")),
                pty: None,
            }),
        };
        let error = other.unary::<Empty>(codec, "SendInput", &message).await.unwrap_err();
        assert_eq!(error.code, Code::Internal);
        assert!(
            error
                .message
                .starts_with("error writing to stdin: tty assigned to process"),
            "{error}"
        );
        let close = CloseStdinRequest { process };
        let error = other.unary::<Empty>(codec, "CloseStdin", &close).await.unwrap_err();
        assert_eq!(error.code, Code::Unknown);

        message.input = Some(ProcessInput {
            stdin: None,
            pty: Some(Bytes::from_static(b"hello\r")),
        });
        other.unary::<Empty>(codec, "SendInput", &message).await.unwrap();
        let rest = events.rest().await;
        let text = String::from_utf8(rest.pty.clone()).unwrap();
        assert!(text.ends_with("[hello]\r\n20 65535\r\n"), "{text:?}");
        assert_eq!(rest.exit().0, 5);
        assert!(rest.stdout.is_empty() && rest.stderr.is_empty());
    }
}

#[tokio::test]
async fn control_characters_are_signals() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    let mut client = sandbox.client().await;
    let mut events = client
        .stream(Codec::Json, "Start", &request("echo go; exec sleep 1000"))
        .await;
    let process = Some(ProcessSelector {
        pid: Some(events.started().await),
        tag: None,
    });
    events.until("go").await;
    let input = Some(ProcessInput {
        stdin: None,
        pty: Some(Bytes::from_static(b"\x03")),
    });
    other
        .unary::<Empty>(Codec::Json, "SendInput", &SendInputRequest { process, input })
        .await
        .unwrap();
    assert_eq!(events.rest().await.exit().2, "signal: interrupt");
}

#[tokio::test]
async fn what_cannot_start_in_a_terminal() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await.user("user");
    let mut missing = request("");
    missing.process = Some(ProcessConfig {
        cmd: "nothing-here".to_owned(),
        ..ProcessConfig::default()
    });
    let mut events = client.stream(Codec::Json, "Start", &missing).await;
    events.started().await;
    let rest = events.rest().await;
    assert_eq!(rest.pty, b"nothing-here: No such file or directory\r\n");
    assert_eq!(rest.exit().0, 127);

    let passwd = sandbox.path("passwd").display().to_string();
    missing.process.as_mut().unwrap().cwd = Some(passwd.clone());
    let error = client.stream(Codec::Json, "Start", &missing).await.failed().await;
    assert_eq!(error.code, Code::InvalidArgument);
    let expect = format!(
        "error starting pty with command 'nothing-here' in dir '{passwd}' with '100' cols and '30' rows: chdir {passwd}: \
         not a directory"
    );
    assert_eq!(error.message, expect);
}
