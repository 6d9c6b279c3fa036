//! The side of a link that is called: serves a node on a connection.
//!
//! A call goes on when its stream or the whole connection is lost, as on a node of the server's own process when its
//! caller is dropped. A stream into a sandbox ends with them.
//!
//! Streams into sandboxes stay on the runtime of the connection, and all other calls are carried out on another one. If that of the
//! connection has one thread, what arrives for a sandbox wakes no other thread on its way. Waking others took more time than the
//! rest: each request for a small file had woken two.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Response, StatusCode};
use protocol::node::{DialError, LayerStream, NodeApi, NodeError, NodeEvents, PauseSandbox};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::call::Call;
use crate::connection;
use crate::frame::{CALL_MAX, write_frame};
use crate::relay::relay;
use crate::stream::{LinkStream, in_parts, read_first, send_last};

/// How long a call may take to arrive once its stream is open.
const CALL_BOUND: Duration = Duration::from_secs(60);
/// Longest call that is decoded on the runtime of the connection, in bytes.
const DECODED_HERE: usize = 64 << 10;
/// The byte that a caller writes to cancel its call.
pub(crate) const CANCEL: u8 = 1;
/// The byte that a subscriber writes for each event that it has used.
pub(crate) const USED: u8 = 2;

/// What a peer has called for, which may outlive the connection that it came by.
#[derive(Debug, Clone)]
pub struct Calls {
    tasks: TaskTracker,
    runtime: Handle,
}

impl Calls {
    /// Calls that are carried out on `runtime`.
    #[must_use]
    pub fn on(runtime: Handle) -> Self {
        Self {
            tasks: TaskTracker::new(),
            runtime,
        }
    }

    /// Carries out a call.
    pub(crate) fn spawn<T>(&self, call: impl Future<Output = T> + Send + 'static) -> JoinHandle<T>
    where
        T: Send + 'static,
    {
        self.tasks.spawn_on(call, &self.runtime)
    }

    /// Waits until all of them have ended. None may arrive any more.
    pub async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Serves `node` on a connection until that is lost, and returns why.
pub async fn serve<S>(node: Arc<dyn NodeApi>, connection: S, calls: &Calls) -> io::Error
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut connection = match connection::called().handshake(connection).await {
        Ok(connection) => connection,
        Err(error) => return io::Error::other(error),
    };
    let watch = connection::watch(connection.ping_pong());
    let accepting = async {
        loop {
            let (request, respond) = match connection.accept().await {
                None => return io::Error::new(io::ErrorKind::ConnectionAborted, "the server closed the connection"),
                Some(Err(error)) => return io::Error::other(error),
                Some(Ok(accepted)) => accepted,
            };
            let (node, carried_out) = (Arc::clone(&node), calls.clone());
            calls.tasks.spawn(async move {
                if let Err(error) = answer(node, request.into_body(), respond, carried_out).await {
                    tracing::debug!("a call of the server was cut: {error}");
                }
            });
        }
    };
    tokio::select! {
        error = accepting => error,
        why = watch => io::Error::new(io::ErrorKind::TimedOut, why),
    }
}

/// A call that has arrived and is not answered.
struct Caller {
    body: RecvStream,
    /// What has arrived after the call.
    rest: BytesMut,
    respond: SendResponse<Bytes>,
}

impl Caller {
    fn begin(&mut self) -> io::Result<SendStream<Bytes>> {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::OK;
        // Fails only if the stream was reset meanwhile.
        self.respond.send_response(response, false).map_err(io::Error::other)
    }

    /// Sends the answer, which ends the stream. Its headers wait for it, so that all is one write and wakes the server once.
    async fn finish(mut self, answer: &impl Serialize) -> io::Result<()> {
        send_last(&mut self.begin()?, answer).await
    }

