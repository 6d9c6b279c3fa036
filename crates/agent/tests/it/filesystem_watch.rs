//! Watching directories, as a stream and by asking, in both codecs.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use http::Method;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::connect::{self, Code, Codec, EndOfStream, Error, FLAG_END};
use protocol::filesystem::{
    FilesystemEvent, WatchDirResponse, WatchRequest, WatcherEvents, WatcherName, event_type::*, file_type,
};
use protocol::process::Empty;

use crate::client::{Client, full};
use crate::filesystem::{CODECS, call};
use crate::sandbox::Sandbox;

/// The answer to `WatchDir`.
struct Watch {
    codec: Codec,
    body: Incoming,
    buffer: BytesMut,
}

impl Watch {
    async fn request(client: &mut Client, codec: Codec, request: &WatchRequest) -> Self {
        let response = client
            .request(
                Method::POST,
                "/filesystem.Filesystem/WatchDir",
                codec.stream_content_type(),
                full(codec.envelope(request)),
            )
            .await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], codec.stream_content_type());
        Self {
            codec,
            body: response.into_body(),
            buffer: BytesMut::new(),
        }
    }

    /// A watch that runs.
    async fn start(client: &mut Client, codec: Codec, request: &WatchRequest) -> Self {
        let mut watch = Self::request(client, codec, request).await;
        let first = watch.message().await.unwrap();
        assert_eq!(first.start, Some(Empty {}));
        watch
    }

    async fn message(&mut self) -> Result<WatchDirResponse, EndOfStream> {
        loop {
            if let Some((flags, message)) = connect::take_envelope(&mut self.buffer, 1 << 24).unwrap() {
                if flags & FLAG_END == 0 {
                    return Ok(self.codec.decode(&message).unwrap());
                }
                assert!(self.buffer.is_empty());
                return Err(serde_json::from_slice(&message).unwrap());
            }
            let frame = self.body.frame().await.expect("an end").unwrap();
            self.buffer.extend_from_slice(&frame.into_data().unwrap());
        }
    }

    async fn event(&mut self) -> FilesystemEvent {
        self.message().await.unwrap().filesystem.expect("an event")
    }

    /// Collects events until this one has been seen, which is included.
    async fn until(&mut self, name: &str, kind: i32) -> Vec<(String, i32)> {
        let mut seen = Vec::new();
        loop {
            let event = self.event().await;
            let found = event.name == name && event.kind == kind;
            seen.push((event.name, event.kind));
            if found {
                return seen;
            }
        }
    }

    async fn failure(mut self) -> Error {
        loop {
            if let Err(end) = self.message().await {
                return end.error.expect("an error");
            }
        }
    }
}

fn plain(path: &Path) -> WatchRequest {
    WatchRequest {
        path: path.display().to_string(),
        ..WatchRequest::default()
    }
}

fn recursive(path: &Path) -> WatchRequest {
    WatchRequest {
        recursive: true,
        ..plain(path)
    }
}

fn check(seen: &[(String, i32)], expect: &[(&str, i32)]) {
    let seen: Vec<_> = seen.iter().map(|(name, kind)| (name.as_str(), *kind)).collect();
    assert_eq!(seen, expect);
}

#[tokio::test]
async fn every_kind_of_event() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for (codec, name) in CODECS.into_iter().zip(["json", "proto"]) {
        let directory = sandbox.path(name);
        fs::create_dir_all(directory.join("sub")).unwrap();
        let mut client = sandbox.client().await;
        let mut watch = Watch::start(&mut client, codec, &plain(&directory)).await;
        let mut file = File::create(directory.join("file")).unwrap();
        file.write_all(b"x").unwrap();
        fs::set_permissions(directory.join("file"), PermissionsExt::from_mode(0o600)).unwrap();
        fs::rename(directory.join("file"), directory.join("other")).unwrap();
        fs::remove_file(directory.join("other")).unwrap();
        // Not seen without recursion.
        fs::write(directory.join("sub/file"), "x").unwrap();
        fs::write(directory.join("last"), "").unwrap();
        let seen = watch.until("last", CREATE).await;
        let expect = [
            ("file", CREATE),
            ("file", WRITE),
            ("file", CHMOD),
            ("file", RENAME),
            ("other", CREATE),
            ("other", REMOVE),
            ("last", CREATE),
        ];
        check(&seen, &expect);
        // An open file keeps its directory from being gone.
        drop(file);
        fs::set_permissions(&directory, PermissionsExt::from_mode(0o700)).unwrap();
        check(&watch.until(".", CHMOD).await, &[(".", CHMOD)]);
        fs::remove_dir_all(&directory).unwrap();
        watch.until(".", REMOVE).await;
    }
}

