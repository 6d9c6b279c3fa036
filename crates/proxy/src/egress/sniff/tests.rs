use super::*;

fn found(text: &str) -> Sniffed {
    sniff(text.as_bytes())
}

fn named(name: &str) -> Sniffed {
    Sniffed::Name(name.to_owned())
}

/// A ClientHello with these extensions, each with its type, in records of at most `fragment` bytes.
pub(super) fn hello(extensions: &[(u16, Vec<u8>)], fragment: usize) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    let mut list = Vec::new();
    for (kind, content) in extensions {
        list.extend(kind.to_be_bytes());
        list.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
        list.extend(content);
    }
    body.extend(u16::try_from(list.len()).unwrap().to_be_bytes());
    body.extend(list);
    records(&message(&body), fragment)
}

fn message(body: &[u8]) -> Vec<u8> {
    let mut message = vec![1];
    message.extend(&u32::try_from(body.len()).unwrap().to_be_bytes()[1..]);
    message.extend(body);
    message
}

fn records(message: &[u8], fragment: usize) -> Vec<u8> {
    let record = |content: &[u8]| {
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        [&[22, 3, 1, length[0], length[1]], content].concat()
    };
    message.chunks(fragment).flat_map(record).collect()
}

/// The content of an extension with these names, each with its type.
pub(super) fn names(names: &[(u8, &[u8])]) -> (u16, Vec<u8>) {
    let mut list = Vec::new();
    for (kind, name) in names {
        list.push(*kind);
        list.extend(u16::try_from(name.len()).unwrap().to_be_bytes());
        list.extend(*name);
    }
    let length = u16::try_from(list.len()).unwrap().to_be_bytes();
    (0, [&length[..], &list].concat())
}

#[test]
fn tls_server_names() {
    let one = |name: &[u8]| {
        sniff(&hello(
            &[(10, vec![0; 4]), names(&[(0, name)]), (43, vec![2, 3, 4])],
            1 << 14,
        ))
    };
    assert_eq!(one(b"Example.COM"), named("example.com"));
    assert_eq!(one(b"example.com."), named("example.com"));
    assert_eq!(one(b"a_b.xn--bcher-kva.example"), named("a_b.xn--bcher-kva.example"));
    assert_eq!(one(b"localhost"), named("localhost"));
    let long = [&[b'a'; 63][..]; 4].join(&b'.');
    for invalid in [
        &b""[..],
        b".",
        b"a..b",
        b".a",
        b"*.example.com",
        b"10.0.0.1",
        b"1.2.3.4.",
        b"127.1",
        b"2130706433",
        b"0x7f.0x1",
        b"[::1]",
        b"::1",
        b"example.com:443",
        b"example.com\0",
        b"exa mple.com",
        b"b\xc3\xbccher.example",
        b"\xff.example",
        b"-a.example",
        &[b'a'; 64],
        &long,
    ] {
        assert_eq!(one(invalid), Sniffed::NoName, "{}", invalid.escape_ascii());
    }
}

#[test]
fn tls_without_one_clear_server_name() {
    let of = |extensions: &[(u16, Vec<u8>)]| sniff(&hello(extensions, 1 << 14));
    let sni = || names(&[(0, b"a.example")]);
    assert_eq!(of(&[sni()]), named("a.example"));
    assert_eq!(of(&[]), Sniffed::NoName);
    assert_eq!(of(&[(10, vec![1, 2])]), Sniffed::NoName);
    assert_eq!(of(&[sni(), sni()]), Sniffed::NoName);
    assert_eq!(of(&[names(&[])]), Sniffed::NoName);
    assert_eq!(of(&[names(&[(1, b"a.example")])]), Sniffed::NoName);
    assert_eq!(of(&[names(&[(0, b"a.example"), (0, b"b.example")])]), Sniffed::NoName);
    assert_eq!(of(&[names(&[(0, b"a.example"), (1, b"b")])]), Sniffed::NoName);
    assert_eq!(of(&[(0, vec![])]), Sniffed::NoName);
    let (_, mut long) = sni();
    long.push(0);
    assert_eq!(of(&[(0, long)]), Sniffed::NoName);
    // The outer name of an encrypted ClientHello.
    assert_eq!(of(&[(0xfe0d, vec![0; 200]), sni()]), named("a.example"));
    // A ClientHello may have no extensions at all.
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    assert_eq!(sniff(&records(&message(&body), 99)), Sniffed::NoName);
}

