//! The two encodings of the messages, against literal bytes.

use bytes::Bytes;

use super::*;
use crate::connect::Codec;

fn check<M: crate::connect::Message + PartialEq + fmt::Debug>(message: &M, json: &str, proto: &[u8]) {
    assert_eq!(Codec::Json.encode(message), json);
    assert_eq!(Codec::Proto.encode(message), proto);
    assert_eq!(&Codec::Json.decode::<M>(json.as_bytes()).unwrap(), message);
    assert_eq!(&Codec::Proto.decode::<M>(proto).unwrap(), message);
}

#[test]
fn both_encodings() {
    let end = EndEvent {
        exit_code: -1,
        exited: false,
        status: "signal: killed".to_owned(),
        error: None,
    };
    check(
        &end,
        r#"{"exitCode":-1,"status":"signal: killed"}"#,
        b"\x08\x01\x1a\x0esignal: killed",
    );
    check(
        &EndEvent {
            exited: true,
            ..EndEvent::default()
        },
        r#"{"exited":true}"#,
        b"\x10\x01",
    );
    let data = StreamResponse {
        event: Some(ProcessEvent {
            data: Some(DataEvent {
                stdout: Some(Bytes::from_static(b"hi\n")),
                ..DataEvent::default()
            }),
            ..ProcessEvent::default()
        }),
    };
    check(
        &data,
        r#"{"event":{"data":{"stdout":"aGkK"}}}"#,
        b"\x0a\x07\x12\x05\x0a\x03hi\n",
    );
    let keepalive = ProcessEvent {
        keepalive: Some(Empty {}),
        ..ProcessEvent::default()
    };
    check(&keepalive, r#"{"keepalive":{}}"#, b"\x22\x00");
    let input = StreamInputRequest {
        data: Some(StreamInputData {
            input: Some(ProcessInput {
                stdin: Some(Bytes::from_static(b"hi\n")),
                pty: None,
            }),
        }),
        ..StreamInputRequest::default()
    };
    check(
        &input,
        r#"{"data":{"input":{"stdin":"aGkK"}}}"#,
        b"\x12\x07\x12\x05\x0a\x03hi\n",
    );
    let select = StreamInputRequest {
        start: Some(StreamInputStart {
            process: Some(ProcessSelector {
                pid: Some(5),
                tag: None,
            }),
        }),
        ..StreamInputRequest::default()
    };
    check(
        &select,
        r#"{"start":{"process":{"pid":5}}}"#,
        b"\x0a\x04\x0a\x02\x08\x05",
    );
    let start = StartRequest {
        process: Some(ProcessConfig {
            cmd: "a".to_owned(),
            args: vec!["b".to_owned()],
            envs: BTreeMap::from([("K".to_owned(), "V".to_owned())]),
            cwd: Some("/".to_owned()),
        }),
        pty: None,
        tag: None,
        stdin: Some(false),
    };
    check(
        &start,
        r#"{"process":{"cmd":"a","args":["b"],"envs":{"K":"V"},"cwd":"/"},"stdin":false}"#,
        b"\x0a\x11\x0a\x01a\x12\x01b\x1a\x06\x0a\x01K\x12\x01V\x22\x01/\x20\x00",
    );
}

#[test]
fn lenient_json_input() {
    let decode = |text: &str| Codec::Json.decode::<SendSignalRequest>(text.as_bytes());
    let expected = SendSignalRequest {
        process: Some(ProcessSelector {
            pid: Some(5),
            tag: None,
        }),
        signal: signal::KILL,
    };
    for text in [
        r#"{"process":{"pid":5},"signal":"SIGNAL_SIGKILL"}"#,
        r#"{"process":{"pid":"5"},"signal":9}"#,
        r#"{"process":{"pid":5.0,"tag":null},"signal":9,"later":{"x":[1]}}"#,
    ] {
        assert_eq!(decode(text).unwrap(), expected, "{text}");
    }
    assert!(decode(r#"{"signal":"SIGNAL_SIGWHAT"}"#).is_err());
    assert!(decode(r#"{"process":{"pid":5.5}}"#).is_err());
    assert!(decode(r#"{"process":{"pid":4294967296}}"#).is_err());
    let end: EndEvent = Codec::Json
        .decode(br#"{"exit_code":3,"status":null,"exited":null}"#)
        .unwrap();
    assert_eq!(end.exit_code, 3);
    for text in ["__8", "//8", "//8=", "__8="] {
        let input: ProcessInput = Codec::Json
            .decode(format!(r#"{{"stdin":"{text}"}}"#).as_bytes())
            .unwrap();
        assert_eq!(input.stdin.as_deref(), Some([0xff, 0xff].as_slice()), "{text}");
    }
    let null: ProcessConfig = Codec::Json.decode(br#"{"args":null,"envs":null,"cmd":null}"#).unwrap();
    assert_eq!(null, ProcessConfig::default());
}