#[tokio::test]
async fn trees_grow_without_anything_missed_or_told_twice() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let tree = sandbox.path("tree");
    fs::create_dir_all(tree.join("old/deep")).unwrap();
    let mut client = sandbox.client().await;
    let mut watch = Watch::start(&mut client, Codec::Json, &recursive(&tree)).await;
    fs::write(tree.join("old/deep/file"), "x").unwrap();
    check(
        &watch.until("old/deep/file", WRITE).await,
        &[("old/deep/file", CREATE), ("old/deep/file", WRITE)],
    );
    for round in 0..20 {
        let mut expect = Vec::new();
        for branch in 0..10 {
            let mut path = format!("{round}-{branch}");
            for level in 0..4 {
                fs::create_dir(tree.join(&path)).unwrap();
                expect.push(path.clone());
                for number in 0..3 {
                    let file = format!("{path}/f{number}");
                    File::create(tree.join(&file)).unwrap();
                    expect.push(file);
                }
                path = format!("{path}/d{level}");
            }
        }
        fs::write(tree.join(format!("end{round}")), "").unwrap();
        expect.push(format!("end{round}"));
        // The directories are told of in their order, but what is below may come after the end.
        let mut created = Vec::new();
        while created.len() < expect.len() {
            let event = watch.event().await;
            assert_eq!(event.kind, CREATE, "{event:?}");
            created.push(event.name);
        }
        for (at, name) in created.iter().enumerate() {
            if let Some((parent, _)) = name.rsplit_once('/') {
                assert!(
                    created[..at].iter().any(|seen| seen == parent),
                    "{name} before {parent}"
                );
            }
        }
        created.sort_unstable();
        expect.sort_unstable();
        assert_eq!(created, expect);
    }
    // What came last is watched like everything else, and nothing more was told.
    fs::write(tree.join("19-9/d0/d1/d2/new"), "x").unwrap();
    check(
        &watch.until("19-9/d0/d1/d2/new", WRITE).await,
        &[("19-9/d0/d1/d2/new", CREATE), ("19-9/d0/d1/d2/new", WRITE)],
    );
}

#[tokio::test]
async fn branches_move() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let (tree, outside) = (sandbox.path("tree"), sandbox.path("outside"));
    fs::create_dir_all(tree.join("a/b/c")).unwrap();
    fs::create_dir(tree.join("target")).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink(&outside, tree.join("link")).unwrap();
    let mut client = sandbox.client().await;
    let mut watch = Watch::start(&mut client, Codec::Proto, &recursive(&tree)).await;
    // Within the tree, with what is below.
    fs::rename(tree.join("a/b"), tree.join("target/moved")).unwrap();
    fs::write(tree.join("target/moved/c/file"), "").unwrap();
    check(
        &watch.until("target/moved/c/file", CREATE).await,
        &[
            ("a/b", RENAME),
            ("target/moved", CREATE),
            ("target/moved/c/file", CREATE),
        ],
    );
    // Out of it: nothing there is of interest any more. Links were never followed.
    fs::rename(tree.join("target"), outside.join("gone")).unwrap();
    fs::write(outside.join("gone/moved/c/unseen"), "").unwrap();
    fs::write(tree.join("mark"), "").unwrap();
    check(
        &watch.until("mark", CREATE).await,
        &[("target", RENAME), ("mark", CREATE)],
    );
    // Back in, with all that came meanwhile.
    fs::rename(outside.join("gone"), tree.join("back")).unwrap();
    let mut seen: Vec<_> = Vec::new();
    while seen.len() < 5 {
        let event = watch.event().await;
        assert_eq!(event.kind, CREATE);
        seen.push(event.name);
    }
    assert_eq!(seen[..3], ["back", "back/moved", "back/moved/c"]);
    seen[3..].sort_unstable();
    assert_eq!(seen[3..], ["back/moved/c/file", "back/moved/c/unseen"]);
    fs::remove_file(tree.join("back/moved/c/file")).unwrap();
    fs::remove_dir_all(tree.join("back")).unwrap();
    check(
        &watch.until("back", REMOVE).await,
        &[
            ("back/moved/c/file", REMOVE),
            ("back/moved/c/unseen", REMOVE),
            ("back/moved/c", REMOVE),
            ("back/moved", REMOVE),
            ("back", REMOVE),
        ],
    );
    // A directory of a name that was another's.
    fs::create_dir(tree.join("back")).unwrap();
    watch.until("back", CREATE).await;
    fs::write(tree.join("back/file"), "").unwrap();
    check(&watch.until("back/file", CREATE).await, &[("back/file", CREATE)]);
    fs::rename(&tree, sandbox.path("elsewhere")).unwrap();
    check(&watch.until(".", RENAME).await, &[(".", RENAME)]);
}

