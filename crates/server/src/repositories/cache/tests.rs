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
