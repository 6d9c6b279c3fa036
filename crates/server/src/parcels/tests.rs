use std::task::Waker;

use blobs::S3Settings;
use futures_util::FutureExt as _;
use model::id::TeamId;
use tempfile::TempDir;
use tokio::io::{AsyncWriteExt as _, DuplexStream};

use super::*;
use crate::settings::CapacitySettings;

const KNOWN: ChunkId = ChunkId::of_hash([7; 32]);

/// Copies in a bucket that does not answer, and the directory that goes with them.
fn parcels() -> (Parcels, TempDir) {
    let directory = TempDir::new().unwrap();
    let blobs = Blobs::open(&S3Settings {
        bucket: "copies".to_owned(),
        endpoint: Some("http://127.0.0.1:9".to_owned()),
        region: "us-east-1".to_owned(),
        prefix: String::new(),
        access_key_id: "a".to_owned(),
        secret_access_key: Secret::new("b".to_owned()),
        allow_http: true,
        path_style: true,
        authority: None,
        journal: directory.path().join("journal"),
    });
    let metrics = Arc::new(Metrics::new(&CapacitySettings::default()));
    let owner = "00000000-0000-4000-8000-000000000007".parse().unwrap();
    let parcels = Parcels::new(Arc::new(blobs.unwrap()), Sealer::new([1; 32]), metrics, owner, None);
    (parcels, directory)
}

fn sandbox(name: &str) -> SandboxId {
    name.parse().unwrap()
}

fn team(number: u8) -> Payer {
    let id: TeamId = format!("00000000-0000-4000-8000-0000000000{number:02}")
        .parse()
        .unwrap();
    Some(id)
}

async fn send(to: &mut DuplexStream, record: Record) {
    let (head, content) = record.encode();
    to.write_all(&[&head[..], &content].concat()).await.unwrap();
}

#[tokio::test]
async fn a_team_has_half_of_the_transfers() {
    let (parcels, _directory) = parcels();
    let upload = |number| parcels.upload_turn(&team(number)).now_or_never().flatten();
    let first = upload(1).unwrap();
    assert!(upload(1).is_none());
    let _second = upload(2).unwrap();
    assert!(upload(3).is_none());
    drop(first);
    assert!(upload(2).is_none());
    assert!(upload(3).is_some());

    let download = |number| parcels.download_turn(&team(number)).now_or_never();
    let of_one = [download(1).unwrap().unwrap(), download(1).unwrap().unwrap()];
    assert!(download(1).is_none());
    let _of_two = [download(2).unwrap().unwrap(), download(2).unwrap().unwrap()];
    assert!(download(3).is_none());
    drop(of_one);
    assert!(download(2).is_none());
    assert!(download(3).is_some());
}

#[tokio::test]
async fn one_team_waits_in_a_queue_of_its_own() {
    let (parcels, _directory) = parcels();
    let payer = team(1);
    let _held = [
        parcels.download_turn(&payer).await.unwrap(),
        parcels.download_turn(&payer).await.unwrap(),
    ];
    let mut waiting: Vec<_> = (0..DOWNLOADS_WAITING)
        .map(|_| Box::pin(parcels.download_turn(&payer)))
        .collect();
    let mut context = Context::from_waker(Waker::noop());
    assert!(
        waiting
            .iter_mut()
            .all(|one| one.as_mut().poll(&mut context).is_pending())
    );
    let refused = parcels.download_turn(&payer).await.unwrap_err();
    assert!(matches!(refused, NodeError::Unavailable(_)), "{refused:?}");
    drop(parcels.download_turn(&team(2)).await.unwrap());
    // Who does not wait any more leaves its place.
    waiting.pop();
    let mut next = Box::pin(parcels.download_turn(&payer));
    assert!(next.as_mut().poll(&mut context).is_pending());
}

