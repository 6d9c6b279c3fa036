//! A node behind encoded byte streams: all communication of server and node passes through JSON frames, so that tests
//! fail for types that could not cross a network.
//!
//! Each call has its own connection, like each request of a simple HTTP client. A dial and a subscription keep theirs:
//! the response is followed by a stream into a sandbox, or by events. The next event is sent once the subscriber has
//! processed the one before.

use std::io;
use std::sync::Arc;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::network::EgressPolicy;
use protocol::node::{
    Adopted, ClaimSandbox, Committed, CommittedCopy, CopiedDisk, DialError, EgressCounters, Failure, ForkSandbox,
    FrozenSandbox, HostCapacity, LayerInfo, LayerStream, MemoryInfo, NodeApi, NodeError, NodeEvent, NodeEvents,
    NodeFuture, PauseSandbox, PausedSandbox, ResumeSandbox, ResumedSandbox, SandboxSample, SandboxStream, StartSandbox,
    StartedSandbox, Wanted,
};
use protocol::template_file::BaseVersion;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::relay::{Chunked, relay};

/// Buffer size of a connection in each direction, in bytes.
const CONNECTION_BYTES: usize = 64 * 1024;
/// Maximum number of connections that wait to be accepted.
const BACKLOG: usize = 64;
/// Maximum size of a frame, in bytes.
const FRAME_MAX: u32 = 16 << 20;
/// The byte that a subscriber writes to request the next event.
const NEXT: u8 = 1;
/// The byte that a caller writes to cancel its call.
const CANCEL: u8 = 2;

#[derive(Serialize, Deserialize)]
#[serde(tag = "call", content = "request", rename_all = "snake_case")]
enum Call {
    Start(Box<StartSandbox>),
    Kill(SandboxId),
    Freeze(SandboxId),
    Claim(Box<ClaimSandbox>),
    Pause(PauseSandbox),
    Resume(Box<ResumeSandbox>),
    Fork(Box<ForkSandbox>),
    Commit(SandboxId, bool),
    CopyDisk(SandboxId, bool),
    CommitCopy(DiskId, bool, Option<BuildId>),
    Memories,
    RemoveMemory(BuildId),
    Layers,
    RemoveLayer(LayerId),
    ExportLayer(LayerId),
    ImportLayer(LayerId, u64),
    BaseVersion,
    Dial(SandboxId, u16),
    SetEgress(SandboxId, EgressPolicy),
    Reconcile(Vec<Wanted>),
    Subscribe,
    Samples,
    Room,
    EgressCounters,
}

/// The client of a node that is reached over byte streams.
#[derive(Debug)]
pub struct RemoteNode {
    connections: mpsc::Sender<DuplexStream>,
}

impl RemoteNode {
    /// Serves `node` on a task of its own, and returns a client of it.
    pub fn of(node: Arc<dyn NodeApi>) -> Arc<Self> {
        let (connections, mut accepted) = mpsc::channel(BACKLOG);
        tokio::spawn(async move {
            while let Some(connection) = accepted.recv().await {
                // A call continues when its connection closes, as on a node of this process when its caller is
                // cancelled.
                tokio::spawn(serve(Arc::clone(&node), connection));
            }
        });
        Arc::new(Self { connections })
    }

    async fn connect(&self, call: &Call) -> io::Result<DuplexStream> {
        let (mut near, far) = tokio::io::duplex(CONNECTION_BYTES);
        let sent = self.connections.send(far).await;
        sent.map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        write_frame(&mut near, call).await?;
        Ok(near)
    }

    async fn exchange<T: DeserializeOwned>(&self, call: &Call) -> io::Result<(T, DuplexStream)> {
        let mut connection = self.connect(call).await?;
        let answer = read_frame(&mut connection).await?;
        Ok((answer, connection))
    }

    async fn call<T: DeserializeOwned>(&self, call: Call) -> Result<T, NodeError> {
        let answered: io::Result<(Result<T, NodeError>, _)> = self.exchange(&call).await;
        answered.map_err(|error| unreachable(&error))?.0
    }

