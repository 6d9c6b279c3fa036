//! Framing and deadlines.

use bytes::{Bytes, BytesMut};

use super::*;
use crate::process::{ProcessSelector, SendInputRequest};

#[test]
fn content_types() {
    assert_eq!(Codec::of_unary("application/json; charset=utf-8"), Some(Codec::Json));
    assert_eq!(Codec::of_unary("Application/Proto"), Some(Codec::Proto));
    assert_eq!(Codec::of_unary("application/connect+json"), None);
    assert_eq!(Codec::of_stream("application/connect+json"), Some(Codec::Json));
    assert_eq!(Codec::of_stream("application/connect+proto"), Some(Codec::Proto));
    assert_eq!(Codec::of_stream("application/grpc"), None);
}

#[test]
fn a_request_body_has_exactly_one_envelope() {
    let selector = ProcessSelector {
        pid: Some(7),
        tag: None,
    };
    for codec in [Codec::Json, Codec::Proto] {
        let whole = codec.envelope(&selector);
        let (flags, message) = only_envelope(whole.clone(), 100).unwrap();
        assert_eq!(flags, 0);
        assert_eq!(codec.decode::<ProcessSelector>(&message).unwrap(), selector);
        for cut in 1..whole.len() {
            let error = only_envelope(whole.slice(..cut), 100).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{cut}");
        }
        let twice = [whole.as_ref(), whole.as_ref()].concat();
        assert_eq!(only_envelope(twice.into(), 100).unwrap_err().code, Code::Unimplemented);
        assert_eq!(only_envelope(whole, 1).unwrap_err().code, Code::InvalidArgument);
    }
    assert_eq!(only_envelope(Bytes::new(), 9).unwrap_err().code, Code::Unimplemented);
    let compressed = wrap(FLAG_COMPRESSED, b"xyz");
    assert_eq!(
        only_envelope(compressed, 9),
        Ok((FLAG_COMPRESSED, Bytes::from_static(b"xyz")))
    );
    let huge = Bytes::from_static(&[0, 255, 255, 255, 255]);
    assert_eq!(only_envelope(huge, 9).unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn flags_of_requests() {
    for declared in [false, true] {
        assert_eq!(is_compressed(0, declared), Ok(false));
        for odd in [2, 3, 4, 0x80, 0xff] {
            assert_eq!(
                is_compressed(odd, declared).unwrap_err().code,
                Code::InvalidArgument,
                "{odd}"
            );
        }
    }
    assert_eq!(is_compressed(FLAG_COMPRESSED, true), Ok(true));
    assert_eq!(is_compressed(FLAG_COMPRESSED, false).unwrap_err().code, Code::Internal);
}

#[test]
fn the_last_envelope_is_json_in_both_codecs() {
    let mut clean = BytesMut::from(end_of_stream(None));
    assert_eq!(
        take_envelope(&mut clean, 100).unwrap(),
        Some((FLAG_END, Bytes::from_static(b"{}")))
    );
    let error = Error::new(Code::NotFound, "process with pid 9 not found");
    let mut failed = BytesMut::from(end_of_stream(Some(&error)));
    let (_, payload) = take_envelope(&mut failed, 100).unwrap().unwrap();
    assert_eq!(
        payload,
        r#"{"error":{"code":"not_found","message":"process with pid 9 not found"}}"#
    );
}

#[test]
fn deadlines() {
    assert_eq!(timeout(None), Ok(None));
    assert_eq!(timeout(Some("0")), Ok(None));
    assert_eq!(timeout(Some("1500")), Ok(Some(Duration::from_millis(1500))));
    for bad in ["", "-1", "+1", "1.5", "1s", "12345678901", " 1"] {
        assert_eq!(timeout(Some(bad)).unwrap_err().code, Code::InvalidArgument, "{bad}");
    }
}

#[test]
fn malformed_messages() {
    for bad in [
        "",
        "[]",
        "null",
        "7",
        "{",
        "{}{}",
        r#"{"process":7}"#,
        r#"{"process":{"pid":-1}}"#,
    ] {
        let error = Codec::Json.decode::<SendInputRequest>(bad.as_bytes()).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{bad}");
    }
    let error = Codec::Proto.decode::<SendInputRequest>(&[0x0a, 0xff]).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(Codec::Proto.decode::<SendInputRequest>(&[]).is_ok());
}
