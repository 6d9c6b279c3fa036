//! A platform from its first start to `down`, with a few real sandboxes made by `bench`.
//!
//! Needs root and a host on which `doctor` finds nothing missing. Elsewhere it says loudly that it did nothing.

mod nodes;
mod tls;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal};

use super::{Ran, TestDir, command};

/// A running platform. Whatever happens to the test, nothing of it stays.
struct Up<'a> {
    place: &'a TestDir,
    child: Child,
    ready: String,
}

impl<'a> Up<'a> {
    fn start(place: &'a TestDir, arguments: &[&str]) -> Self {
        // As an operator with a careful umask starts it: sandboxes must see what they need all the same.
        let plain = place.ringfence(&[&["up"], arguments].concat());
        let mut command = command(Path::new("/bin/sh"));
        command.args(["-c", "umask 077 && exec \"$0\" \"$@\""]);
        command.arg(plain.get_program()).args(plain.get_args());
        command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let log = std::fs::File::create(place.temp.path().join("log")).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut ready)
            .unwrap();
        let up = Self { place, child, ready };
        assert!(up.ready.contains("ready at http://"), "{}", up.log());
        up
    }

    /// Another start after one that has ended.
    fn again(ended: Self, arguments: &[&str]) -> Self {
        let place = ended.place;
        // What it would do is for the next one to do.
        std::mem::forget(ended);
        Self::start(place, arguments)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.temp.path().join("log")).unwrap()
    }

    /// The address `host:port` in the line on stdout.
    fn address(&self) -> &str {
        let rest = self.ready.split("http://").nth(1).unwrap();
        rest.split_whitespace().next().unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Up<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let down = self.place.run(&["down"]);
        if !std::thread::panicking() {
            down.expect(0);
        }
    }
}

#[expect(
    clippy::print_stderr,
    reason = "a test that did nothing must not look like one that passed"
)]
fn cannot_run() -> bool {
    let place = TestDir::new();
    let cannot = place.run(&["doctor", "--listen", "127.0.0.1:0"]).code != Some(0);
    if cannot {
        eprintln!("SKIPPED: this host or user cannot run sandboxes, see `ringfence doctor`");
    }
    cannot
}

fn credential(place: &TestDir, name: &str) -> String {
    let text = std::fs::read_to_string(place.data_dir().join("credentials.env")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("no {name}")).to_owned()
}