    /// Goes on as a stream.
    fn into_stream(mut self) -> io::Result<LinkStream> {
        let send = self.begin()?;
        Ok(LinkStream::of_response(self.rest, self.body, send))
    }
}

async fn answer(
    node: Arc<dyn NodeApi>,
    mut body: RecvStream,
    respond: SendResponse<Bytes>,
    calls: Calls,
) -> io::Result<()> {
    let (text, rest) = tokio::time::timeout(CALL_BOUND, read_first(&mut body, CALL_MAX)).await??;
    let caller = Caller { body, rest, respond };
    // A large one takes milliseconds, in which nothing of any sandbox would pass.
    let decoded = if text.len() <= DECODED_HERE {
        serde_json::from_slice(&text)
    } else {
        let decoding = calls.spawn(async move { serde_json::from_slice(&text) });
        decoding.await.map_err(io::Error::other)?
    };
    let call = match decoded {
        Ok(call) => call,
        Err(error) => {
            let why = format!("this node does not understand the request: {error}");
            return caller.finish(&Err::<(), _>(NodeError::Unsupported(why))).await;
        }
    };
    if matches!(call, Call::Dial(..)) {
        return carry_out(node.as_ref(), call, caller).await;
    }
    let carrying_out = async move { carry_out(node.as_ref(), call, caller).await };
    let carried_out = calls.spawn(carrying_out).await;
    carried_out.unwrap_or_else(|error| Err(io::Error::other(error)))
}

async fn carry_out(node: &dyn NodeApi, call: Call, caller: Caller) -> io::Result<()> {
    match call {
        Call::Permit(request) => caller.finish(&node.permit(*request).await).await,
        Call::GiveBack(id, number) => {
            node.give_back(&id, number);
            caller.finish(&Ok::<(), NodeError>(())).await
        }
        Call::Start(request) => caller.finish(&node.start(*request).await).await,
        Call::Kill(id) => caller.finish(&node.kill(&id).await).await,
        Call::Freeze(id) => caller.finish(&node.freeze(&id).await).await,
        Call::Claim(request) => caller.finish(&node.claim(*request).await).await,
        Call::Pause(request) => pause(node, request, caller.into_stream()?).await,
        Call::Resume(request) => caller.finish(&node.resume(*request).await).await,
        Call::Commit(id, merge) => caller.finish(&node.commit(&id, merge).await).await,
        Call::Fork(request) => caller.finish(&node.fork(*request).await).await,
        Call::CopyDisk(id, memory) => caller.finish(&node.copy_disk(&id, memory).await).await,
        Call::CommitCopy(disk, merge, memory) => {
            let committed = node.commit_copy(&disk, merge, memory.as_ref()).await;
            caller.finish(&committed).await
        }
        Call::KeepCopy(disk, memory) => caller.finish(&node.keep_copy(&disk, memory.as_ref()).await).await,
        Call::Memories => caller.finish(&node.memories().await).await,
        Call::RemoveMemory(build) => caller.finish(&node.remove_memory(&build).await).await,
        Call::Layers => caller.finish(&node.layers().await).await,
        Call::RemoveLayer(id) => caller.finish(&node.remove_layer(&id).await).await,
        Call::ExportLayer(id) => export(node.export_layer(&id).await, caller).await,
        Call::ImportLayer(id, bytes) => {
            let (archive, answers) = tokio::io::split(caller.into_stream()?);
            let imported = node.import_layer(&id, bytes, LayerStream::new(archive)).await;
            end(answers, &imported).await
        }
        Call::PackSandbox(request) => export(node.pack_sandbox(*request).await, caller).await,
        Call::UnpackSandbox(request) => {
            let (parcel, answers) = tokio::io::split(caller.into_stream()?);
            let unpacked = node.unpack_sandbox(*request, LayerStream::new(parcel)).await;
            end(answers, &unpacked).await
        }
        Call::PackMemory(request) => export(node.pack_memory(*request).await, caller).await,
        Call::UnpackMemory(request) => {
            let (parcel, answers) = tokio::io::split(caller.into_stream()?);
            let unpacked = node.unpack_memory(*request, LayerStream::new(parcel)).await;
            end(answers, &unpacked).await
        }
        Call::BaseVersion => caller.finish(&node.base_version().await).await,
        Call::Dial(id, port) => match node.dial(&id, port).await {
            Ok(guest) => {
                let mut stream = caller.into_stream()?;
                write_frame(&mut stream, &Ok::<(), DialError>(())).await?;
                relay(stream, guest).await
            }
            Err(error) => caller.finish(&Err::<(), _>(error)).await,
        },
        Call::SetEgress(id, policy) => caller.finish(&node.set_egress(&id, policy).await).await,
        Call::SetDeadline(id, deadline) => caller.finish(&node.set_deadline(&id, deadline).await).await,
        Call::Expired => caller.finish(&node.expired().await).await,
        Call::ForgetExpired(ids) => caller.finish(&node.forget_expired(ids).await).await,
        Call::Reconcile(wanted) => caller.finish(&node.reconcile(wanted).await).await,
        Call::Subscribe(ahead) => match node.subscribe().await {
            Ok(events) => {
                let mut stream = caller.into_stream()?;
                write_frame(&mut stream, &Ok::<(), NodeError>(())).await?;
                send_events(events, stream, ahead).await
            }
            Err(error) => caller.finish(&Err::<(), _>(error)).await,
        },
        Call::Samples => caller.finish(&node.samples().await).await,
        Call::Capacity => caller.finish(&node.capacity().await).await,
        Call::EgressCounters => caller.finish(&node.egress_counters().await).await,
    }
}

/// Sends an answer, and ends its stream.
async fn end(mut stream: impl AsyncWrite + Unpin, answer: &impl Serialize) -> io::Result<()> {
    write_frame(&mut stream, answer).await?;
    stream.shutdown().await
}

async fn pause(node: &dyn NodeApi, request: PauseSandbox, mut stream: LinkStream) -> io::Result<()> {
    let cancel = CancellationToken::new();
    let mut pausing = node.pause(request, cancel.clone());
    let paused = tokio::select! {
        paused = &mut pausing => paused,
        cancelled = stream.read_u8() => {
            // A caller that is gone has not cancelled.
            if cancelled.is_ok_and(|byte| byte == CANCEL) {
                cancel.cancel();
            }
            pausing.await
        }
    };
    end(stream, &paused).await
}

async fn export(exported: Result<LayerStream, NodeError>, caller: Caller) -> io::Result<()> {
    match exported {
        Ok(archive) => {
            let mut stream = caller.into_stream()?;
            write_frame(&mut stream, &Ok::<(), NodeError>(())).await?;
            // An archive that is incomplete is not ended, but cut.
            tokio::io::copy_buf(&mut in_parts(archive), &mut stream).await?;
            stream.shutdown().await
        }
        Err(error) => caller.finish(&Err::<(), _>(error)).await,
    }
}

/// Sends events, of which `ahead` may not be used yet. The others wait on the node, for whoever subscribes next.
async fn send_events(mut events: NodeEvents, stream: LinkStream, ahead: u32) -> io::Result<()> {
    let (mut used, mut stream) = tokio::io::split(stream);
    let mut sent = 0;
    loop {
        tokio::select! {
            event = events.next(), if sent < ahead.max(1) => match event {
                Some(event) => {
                    write_frame(&mut stream, &event).await?;
                    sent += 1;
                }
                None => return stream.shutdown().await,
            },
            // A subscriber that has ended or was cut gets nothing more.
            one = used.read_u8() => match one {
                Ok(_) => sent = sent.saturating_sub(1),
                Err(_) => return Ok(()),
            },
        }
    }
}
