//! Two platforms on one PostgreSQL database.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::super::TestDir;
use super::super::postgres::Server;
use super::{Up, cannot_run, credential};

/// The status and the body of an answer.
fn ask(up: &Up<'_>, key: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    let address = up.address();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nX-API-Key: {key}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

fn create(up: &Up<'_>, key: &str) -> String {
    let (status, body) = ask(up, key, "POST", "/sandboxes", r#"{"templateID":"base","timeout":600}"#);
    assert_eq!(status, 201, "{body}");
    let created: serde_json::Value = serde_json::from_str(&body).unwrap();
    created["sandboxID"].as_str().unwrap().to_owned()
}

/// Makes `to` a data directory with these files of `from`.
fn share(from: &TestDir, to: &TestDir, names: &[&str]) {
    to.run(&["key", "list"]).expect(0);
    for name in names {
        fs::copy(from.data_dir().join(name), to.data_dir().join(name)).unwrap();
    }
}

#[test]
fn two_platforms_on_one_database_keep_out_of_each_others_way() {
    if cannot_run() {
        return;
    }
    let server = Server::start();
    let (first, second) = (TestDir::on(server.url("postgres")), TestDir::on(server.url("postgres")));
    let config = first.file("ringfence.toml", "[sandbox]\ndisk_mb = 256\n");
    let arguments = ["--listen", "127.0.0.1:0", "--config", config.to_str().unwrap()];

    let mut one = Up::start(&first, &arguments);
    let key = credential(&first, "E2B_API_KEY");
    let theirs = create(&one, &key);
    // What is sealed in a database that is shared is sealed with one master key.
    share(&first, &second, &["secret.key"]);
    let mut two = Up::start(&second, &arguments);
    let own = create(&two, &key);

    // Each sees both, and says where the other's is.
    for up in [&one, &two] {
        let (status, list) = ask(up, &key, "GET", "/v2/sandboxes", "");
        assert_eq!(status, 200, "{list}");
        assert!(list.contains(&theirs) && list.contains(&own), "{list}");
    }
    let path = format!("/sandboxes/{theirs}");
    assert_eq!(ask(&two, &key, "GET", &path, "").0, 200);
    let (status, refusal) = ask(&two, &key, "DELETE", &path, "");
    assert_eq!(status, 503, "{refusal}");
    assert!(refusal.contains("is on node"), "{refusal}");

    // A restart of one, however it ends, takes nothing of the other's.
    for signal in [Signal::TERM, Signal::KILL] {
        two.signal(signal);
        two.wait();
        two = Up::again(two, &arguments);
        // The lock of the data directory proves that the server before is gone.
        assert!(!two.log().contains("was not released"), "{}", two.log());
        assert_eq!(ask(&one, &key, "GET", &path, "").0, 200);
        assert_eq!(ask(&two, &key, "GET", &format!("/sandboxes/{own}"), "").0, 200);
    }

    // A copy of a data directory is no second server of its node.
    let copy = TestDir::on(server.url("postgres"));
    share(&first, &copy, &["secret.key", "node.json"]);
    let refused = copy.run(&["up", "--listen", "127.0.0.1:0"]).expect(1);
    refused.complains_of(&["another server runs node", "node.json"]);

    // `down` ends what is its own.
    let down = second.run(&["down"]).expect(0);
    assert!(down.stdout.starts_with("ended 1 sandbox of"), "{down:?}");
    drop(two);
    assert_eq!(ask(&one, &key, "GET", &path, "").0, 200);
    one.signal(Signal::KILL);
    one.wait();
    one = Up::again(one, &arguments);
    assert_eq!(ask(&one, &key, "DELETE", &path, "").0, 204);
    let (_, list) = ask(&one, &key, "GET", "/v2/sandboxes", "");
    assert_eq!(list, "[]");
    drop(one);
}

#[test]
fn health_follows_the_database() {
    if cannot_run() {
        return;
    }
    let mut server = Server::start();
    let place = TestDir::on(server.url("postgres"));
    let config = place.file("ringfence.toml", "[sandbox]\ndisk_mb = 256\n");
    let up = Up::start(
        &place,
        &["--listen", "127.0.0.1:0", "--config", config.to_str().unwrap()],
    );
    let key = credential(&place, "E2B_API_KEY");
    let health = || ask(&up, &key, "GET", "/health", "");
    let becomes = |status: u16| {
        // The last answer counts for a moment.
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let (found, body) = health();
            if found == status {
                return body;
            }
            assert!(Instant::now() < deadline, "{found}: {body}");
        }
    };
    assert_eq!(health().0, 200);
    server.stop();
    assert!(becomes(503).contains("the database of the platform does not answer"));
    assert!(up.log().contains(".s.PGSQL."), "{}", up.log());
    server.start_again();
    becomes(200);
    create(&up, &key);
    drop(up);
    // A start says at once what it cannot reach.
    server.stop();
    let refused = place.run(&["key", "list"]).expect(1);
    refused.complains_of(&["database_url", ".s.PGSQL."]);
    server.start_again();
}
