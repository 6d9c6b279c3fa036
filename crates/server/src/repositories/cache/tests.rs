use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn team(n: u8) -> TeamId {
    format!("00000000-0000-4000-8000-00000000000{n}")
        .parse()
        .expect("an id")
}

fn key(team_n: u8, name: &str) -> MirrorKey {
    let url: RepositoryUrl = format!("https://github.com/o/{name}").parse().expect("an address");
    MirrorKey::new(&team(team_n), &url)
}

fn settings() -> RepositorySettings {
    RepositorySettings {
        bundle_bytes: 100,
        team_bytes: 250,
        total_bytes: 400,
        mirrors: 5,
        hard_age_s: 60,
        ..RepositorySettings::default()
    }
}

const REFERENCES: &str = "0123456789abcdef0123456789abcdef";

async fn put(cache: &MirrorCache, key: &MirrorKey, bytes: usize, at_s: u64) {
    let mut new = cache.create().expect("a file");
    new.take(Bytes::from(vec![7; bytes])).await.expect("written");
    cache.keep(key, new, REFERENCES, at_s).await.expect("kept");
}

fn files(directory: &Path) -> usize {
    fs::read_dir(directory).expect("a directory").count()
}

async fn read(mirror: OpenMirror) -> usize {
    let mut content = mirror.content().0;
    let mut bytes = 0;
    while let Some(piece) = content.recv().await {
        bytes += piece.expect("a piece").len();
    }
    bytes
}

#[tokio::test]
async fn copies_are_found_by_team_and_address_until_they_are_too_old() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let path = directory.path().join("repositories");
    let cache = MirrorCache::open(&path, &settings()).expect("a cache");
    let own = key(1, "Repo");
    assert_eq!(own, key(1, "repo"));
    put(&cache, &own, 10, 1000).await;
    for foreign in [key(2, "repo"), key(1, "other")] {
        assert!(cache.find(&foreign, 1000).is_none());
    }
    let found = cache.find(&own, 1060).expect("a copy");
    assert_eq!(
        (found.bytes, found.references.as_str(), found.fetched_s),
        (10, REFERENCES, 1000)
    );
    assert_eq!(read(found).await, 10);
    assert!(cache.find(&own, 1061).is_none());
    // A new copy replaces the one before, which can still be read.
    let before = cache.find(&own, 1000).expect("a copy");
    put(&cache, &own, 20, 1100).await;
    assert_eq!(read(before).await, 10);
    assert_eq!((files(&path), cache.size()), (1, (1, 20)));
    let mode = |path: &Path| fs::metadata(path).expect("a file").permissions().mode() & 0o777;
    let file = fs::read_dir(&path)
        .expect("a directory")
        .next()
        .expect("a file")
        .expect("a file");
    assert_eq!((mode(&path), mode(&file.path())), (0o700, 0o600));
}

#[tokio::test]
async fn incomplete_and_unknown_files_are_removed_at_the_start() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let cache = MirrorCache::open(directory.path(), &settings()).expect("a cache");
    put(&cache, &key(1, "a"), 10, 1000).await;
    // As after a kill: the file of a copy that was being written.
    let mut new = cache.create().expect("a file");
    new.take(Bytes::from_static(b"half")).await.expect("written");
    std::mem::forget(new);
    fs::write(directory.path().join("unknown"), "x").expect("a file");
    fs::write(directory.path().join("a-b.c.1.bundle"), "x").expect("a file");
    let cache = MirrorCache::open(directory.path(), &settings()).expect("a cache");
    assert_eq!((files(directory.path()), cache.size()), (1, (1, 10)));
    assert!(cache.find(&key(1, "a"), 1000).is_some());
    // One that is given up is removed at once.
    let mut new = cache.create().expect("a file");
    new.take(Bytes::from_static(b"half")).await.expect("written");
    assert_eq!(files(directory.path()), 2);
    drop(new);
    assert_eq!(files(directory.path()), 1);
}