#[tokio::test(start_paused = true)]
async fn a_node_that_sends_slowly_is_waited_for_and_one_that_sends_nothing_is_not() {
    let (parcels, _directory) = parcels();
    let (of, known) = (CopyOf::Sandbox(sandbox("ione")), HashSet::from([KNOWN]));
    let (mut node, stream) = tokio::io::duplex(1 << 16);
    let sending = async {
        for _ in 0..20 {
            tokio::time::sleep(UPLOAD_STALL - Duration::from_secs(1)).await;
            send(&mut node, Record::Known(KNOWN)).await;
        }
        send(&mut node, Record::Manifest(Bytes::from_static(b"manifest"))).await;
    };
    let mut stream = LayerStream::new(stream);
    let (received, ()) = tokio::join!(parcels.receive(&of, &mut stream, &known, 1 << 20), sending);
    let (chunks, sealed, sent) = received.unwrap();
    assert_eq!((chunks.len(), &sealed[..], sent), (20, &b"manifest"[..], 0));

    let (mut node, stream) = tokio::io::duplex(1 << 16);
    send(&mut node, Record::Known(KNOWN)).await;
    let begun = Instant::now();
    let received = parcels
        .receive(&of, &mut LayerStream::new(stream), &known, 1 << 20)
        .await;
    assert!(
        matches!(received, Err(ParcelError::Stalled(UPLOAD_STALL))),
        "{received:?}"
    );
    assert_eq!(begun.elapsed(), UPLOAD_STALL);
}

#[tokio::test(start_paused = true)]
async fn what_is_taken_of_a_copy_is_noted() {
    let (parcels, _directory) = parcels();
    let stream = |chunks: Vec<ChunkId>, progress: &Progress| {
        let sealed = Bytes::from_static(b"manifest");
        let object = ManifestObject { chunks, sealed };
        parcels.stream(
            &CopyOf::Sandbox(sandbox("ione")),
            &object,
            Arc::default(),
            progress.clone(),
        )
    };
    let is_stalled = async |progress: &Progress| {
        let stalled = tokio::time::timeout(10 * DOWNLOAD_STALL, progress.until_stalled(DOWNLOAD_STALL)).await;
        stalled.is_ok()
    };
    // All of it was taken, and the node does the rest.
    let progress = Progress::begun();
    let mut all = stream(Vec::new(), &progress);
    assert_eq!(
        Record::read(&mut all).await.unwrap(),
        Record::Manifest(Bytes::from_static(b"manifest"))
    );
    assert!(!is_stalled(&progress).await);
    // A chunk is left, which nobody takes.
    let progress = Progress::begun();
    let mut part = stream(vec![KNOWN], &progress);
    tokio::time::advance(DOWNLOAD_STALL - Duration::from_secs(1)).await;
    Record::read(&mut part).await.unwrap();
    let begun = Instant::now();
    assert!(is_stalled(&progress).await);
    assert_eq!(begun.elapsed(), DOWNLOAD_STALL);
}

#[tokio::test]
async fn paused_sandboxes_are_counted_by_their_copies() {
    let (parcels, _directory) = parcels();
    let ids = ["ione", "itwo", "ithree", "ifour"].map(sandbox);
    let [complete, waiting, failing, given_up] = &ids;
    for id in [waiting, failing] {
        parcels.packing.lock().insert(id.clone(), Packing::default());
    }
    parcels.upload_failed(failing, 1);
    parcels.given_up.lock().insert(given_up.clone());
    let counts = parcels.counts(&ids);
    assert_eq!((counts.complete, counts.waiting, counts.failing), (1, 1, 2));
    // Those that are not paused count as nothing.
    assert_eq!(parcels.counts(std::slice::from_ref(complete)).failing, 0);
    assert_eq!(parcels.counts(&[]), CopyCounts::default());
}

#[test]
fn what_is_missing_or_refused_is_damage_and_what_may_come_back_is_not() {
    for (error, is_damage) in [
        (ParcelError::Blobs(BlobError::NotFound("a".to_owned())), true),
        (ParcelError::Node(NodeError::Refused("a".to_owned())), true),
        (ParcelError::Node(NodeError::Away), false),
        (ParcelError::Stalled(DOWNLOAD_STALL), false),
        (ParcelError::Cut(io::ErrorKind::UnexpectedEof.into()), false),
    ] {
        assert_eq!(error.is_damage(), is_damage, "{error:?}");
    }
}
