//! Forms under random input. `PROPTEST_CASES` says how much of it.

use proptest::prelude::*;

use super::*;

const TYPE: &str = "multipart/form-data; boundary=xY";

/// What a body holds, its content put together.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    parts: Vec<(Head, Vec<u8>, bool)>,
    end: Result<(), Malformed>,
}

fn read(body: &[u8], pieces: &[usize]) -> Read {
    let mut reader = Reader::new(TYPE).unwrap();
    let mut found = Read {
        parts: Vec::new(),
        end: Ok(()),
    };
    let mut rest = body;
    let mut pieces = pieces.iter().cycle();
    loop {
        match reader.next() {
            Err(error) => {
                found.end = Err(error);
                return found;
            }
            Ok(Some(FormEvent::End)) => return found,
            Ok(Some(FormEvent::Part(head))) => found.parts.push((head, Vec::new(), false)),
            Ok(Some(FormEvent::Data(data))) => {
                assert!(!data.is_empty());
                found.parts.last_mut().unwrap().1.extend_from_slice(&data);
            }
            Ok(Some(FormEvent::PartEnd)) => found.parts.last_mut().unwrap().2 = true,
            Ok(None) if rest.is_empty() => {
                found.end = Err(Malformed::Truncated);
                return found;
            }
            Ok(None) => {
                let length = pieces.next().map_or(1, |length| *length).clamp(1, rest.len());
                reader.push(Bytes::copy_from_slice(&rest[..length]));
                rest = &rest[length..];
            }
        }
    }
}

/// Content that is full of what nearly is a delimiter, and never is one.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let bit = prop::sample::select(vec![
        "\r", "\n", "\r\n", "-", "--", "\r\n--", "\r\n--x", "xY", "--xY", "a", "\0",
    ]);
    prop::collection::vec(bit, 0..12)
        .prop_map(|bits| bits.concat().into_bytes())
        .prop_filter("holds a delimiter", |content| {
            // The line end before the content counts as well.
            memmem::find(&[b"\r\n", &content[..]].concat(), b"\r\n--xY").is_none()
        })
}

/// A name in a form that a quoted parameter can have.
fn name() -> impl Strategy<Value = String> {
    "[a-zü /;=\"\\\\.]{0,6}".prop_filter("a backslash before what it would escape", |name| {
        !name.contains('\\') || !name.contains('"')
    })
}

fn written(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"")
}

proptest! {
    // Contents that hold a delimiter are made again; a long run makes many.
    #![proptest_config(ProptestConfig { failure_persistence: None, max_local_rejects: u32::MAX, ..ProptestConfig::default() })]

    #[test]
    fn forms_are_read_as_they_were_written(
        parts in prop::collection::vec((name(), prop::option::of(name()), content()), 0..4),
        preamble in prop_oneof![Just(""), Just("preamble\r\n"), Just("\r\n")],
        epilogue in "[a-z\r\n-]{0,5}",
        blanks in "[ \t]{0,3}",
        pieces in prop::collection::vec(1..30_usize, 1..6),
    ) {
        let mut body = preamble.as_bytes().to_vec();
        let mut expect = Vec::new();
        for (name, file_name, content) in parts {
            let file = file_name.as_deref().map(|name| format!("; filename=\"{}\"", written(name)));
            let head = format!(
                "--xY{blanks}\r\nX-Other: y\r\nContent-Disposition: form-data; name=\"{}\"{}\r\n\r\n",
                written(&name),
                file.unwrap_or_default()
            );
            body.extend_from_slice(head.as_bytes());
            body.extend_from_slice(&content);
            body.extend_from_slice(b"\r\n");
            expect.push((Head { name, file_name }, content, true));
        }
        body.extend_from_slice(b"--xY--");
        body.extend_from_slice(epilogue.as_bytes());
        prop_assert_eq!(read(&body, &pieces), Read { parts: expect, end: Ok(()) });
    }

    /// Whatever it is, it is the same in any pieces.
    #[test]
    fn pieces_make_no_difference(
        bits in prop::collection::vec(prop::sample::select(vec![
            "--xY", "\r\n", "\r\n--xY", "\r\n--xY--", "--", ":", "a", "Content-Disposition: form-data; name=\"f\"", ";",
            "\"", "filename*=utf-8''%41", " ", "\t", "\r", "\n", "ü", "\r\n\r\n",
        ]), 0..14),
        pieces in prop::collection::vec(1..20_usize, 1..6),
        noise in prop::collection::vec(any::<u8>(), 0..4),
    ) {
        let body = [bits.concat().as_bytes(), &noise].concat();
        prop_assert_eq!(read(&body, &pieces), read(&body, &[usize::MAX]));
    }

    #[test]
    fn any_header_has_parameters_or_not(value in prop_oneof![".{0,40}", "[a-z; =\"\\\\]{0,30}"], wanted in "[a-z]{1,2}") {
        let _ = parameter(&value, &wanted);
        let _ = Reader::new(&value);
        let _ = extended(&value);
        let _ = Head::parse(value.as_bytes());
    }
}