#[tokio::test]
async fn entries_come_along_when_asked_for() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let tree = sandbox.path("tree");
    fs::create_dir(&tree).unwrap();
    let request = WatchRequest {
        include_entry: true,
        ..recursive(&tree)
    };
    for codec in CODECS {
        let mut client = sandbox.client().await;
        let mut watch = Watch::start(&mut client, codec, &request).await;
        fs::create_dir_all(tree.join("d/below")).unwrap();
        for name in ["d", "d/below"] {
            let event = watch.event().await;
            let entry = event.entry.expect("an entry");
            assert_eq!((event.name.as_str(), event.kind), (name, CREATE));
            assert_eq!((entry.kind, entry.mode), (file_type::DIRECTORY, 0o755));
            assert_eq!(entry.path, tree.join(name).display().to_string());
        }
        fs::remove_dir(tree.join("d/below")).unwrap();
        fs::rename(tree.join("d"), sandbox.path("out")).unwrap();
        for kind in [REMOVE, RENAME] {
            let event = watch.event().await;
            assert_eq!((event.kind, event.entry), (kind, None));
        }
        fs::remove_dir(sandbox.path("out")).unwrap();
    }
    // The old client does not know them.
    let mut client = sandbox.client().await.with("user-agent", "connect-python");
    let mut watch = Watch::start(&mut client, Codec::Json, &request).await;
    fs::write(tree.join("file"), "").unwrap();
    assert_eq!(watch.event().await.entry, None);
}

#[tokio::test]
async fn uploads_begin_with_a_create() {
    let Some(sandbox) = Sandbox::ready(r#"{"defaultUser":"user"}"#).await else {
        return;
    };
    let mut client = sandbox.client().await;
    let mut watch = Watch::start(&mut client, Codec::Json, &plain(&sandbox.path("home/user"))).await;
    let mut other = sandbox.client().await;
    for overwrite in [false, true] {
        let body = full("content");
        let answer = other
            .send(Method::POST, "/files?path=up", "application/octet-stream", body)
            .await;
        assert_eq!(answer.status, 200);
        let seen = watch.until("up", WRITE).await;
        assert_eq!(seen[0].1 == CREATE, !overwrite, "{seen:?}");
    }
}

#[tokio::test]
async fn watchers_are_asked() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    for (codec, name) in CODECS.into_iter().zip(["json", "proto"]) {
        let directory = sandbox.path(name);
        fs::create_dir(&directory).unwrap();
        let watcher: WatcherName = call(&mut client, codec, "CreateWatcher", &recursive(&directory))
            .await
            .unwrap();
        let id = watcher.watcher_id.strip_prefix('w').unwrap();
        assert!(id.len() == 20 && id.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9')));
        fs::create_dir_all(directory.join("a/b")).unwrap();
        fs::write(directory.join("a/b/c"), "x").unwrap();
        // Anybody may ask, over any connection.
        let mut other = sandbox.client().await;
        let mut seen = Vec::new();
        while !seen.contains(&("a/b/c".to_owned(), CREATE)) {
            let news: WatcherEvents = call(&mut other, codec, "GetWatcherEvents", &watcher).await.unwrap();
            seen.extend(news.events.into_iter().map(|event| (event.name, event.kind)));
        }
        check(&seen[..3], &[("a", CREATE), ("a/b", CREATE), ("a/b/c", CREATE)]);
        let Empty {} = call(&mut client, codec, "RemoveWatcher", &watcher).await.unwrap();
        for method in ["GetWatcherEvents", "RemoveWatcher"] {
            let error = call::<Empty>(&mut client, codec, method, &watcher).await.unwrap_err();
            let message = format!("watcher with id {} not found", watcher.watcher_id);
            assert_eq!(error, Error::new(Code::NotFound, message));
        }
    }
}

