//! The side of a link that calls: a [`NodeApi`] over whatever connection its node has opened last.
//!
//! Without a connection each call fails at once with [`NodeError::Away`], and nothing was begun. A call whose connection
//! is lost fails with [`NodeError::Unreachable`], and whether it was carried out is unknown. A pause or a resume of which
//! that is unknown puts everything in doubt: the session ends, and the next one takes over what there is.
//! [`RemoteNode::subscribe`] alone waits for a connection.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{Method, Request};
use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::network::EgressPolicy;
use parking_lot::Mutex;
use protocol::node::{
    Adopted, ClaimSandbox, Committed, CommittedCopy, CopiedDisk, DialError, EgressCounters, ExpiredSandbox, Failure,
    ForkSandbox, FrozenSandbox, HostReport, LayerInfo, LayerStream, MemoryInfo, NoCapacity, NodeApi, NodeDeadline,
    NodeError, NodeEvent, NodeEvents, NodeFuture, PackMemory, PackSandbox, PauseSandbox, PausedSandbox, PermitRequest,
    ResumeSandbox, ResumedSandbox, SandboxSample, SandboxStream, StartSandbox, StartedSandbox, UnpackMemory,
    UnpackSandbox, UnpackedSandbox, Wanted,
};
use protocol::template_file::BaseVersion;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::call::Call;
use crate::connection::{self, CALLS, STREAMS};
use crate::frame::{ANSWER_MAX, read_bytes, read_frame, write_frame};
use crate::held::Held;
use crate::serve::{CANCEL, USED};
use crate::stream::{LinkStream, answered, in_parts, read_first, send_last};

/// How long a call waits for others to end, when there are too many.
const TURN_BOUND: Duration = Duration::from_secs(10);
/// How long an answer may take that was sent before the node stopped reading.
const LATE_ANSWER: Duration = Duration::from_secs(1);
/// Events that may be on their way and not used, which are lost with a connection; more wait on the node.
const AHEAD: u32 = 64;

/// Permits that are given back and not sent yet; further ones end by themselves.
const GIVEN_BACK: usize = 1024;

/// The connection that is used.
#[derive(Debug, Clone)]
struct Current {
    /// Distinguishes it from those before and after it.
    number: u64,
    requests: SendRequest<Bytes>,
}

/// A node that is reached over connections which it has opened.
#[derive(Debug)]
pub struct RemoteNode {
    current: watch::Sender<Option<Current>>,
    /// When the last connection was lost, or this was made.
    lost: Mutex<Instant>,
    connections: AtomicU64,
    calls: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    over: CancellationToken,
    ahead: u32,
    /// The permits that are given back, which the connection sends.
    give_back: mpsc::Sender<(SandboxId, u64)>,
    given_back: tokio::sync::Mutex<mpsc::Receiver<(SandboxId, u64)>>,
}

impl Default for RemoteNode {
    fn default() -> Self {
        Self::new(CancellationToken::new())
    }
}

impl RemoteNode {
    /// A node without a connection. It cancels `over` when its sandboxes have to be taken over again.
    #[must_use]
    pub fn new(over: CancellationToken) -> Self {
        let (give_back, given_back) = mpsc::channel(GIVEN_BACK);
        Self {
            give_back,
            given_back: tokio::sync::Mutex::new(given_back),
            current: watch::Sender::new(None),
            lost: Mutex::new(Instant::now()),
            connections: AtomicU64::new(0),
            calls: Arc::new(Semaphore::new(CALLS)),
            streams: Arc::new(Semaphore::new(STREAMS)),
            over,
            ahead: AHEAD,
        }
    }

    /// Sends an event only when the one before was used.
    #[must_use]
    pub fn in_lockstep(self) -> Self {
        Self { ahead: 1, ..self }
    }

