use http::Request;
use proptest::prelude::*;

use super::*;

const SECRET: &[u8] = b"sk";

fn token(text: &str) -> SignedToken {
    SignedToken::parse("Qiniu", text).expect("a token")
}

fn request(method: &str, target: &str, headers: &[(&str, &str)]) -> request::Parts {
    let mut request = Request::builder().method(method).uri(target);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request").into_parts().0
}

/// The signature of a text, made without the code under test.
fn sign(text: &str) -> SignedToken {
    let mut mac = Hmac::<Sha1>::new_from_slice(SECRET).expect("a key");
    mac.update(text.as_bytes());
    token(&format!("ak:{}", URL_SAFE.encode(mac.finalize().into_bytes())))
}

const HOST: (&str, &str) = ("host", "127.0.0.1:3000");
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test(start_paused = true)]
async fn failed_signatures_are_limited_per_peer() {
    let failures = Failures::default();
    let (guesser, other) = (Some(Peer::V6(1)), Some(Peer::V6(2)));
    for _ in 0..3 * FAILURES.0 {
        let attempt = failures.begin(guesser).expect("no failure so far");
        failures.succeeded(&attempt);
    }
    for _ in 0..FAILURES.0 {
        failures.begin(guesser).expect("within the burst");
    }
    assert_eq!(failures.begin(guesser).expect_err("beyond it"), FAILURES.1);
    // Addresses that many clients share are not limited.
    for who in [other, None, None] {
        failures.begin(who).expect("not the guesser");
    }
    tokio::time::advance(FAILURES.1).await;
    let attempt = failures.begin(guesser).expect("one permit was refilled");
    failures.succeeded(&attempt);
    failures.begin(guesser).expect("it was given back");
    failures.begin(guesser).expect_err("and used");
}

