//! The objects of a bucket.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{Stream, StreamExt as _, TryStreamExt as _};
use model::id::{BuildId, SandboxId};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::multipart::{MultipartStore as _, PartId};
use object_store::path::Path;
use object_store::{BackoffConfig, Certificate, ClientOptions};
use object_store::{ObjectStore as _, ObjectStoreExt as _, PutPayload, RetryConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf, Take};
use tokio_util::io::StreamReader;

use crate::error::BlobError;
use crate::journal::{Entry, Journal};
use crate::name::{CopyOf, Name};
use crate::settings::S3Settings;

/// Size of a part of an upload, in bytes. Smaller content is one request.
pub const PART: usize = 8 << 20;
/// Maximum size of an object, in bytes: 10,000 parts.
pub const OBJECT_MAX: u64 = 10_000 * PART as u64;
/// How long a connection may take to be made.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a request may go without progress; for one that sends a part, until its answer.
pub const STALL: Duration = Duration::from_secs(60);
/// How often a request is repeated.
pub const RETRIES: usize = 3;
/// How long after its beginning a request is not repeated any more.
const RETRY_UNTIL: Duration = Duration::from_secs(60);
/// How long one request with all its repetitions may take, except for the content of an answer.
const REQUEST: Duration = Duration::from_secs(180);
/// How often an upload is aborted until there is no such upload, and the pause before the next time.
const ABORTS: usize = 5;
const ABORT_PAUSE: Duration = Duration::from_millis(500);
/// The object that names the database to which the objects of the bucket belong.
const OWNER: &str = "owner";

/// An object of the bucket, without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// Its size, in bytes.
    pub size: u64,
    /// When it was written, by the clock of the store, in microseconds since 1970.
    pub written_us: i64,
}

/// The database to which the objects under the prefix belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// The objects belong to the database of the caller.
    Own,
    /// The objects belong to another database.
    Foreign,
}

/// The objects of a bucket below a prefix.
#[derive(Debug)]
pub struct Blobs {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: AmazonS3,
    prefix: Path,
    place: String,
    journal: Journal,
}

/// An upload in parts that is aborted when this is dropped before its end.
struct Upload {
    inner: Arc<Inner>,
    entry: Option<Entry>,
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(entry) = self.entry.take() else {
            return;
        };
        let inner = Arc::clone(&self.inner);
        // Without a runtime the platform ends, and its next start aborts it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { inner.abort(&entry).await });
        }
    }
}

impl Inner {
    fn failed(&self, name: &str, error: &object_store::Error) -> BlobError {
        BlobError::of(&self.place, name, error)
    }