    /// Whether the node is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.current.borrow().is_some()
    }

    /// Makes calls on `connection` until that is lost or `stop` is cancelled, and returns why it ended. A connection
    /// before is not used any more.
    pub async fn carry<S>(&self, connection: S, stop: &CancellationToken) -> io::Error
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (requests, mut connection) = match connection::caller().handshake::<_, Bytes>(connection).await {
            Ok(ready) => ready,
            Err(error) => return io::Error::other(error),
        };
        let watch = connection::watch(connection.ping_pong());
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        self.current.send_replace(Some(Current { number, requests }));
        let _used = Used { node: self, number };
        tokio::select! {
            ended = connection => match ended {
                Ok(()) => io::Error::new(io::ErrorKind::ConnectionAborted, "the node closed the connection"),
                Err(error) => io::Error::other(error),
            },
            why = watch => io::Error::new(io::ErrorKind::TimedOut, why),
            () = stop.cancelled() => io::Error::new(io::ErrorKind::ConnectionAborted, "the server closes the connection"),
            () = self.send_given_back() => io::Error::other("the node is dropped"),
        }
    }

    /// Sends the permits that are given back, one after another. It ends with this node.
    async fn send_given_back(&self) {
        let mut given_back = self.given_back.lock().await;
        while let Some((id, number)) = given_back.recv().await {
            if let Err(error) = self.call::<()>(Call::GiveBack(id, number)).await {
                tracing::debug!("a permit was not given back, and ends by itself: {error}");
            }
        }
    }

    /// Begins a request.
    async fn request(&self) -> io::Result<(ResponseFuture, SendStream<Bytes>)> {
        let current = self.current.borrow().clone();
        let current = current.ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "no node is connected"))?;
        let mut requests = current.requests.ready().await.map_err(io::Error::other)?;
        let request = Request::builder()
            .method(Method::POST)
            .uri("https://node/call")
            .body(())
            .map_err(io::Error::other)?;
        requests.send_request(request, false).map_err(io::Error::other)
    }

    /// Sends a call that is answered by one frame, and reads that.
    async fn ask<T: DeserializeOwned>(&self, call: &Call) -> io::Result<T> {
        let exchange = async {
            let (response, mut send) = self.request().await?;
            send_last(&mut send, call).await?;
            let (answer, _) = read_first(&mut answered(response).await?, ANSWER_MAX).await?;
            Ok(serde_json::from_slice(&answer)?)
        };
        tokio::time::timeout(call.bound(), exchange).await?
    }

    /// Opens a stream, and sends a call over it.
    async fn open(&self, call: &Call) -> io::Result<LinkStream> {
        let (response, send) = self.request().await?;
        let mut stream = LinkStream::of_request(response, send);
        write_frame(&mut stream, call).await?;
        Ok(stream)
    }

    /// Sends a call and reads the first frame of the answer.
    async fn exchange<T: DeserializeOwned>(&self, call: &Call) -> io::Result<(T, LinkStream)> {
        let exchange = async {
            let mut stream = self.open(call).await?;
            let answer = read_frame(&mut stream, ANSWER_MAX).await?;
            Ok((answer, stream))
        };
        tokio::time::timeout(call.bound(), exchange).await?
    }

    async fn call<T: DeserializeOwned>(&self, call: Call) -> Result<T, NodeError> {
        let called = async {
            let _turn = turn(&self.calls).await?;
            self.ask(&call).await
        };
        let answered: io::Result<Result<T, NodeError>> = called.await;
        answered.map_err(|error| self.failure(&call, &error))?
    }

    async fn call_unless<T: DeserializeOwned>(&self, call: Call, cancel: CancellationToken) -> Result<T, NodeError> {
        let called = async {
            let _turn = turn(&self.calls).await?;
            let (mut answers, mut cancels) = tokio::io::split(self.open(&call).await?);
            let answer = read_frame(&mut answers, ANSWER_MAX);
            tokio::pin!(answer);
            tokio::select! {
                answer = &mut answer => return answer,
                () = cancel.cancelled() => cancels.write_u8(CANCEL).await?,
            }
            answer.await
        };
        let answered = tokio::time::timeout(call.bound(), called).await;
        let answered = answered.unwrap_or_else(|elapsed| Err(elapsed.into()));
        answered.unwrap_or_else(|error| Err(self.failure(&call, &error)))
    }

    /// The error of a call without an answer.
    fn failure(&self, call: &Call, error: &io::Error) -> NodeError {
        let failure = unreachable(error);
        if failure != NodeError::Away && matches!(call, Call::Pause(_) | Call::Resume(_)) {
            tracing::warn!("whether a sandbox was paused or resumed is unknown: {error}");
            self.over.cancel();
        }
        failure
    }

    /// Sends a call whose answer goes on as a stream of bytes.
    async fn export(&self, call: &Call) -> io::Result<Result<LayerStream, NodeError>> {
        let turn = turn(&self.streams).await?;
        let (answer, stream): (Result<(), NodeError>, _) = self.exchange(call).await?;
        Ok(answer.map(|()| LayerStream::new(Held::new(stream, turn))))
    }

    /// Sends a call that goes on as a stream of bytes.
    async fn import<T: DeserializeOwned>(&self, call: &Call, archive: LayerStream) -> io::Result<Result<T, NodeError>> {
        let _turn = turn(&self.streams).await?;
        let (mut answers, mut sent) = tokio::io::split(self.open(call).await?);
        let sending = async {
            tokio::io::copy_buf(&mut in_parts(archive), &mut sent).await?;
            sent.shutdown().await
        };
        let answer = read_frame(&mut answers, ANSWER_MAX);
        tokio::pin!(answer);
        tokio::select! {
            biased;
            // The node may have read enough.
            answer = &mut answer => return answer,
            sent = sending => if let Err(error) = sent {
                // It may have answered and read no more. Otherwise the archive cannot be read, and is cut, not ended.
                return tokio::time::timeout(LATE_ANSWER, answer).await.unwrap_or(Err(error));
            },
        }
        answer.await
    }

    async fn open_dial(&self, id: &SandboxId, port: u16) -> io::Result<Result<SandboxStream, DialError>> {
        let turn = turn(&self.streams).await?;
        let (answer, stream): (Result<(), DialError>, _) = self.exchange(&Call::Dial(id.clone(), port)).await?;
        Ok(answer.map(|()| SandboxStream::remote(Held::new(stream, turn))))
    }

    async fn open_events(&self) -> io::Result<Result<NodeEvents, NodeError>> {
        let mut current = self.current.subscribe();
        current.wait_for(Option::is_some).await.map_err(io::Error::other)?;
        drop(current);
        let (answer, stream): (Result<(), NodeError>, _) = self.exchange(&Call::Subscribe(self.ahead)).await?;
        Ok(answer.map(|()| follow(stream, self.ahead)))
    }
}