    async fn call_unless<T: DeserializeOwned>(&self, call: Call, cancel: CancellationToken) -> Result<T, NodeError> {
        let called = async {
            let (mut answers, mut cancels) = tokio::io::split(self.connect(&call).await?);
            let answer = read_frame(&mut answers);
            tokio::pin!(answer);
            tokio::select! {
                answer = &mut answer => return answer,
                () = cancel.cancelled() => cancels.write_u8(CANCEL).await?,
            }
            answer.await
        };
        called.await.unwrap_or_else(|error| Err(unreachable(&error)))
    }
}

fn unreachable(error: &io::Error) -> NodeError {
    NodeError::Unreachable(Failure::of(error))
}

impl NodeApi for RemoteNode {
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
            let answered: io::Result<(Result<(), NodeError>, _)> = self.exchange(&Call::ExportLayer(id.clone())).await;
            let (answer, connection) = answered.map_err(|error| unreachable(&error))?;
            answer?;
            Ok(LayerStream::new(Chunked::new(connection)))
        })
    }

    fn import_layer<'a>(
        &'a self,
        id: &'a LayerId,
        bytes: u64,
        mut archive: LayerStream,
    ) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(async move {
            let sent = async {
                let mut connection = self.connect(&Call::ImportLayer(id.clone(), bytes)).await?;
                let mut chunked = Chunked::new(&mut connection);
                tokio::io::copy(&mut archive, &mut chunked).await?;
                chunked.shutdown().await?;
                read_frame(&mut connection).await
            };
            let answer: io::Result<Result<Committed, NodeError>> = sent.await;
            answer.map_err(|error| unreachable(&error))?
        })
    }

    fn base_version(&self) -> NodeFuture<'_, Result<BaseVersion, NodeError>> {
        Box::pin(self.call(Call::BaseVersion))
    }

    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async move {
            let answered: io::Result<(Result<(), DialError>, _)> = self.exchange(&Call::Dial(id.clone(), port)).await;
            let (answer, connection) = answered.map_err(|_| DialError::Unreachable)?;
            answer?;
            Ok(SandboxStream::remote(Chunked::new(connection)))
        })
    }

    fn set_egress<'a>(&'a self, id: &'a SandboxId, policy: EgressPolicy) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.call(Call::SetEgress(id.clone(), policy)))
    }

    fn reconcile(&self, wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<Adopted>, NodeError>> {
        Box::pin(self.call(Call::Reconcile(wanted)))
    }

    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>> {
        Box::pin(async move {
            let answered: io::Result<(Result<(), NodeError>, _)> = self.exchange(&Call::Subscribe).await;
            let (answer, connection) = answered.map_err(|error| unreachable(&error))?;
            answer?;
            // One event is read ahead, and requested only when the one before was processed.
            let (requests, mut requested) = mpsc::channel::<()>(1);
            let (events, mut received) = mpsc::channel::<NodeEvent>(1);
            tokio::spawn(async move {
                let mut connection = connection;
                while let Some(()) = requested.recv().await {
                    if connection.write_all(&[NEXT]).await.is_err() {
                        return;
                    }
                    let Ok(event) = read_frame(&mut connection).await else {
                        return;
                    };
                    if events.send(event).await.is_err() {
                        return;
                    }
                }
            });
            let mut is_requested = false;
            Ok(NodeEvents::from_poll(move |cx| {
                if !is_requested {
                    // Full means requested already, and closed that no event will follow.
                    let _ = requests.try_send(());
                    is_requested = true;
                }
                received.poll_recv(cx).map(|event| {
                    is_requested = false;
                    event
                })
            }))
        })
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(self.call(Call::Samples))
    }

    fn capacity(&self) -> NodeFuture<'_, Result<HostCapacity, NodeError>> {
        Box::pin(self.call(Call::Room))
    }

    fn egress_counters(&self) -> NodeFuture<'_, Result<EgressCounters, NodeError>> {
        Box::pin(self.call(Call::EgressCounters))
    }
}

async fn serve(node: Arc<dyn NodeApi>, mut connection: DuplexStream) {
    if let Err(error) = answer(node.as_ref(), &mut connection).await {
        tracing::debug!("connection to a node failed: {error}");
    }
}