    /// Waits for a request, which is one small exchange.
    async fn request<T>(
        &self,
        name: &str,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, BlobError> {
        match tokio::time::timeout(REQUEST, request).await {
            Ok(answer) => answer.map_err(|error| self.failed(name, &error)),
            Err(_) => Err(BlobError::Unavailable {
                place: self.place.clone(),
                why: "no answer in time".to_owned(),
            }),
        }
    }

    /// Waits for a request that needs the bucket and no object.
    async fn write<T>(
        &self,
        name: &str,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, BlobError> {
        match self.request(name, request).await {
            Err(BlobError::NotFound(_)) => Err(BlobError::NoBucket(self.place.clone())),
            answer => answer,
        }
    }

    /// Aborts an upload, and forgets it if there is no such upload any more.
    async fn abort(&self, entry: &Entry) -> bool {
        let Ok(path) = Path::parse(&entry.object) else {
            self.journal.end(entry);
            return true;
        };
        let mut last = None;
        for attempt in 0..ABORTS {
            if attempt > 0 {
                tokio::time::sleep(ABORT_PAUSE).await;
            }
            let abort = self.store.abort_multipart(&path, &entry.upload);
            match self.request(&entry.object, abort).await {
                // A part that is still on its way can be stored after it was aborted.
                Ok(()) => last = None,
                Err(BlobError::NotFound(_)) => {
                    last = None;
                    break;
                }
                Err(error) => last = Some(error),
            }
        }
        if let Some(error) = last {
            self.journal.leave(entry);
            tracing::warn!(%error, "cannot abort an upload to the blob store; it is tried again");
            return false;
        }
        self.journal.end(entry);
        true
    }
}

type ByteStream = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// The content of an object. It ends with an error if it is cut.
pub struct Content(Take<StreamReader<ByteStream, Bytes>>);

impl AsyncRead for Content {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Content")
    }
}

impl Blobs {
    /// The objects of a bucket. No request is sent.
    ///
    /// # Errors
    /// When the settings cannot be used.
    pub fn open(settings: &S3Settings) -> Result<Self, BlobError> {
        let invalid = |why: String| BlobError::Settings(why);
        let mut client = ClientOptions::new()
            .with_connect_timeout(CONNECT)
            .with_read_timeout(STALL)
            .with_timeout_disabled()
            .with_allow_http(settings.allow_http);
        if let Some(pem) = &settings.authority {
            let certificates = Certificate::from_pem_bundle(pem.as_bytes());
            let certificates = certificates.map_err(|error| invalid(format!("blobs.ca_file: {error}")))?;
            for certificate in certificates {
                client = client.with_root_certificate(certificate);
            }
        }
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(200),
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: RETRIES,
            retry_timeout: RETRY_UNTIL,
        };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&settings.bucket)
            .with_region(&settings.region)
            .with_access_key_id(&settings.access_key_id)
            .with_secret_access_key(settings.secret_access_key.expose())
            .with_virtual_hosted_style_request(!settings.path_style)
            .with_allow_http(settings.allow_http)
            .with_client_options(client)
            .with_retry(retry);
        if let Some(endpoint) = &settings.endpoint {
            let address = if settings.path_style {
                endpoint.clone()
            } else {
                settings.address_of_bucket(endpoint).map_err(invalid)?
            };
            builder = builder.with_endpoint(address);
        }
        let store = builder
            .build()
            .map_err(|error| invalid(format!("the settings of the blob store cannot be used: {error}")))?;
        let prefix = Path::parse(&settings.prefix).map_err(|error| invalid(format!("blobs.prefix: {error}")))?;
        let journal = Journal::open(settings.journal.clone()).map_err(|error| BlobError::Journal(error.to_string()))?;
        Ok(Self {
            inner: Arc::new(Inner {
                store,
                prefix,
                place: settings.place(),
                journal,
            }),
        })
    }

    /// Where the objects are, for messages.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.inner.place
    }

    fn path(&self, name: &str) -> Path {
        let below = Path::from(name);
        self.inner.prefix.parts().chain(below.parts()).collect()
    }

    /// Stores what `content` yields until its end, in place of an earlier object. Nothing is visible before all of it
    /// is there, and nothing stays of it if this fails or is dropped. Returns the size.
    ///
    /// # Errors
    /// When the content cannot be read or the store fails.
    pub async fn put(&self, name: &Name, mut content: impl AsyncRead + Send + Unpin) -> Result<u64, BlobError> {
        let (name, path) = (name.to_string(), self.path(&name.to_string()));
        let first = read_part(&name, &mut content).await?;
        if first.len() < PART {
            let size = first.len() as u64;
            let inner = &self.inner;
            let put = inner.store.put(&path, PutPayload::from_bytes(first));
            inner.write(&name, put).await?;
            return Ok(size);
        }
        self.put_parts(&name, &path, first, content).await
    }

    async fn put_parts(
        &self,
        name: &str,
        path: &Path,
        first: Bytes,
        mut content: impl AsyncRead + Send + Unpin,
    ) -> Result<u64, BlobError> {
        let inner = &self.inner;
        let id = inner.write(name, inner.store.create_multipart(path)).await?;
        let entry = inner.journal.begin(path.as_ref(), &id);
        let mut upload = Upload {
            inner: Arc::clone(inner),
            entry: None,
        };
        match entry {
            Ok(entry) => upload.entry = Some(entry),
            Err(error) => {
                let _ = inner.request(name, inner.store.abort_multipart(path, &id)).await;
                return Err(BlobError::Journal(error.to_string()));
            }
        }
        let mut parts: Vec<PartId> = Vec::new();
        let mut size = 0;
        let mut part = first;
        while !part.is_empty() {
            size += part.len() as u64;
            if size > OBJECT_MAX {
                return Err(BlobError::Content {
                    name: name.to_owned(),
                    why: format!("would have more than {OBJECT_MAX} bytes"),
                });
            }
            let is_last = part.len() < PART;
            let put = inner
                .store
                .put_part(path, &id, parts.len(), PutPayload::from_bytes(part));
            let next = async {
                if is_last {
                    Ok(Bytes::new())
                } else {
                    read_part(name, &mut content).await
                }
            };
            let (put, next) = tokio::try_join!(inner.request(name, put), next)?;
            parts.push(put);
            part = next;
        }
        let complete = inner.store.complete_multipart(path, &id, parts);
        inner.request(name, complete).await?;
        if let Some(entry) = upload.entry.take() {
            inner.journal.end(&entry);
        }
        Ok(size)
    }

    /// An object as a stream, and its size. The stream ends with an error if it is cut.
    ///
    /// # Errors
    /// When there is no such object or the store fails.
    pub async fn get(&self, name: &Name) -> Result<(u64, Content), BlobError> {
        let name = name.to_string();
        let path = self.path(&name);
        let got = self.inner.request(&name, self.inner.store.get(&path)).await?;
        let size = got.meta.size;
        let inner = Arc::clone(&self.inner);
        let content = got
            .into_stream()
            .map_err(move |error| io::Error::from(inner.failed(&name, &error)));
        let content: ByteStream = Box::pin(content);
        Ok((size, Content(StreamReader::new(content).take(size))))
    }

    /// Looks up an object; none if the bucket does not have it.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn head(&self, name: &Name) -> Result<Option<Object>, BlobError> {
        let name = name.to_string();
        let path = self.path(&name);
        match self.inner.request(&name, self.inner.store.head(&path)).await {
            Ok(meta) => Ok(Some(object_of(&meta))),
            Err(BlobError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes an object. Succeeds when there is none.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn delete(&self, name: &Name) -> Result<(), BlobError> {
        self.delete_named(&name.to_string()).await
    }

    async fn delete_named(&self, name: &str) -> Result<(), BlobError> {
        let path = self.path(name);
        match self.inner.request(name, self.inner.store.delete(&path)).await {
            Err(BlobError::NotFound(_)) => Ok(()),
            deleted => deleted,
        }
    }

    /// Every object of builds: layers and uploaded files. Objects with other names are not told.
    pub fn list(&self) -> impl Stream<Item = Result<(Name, Object), BlobError>> + Send + '_ {
        let folders = futures_util::stream::iter(Name::FOLDERS_OF_BUILDS);
        folders.flat_map(move |folder| {
            let found = self.inner.store.list(Some(&self.path(folder)));
            found.filter_map(move |meta| std::future::ready(self.listed(folder, meta)))
        })
    }

    /// Every sandbox that has objects of copies, without those: the bucket tells the folders alone. Folders with other names are not told.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxId>, BlobError> {
        self.folders(Name::FOLDER_OF_SANDBOXES).await
    }

    /// Every build whose memory has objects of copies, as [`Self::sandboxes`].
    ///
    /// # Errors
    /// When the store fails.
    pub async fn memories(&self) -> Result<Vec<BuildId>, BlobError> {
        self.folders(Name::FOLDER_OF_MEMORIES).await
    }

    async fn folders<T: FromStr>(&self, folder: &str) -> Result<Vec<T>, BlobError> {
        let listed = self.inner.store.list_with_delimiter(Some(&self.path(folder))).await;
        let listed = listed.map_err(|error| self.inner.failed(folder, &error))?;
        let folders = listed.common_prefixes.iter();
        Ok(folders.filter_map(|folder| folder.filename()?.parse().ok()).collect())
    }

    /// Every object of copies of this.
    pub fn list_of<'a>(&'a self, of: &CopyOf) -> impl Stream<Item = Result<(Name, Object), BlobError>> + Send + 'a {
        let folder = of.folder();
        let found = self.inner.store.list(Some(&self.path(&folder)));
        found.filter_map(move |meta| std::future::ready(self.listed(&folder, meta)))
    }

    /// Deletes every object of copies of this, as the bucket tells them, and returns how many. What is stored meanwhile may stay.
    ///
    /// # Errors
    /// When the store fails. Some may be deleted then.
    pub async fn delete_of(&self, of: &CopyOf) -> Result<usize, BlobError> {
        let (mut objects, mut deleted) = (Box::pin(self.list_of(of)), 0);
        while let Some(object) = objects.next().await {
            self.delete(&object?.0).await?;
            deleted += 1;
        }
        Ok(deleted)
    }

    fn listed(
        &self,
        folder: &str,
        meta: object_store::Result<object_store::ObjectMeta>,
    ) -> Option<Result<(Name, Object), BlobError>> {
        match meta {
            Ok(meta) => {
                let below = meta.location.prefix_match(&self.inner.prefix)?;
                let words: Vec<_> = below.map(|part| part.as_ref().to_owned()).collect();
                let name = Name::parse(&words.join("/"))?;
                Some(Ok((name, object_of(&meta))))
            }
            Err(error) => Some(Err(self.inner.failed(folder, &error))),
        }
    }

    /// Checks that objects can be written, read, listed and deleted. `random` is part of the name that is used.
    ///
    /// # Errors
    /// When one of it fails.
    pub async fn probe(&self, random: &str) -> Result<(), BlobError> {
        let name = format!("probe-{random}");
        let (inner, path) = (&self.inner, self.path(&name));
        let content = Bytes::copy_from_slice(random.as_bytes());
        inner
            .write(&name, inner.store.put(&path, PutPayload::from_bytes(content.clone())))
            .await?;
        let read = self.read_small(&name).await;
        let listed = inner.request(&name, async {
            let mut found = inner.store.list(Some(&self.path("layers")));
            found.next().await.transpose()
        });
        let listed = listed.await;
        self.delete_named(&name).await?;
        listed?;
        if read? == content {
            Ok(())
        } else {
            Err(BlobError::Content {
                name,
                why: "is not what was written".to_owned(),
            })
        }
    }

    async fn read_small(&self, name: &str) -> Result<Bytes, BlobError> {
        let path = self.path(name);
        let read = async { self.inner.store.get_range(&path, 0..128).await };
        self.inner.request(name, read).await
    }

    /// Makes the objects below the prefix those of `owner`, if they have no owner yet. Two databases that share a
    /// prefix would delete the objects of each other.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn claim(&self, owner: &str) -> Result<Claim, BlobError> {
        let (inner, path) = (&self.inner, self.path(OWNER));
        match self.read_small(OWNER).await {
            Ok(known) if known == owner.as_bytes() => return Ok(Claim::Own),
            Ok(_) => return Ok(Claim::Foreign),
            Err(BlobError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
        let content = PutPayload::from_bytes(Bytes::copy_from_slice(owner.as_bytes()));
        inner.write(OWNER, inner.store.put(&path, content)).await?;
        // Of two that claim it at the same time, the last one has it.
        if self.read_small(OWNER).await? == owner.as_bytes() {
            Ok(Claim::Own)
        } else {
            Ok(Claim::Foreign)
        }
    }

    /// Aborts the uploads that an earlier process did not end, and returns how many.
    ///
    /// # Errors
    /// When their directory cannot be read.
    pub async fn abort_left(&self) -> Result<usize, BlobError> {
        let left = self.inner.journal.left();
        let mut aborted = 0;
        for entry in left.map_err(|error| BlobError::Journal(error.to_string()))? {
            aborted += usize::from(self.inner.abort(&entry).await);
        }
        Ok(aborted)
    }
}

fn object_of(meta: &object_store::ObjectMeta) -> Object {
    Object {
        size: meta.size,
        written_us: meta.last_modified.timestamp_micros(),
    }
}

/// The next part, which is shorter than [`PART`] at the end only.
async fn read_part(name: &str, content: &mut (impl AsyncRead + Unpin)) -> Result<Bytes, BlobError> {
    let mut part = BytesMut::new();
    while part.len() < PART {
        let left = PART - part.len();
        part.reserve(left.min(64 << 10));
        let read = (&mut *content).take(left as u64).read_buf(&mut part).await;
        let read = read.map_err(|error| BlobError::Source {
            name: name.to_owned(),
            why: error.to_string(),
        })?;
        if read == 0 {
            break;
        }
    }
    Ok(part.freeze())
}