/// A connection is used until this is dropped, unless another one is by then.
struct Used<'a> {
    node: &'a RemoteNode,
    number: u64,
}

impl Drop for Used<'_> {
    fn drop(&mut self) {
        self.node.current.send_if_modified(|current| {
            let is_used = current.as_ref().is_some_and(|current| current.number == self.number);
            if is_used {
                *current = None;
                *self.node.lost.lock() = Instant::now();
            }
            is_used
        });
    }
}

/// Waits until fewer calls or streams are open.
async fn turn(semaphore: &Arc<Semaphore>) -> io::Result<OwnedSemaphorePermit> {
    let turn = tokio::time::timeout(TURN_BOUND, Arc::clone(semaphore).acquire_owned()).await;
    turn.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the node has too many calls"))?
        .map_err(io::Error::other)
}

/// The events that arrive on a stream. Asking for the next one says that the one before was used.
fn follow(stream: LinkStream, ahead: u32) -> NodeEvents {
    let ahead = ahead as usize;
    let (mut stream, mut said) = tokio::io::split(stream);
    let (events, mut received) = mpsc::channel::<NodeEvent>(ahead);
    let (used, mut to_say) = mpsc::channel::<()>(ahead + 1);
    let ignored = used.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Ok(text) = read_bytes(&mut stream, ANSWER_MAX).await {
            match serde_json::from_slice(&text) {
                Ok(event) => {
                    if events.send(event).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::debug!("an event of the node is ignored: {error}");
                    let _ = ignored.try_send(());
                }
            }
        }
    });
    tasks.spawn(async move {
        while let Some(()) = to_say.recv().await {
            if said.write_u8(USED).await.is_err() {
                return;
            }
        }
    });
    let mut has_one = false;
    NodeEvents::from_poll(move |cx| {
        // They end with the events.
        let _ = &tasks;
        if std::mem::take(&mut has_one) {
            // Never full, because no more are on their way; closed when no event will follow.
            let _ = used.try_send(());
        }
        let next = match received.try_recv() {
            Ok(event) => Poll::Ready(Some(event)),
            Err(_) => received.poll_recv(cx),
        };
        has_one = matches!(next, Poll::Ready(Some(_)));
        next
    })
}