#[tokio::test]
async fn the_copy_that_was_not_used_for_longest_is_removed() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let cache = MirrorCache::open(directory.path(), &settings()).expect("a cache");
    let has = |team: u8, name: &str| cache.find(&key(team, name), 1000).is_some();
    for name in ["a", "b"] {
        put(&cache, &key(1, name), 100, 1000).await;
    }
    assert!(has(1, "a"));
    // The limit of the team is 250 bytes.
    put(&cache, &key(1, "c"), 100, 1000).await;
    assert_eq!([has(1, "a"), has(1, "b"), has(1, "c")], [true, false, true]);
    // The limit of all is 400 bytes: the other team is not over its own.
    for name in ["a", "b"] {
        put(&cache, &key(2, name), 100, 1000).await;
    }
    assert_eq!(cache.size(), (4, 400));
    put(&cache, &key(2, "tiny"), 1, 1000).await;
    assert_eq!(
        [has(1, "a"), has(1, "c"), has(2, "a"), has(2, "b"), has(2, "tiny")],
        [false, true, true, true, true]
    );
    for name in ["d", "e"] {
        put(&cache, &key(3, name), 1, 1000).await;
    }
    // At most 5 copies.
    assert_eq!(cache.size().0, 5);
    assert_eq!(files(directory.path()), 5);
}

#[tokio::test]
async fn a_copy_that_is_too_large_is_given_up() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let cache = MirrorCache::open(directory.path(), &settings()).expect("a cache");
    let mut new = cache.create().expect("a file");
    new.take(Bytes::from(vec![7; 100])).await.expect("written");
    assert!(new.take(Bytes::from_static(b"x")).await.is_err());
    drop(new);
    assert_eq!(files(directory.path()), 0);
}

/// The directory of a test that runs this one as a process of its own, to kill it.
const WRITER_DIRECTORY: &str = "RINGFENCE_TEST_COPIES";
/// Copies whose writing takes a while.
const LARGE: usize = 1 << 20;

fn large() -> RepositorySettings {
    RepositorySettings {
        bundle_bytes: 2 * LARGE as u64,
        team_bytes: 64 * LARGE as u64,
        total_bytes: 64 * LARGE as u64,
        mirrors: 5,
        ..settings()
    }
}

/// Writes copies until it is killed.
#[tokio::test]
async fn writer_of_copies() {
    let Some(directory) = std::env::var_os(WRITER_DIRECTORY) else {
        return;
    };
    let cache = MirrorCache::open(Path::new(&directory), &large()).expect("a cache");
    for round in 0.. {
        let key = key(1, &format!("r{}", round % 5));
        let mut new = cache.create().expect("a file");
        for _ in 0..64 {
            new.take(Bytes::from(vec![7; LARGE / 64])).await.expect("written");
        }
        cache.keep(&key, new, REFERENCES, 1000 + round).await.expect("kept");
    }
}

#[tokio::test]
async fn what_a_killed_server_was_writing_is_never_used() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let (mut found, mut partial) = (0, 0);
    for round in 0..24 {
        let mut writer = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "--nocapture", "repositories::cache::tests::writer_of_copies"])
            .env(WRITER_DIRECTORY, directory.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("a process");
        // Once it writes, which no file of an earlier round says, and in the later rounds once one is complete, too: the sooner or
        // later after that, the better it is spread.
        let has_begun = || {
            let entries = fs::read_dir(directory.path()).expect("a directory");
            let is_partial = |entry: io::Result<fs::DirEntry>| {
                let name = entry.expect("an entry").file_name();
                name.to_string_lossy().ends_with(PARTIAL)
            };
            let (partial, complete): (Vec<bool>, Vec<bool>) = entries.map(is_partial).partition(|is| *is);
            !partial.is_empty() && (round < 12 || !complete.is_empty())
        };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
        while !has_begun() {
            assert!(std::time::Instant::now() < deadline, "nothing is written");
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        tokio::time::sleep(std::time::Duration::from_micros(30_000 + 1700 * round)).await;
        writer.kill().expect("killed");
        writer.wait().expect("ended");
        let is_partial = |entry: &io::Result<fs::DirEntry>| {
            let entry = entry.as_ref().expect("an entry");
            entry.file_name().to_string_lossy().ends_with(PARTIAL)
        };
        partial += fs::read_dir(directory.path())
            .expect("a directory")
            .filter(is_partial)
            .count();
        let cache = MirrorCache::open(directory.path(), &large()).expect("a cache");
        assert_eq!(
            files(directory.path()),
            cache.size().0,
            "what is not a copy was removed"
        );
        for n in 0..5 {
            if let Some(copy) = cache.find(&key(1, &format!("r{n}")), 1000) {
                assert_eq!(read(copy).await, LARGE);
                found += 1;
            }
        }
    }
    assert!(found > 0 && partial > 0, "{found} copies, {partial} were being written");
}
