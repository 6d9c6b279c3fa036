//! Framing and messages with random input. `PROPTEST_CASES` sets the number of cases.

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;

use super::*;
use crate::process::{Empty, ProcessInput, SendInputRequest, StartRequest, StreamInputRequest, StreamResponse};

const LIMIT: usize = 64;

/// Reference implementation: parses a whole stream of envelopes.
#[derive(Debug, PartialEq, Eq)]
enum Tail {
    Nothing,
    Incomplete,
    TooLong,
}

fn reference(mut bytes: &[u8]) -> (Vec<(u8, Vec<u8>)>, Tail) {
    let mut found = Vec::new();
    loop {
        if bytes.is_empty() {
            return (found, Tail::Nothing);
        }
        if bytes.len() < 5 {
            return (found, Tail::Incomplete);
        }
        let length = bytes[1..5]
            .iter()
            .fold(0_usize, |length, byte| length * 256 + usize::from(*byte));
        if length > LIMIT {
            return (found, Tail::TooLong);
        }
        if bytes.len() < 5 + length {
            return (found, Tail::Incomplete);
        }
        found.push((bytes[0], bytes[5..5 + length].to_vec()));
        bytes = &bytes[5 + length..];
    }
}

/// Parses the same stream in pieces, as a connection delivers it.
fn piecewise(bytes: &[u8], pieces: &[usize]) -> (Vec<(u8, Vec<u8>)>, Tail) {
    let mut buffer = BytesMut::new();
    let mut found = Vec::new();
    let mut rest = bytes;
    let mut pieces = pieces.iter().cycle();
    while !rest.is_empty() {
        let length = pieces.next().map_or(1, |length| *length).clamp(1, rest.len());
        buffer.extend_from_slice(&rest[..length]);
        rest = &rest[length..];
        loop {
            match take_envelope(&mut buffer, LIMIT) {
                Ok(Some((flags, message))) => found.push((flags, message.to_vec())),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(error.code, Code::InvalidArgument);
                    return (found, Tail::TooLong);
                }
            }
        }
    }
    let tail = if buffer.is_empty() {
        Tail::Nothing
    } else {
        Tail::Incomplete
    };
    (found, tail)
}

/// Complete envelopes, with some bytes changed, removed or added.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let envelope = (any::<u8>(), prop::collection::vec(any::<u8>(), 0..=LIMIT + 2))
        .prop_map(|(flags, message)| wrap(flags, &message).to_vec());
    let whole = prop::collection::vec(envelope, 0..5).prop_map(|all| all.concat());
    let changed = (whole.clone(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(mut bytes, at, to)| {
        if !bytes.is_empty() {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        bytes
    });
    let cut = (whole.clone(), any::<prop::sample::Index>()).prop_map(|(mut bytes, at)| {
        bytes.truncate(at.index(bytes.len() + 1));
        bytes
    });
    prop_oneof![whole, changed, cut, prop::collection::vec(any::<u8>(), 0..40)]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![".{0,8}", "[a-z/=:\"\\\\\\u{0}-\\u{1f}]{0,8}"]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn envelopes_are_the_same_in_any_pieces(bytes in stream(), pieces in prop::collection::vec(1..40_usize, 1..6)) {
        prop_assert_eq!(piecewise(&bytes, &pieces), reference(&bytes));
        let only = only_envelope(Bytes::from(bytes.clone()), LIMIT);
        let (found, tail) = reference(&bytes);
        match (&found[..], tail) {
            ([(flags, message)], Tail::Nothing) => {
                prop_assert_eq!(only, Ok((*flags, Bytes::from(message.clone()))));
            }
            ([], Tail::TooLong) => prop_assert_eq!(only.unwrap_err().code, Code::InvalidArgument),
            ([], Tail::Incomplete) => prop_assert_eq!(only.unwrap_err().code, Code::InvalidArgument),
            _ => prop_assert_eq!(only.unwrap_err().code, Code::Unimplemented),
        }
    }

    #[test]
    fn arbitrary_bytes_decode_or_fail_cleanly(bytes in prop_oneof![
        prop::collection::vec(any::<u8>(), 0..60),
        "\\{(\"(process|input|stdin|pid|tag|pty|start|data|event|cmd|envs|cols|size)\":(\\{|\\}|null|-?[0-9]{1,20}|1e[0-9]{1,3}|\"[A-Za-z0-9+/=_-]{0,9}\"|\\[|\\]|true),?){0,5}\\}{0,5}"
            .prop_map(String::into_bytes),
    ]) {
        for codec in [Codec::Json, Codec::Proto] {
            macro_rules! check {
                ($($message:ty),*) => {$(
                    if let Ok(message) = codec.decode::<$message>(&bytes) {
                        // A decoded message encodes and decodes to the same message.
                        prop_assert_eq!(&codec.decode::<$message>(&codec.encode(&message)).unwrap(), &message);
                    }
                )*};
            }
            check!(SendInputRequest, StartRequest, StreamInputRequest, StreamResponse, Empty);
        }
    }

    #[test]
    fn messages_round_trip_through_both_codecs(
        cmd in text(),
        args in prop::collection::vec(text(), 0..4),
        envs in prop::collection::btree_map(text(), text(), 0..4),
        cwd in prop::option::of(text()),
        tag in prop::option::of(text()),
        stdin in prop::option::of(any::<bool>()),
        bytes in prop::option::of(prop::collection::vec(any::<u8>(), 0..50)),
        pid in prop::option::of(any::<u32>()),
    ) {
        let start = StartRequest {
            process: Some(crate::process::ProcessConfig { cmd, args, envs, cwd }),
            pty: None,
            tag: tag.clone(),
            stdin,
        };
        let input = SendInputRequest {
            process: Some(crate::process::ProcessSelector { tag: if pid.is_some() { None } else { tag }, pid }),
            input: Some(ProcessInput { stdin: bytes.map(Bytes::from), pty: None }),
        };
        for codec in [Codec::Json, Codec::Proto] {
            prop_assert_eq!(&codec.decode::<StartRequest>(&codec.encode(&start)).unwrap(), &start);
            prop_assert_eq!(&codec.decode::<SendInputRequest>(&codec.encode(&input)).unwrap(), &input);
        }
    }

    #[test]
    fn only_digits_are_a_timeout(header in prop_oneof!["[0-9]{0,12}", ".{0,12}"]) {
        let digits = (1..=10).contains(&header.len()) && header.bytes().all(|byte| byte.is_ascii_digit());
        match timeout(Some(&header)) {
            Ok(found) => {
                prop_assert!(digits);
                let millis: u64 = header.parse().unwrap();
                prop_assert_eq!(found, (millis > 0).then(|| Duration::from_millis(millis)));
            }
            Err(_) => prop_assert!(!digits),
        }
    }
}