fn unreachable(error: &io::Error) -> NodeError {
    if error.kind() == io::ErrorKind::NotConnected {
        return NodeError::Away;
    }
    NodeError::Unreachable(Failure::of(error))
}

impl NodeApi for RemoteNode {
    fn permit(&self, request: PermitRequest) -> NodeFuture<'_, Result<Result<(), NoCapacity>, NodeError>> {
        Box::pin(self.call(Call::Permit(Box::new(request))))
    }

    fn give_back(&self, id: &SandboxId, number: u64) {
        // Full only while there is no connection for long.
        let _ = self.give_back.try_send((id.clone(), number));
    }

    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(self.call(Call::Start(Box::new(request))))
    }

    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.call(Call::Kill(id.clone())))
    }

    fn freeze<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<FrozenSandbox, NodeError>> {
        Box::pin(self.call(Call::Freeze(id.clone())))
    }

    fn claim(&self, request: ClaimSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(self.call(Call::Claim(Box::new(request))))
    }

    fn pause(
        &self,
        request: PauseSandbox,
        cancel: CancellationToken,
    ) -> NodeFuture<'_, Result<PausedSandbox, NodeError>> {
        Box::pin(self.call_unless(Call::Pause(request), cancel))
    }

    fn resume(&self, request: ResumeSandbox) -> NodeFuture<'_, Result<ResumedSandbox, NodeError>> {
        Box::pin(self.call(Call::Resume(Box::new(request))))
    }

    fn commit<'a>(&'a self, id: &'a SandboxId, merge: bool) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(self.call(Call::Commit(id.clone(), merge)))
    }

    fn fork(&self, request: ForkSandbox) -> NodeFuture<'_, Result<Vec<Result<StartedSandbox, NodeError>>, NodeError>> {
        Box::pin(self.call(Call::Fork(Box::new(request))))
    }

    fn copy_disk<'a>(&'a self, id: &'a SandboxId, memory: bool) -> NodeFuture<'a, Result<CopiedDisk, NodeError>> {
        Box::pin(self.call(Call::CopyDisk(id.clone(), memory)))
    }

    fn commit_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        merge: bool,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<CommittedCopy, NodeError>> {
        Box::pin(self.call(Call::CommitCopy(disk.clone(), merge, memory.cloned())))
    }

    fn keep_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<Option<u64>, NodeError>> {
        Box::pin(self.call(Call::KeepCopy(disk.clone(), memory.cloned())))
    }

    fn memories(&self) -> NodeFuture<'_, Result<Vec<MemoryInfo>, NodeError>> {
        Box::pin(self.call(Call::Memories))
    }

    fn remove_memory<'a>(&'a self, build: &'a BuildId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.call(Call::RemoveMemory(build.clone())))
    }

    fn layers(&self) -> NodeFuture<'_, Result<Vec<LayerInfo>, NodeError>> {
        Box::pin(self.call(Call::Layers))
    }

    fn remove_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.call(Call::RemoveLayer(id.clone())))
    }

    fn export_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<LayerStream, NodeError>> {
        Box::pin(async move {
            let exported = self.export(&Call::ExportLayer(id.clone())).await;
            exported.map_err(|error| unreachable(&error))?
        })
    }

    fn import_layer<'a>(
        &'a self,
        id: &'a LayerId,
        bytes: u64,
        archive: LayerStream,
    ) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(async move {
            let imported = self.import(&Call::ImportLayer(id.clone(), bytes), archive).await;
            imported.map_err(|error| unreachable(&error))?
        })
    }

    fn pack_sandbox(&self, request: PackSandbox) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(async move {
            let packed = self.export(&Call::PackSandbox(Box::new(request))).await;
            packed.map_err(|error| unreachable(&error))?
        })
    }

    fn unpack_sandbox(
        &self,
        request: UnpackSandbox,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<UnpackedSandbox, NodeError>> {
        Box::pin(async move {
            let unpacked = self.import(&Call::UnpackSandbox(Box::new(request)), parcel).await;
            unpacked.map_err(|error| unreachable(&error))?
        })
    }

    fn pack_memory(&self, request: PackMemory) -> NodeFuture<'_, Result<LayerStream, NodeError>> {
        Box::pin(async move {
            let packed = self.export(&Call::PackMemory(Box::new(request))).await;
            packed.map_err(|error| unreachable(&error))?
        })
    }

    fn unpack_memory(
        &self,
        request: UnpackMemory,
        parcel: LayerStream,
    ) -> NodeFuture<'_, Result<MemoryInfo, NodeError>> {
        Box::pin(async move {
            let unpacked = self.import(&Call::UnpackMemory(Box::new(request)), parcel).await;
            unpacked.map_err(|error| unreachable(&error))?
        })
    }

    fn away_for(&self) -> Option<Duration> {
        let since = *self.lost.lock();
        (!self.is_connected()).then(|| since.elapsed())
    }

    fn base_version(&self) -> NodeFuture<'_, Result<BaseVersion, NodeError>> {
        Box::pin(self.call(Call::BaseVersion))
    }

    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async move {
            let dialed = self.open_dial(id, port).await;
            dialed.map_err(|_| DialError::Unreachable)?
        })
    }

    fn set_egress<'a>(&'a self, id: &'a SandboxId, policy: EgressPolicy) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.call(Call::SetEgress(id.clone(), policy)))
    }

    fn set_deadline<'a>(&'a self, id: &'a SandboxId, deadline: NodeDeadline) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.call(Call::SetDeadline(id.clone(), deadline)))
    }

    fn expired(&self) -> NodeFuture<'_, Result<Vec<ExpiredSandbox>, NodeError>> {
        Box::pin(self.call(Call::Expired))
    }

    fn forget_expired(&self, ids: Vec<SandboxId>) -> NodeFuture<'_, Result<(), NodeError>> {
        Box::pin(self.call(Call::ForgetExpired(ids)))
    }

    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<Adopted>, NodeError>> {
        Box::pin(self.call(Call::Reconcile(wanted)))
    }

    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>> {
        Box::pin(async move { self.open_events().await.map_err(|error| unreachable(&error))? })
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(self.call(Call::Samples))
    }

    fn capacity(&self) -> NodeFuture<'_, Result<HostReport, NodeError>> {
        Box::pin(self.call(Call::Capacity))
    }

    fn egress_counters(&self) -> NodeFuture<'_, Result<EgressCounters, NodeError>> {
        Box::pin(self.call(Call::EgressCounters))
    }
}