#[tokio::test]
async fn what_cannot_be_watched() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    fs::write(sandbox.path("file"), "").unwrap();
    let shown = |name: &str| sandbox.path(name).display().to_string();
    let rows = [
        (
            shown("none"),
            Code::NotFound,
            format!("path {} not found: ", shown("none")),
        ),
        (
            shown("file"),
            Code::InvalidArgument,
            format!("path {} not a directory", shown("file")),
        ),
        (
            "~other".to_owned(),
            Code::InvalidArgument,
            "failed to expand".to_owned(),
        ),
    ];
    for codec in CODECS {
        for (path, code, message) in &rows {
            let request = WatchRequest {
                path: path.clone(),
                ..WatchRequest::default()
            };
            let mut client = sandbox.client().await;
            let polled = call::<WatcherName>(&mut client, codec, "CreateWatcher", &request).await;
            let streamed = Watch::request(&mut client, codec, &request).await.failure().await;
            for error in [polled.unwrap_err(), streamed] {
                assert_eq!(error.code, *code, "{error}");
                assert!(error.message.starts_with(message), "{error}");
            }
        }
    }
    // There are only so many, and room again when one went.
    let mut client = sandbox.client().await;
    let mut watchers = Vec::new();
    let request = plain(sandbox.directory.path());
    let refusal = loop {
        match call::<WatcherName>(&mut client, Codec::Proto, "CreateWatcher", &request).await {
            Ok(watcher) => watchers.push(watcher),
            Err(error) => break error,
        }
    };
    // The kernel's limit may be lower than ours.
    assert!(
        matches!(refusal.code, Code::FailedPrecondition | Code::Internal),
        "{refusal}"
    );
    assert!(watchers.len() <= 128);
    for watcher in &watchers {
        let Empty {} = call(&mut client, Codec::Proto, "RemoveWatcher", watcher).await.unwrap();
    }
    let again: Result<WatcherName, _> = call(&mut client, Codec::Proto, "CreateWatcher", &request).await;
    assert!(again.is_ok(), "{again:?}");
}

#[tokio::test]
async fn silence_is_broken_and_deadlines_are_kept() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let request = plain(sandbox.directory.path());
    let mut client = sandbox.client().await.with("keepalive-ping-interval", "1");
    let begun = Instant::now();
    let mut watch = Watch::start(&mut client, Codec::Json, &request).await;
    assert_eq!(watch.message().await.unwrap().keepalive, Some(Empty {}));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    // On a busy machine the deadline may come before the start.
    let mut client = sandbox.client().await.with("connect-timeout-ms", "500");
    let begun = Instant::now();
    let watch = Watch::request(&mut client, Codec::Json, &request).await;
    assert_eq!(watch.failure().await.code, Code::DeadlineExceeded);
    assert!(begun.elapsed() >= Duration::from_millis(500));
}

#[tokio::test]
async fn lost_events_are_reported() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let directory = sandbox.path("busy");
    fs::create_dir(&directory).unwrap();
    let mut client = sandbox.client().await;
    let watch = Watch::start(&mut client, Codec::Json, &plain(&directory)).await;
    let mut other = sandbox.client().await;
    let watcher: WatcherName = call(&mut other, Codec::Json, "CreateWatcher", &plain(&directory))
        .await
        .unwrap();
    let agent = rustix::process::Pid::from_raw(sandbox.agent).unwrap();
    rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    for number in 0..=limit {
        File::create(directory.join(number.to_string())).unwrap();
    }
    rustix::process::kill_process(agent, rustix::process::Signal::CONT).unwrap();
    let error = watch.failure().await;
    assert_eq!(error.code, Code::Internal);
    assert!(error.message.contains("events were lost"), "{error}");
    // Once what was seen is taken, every further question has the same answer.
    let mut count = 0;
    let error = loop {
        match call::<WatcherEvents>(&mut other, Codec::Json, "GetWatcherEvents", &watcher).await {
            Ok(news) => count += news.events.len(),
            Err(error) => break error,
        }
    };
    assert_eq!(count, limit);
    assert!(error.message.contains("events were lost"), "{error}");
    let again = call::<WatcherEvents>(&mut other, Codec::Json, "GetWatcherEvents", &watcher).await;
    assert_eq!(again.unwrap_err(), error);
}

#[tokio::test]
async fn a_client_that_does_not_listen_costs_little_and_is_told() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let directory = sandbox.path("busy");
    fs::create_dir(&directory).unwrap();
    let mut client = sandbox.client().await;
    let watch = Watch::start(&mut client, Codec::Json, &plain(&directory)).await;
    let before = sandbox.memory("VmHWM");
    let mut other = sandbox.client().await;
    let long = "n".repeat(240);
    for number in 0..120_000 {
        let path = directory.join(format!("{long}{number}"));
        File::create(&path).unwrap();
        fs::remove_file(&path).unwrap();
        if number % 2_000 == 0 {
            // Others are served, and the kernel's queue is emptied, meanwhile.
            assert_eq!(other.get("/health").await.status, 204);
        }
    }
    let failure = tokio::time::timeout(Duration::from_secs(60), watch.failure()).await;
    assert!(failure.unwrap().message.contains("events were lost"));
    let growth = sandbox.memory("VmHWM") - before;
    assert!(growth < 96 * 1024, "{growth} kB");
}
