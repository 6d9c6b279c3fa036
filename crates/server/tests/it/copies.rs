//! Copies of paused sandboxes that have ended: nothing of them stays in the bucket, whatever fails meanwhile.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::{Query, State};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, Uri};
use model::id::SandboxId;
use parking_lot::Mutex;
use sqlx::{AnyConnection, Connection as _, Executor as _};
use tempfile::TempDir;
use testkit::node::FakeNode;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::platform::{open, pause, seed, within};
use crate::servers_apart::copies_at;
use crate::several::{Connected, Several, authority};

/// A bucket, as far as copies need one.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) objects: Mutex<BTreeMap<String, Bytes>>,
    /// Whether what is sent is kept on its way.
    delays: AtomicBool,
    /// What is on its way: it arrives after the next list was made.
    delayed: Mutex<BTreeMap<String, Bytes>>,
    /// Has a permit for each list that may be made.
    lists: Semaphore,
    /// Lists that are being made, and how many those were at most.
    listing: AtomicUsize,
    listing_most: AtomicUsize,
}

impl Bucket {
    /// A bucket, and where it is.
    pub(crate) async fn serve() -> (Arc<Self>, String) {
        let bucket = Arc::new(Self {
            objects: Mutex::default(),
            delays: AtomicBool::new(false),
            delayed: Mutex::default(),
            lists: Semaphore::new(Semaphore::MAX_PERMITS / 2),
            listing: AtomicUsize::new(0),
            listing_most: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let router = axum::Router::new().fallback(answer).with_state(Arc::clone(&bucket));
        tokio::spawn(async move { axum::serve(listener, router).await });
        (bucket, address)
    }

    fn is_empty(&self) -> bool {
        !self.objects.lock().keys().any(|name| name.starts_with("parcels/"))
    }

    async fn list(&self, prefix: &str) -> Response {
        let listing = self.listing.fetch_add(1, Ordering::SeqCst) + 1;
        self.listing_most.fetch_max(listing, Ordering::SeqCst);
        drop(self.lists.acquire().await);
        let mut text = "<ListBucketResult>".to_owned();
        let mut objects = self.objects.lock();
        for (name, content) in objects.iter().filter(|(name, _)| name.starts_with(prefix)) {
            let _ = write!(
                text,
                "<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><Size>{}</Size></Contents>",
                content.len()
            );
        }
        text += "</ListBucketResult>";
        objects.append(&mut self.delayed.lock());
        self.listing.fetch_sub(1, Ordering::SeqCst);
        text.into_response()
    }

    async fn put(&self, name: String, content: Bytes) -> Response {
        if self.delays.load(Ordering::SeqCst) {
            self.delayed.lock().insert(name, content);
            return std::future::pending().await;
        }
        self.objects.lock().insert(name, content);
        [("etag", "\"1\"")].into_response()
    }
}

/// An object, or the part of it that is asked for.
fn object(content: &Bytes, headers: &HeaderMap, is_head: bool) -> Response {
    let (whole, asked) = (
        content.len(),
        headers.get("range").and_then(|range| range.to_str().ok()),
    );
    let range = asked.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (status, part) = match range {
        Some((from, to)) => {
            let to = to.parse().unwrap_or(usize::MAX).min(whole - 1);
            (StatusCode::PARTIAL_CONTENT, from.parse().expect("a number")..=to)
        }
        None => (StatusCode::OK, 0..=whole - 1),
    };
    let said = [
        ("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT".to_owned()),
        ("etag", "\"1\"".to_owned()),
        (
            "content-range",
            format!("bytes {}-{}/{whole}", part.start(), part.end()),
        ),
        ("content-length", part.clone().count().to_string()),
    ];
    let content = if is_head { Bytes::new() } else { content.slice(part) };
    (status, said, content).into_response()
}

async fn answer(
    State(bucket): State<Arc<Bucket>>,
    method: Method,
    uri: Uri,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
    content: Bytes,
) -> Response {
    let name = uri.path().trim_start_matches("/copies/").to_owned();
    match method {
        Method::GET if query.contains_key("list-type") => {
            bucket.list(query.get("prefix").map_or("", String::as_str)).await
        }
        Method::GET | Method::HEAD => match bucket.objects.lock().get(&name) {
            Some(content) => object(content, &headers, method == Method::HEAD),
            None => StatusCode::NOT_FOUND.into_response(),
        },
        Method::PUT => bucket.put(name, content).await,
        // Deletes several by their names.
        Method::POST => {
            let text = String::from_utf8_lossy(&content);
            for after in text.split("<Key>").skip(1) {
                bucket
                    .objects
                    .lock()
                    .remove(after.split('<').next().unwrap_or_default());
            }
            "<DeleteResult></DeleteResult>".into_response()
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

/// A server with a node and a bucket.
struct Copying {
    server: Several,
    bucket: Arc<Bucket>,
    _connected: Connected,
}

impl Copying {
    async fn start() -> Self {
        let directory = TempDir::new().expect("a directory");
        let store = open(directory.path()).await;
        seed(&store).await;
        let (bucket, address) = Bucket::serve().await;
        let with_bucket = |settings: &mut _| copies_at(settings, address);
        let server = Several::one_of(directory, store, 1, authority(), Some(with_bucket)).await;
        let server = server.expect("a server");
        let node = FakeNode::new();
        node.makes_parcels.store(true, Ordering::Relaxed);
        let connected = server.join(&node).await;
        Self {
            server,
            bucket,
            _connected: connected,
        }
    }

    async fn paused(&self) -> SandboxId {
        let id = self.server.created().await;
        let path = format!("/sandboxes/{id}/pause");
        let reply = self.server.call("POST", &path, r#"{"memory":false}"#).await;
        assert_eq!(reply.status, 204, "{reply:?}");
        id
    }

    /// A paused sandbox, once its copy is complete.
    async fn copied(&self) -> SandboxId {
        let id = self.paused().await;
        let is_complete = async || {
            let parcel = self.server.store.sandbox_parcel(&id).await.expect("a database");
            parcel.expect("a row").current.is_some()
        };
        within(async { while !is_complete().await {} }).await;
        id
    }

    async fn end(&self, id: &SandboxId, status: u16) {
        let reply = self.server.call("DELETE", &format!("/sandboxes/{id}"), "").await;
        assert_eq!(reply.status, status, "{reply:?}");
    }

    async fn until_empty(&self) {
        within(async {
            while !self.bucket.is_empty() {
                pause().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn what_arrives_after_the_end_of_a_sandbox_is_removed() {
    let copying = Copying::start().await;
    copying.bucket.delays.store(true, Ordering::SeqCst);
    let id = copying.paused().await;
    within(async {
        while copying.bucket.delayed.lock().is_empty() {
            pause().await;
        }
    })
    .await;
    copying.end(&id, 204).await;
    within(async {
        while copying.bucket.is_empty() {
            pause().await;
        }
    })
    .await;
    copying.until_empty().await;
    copying.server.close().await;
}

/// The second attempt to remove the row finds none.
#[tokio::test]
async fn copies_are_removed_where_it_was_not_known_that_the_row_was() {
    let copying = Copying::start().await;
    let id = copying.copied().await;
    let url = format!("sqlite:{}", copying.server.directory.path().join("test.db").display());
    let mut database = AnyConnection::connect(&url).await.expect("a database");
    let refuse =
        "BEGIN; CREATE TRIGGER refused BEFORE DELETE ON sandboxes BEGIN SELECT RAISE(ABORT, 'refused'); END; COMMIT";
    database.execute(refuse).await.expect("a database");
    let reply = copying.server.call("DELETE", &format!("/sandboxes/{id}"), "").await;
    assert!(reply.status.is_server_error(), "{reply:?}");
    let removed = "BEGIN; DROP TRIGGER refused; DELETE FROM sandboxes; COMMIT";
    database.execute(removed).await.expect("a database");
    copying.until_empty().await;
    copying.server.close().await;
}

#[tokio::test]
async fn copies_of_few_sandboxes_are_removed_at_the_same_time() {
    let copying = Copying::start().await;
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(copying.copied().await);
    }
    let bucket = &copying.bucket;
    bucket.listing_most.store(0, Ordering::SeqCst);
    let all = bucket.lists.forget_permits(usize::MAX);
    for id in &ids {
        copying.end(id, 204).await;
    }
    // For the others to come as well.
    tokio::time::sleep(Duration::from_millis(300)).await;
    bucket.lists.add_permits(all);
    copying.until_empty().await;
    assert_eq!(bucket.listing_most.load(Ordering::SeqCst), 2);
    copying.server.close().await;
}
