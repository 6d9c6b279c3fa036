//! The blob store with a real S3 server.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and runs a server of its own"
)]

mod gateway;

use std::fs;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use blobs::{BlobError, Blobs, Claim, CopyOf, Name, PART};
use futures_util::TryStreamExt as _;
use model::id::{BuildId, SandboxId};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};

use self::gateway::{BUCKET, Gateway, KEY, until};

const TEAM: &str = "0b0e1d52-58ff-4c8e-8f0d-0a1b2c3d4e5f";

fn layer(digit: char) -> Name {
    Name::Layer(digit.to_string().repeat(64).parse().unwrap())
}

/// Content in which every part is another.
fn content(size: usize) -> Vec<u8> {
    (0..size).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect()
}

async fn read(blobs: &Blobs, name: &Name) -> Result<Vec<u8>, BlobError> {
    let (size, mut object) = blobs.get(name).await?;
    let mut read = Vec::new();
    object.read_to_end(&mut read).await.unwrap();
    assert_eq!(read.len() as u64, size);
    Ok(read)
}

async fn names(blobs: &Blobs) -> Vec<Name> {
    let mut found: Vec<_> = blobs.list().map_ok(|(name, _)| name).try_collect().await.unwrap();
    found.sort_by_key(Name::to_string);
    found
}

/// Zeros for a while; then an error, or nothing more ever.
struct Broken {
    left: usize,
    is_error: bool,
}