#[test]
fn tls_records() {
    let whole = hello(&[names(&[(0, b"a.example")])], 1 << 14);
    for fragment in [2, 3, 4, 5, 7, 40, 64, 67] {
        let bytes = hello(&[names(&[(0, b"a.example")])], fragment);
        assert_eq!(sniff(&bytes), named("a.example"), "{fragment}");
        for end in 0..bytes.len() {
            assert_eq!(sniff(&bytes[..end]), Sniffed::Incomplete, "{fragment} {end}");
        }
    }
    // Too many records.
    assert_eq!(sniff(&hello(&[names(&[(0, b"a.example")])], 1)), Sniffed::NoName);
    // What follows is of no interest, early data for example.
    assert_eq!(sniff(&[&whole[..], &[23, 3, 3, 0, 9]].concat()), named("a.example"));
    let changed = |at: usize, to: u8| {
        let mut bytes = whole.clone();
        bytes[at] = to;
        sniff(&bytes)
    };
    assert_eq!(changed(0, 23), Sniffed::NoName);
    assert_eq!(changed(1, 2), Sniffed::NoName);
    assert_eq!(changed(5, 2), Sniffed::NoName);
    assert_eq!(changed(6, 1), Sniffed::NoName);
    // A record that goes on after the message, and a message that goes on after the record.
    assert_eq!(changed(8, whole[8] - 1), Sniffed::NoName);
    assert_eq!(changed(8, whole[8] + 1), Sniffed::Incomplete);
    assert_eq!(sniff(&[22, 3, 1, 0, 0]), Sniffed::NoName);
    assert_eq!(sniff(&[22, 3, 1, 0x40, 1]), Sniffed::NoName);
    assert_eq!(sniff(&[22, 3, 1, 0x40, 0]), Sniffed::Incomplete);
    assert_eq!(sniff(&[22, 3, 1, 0, 9, 1, 0, 0x40, 1]), Sniffed::NoName);
    // An alert, and SSL 2.
    assert_eq!(sniff(&[21, 3, 1, 0, 2, 1, 0]), Sniffed::NoName);
    assert_eq!(sniff(&[0x80, 0x2e, 1, 3, 1]), Sniffed::NoName);
}

#[test]
fn the_longest_hello_fits() {
    let fixed = hello(&[names(&[(0, b"a.example")]), (21, vec![])], 1 << 14).len() - 9;
    let hello = |padding: usize| {
        let extensions = [names(&[(0, b"a.example")]), (21, vec![0; padding])];
        super::tests::hello(&extensions, (MAX_HELLO + 4).div_ceil(MAX_RECORDS))
    };
    let longest = hello(MAX_HELLO - fixed);
    assert_eq!(longest.len(), MAX_BYTES);
    assert_eq!(sniff(&longest), named("a.example"));
    assert_eq!(sniff(&longest[..MAX_BYTES - 1]), Sniffed::Incomplete);
    assert_eq!(sniff(&hello(MAX_HELLO - fixed + 1)), Sniffed::NoName);
}

#[test]
fn http_hosts() {
    for (request, name) in [
        ("GET / HTTP/1.1\r\nHost: Example.com\r\n\r\n", "example.com"),
        ("GET / HTTP/1.0\r\nhost:example.com:8080\r\n\r\nbody", "example.com"),
        (
            "POST /a?b=%20 HTTP/1.1\r\nA: b\r\nHOST: \t example.com. \t\r\nC:\r\n\r\n",
            "example.com",
        ),
        ("OPTIONS * HTTP/1.1\r\nHost: a.example:\r\n\r\n", "a.example"),
        (
            "GET http://a.example/x HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "a.example",
        ),
        (
            "GET HTTP://A.example:80 HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "a.example",
        ),
        (
            "GET https://a.example?x HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "a.example",
        ),
        (
            "GET /\u{fc} HTTP/1.1\r\nHost: a.example\r\nX: \u{fc}\r\n\r\n",
            "a.example",
        ),
        (
            "X-1 / HTTP/1.1\r\nHost: a.example\r\n\r\nGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
            "a.example",
        ),
    ] {
        assert_eq!(found(request), named(name), "{request:?}");
        let end = request.find("\r\n\r\n").unwrap() + 4;
        for end in 0..end {
            assert_eq!(
                sniff(&request.as_bytes()[..end]),
                Sniffed::Incomplete,
                "{request:?} {end}"
            );
        }
    }
}

#[test]
fn http_without_one_clear_host() {
    for request in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost:\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: ::1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: user@a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example:80:80\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example:x\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example:123456\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example, b.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nhost: a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\n b.example\r\n\r\n",
        "GET / HTTP/1.1\r\n Host: a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nX : b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nnot a header\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\n: x\r\n\r\n",
        "GET / HTTP/1.1\nHost: a.example\n\n",
        "GET / HTTP/1.1\r\nHost: a.example\n\r\n",
        "GET / HTTP/1.1\r\nX: a\rHost: a.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nX: \0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nX: \x0b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.ex\x7fample\r\n\r\n",
        "\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET / HTTP/1.1 \r\nHost: a.example\r\n\r\n",
        "GET /\tx HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: a.example\r\n\r\n",
        "GET / http/1.1\r\nHost: a.example\r\n\r\n",
        "GET /\r\n",
        "GET x HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET * HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET ftp://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET http://a.example/ HTTP/1.1\r\n\r\n",
        "GET http://b.example@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET http:///a.example HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n",
        "EHLO a.example\r\n",
        "*1\r\n$4\r\nPING\r\n",
        "{\"a\": 1}",
        " ",
        "\0\0\0\x08",
    ] {
        assert_eq!(found(request), Sniffed::NoName, "{request:?}");
    }
}

#[test]
fn no_wait_lasts_forever() {
    assert_eq!(sniff(&[]), Sniffed::Incomplete);
    assert_eq!(sniff(&[b'A'; 32]), Sniffed::Incomplete);
    assert_eq!(sniff(&[b'A'; 33]), Sniffed::NoName);
    let mut request = b"GET / HTTP/1.1\r\nHost: a.example\r\n".to_vec();
    while request.len() < MAX_BYTES {
        request.extend_from_slice(b"X: y\r\n");
    }
    assert_eq!(sniff(&request[..MAX_BYTES - 1]), Sniffed::Incomplete);
    assert_eq!(sniff(&request), Sniffed::NoName);
    request.extend_from_slice(b"\r\n");
    assert_eq!(sniff(&request), Sniffed::NoName);
}