async fn answer(node: &dyn NodeApi, connection: &mut DuplexStream) -> io::Result<()> {
    match read_frame(connection).await? {
        Call::Start(request) => write_frame(connection, &node.start(*request).await).await,
        Call::Kill(id) => write_frame(connection, &node.kill(&id).await).await,
        Call::Freeze(id) => write_frame(connection, &node.freeze(&id).await).await,
        Call::Claim(request) => write_frame(connection, &node.claim(*request).await).await,
        Call::Pause(request) => {
            let cancel = CancellationToken::new();
            let mut pausing = node.pause(request, cancel.clone());
            let paused = tokio::select! {
                paused = &mut pausing => paused,
                cancelled = connection.read_u8() => {
                    if cancelled.is_ok() {
                        cancel.cancel();
                    }
                    pausing.await
                }
            };
            write_frame(connection, &paused).await
        }
        Call::Resume(request) => write_frame(connection, &node.resume(*request).await).await,
        Call::Commit(id, merge) => write_frame(connection, &node.commit(&id, merge).await).await,
        Call::Fork(request) => write_frame(connection, &node.fork(*request).await).await,
        Call::CopyDisk(id, memory) => write_frame(connection, &node.copy_disk(&id, memory).await).await,
        Call::CommitCopy(disk, merge, memory) => {
            let committed = node.commit_copy(&disk, merge, memory.as_ref()).await;
            write_frame(connection, &committed).await
        }
        Call::Memories => write_frame(connection, &node.memories().await).await,
        Call::RemoveMemory(build) => write_frame(connection, &node.remove_memory(&build).await).await,
        Call::Layers => write_frame(connection, &node.layers().await).await,
        Call::RemoveLayer(id) => write_frame(connection, &node.remove_layer(&id).await).await,
        Call::BaseVersion => write_frame(connection, &node.base_version().await).await,
        Call::ExportLayer(id) => match node.export_layer(&id).await {
            Ok(mut archive) => {
                write_frame(connection, &Ok::<(), NodeError>(())).await?;
                let mut chunked = Chunked::new(connection);
                tokio::io::copy(&mut archive, &mut chunked).await?;
                chunked.shutdown().await
            }
            Err(error) => write_frame(connection, &Err::<(), _>(error)).await,
        },
        Call::ImportLayer(id, bytes) => {
            let (near, far) = tokio::io::duplex(CONNECTION_BYTES);
            let relay = async {
                let mut near = Chunked::new(near);
                tokio::io::copy(&mut Chunked::new(&mut *connection), &mut near).await?;
                near.shutdown().await
            };
            let archive = LayerStream::new(Chunked::new(far));
            let (_, imported) = tokio::join!(relay, node.import_layer(&id, bytes, archive));
            write_frame(connection, &imported).await
        }
        Call::SetEgress(id, policy) => write_frame(connection, &node.set_egress(&id, policy).await).await,
        Call::Reconcile(wanted) => write_frame(connection, &node.reconcile(wanted).await).await,
        Call::Samples => write_frame(connection, &node.samples().await).await,
        Call::Room => write_frame(connection, &node.capacity().await).await,
        Call::EgressCounters => write_frame(connection, &node.egress_counters().await).await,
        Call::Dial(id, port) => match node.dial(&id, port).await {
            Ok(stream) => {
                write_frame(connection, &Ok::<(), DialError>(())).await?;
                relay(Chunked::new(connection), stream).await
            }
            Err(error) => write_frame(connection, &Err::<(), _>(error)).await,
        },
        Call::Subscribe => match node.subscribe().await {
            Ok(events) => {
                write_frame(connection, &Ok::<(), NodeError>(())).await?;
                send_events(events, connection).await
            }
            Err(error) => write_frame(connection, &Err::<(), _>(error)).await,
        },
    }
}

async fn send_events(mut events: NodeEvents, connection: &mut DuplexStream) -> io::Result<()> {
    while connection.read_u8().await? == NEXT {
        let Some(event) = events.next().await else {
            return Ok(());
        };
        write_frame(connection, &event).await?;
    }
    Err(io::ErrorKind::InvalidData.into())
}

async fn write_frame(connection: &mut DuplexStream, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(value)?;
    connection
        .write_u32(u32::try_from(text.len()).map_err(io::Error::other)?)
        .await?;
    connection.write_all(&text).await
}

async fn read_frame<T: DeserializeOwned>(connection: &mut (impl AsyncRead + Unpin)) -> io::Result<T> {
    let length = connection.read_u32().await?;
    if length > FRAME_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length as usize];
    connection.read_exact(&mut text).await?;
    Ok(serde_json::from_slice(&text)?)
}
