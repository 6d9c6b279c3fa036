//! Headers between two connections, at random. `PROPTEST_CASES` says how many.

use http::Request;
use proptest::prelude::*;

use super::*;

const NAMES: [&str; 16] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
    "te",
    "expect",
    "content-length",
    "host",
    "forwarded",
    "x-forwarded-for",
    "x-custom",
    "cookie",
    "e2b-traffic-access-token",
    "proxy-authorization",
    "trailer",
];

fn fields() -> impl Strategy<Value = Vec<(&'static str, String)>> {
    let value = prop_oneof![
        prop::sample::select(vec![
            "upgrade",
            "Upgrade, x-custom",
            "close",
            "host, content-length",
            "websocket",
            "h2c",
            "websocket, h2c",
            "chunked",
            "100-continue",
            "trailers;q=0.5, x",
            "12",
            "+12",
            "0",
            "x-custom,,cookie ,",
            "identity",
        ])
        .prop_map(str::to_owned),
        "[ -~]{0,8}",
    ];
    prop::collection::vec((prop::sample::select(NAMES.to_vec()), value), 0..8)
}

fn map(fields: &[(&'static str, String)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.append(*name, value);
        }
    }
    headers
}

/// Names in a field that lists some.
fn named(headers: &HeaderMap) -> Vec<String> {
    let values = headers
        .get_all("connection")
        .iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_request_says_one_thing_about_its_connection(
        fields in fields(),
        has_body in any::<bool>(),
        allowed in any::<bool>(),
        uri in prop::sample::select(vec!["/", "/a?b", "http://h.x:1/p", "*"]),
        version in prop::sample::select(vec![Version::HTTP_10, Version::HTTP_11, Version::HTTP_2]),
    ) {
        let before = map(&fields);
        let mut request = Request::builder().method("OPTIONS").uri(uri).version(version).body(()).unwrap();
        *request.headers_mut() = before.clone();
        let (mut parts, ()) = request.into_parts();
        let framing = to_guest(&mut parts, has_body, allowed);
        let after = &parts.headers;
        // None on a connection that may serve another request.
        prop_assert_eq!(after.get_all(CONNECTION).iter().count(), usize::from(!framing.keeps));
        prop_assert_eq!(after.get(CONNECTION).is_some_and(|value| value == "upgrade"), framing.upgrade);
        prop_assert!(!framing.keeps || !(framing.upgrade || framing.expects_continue));
        prop_assert_eq!(after.contains_key(UPGRADE), framing.upgrade);
        prop_assert!(!framing.upgrade || (allowed && version == Version::HTTP_11));
        prop_assert!(!framing.upgrade || !lists(after, &UPGRADE, "h2c"));
        prop_assert!(after.contains_key(HOST));
        for gone in ["keep-alive", "proxy-connection", "proxy-authorization", "forwarded", "x-forwarded-for"] {
            prop_assert!(!after.contains_key(gone), "{}", gone);
        }
        // A length or chunks, never both: two readers would see two bodies.
        prop_assert!(!(after.contains_key(CONTENT_LENGTH) && after.contains_key(TRANSFER_ENCODING)));
        prop_assert!(after.get_all(TRANSFER_ENCODING).iter().all(|value| value == "chunked"));
        prop_assert!(!has_body || after.contains_key(CONTENT_LENGTH) || after.contains_key(TRANSFER_ENCODING));
        prop_assert_eq!(framing.expects_continue && has_body, framing.expects_continue);
        prop_assert_eq!(after.contains_key(EXPECT), framing.expects_continue);
        // What describes the request, and not the connection, comes through as it is.
        let dropped = named(&before);
        for name in ["x-custom", "cookie", "e2b-traffic-access-token", "trailer"] {
            if !dropped.iter().any(|other| other == name) {
                prop_assert!(before.get_all(name).iter().eq(after.get_all(name).iter()), "{}", name);
            } else {
                prop_assert!(!after.contains_key(name), "{}", name);
            }
        }
        prop_assert!(parts.uri.authority().is_none());
    }

    #[test]
    fn an_answer_says_nothing_about_the_other_connection(fields in fields(), upgraded in any::<bool>()) {
        let before = map(&fields);
        let mut after = before.clone();
        to_client(&mut after, upgraded);
        prop_assert!(!after.contains_key(TRANSFER_ENCODING));
        prop_assert_eq!(after.contains_key(CONNECTION), upgraded);
        prop_assert!(upgraded || !after.contains_key(UPGRADE));
        prop_assert!(after.get_all(CONTENT_LENGTH).iter().count() <= 1);
        if let Some(length) = after.get(CONTENT_LENGTH) {
            prop_assert!(length.to_str().unwrap().bytes().all(|byte| byte.is_ascii_digit()));
            prop_assert!(!before.contains_key(TRANSFER_ENCODING));
        }
    }
}