impl AsyncRead for Broken {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let size = buf.remaining().min(self.left);
        if size > 0 {
            buf.put_slice(&vec![0; size]);
            self.left -= size;
            return Poll::Ready(Ok(()));
        }
        if self.is_error {
            Poll::Ready(Err(io::Error::other("the source broke")))
        } else {
            Poll::Pending
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn content_of_every_size_comes_back_as_it_was() {
    let gateway = Gateway::start().await;
    let blobs = gateway.blobs();
    let name = layer('a');
    assert_eq!(blobs.head(&name).await.unwrap(), None);
    assert_eq!(
        read(&blobs, &name).await.unwrap_err(),
        BlobError::NotFound(name.to_string())
    );
    blobs.delete(&name).await.unwrap();
    for size in [0, 1, PART - 1, PART, PART + 1, 2 * PART + 5] {
        let content = content(size);
        assert_eq!(blobs.put(&name, &content[..]).await.unwrap(), size as u64);
        assert!(read(&blobs, &name).await.unwrap() == content, "{size}");
        let object = blobs.head(&name).await.unwrap().unwrap();
        assert_eq!(object.size, size as u64);
        assert!(object.written_us > 0);
        assert_eq!(gateway.noted(), 0);
    }
    let file = gateway.file(&format!("some/where/{name}"));
    assert!(file.exists());
    let other = Name::File(TEAM.parse().unwrap(), "b".repeat(64));
    blobs.put(&other, &b"x"[..]).await.unwrap();
    assert_eq!(names(&blobs).await, [other.clone(), name.clone()]);
    blobs.delete(&name).await.unwrap();
    blobs.delete(&name).await.unwrap();
    assert_eq!(names(&blobs).await, [other]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_fails_or_is_dropped_leaves_nothing() {
    let gateway = Gateway::start().await;
    let blobs = gateway.blobs();
    let name = layer('a');
    let broken = |is_error| Broken {
        left: 2 * PART + 1,
        is_error,
    };
    let failed = blobs.put(&name, broken(true)).await.unwrap_err();
    assert!(failed.to_string().contains("the source broke"), "{failed}");
    until("the upload is aborted", || {
        gateway.noted() == 0 && gateway.unfinished() == 0
    })
    .await;
    assert_eq!(blobs.head(&name).await.unwrap(), None);

    let mut put = Box::pin(blobs.put(&name, broken(false)));
    tokio::select! {
        _ = &mut put => panic!("it has no end"),
        () = until("parts arrive", || gateway.unfinished() == 1 && gateway.noted() == 1) => {}
    }
    assert_eq!(gateway.noted(), 1);
    // Not what this process still does.
    assert_eq!(blobs.abort_left().await.unwrap(), 0);
    drop(put);
    until("the upload is aborted", || {
        gateway.noted() == 0 && gateway.unfinished() == 0
    })
    .await;
    assert_eq!(blobs.head(&name).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_of_a_process_that_was_killed_are_aborted_by_the_next_one() {
    let mut gateway = Gateway::start().await;
    let name = layer('a');
    let blobs = gateway.blobs();
    let mut put = Box::pin(async move {
        let endless = Broken {
            left: 2 * PART,
            is_error: false,
        };
        blobs.put(&layer('a'), endless).await
    });
    tokio::select! {
        _ = &mut put => panic!("it has no end"),
        () = until("parts arrive", || gateway.unfinished() == 1 && gateway.noted() == 1) => {}
    }
    // Nothing of it is run any more, its destructors neither.
    std::mem::forget(put);

    let blobs = gateway.blobs();
    gateway.kill();
    assert_eq!(blobs.abort_left().await.unwrap(), 0);
    assert_eq!(gateway.noted(), 1);
    gateway.run().await;
    assert_eq!(blobs.abort_left().await.unwrap(), 1);
    assert_eq!((gateway.noted(), gateway.unfinished()), (0, 0));
    assert_eq!(blobs.head(&name).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_others_are_not_told() {
    let gateway = Gateway::start().await;
    let blobs = gateway.blobs();
    blobs.put(&layer('a'), &b"x"[..]).await.unwrap();
    let own = format!("some/where/{}", layer('a'));
    for foreign in [
        layer('b').to_string(),
        format!("some/where2/{}", layer('b')),
        format!("some/where/x/{}", layer('b')),
        "some/where/layers/note.txt".to_owned(),
        format!("{own}.bak"),
    ] {
        let path = gateway.file(&foreign);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "y").unwrap();
    }
    assert_eq!(names(&blobs).await, [layer('a')]);
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_are_found_and_deleted_sandbox_by_sandbox() {
    let gateway = Gateway::start().await;
    let blobs = gateway.blobs();
    assert_eq!(blobs.sandboxes().await.unwrap(), []);
    let [one, other] = ["ione", "ione2"].map(|id| -> SandboxId { id.parse().unwrap() });
    let chunk = |id: &SandboxId, digit: &str| Name::Chunk(CopyOf::Sandbox(id.clone()), digit.repeat(64));
    // More than a page of a listing has.
    let digits: Vec<String> = (0..1100).map(|number| format!("{number:064x}")).collect();
    for digits in digits.chunks(50) {
        let puts = digits.iter().map(|hash| {
            let name = Name::Chunk(CopyOf::Sandbox(one.clone()), hash.clone());
            let blobs = &blobs;
            async move { blobs.put(&name, &b"x"[..]).await.unwrap() }
        });
        futures_util::future::join_all(puts).await;
    }
    let manifest = Name::Manifest(CopyOf::Sandbox(one.clone()), "0f".repeat(16));
    let build: BuildId = "11111111-2222-4333-8444-555555555555".parse().unwrap();
    let memory = CopyOf::Memory(build.clone());
    let of_memory = Name::Chunk(memory.clone(), "a".repeat(64));
    let kept = [chunk(&other, "a"), layer('a'), of_memory];
    for name in kept.iter().chain([&manifest]) {
        blobs.put(name, &b"x"[..]).await.unwrap();
    }
    let foreign = gateway.file("some/where/parcels/Not An Id/file");
    fs::create_dir_all(foreign.parent().unwrap()).unwrap();
    fs::write(&foreign, "x").unwrap();
    let beside = gateway.file("some/where/parcels/ione/notes.txt");
    fs::write(&beside, "x").unwrap();

    let mut found = blobs.sandboxes().await.unwrap();
    found.sort();
    assert_eq!(found, [one.clone(), other.clone()]);
    assert_eq!(names(&blobs).await, [layer('a')], "those of builds");
    assert_eq!(
        blobs.delete_of(&CopyOf::Sandbox(one.clone())).await.unwrap(),
        digits.len() + 1
    );
    assert_eq!(blobs.delete_of(&CopyOf::Sandbox(one.clone())).await.unwrap(), 0);
    for name in &kept {
        assert!(blobs.head(name).await.unwrap().is_some(), "{name}");
    }
    assert!(foreign.exists() && beside.exists());
    assert_eq!(blobs.delete_of(&CopyOf::Sandbox(other.clone())).await.unwrap(), 1);
    assert!(blobs.head(&layer('a')).await.unwrap().is_some());
    assert_eq!(blobs.memories().await.unwrap(), [build]);
    assert_eq!(blobs.delete_of(&memory).await.unwrap(), 1);
    assert_eq!(blobs.memories().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_belongs_to_who_claims_it_first() {
    let gateway = Gateway::start().await;
    let blobs = gateway.blobs();
    assert_eq!(blobs.claim("one").await.unwrap(), Claim::Own);
    assert_eq!(blobs.claim("one").await.unwrap(), Claim::Own);
    assert_eq!(blobs.claim("two").await.unwrap(), Claim::Foreign);
    let mut settings = gateway.settings();
    settings.prefix = String::new();
    let whole = Blobs::open(&settings).unwrap();
    assert_eq!(whole.claim("two").await.unwrap(), Claim::Own);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_says_what_is_wrong_and_no_secret() {
    let mut gateway = Gateway::start().await;
    gateway.blobs().probe("abc").await.unwrap();
    assert!(!gateway.file("some/where/probe-abc").exists());

    let mut wrong = gateway.settings();
    wrong.secret_access_key = model::secret::Secret::new("another-secret".to_owned());
    let refused = Blobs::open(&wrong).unwrap().probe("abc").await.unwrap_err();
    assert!(matches!(refused, BlobError::Refused { .. }), "{refused:?}");
    assert!(refused.is_lasting());
    let mut unknown = gateway.settings();
    unknown.access_key_id = "nobody".to_owned();
    let refused_too = Blobs::open(&unknown).unwrap().probe("abc").await.unwrap_err();
    assert!(matches!(refused_too, BlobError::Refused { .. }), "{refused_too:?}");
    let mut missing = gateway.settings();
    missing.bucket = "nowhere".to_owned();
    let no_bucket = Blobs::open(&missing).unwrap().probe("abc").await.unwrap_err();
    assert!(matches!(no_bucket, BlobError::NoBucket(_)), "{no_bucket:?}");
    gateway.kill();
    let away = gateway.blobs().probe("abc").await.unwrap_err();
    assert!(matches!(away, BlobError::Unavailable { .. }), "{away:?}");
    assert!(!away.is_lasting());
    for error in [refused, refused_too, no_bucket, away] {
        let text = format!("{error} {error:?}");
        assert!(!text.contains(KEY) && !text.contains("another-secret"), "{text}");
        assert!(text.contains(BUCKET) || text.contains("nowhere"), "{text}");
    }
    let mut http = gateway.settings();
    http.allow_http = false;
    let error = Blobs::open(&http).unwrap().probe("abc").await.unwrap_err();
    assert!(!error.to_string().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_cut_is_an_error_and_not_an_end() {
    let mut gateway = Gateway::start().await;
    let blobs = gateway.blobs();
    let name = layer('a');
    // More than what fits into the buffers of sockets.
    let size = 8 * PART;
    blobs.put(&name, tokio::io::repeat(1).take(size as u64)).await.unwrap();
    let (told, mut object) = blobs.get(&name).await.unwrap();
    assert_eq!(told, size as u64);
    object.read_exact(&mut [0; 1000]).await.unwrap();
    gateway.kill();
    let cut = tokio::io::copy(&mut object, &mut tokio::io::sink()).await;
    assert!(cut.is_err(), "{cut:?}");
    gateway.run().await;
    assert_eq!(read(&blobs, &name).await.unwrap().len(), size);
}
