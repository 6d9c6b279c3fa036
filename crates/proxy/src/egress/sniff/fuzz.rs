//! First bytes of connections at random. `PROPTEST_CASES` says how many.

use std::sync::Arc;

use model::network::domain_name;
use proptest::prelude::*;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::tests::{hello, names};
use super::*;

/// What rustls sends first.
fn rustls_hello(host: &str, protocols: &[&str], fragment: Option<usize>) -> Vec<u8> {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    config.max_fragment_size = fragment;
    let host = host.to_owned().try_into().unwrap();
    let mut connection = ClientConnection::new(Arc::new(config), host).unwrap();
    let mut bytes = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut bytes).unwrap();
    }
    bytes
}

fn fragments() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "GET ",
            "/",
            " HTTP/1.1",
            "\r\n",
            "\r",
            "\n",
            "Host:",
            "host: ",
            "a.example",
            ":80",
            " ",
            "http://",
            "x: y",
            "1.2.3.4",
            "\0",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        prop::sample::select(vec![
            "GET / HTTP/1.1\r\n",
            "Host: a.example\r\n",
            "X: y\r\n",
            "\r\n\r\n"
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 0..12),
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let extension = prop_oneof![
        Just(names(&[(0, b"a.example")])),
        Just(names(&[(0, b"b.example")])),
        (any::<u16>(), prop::collection::vec(any::<u8>(), 0..40)),
    ];
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (prop::collection::vec(extension, 0..4), 1usize..300, changes).prop_map(|(extensions, fragment, changes)| {
        let mut bytes = hello(&extensions, fragment);
        for (at, to) in changes {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        bytes
    })
}

/// No answer changes if more bytes follow, and a name is a domain name.
fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    let mut previous = Sniffed::Incomplete;
    for end in 0..=bytes.len() {
        let found = sniff(&bytes[..end]);
        if let Sniffed::Name(name) = &found {
            prop_assert_eq!(domain_name(name), Some(name.clone()));
        }
        prop_assert!(
            previous == Sniffed::Incomplete || previous == found,
            "{:?} {:?}",
            previous,
            found
        );
        previous = found;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_have_one_answer(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check(&bytes)?;
    }

    #[test]
    fn requests_have_one_answer(bytes in fragments()) {
        check(&bytes)?;
    }

    #[test]
    fn hellos_have_one_answer(bytes in damaged()) {
        check(&bytes)?;
    }

    #[test]
    fn rustls_agrees(
        host in "[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?(\\.[a-z0-9]{1,20}){0,5}\\.[a-z]{2,10}",
        protocols in prop::sample::subsequence(vec!["h2", "http/1.1", "x"], 0..3),
        fragment in prop::option::of(32usize..600),
        after in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let mut bytes = rustls_hello(&host, &protocols, fragment);
        for end in 0..bytes.len() {
            prop_assert_eq!(sniff(&bytes[..end]), Sniffed::Incomplete);
        }
        bytes.extend(after);
        prop_assert_eq!(sniff(&bytes), Sniffed::Name(host));
    }
}

#[test]
fn rustls_hides_addresses() {
    assert_eq!(sniff(&rustls_hello("10.0.0.1", &[], None)), Sniffed::NoName);
    assert_eq!(sniff(&rustls_hello("::1", &[], None)), Sniffed::NoName);
}