/// The answer to a GET, from its status line on.
fn answer(address: &str, path: &str, key: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nX-API-Key: {key}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The status of a GET.
fn get(address: &str, path: &str, key: &str) -> u16 {
    answer(address, path, key).split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn from_the_first_start_to_down() {
    if cannot_run() {
        return;
    }
    let place = TestDir::new();
    let config = place.file("ringfence.toml", "[sandbox]\ndisk_mb = 256\n");
    let config = config.to_str().unwrap();
    let mut up = Up::start(&place, &["--listen", "127.0.0.1:0", "--config", config]);
    let address = up.address().to_owned();
    let key = credential(&place, "E2B_API_KEY");
    assert_eq!(credential(&place, "E2B_API_URL"), format!("http://{address}"));
    let port = address.rsplit(':').next().unwrap();
    assert_eq!(credential(&place, "E2B_DOMAIN"), format!("sandbox.localhost:{port}"));
    assert_eq!(get(&address, "/health", ""), 200);
    assert_eq!(get(&address, "/v2/sandboxes", &key), 200);

    // The same directory and the same port are refused by name.
    let in_use = place.data_dir().to_str().unwrap().to_owned();
    place
        .run(&["up", "--listen", "127.0.0.1:0"])
        .expect(1)
        .complains_of(&[&in_use, "in use"]);
    let other = TestDir::new();
    other
        .run(&["up", "--listen", &address])
        .expect(1)
        .complains_of(&[&address, "--listen"]);
    place.run(&["doctor"]).expect(0);

    // Keys come and go while it runs.
    let second = place.run(&["key", "create", "--name", "second"]).expect(0).stdout;
    assert_eq!(get(&address, "/v2/sandboxes", second.trim()), 200);

    let listed = place.run(&["key", "list", "--format", "json"]).expect(0).json();
    let keys = listed.as_array().unwrap();
    let id = keys.iter().find(|key| key["name"] == "second").unwrap()["id"]
        .as_str()
        .unwrap();
    place.run(&["key", "revoke", id]).expect(0);
    assert_eq!(get(&address, "/v2/sandboxes", second.trim()), 401);

    let what = "create,first-output,delete,sustained,concurrent,ready,pause,connect,fork";
    let bench = place.run(&[
        "bench",
        "--count",
        "3",
        "--duration",
        "1",
        "--what",
        what,
        "--format",
        "json",
    ]);
    let report = bench.expect(0).json();
    assert_eq!(report["errors"], 0, "{report}");
    assert_eq!(report["requests"][1]["n"], 3, "{report}");
    assert!(report["sustained"]["completed"].as_u64().unwrap() > 0, "{report}");
    assert!(report["concurrent"]["completed"].as_u64().unwrap() > 0, "{report}");
    let of = |what: &str| {
        let requests = report["requests"].as_array().unwrap();
        let found = requests
            .iter()
            .find(|request| request["what"].as_str().unwrap().starts_with(what));
        found.unwrap_or_else(|| panic!("{what}: {report}"))["n"].as_u64()
    };
    for what in [
        "create every 0.3 s (0 of 3 kept ready)",
        "pause to 204",
        "connect to 201",
    ] {
        assert_eq!(of(what), Some(3), "{report}");
    }
    // Without CRIU.
    assert!(report["notes"][0].as_str().unwrap().starts_with("fork:"), "{report}");

    // No secret is in the log.
    for secret in [&key, second.trim(), &credential(&place, "RINGFENCE_SECRET_KEY")] {
        assert!(!up.log().contains(secret));
    }

    // A second start keeps the keys and follows the address.
    up.signal(Signal::TERM);
    assert_eq!(up.wait(), Some(0), "{}", up.log());
    let again = Up::start(
        &place,
        &["--listen", "0.0.0.0:0", "--domain", "box.test", "--config", config],
    );
    assert_eq!(credential(&place, "E2B_API_KEY"), key);
    assert_eq!(credential(&place, "E2B_API_URL"), format!("http://{}", again.address()));
    assert!(again.address().starts_with("127.0.0.1:"), "{}", again.ready);
    assert_eq!(credential(&place, "E2B_DOMAIN"), "box.test");

    // `down` ends the platform first.
    place.run(&["down"]).expect(0);
    drop(again);
    drop(up);
}

#[test]
fn an_interrupted_bench_deletes_what_it_made() {
    if cannot_run() {
        return;
    }
    let place = TestDir::new();
    let config = place.file("ringfence.toml", "[sandbox]\ndisk_mb = 256\n");
    let up = Up::start(
        &place,
        &["--listen", "127.0.0.1:0", "--config", config.to_str().unwrap()],
    );
    let key = credential(&place, "E2B_API_KEY");
    let mut bench = place.ringfence(&[
        "bench",
        "--what",
        "idle-memory",
        "--count",
        "100000",
        "--format",
        "json",
    ]);
    let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Two alive at once: it is past its first sandbox, which it deletes at once, and in the middle of making many.
    while answer(up.address(), "/v2/sandboxes", &key).matches("sandboxID").count() < 2 {}
    let pid = Pid::from_raw(bench.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    let report = Ran::from(bench.wait_with_output().unwrap()).expect(1).json();
    assert_eq!(
        (&report["interrupted"], &report["errors"]),
        (&true.into(), &0.into()),
        "{report}"
    );
    let left = answer(up.address(), "/v2/sandboxes", &key);
    assert!(left.ends_with("\r\n\r\n[]"), "{left}");
}

#[test]
fn a_start_that_fails_can_be_tried_again() {
    if cannot_run() {
        return;
    }
    let place = TestDir::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut json = place.ringfence(&["up", "--log-format", "json", "--listen", &address]);
    let ran = Ran::of(&mut json).expect(1).complains_of(&[&address]);
    for line in ran.stderr.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
    drop(taken);
    let mut up = Up::start(&place, &["--listen", "127.0.0.1:0"]);
    up.signal(Signal::INT);
    assert_eq!(up.wait(), Some(0), "{}", up.log());
}