#[test]
fn published_vectors_match() {
    let body = br#"{"injection":{"api_key":"sk-1","type":"openai"},"name":"r1"}"#;
    let date = ("x-qiniu-date", "20260101T000000Z");
    let list = request("GET", "/injection-rules", &[HOST]);
    let create = request("POST", "/injection-rules", &[HOST, JSON]);
    let update = request("PUT", "/injection-rules/rule_1", &[HOST, JSON, date]);
    for (parts, body, signed) in [
        (&list, &b""[..], "ak:unv1N70NmLe59sgW5Z3jbIiOm7M="),
        (&create, body, "ak:Lh3SZl5O46ie__LgecRiuG4pQfQ="),
        (&update, br#"{"name":"r2"}"#, "ak:iIloBkrp2QOciGqrCwQb2W5JRSM="),
    ] {
        let matched = matches(SECRET, &token(signed), parts, body);
        let has_date = parts.headers.contains_key("x-qiniu-date");
        assert_eq!(matched.expect(signed).date.is_some(), has_date);
        assert!(matches(b"other", &token(signed), parts, body).is_none());
        assert!(matches(SECRET, &token(signed), parts, b"{}").is_none());
    }
    let mut mac = Hmac::<Sha1>::new_from_slice(SECRET).expect("a key");
    mac.update(b"hello");
    assert!(
        mac.verify_slice(&token("ak:NDN8cM0rwosxhHJ6QAcI7ialr0g=").signature)
            .is_ok()
    );
}

#[test]
fn every_form_that_clients_sign_matches() {
    let target = "/injection-rules/a%20b?x=%20y";
    for headers in [&[HOST][..], &[HOST, JSON]] {
        let parts = request("PUT", target, headers);
        let sent = headers.contains(&JSON).then_some("application/json");
        for path in ["/injection-rules/a%20b", "/injection-rules/a b"] {
            for host in ["127.0.0.1:3000", "127.0.0.1:3000:3000"] {
                for kind in [sent, Some(FORM), None] {
                    let kind = kind.map(|kind| format!("Content-Type: {kind}\n")).unwrap_or_default();
                    let text = format!("PUT {path}?x=%20y\nHost: {host}\n{kind}\n{{}}");
                    assert!(matches(SECRET, &sign(&text), &parts, b"{}").is_some(), "{text}");
                }
            }
        }
    }
}

#[test]
fn a_changed_request_does_not_match() {
    let text = "POST /injection-rules?a=b\nHost: h:1\nContent-Type: application/json\nX-Qiniu-Date: d\n\nbody";
    let token = sign(text);
    let headers = [("host", "h:1"), JSON, ("x-qiniu-date", "d")];
    let good = request("POST", "/injection-rules?a=b", &headers);
    assert!(matches(SECRET, &token, &good, b"body").is_some());
    for (method, target, headers, body) in [
        ("PUT", "/injection-rules?a=b", &headers[..], "body"),
        ("POST", "/injection-rule?a=b", &headers, "body"),
        ("POST", "/injection-rules?a=c", &headers, "body"),
        ("POST", "/injection-rules", &headers, "body"),
        ("POST", "/injection-rules?a=b", &headers, "Body"),
        ("POST", "/injection-rules?a=b", &headers, ""),
        ("POST", "/injection-rules?a=b", &headers[..2], "body"),
        (
            "POST",
            "/injection-rules?a=b",
            &[("host", "h:2"), JSON, headers[2]],
            "body",
        ),
        (
            "POST",
            "/injection-rules?a=b",
            &[headers[0], ("content-type", "text/plain"), headers[2]],
            "body",
        ),
        (
            "POST",
            "/injection-rules?a=b",
            &[headers[0], JSON, ("x-qiniu-date", "e")],
            "body",
        ),
        (
            "POST",
            "/injection-rules?a=b",
            &[headers[0], JSON, headers[2], ("x-qiniu-more", "e")],
            "body",
        ),
    ] {
        let parts = request(method, target, headers);
        assert!(
            matches(SECRET, &token, &parts, body.as_bytes()).is_none(),
            "{parts:?} {body}"
        );
    }
}

#[test]
fn extra_headers_are_sorted_and_named_after_the_scheme() {
    let parts = request(
        "GET",
        "/x",
        &[
            ("host", "h"),
            ("x-sufy-b", "2"),
            ("x-sufy-a-key", "1"),
            ("x-sufy-a-key", "3"),
            ("x-sufy-", "4"),
        ],
    );
    let text = "GET /x\nHost: h\nX-Sufy-A-Key: 1\nX-Sufy-B: 2\n\n";
    let sufy = |token: SignedToken| SignedToken {
        scheme: "Sufy".to_owned(),
        ..token
    };
    assert!(matches(SECRET, &sufy(sign(text)), &parts, b"").is_some());
    assert!(matches(SECRET, &sign(text), &parts, b"").is_none());
    // A client of another scheme that signs the headers of the common one.
    let parts = request("GET", "/x", &[("host", "h"), ("x-qiniu-date", "d")]);
    let signed = matches(SECRET, &sufy(sign("GET /x\nHost: h\nX-Qiniu-Date: d\n\n")), &parts, b"");
    assert_eq!(signed.expect("signed").date.as_deref(), Some("d"));
}

#[test]
fn tokens_are_read_strictly() {
    let schemes = ["Ringfence".to_owned(), "Qiniu".to_owned()];
    let read = |value: &str| {
        let parts = request("GET", "/", &[("authorization", value)]);
        SignedToken::read(&parts.headers, &schemes)
    };
    let good = read("Qiniu ak:NDN8cM0rwosxhHJ6QAcI7ialr0g=")
        .expect("a token")
        .expect("well-formed");
    assert_eq!((good.scheme.as_str(), good.access_key.as_str()), ("Qiniu", "ak"));
    assert!(matches!(read("qiniu ak:NDN8cM0rwosxhHJ6QAcI7ialr0g="), Some(Ok(_))));
    for other in ["Bearer x", "QBox ak:NDN8cM0rwosxhHJ6QAcI7ialr0g=", "Qiniu", ""] {
        assert!(read(other).is_none(), "{other}");
    }
    for malformed in [
        "Qiniu ",
        "Qiniu ak",
        "Qiniu :NDN8cM0rwosxhHJ6QAcI7ialr0g=",
        "Qiniu ak:",
        "Qiniu ak:NDN8cM0rwosxhHJ6QAcI7ialr0g",
        "Qiniu ak:NDN8cM0rwosxhHJ6QAcI7ialr0g==",
        "Qiniu ak:NDN8cM0rwosxhHJ6QAcI7ialr+g=",
        "Qiniu a k:NDN8cM0rwosxhHJ6QAcI7ialr0g=",
    ] {
        assert!(
            matches!(read(malformed), Some(Err(SignatureError::Malformed))),
            "{malformed}"
        );
    }
    let long = format!("Qiniu {}:NDN8cM0rwosxhHJ6QAcI7ialr0g=", "a".repeat(ACCESS_KEY_MAX + 1));
    assert!(matches!(read(&long), Some(Err(SignatureError::Malformed))));
}

#[test]
fn dates_have_one_form() {
    assert_eq!(parse_date("19700101T000001Z"), Some(1_000_000));
    assert_eq!(parse_date("20260101T000000Z"), Some(1_767_225_600_000_000));
    for bad in [
        "",
        "20260101T000000",
        "2026-01-01T00:00:00Z",
        "20261301T000000Z",
        " 0260101T000000Z",
        "20260101T000000é",
    ] {
        assert_eq!(parse_date(bad), None, "{bad}");
    }
}

proptest! {
    #[test]
    fn any_header_is_read_or_refused(value in "(Qiniu |Sufy |Bearer )?[ -~]{0,20}(:[A-Za-z0-9_=+/-]{20,30})?") {
        let parts = request("GET", "/", &[("authorization", value.trim())]);
        let _ = SignedToken::read(&parts.headers, &["Qiniu".to_owned(), "Sufy".to_owned()]);
    }

    #[test]
    fn no_other_signature_matches(signature in proptest::collection::vec(any::<u8>(), SIGNATURE_BYTES), body in "\\PC{0,9}") {
        let token = token(&format!("ak:{}", URL_SAFE.encode(signature)));
        let parts = request("POST", "/injection-rules", &[HOST, JSON]);
        prop_assert!(matches(SECRET, &token, &parts, body.as_bytes()).is_none());
    }

    #[test]
    fn any_target_is_verified(path in "/[a-z%0-9./]{0,12}", query in "[a-z=%&]{0,8}") {
        let target = format!("{path}?{query}");
        if let Ok(uri) = target.parse::<http::Uri>() {
            let parts = request("GET", &uri.to_string(), &[HOST]);
            let _ = matches(SECRET, &token("ak:NDN8cM0rwosxhHJ6QAcI7ialr0g="), &parts, b"");
        }
    }
}
