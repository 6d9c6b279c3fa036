//! From a platform in one process to a server and its node, as far as that is files: `ringfence split`.

use std::fs;
use std::path::{Path, PathBuf};

use super::postgres::Server;
use super::{Ran, TestDir};

const NODE: &str = "0199d0a6-0000-7000-8000-000000000001";
const SERVE: [&str; 5] = ["server", "--listen", "127.0.0.1:0", "--nodes-listen", "127.0.0.1:0"];

fn write(path: &Path, content: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

/// Runs a command with PostgreSQL as the database.
fn run_on(place: &TestDir, url: &str, arguments: &[&str]) -> Ran {
    Ran::of(place.ringfence(arguments).env("RINGFENCE_DATABASE_URL", url))
}

/// What a platform has in its data directory that was stopped.
fn stopped() -> TestDir {
    let place = TestDir::new();
    place.run(&["key", "list"]).expect(0);
    let data = place.data_dir();
    write_identity(&data);
    write(&data.join("secret.key"), &"07".repeat(32));
    write(&data.join("credentials.env"), "E2B_API_KEY=one");
    write(&data.join("tls/ca.pem"), "certificate");
    write(&data.join("builds/a/file"), "uploaded");
    place
}

fn write_identity(data: &Path) {
    let owner = NODE.replace("001", "002");
    let place = r#"{"boot": "b", "device": 1, "inode": 1}"#;
    let text = format!(r#"{{"node": "{NODE}", "owner": "{owner}", "place": {place}}}"#);
    write(&data.join("node.json"), &text);
}

fn separate(place: &TestDir, url: &str, server: &Path) -> Ran {
    let server = server.to_str().unwrap();
    run_on(place, url, &["split", "node", server, "https://server:3100"])
}

#[test]
fn nothing_starts_on_a_file_whose_rows_were_moved() {
    let postgres = Server::start();
    let url = postgres.url("postgres");
    let place = TestDir::new();
    place.run(&["key", "list"]).expect(0);
    let mark = place.data_dir().join("ringfence.db.moved");
    let moved = run_on(&place, &url, &["split", "database"]).expect(0);
    assert!(
        moved.stdout.contains("copied") && moved.stdout.contains("ringfence.db.moved"),
        "{moved:?}"
    );
    assert!(read(&mark).contains("RINGFENCE_DATABASE_URL"));
    let shown = mark.to_str().unwrap();
    for arguments in [&SERVE[..], &["key", "list"]] {
        let refused = place.run(arguments).expect(1);
        refused.complains_of(&[shown, "RINGFENCE_DATABASE_URL", "only if nothing has run"]);
    }
    run_on(&place, &url, &["key", "list"]).expect(0);
    let again = run_on(&place, &url, &["split", "database"]).expect(1);
    again.complains_of(&["has rows already"]);
    assert!(mark.exists());
    // What was not copied is not marked.
    let other = TestDir::new();
    other.run(&["key", "list"]).expect(0);
    run_on(&other, &url, &["split", "database"]).expect(1);
    other.run(&["key", "list"]).expect(0);
    // The way back.
    fs::remove_file(&mark).unwrap();
    place.run(&["key", "list"]).expect(0);
}

#[test]
fn a_node_keeps_nothing_of_its_server() {
    let postgres = Server::start();
    let url = postgres.url("postgres");
    let place = stopped();
    let (data, server) = (place.data_dir(), place.temp.path().join("server"));
    separate(&place, &url, &server).expect(0);
    let mut left: Vec<PathBuf> = fs::read_dir(&data)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    left.sort();
    assert_eq!(left, ["link.json", "lock"].map(|name| data.join(name)));
    assert_eq!(read(server.join("secret.key")), "07".repeat(32));
    assert_eq!(read(server.join("builds/a/file")), "uploaded");
    // Nothing starts on that either.
    assert!(server.join("ringfence.db").exists() && server.join("ringfence.db.moved").exists());

    // As if it had been interrupted when the node had its credentials, and the server had been started.
    write_identity(&data);
    write(&data.join("secret.key"), &"07".repeat(32));
    write(&data.join("credentials.env"), "E2B_API_KEY=one");
    write(&data.join("builds/b/file"), "late");
    write(&server.join("split.unfinished"), NODE);
    write(&server.join("credentials.env"), "E2B_API_KEY=one E2B_API_URL=changed");
    separate(&place, &url, &server).expect(0);
    assert!(!data.join("builds").exists() && !data.join("node.json").exists());
    assert_eq!(
        read(server.join("builds/a/file")) + &read(server.join("builds/b/file")),
        "uploadedlate"
    );
    assert!(read(server.join("credentials.env")).contains("changed"));
    assert!(!server.join("split.unfinished").exists());
}

#[test]
fn a_server_that_is_there_is_not_overwritten() {
    let postgres = Server::start();
    let url = postgres.url("postgres");
    let place = stopped();
    let (data, server) = (place.data_dir(), place.temp.path().join("server"));
    fs::create_dir(&server).unwrap();
    write(&server.join("lock"), "");
    for (name, content) in [
        ("secret.key", "08"),
        ("credentials.env", "E2B_API_KEY=two"),
        ("ringfence.db", "x"),
    ] {
        let path = server.join(name);
        write(&path, content);
        separate(&place, &url, &server)
            .expect(1)
            .complains_of(&[path.to_str().unwrap(), "another content"]);
        assert_eq!(read(&path), content);
        fs::remove_file(path).unwrap();
    }
    write(&server.join("builds"), "in the way");
    separate(&place, &url, &server)
        .expect(1)
        .complains_of(&["builds is in the way"]);
    fs::remove_file(server.join("builds")).unwrap();
    let next = data.join("secret.key.next");
    write(&next, &"09".repeat(32));
    separate(&place, &url, &server)
        .expect(1)
        .complains_of(&[next.to_str().unwrap(), "master-key rotate"]);
    // Nothing has happened until then.
    assert!(
        !server.join("secret.key").exists() && data.join("tls/ca.pem").exists() && !data.join("link.json").exists()
    );
    fs::remove_file(next).unwrap();
    separate(&place, &url, &server).expect(0);
}
