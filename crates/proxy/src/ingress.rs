//! Routes requests from clients to ports of sandboxes.
//!
//! [`route::route`] determines the target of a request and [`Ingress::serve`] forwards it: a new HTTP/1.1 connection per
//! request, both directions streamed at the same time and never collected, upgrades relayed as bytes.
//!
//! Invariants: when a sandbox ends, its streams are aborted (reset, or a body without its end) and never closed cleanly,
//! because clients take a clean end for "the command finished". Every failure before the head of the response is one of
//! two 502 responses, by which a client can tell whether the sandbox has ended or only the port is closed.

pub mod answer;
mod body;
pub mod client;
mod connection_limit;
mod dial;
mod fair;
mod flow;
mod guest;
mod headers;
mod relay;
pub mod route;

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use model::id::SandboxId;
use model::sandbox::HostMask;
use protocol::agent;
use protocol::node::{DialError, NodeApi, SandboxStream};
use secrecy::SecretString;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use answer::Answer;
pub use body::{BodyError, ClientBody, DelayedEnd, PendingUpload, ResponseBody};
use body::{Discards, GuestBody, RequestBody};
use client::ClientConnection;
use connection_limit::{ConnectionLimiter, ConnectionPermit, LimitReached};
use flow::Flow;
use guest::{GuestStream, Head};
use route::Target;

/// Header that carries the traffic token of a sandbox that is not public.
pub const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";

/// Buffer limit of a connection into a sandbox, and with it of the head of a response, in bytes.
const GUEST_BUFFER_BYTES: usize = 128 * 1024;

/// Access rules for the traffic of a running sandbox.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The token required for every port except that of the agent; none when the sandbox is public.
    pub traffic_token: Option<SecretString>,
    /// The token of its agent, which must not be forwarded to other programs inside.
    pub access_token: Option<SecretString>,
    /// The host that requests have inside, except for the agent's port; none for the host of the client.
    pub mask_host: Option<HostMask>,
    /// Cancelled the moment the sandbox begins to end, before its processes are killed where that can be known: its
    /// streams are cut then.
    pub ending: CancellationToken,
}

/// Forwards requests to sandboxes.
#[derive(Clone)]
pub struct Ingress {
    node: Arc<dyn NodeApi>,
    tasks: TaskTracker,
    stop: CancellationToken,
    connections: ConnectionLimiter,
}

impl std::fmt::Debug for Ingress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ingress").finish_non_exhaustive()
    }
}

impl Ingress {
    /// An ingress that connects through `node` and runs its connections on `tasks`; all streams are aborted when `stop` is
    /// cancelled.
    #[must_use]
    pub fn new(node: Arc<dyn NodeApi>, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self {
            node,
            tasks,
            stop,
            connections: ConnectionLimiter::new(usize::MAX, usize::MAX),
        }
    }

    /// Sets limits on connections into sandboxes, in total and per sandbox.
    #[must_use]
    pub fn limited(mut self, total: usize, per_sandbox: usize) -> Self {
        self.connections = ConnectionLimiter::new(total, per_sandbox);
        self
    }

    /// Forwards `request` to its sandbox and returns the response, or an error response of the proxy. `find` returns the
    /// access rules of a running sandbox, and `None` for any other id.
    ///
    /// The client's connection is taken from the extensions of the request ([`ClientConnection`]); without it, an HTTP/1
    /// stream that has to be aborted is only dropped.
    pub async fn serve<F>(&self, mut request: Request<ClientBody>, target: &Target, find: F) -> Response<ResponseBody>
    where
        F: FnOnce(&SandboxId) -> Option<Access>,
    {
        let access = match admit(&request, target, find) {
            Ok(access) => access,
            Err(answer) => return self.answer(request.headers(), &answer),
        };
        headers::remove_tokens(request.headers_mut(), &access, target.port);
        let masked = headers::masked_host(&access, target.port);
        let permit = match self.connections.take(&target.id) {
            Ok(permit) => permit,
            Err(LimitReached::Total) => return self.answer(request.headers(), &Answer::Unavailable),
            Err(LimitReached::Sandbox(limit)) => {
                let id = target.id.clone();
                return self.answer(request.headers(), &Answer::TooManyConnections { id, limit });
            }
        };
        let ending = access.ending;
        let stream = match dial::dial(self.node.as_ref(), target, &ending).await {
            Ok(stream) => stream,
            Err(error) => return self.answer(request.headers(), &instead(error, target)),
        };
        let headers = request.headers().clone();
        match self.forward(request, target, (stream, permit), (ending, masked)).await {
            Ok(response) => response,
            Err(error) => instead(error, target).response(&headers).map(ResponseBody::local),
        }
    }

    /// The body of a request of a client. If the response is sent early, the rest of the body is read and discarded, on
    /// the runtime of the caller.
    #[must_use]
    pub fn body(&self, version: Version, headers: &HeaderMap, incoming: Incoming) -> ClientBody {
        let waits = version < Version::HTTP_2 && headers.contains_key(header::EXPECT);
        let discards = Discards {
            runtime: Handle::current(),
            tasks: self.tasks.clone(),
            stop: self.stop.clone(),
        };
        ClientBody::new(incoming, waits, discards)
    }

    /// The response for an [`Answer`] of the proxy.
    #[must_use]
    pub fn answer(&self, request: &HeaderMap, answer: &Answer) -> Response<ResponseBody> {
        answer.response(request).map(ResponseBody::local)
    }

    async fn forward(
        &self,
        mut request: Request<ClientBody>,
        target: &Target,
        (stream, permit): (SandboxStream, ConnectionPermit),
        (ending, masked): (CancellationToken, Option<HeaderValue>),
    ) -> Result<Response<ResponseBody>, DialError> {
        let client = request.extensions().get::<ClientConnection>().cloned();
        let client_upgrade = hyper::upgrade::on(&mut request);
        // An HTTP/2 connection has other streams; an error of the body resets only this one.
        let cuttable = client.clone().filter(|_| request.version() < Version::HTTP_2);

        let (mut parts, incoming) = request.into_parts();
        parts.extensions.clear();
        let framing = headers::to_guest(&mut parts, !incoming.is_end_stream(), target.port != agent::PORT);
        if let Some(host) = masked {
            headers::mask_host(&mut parts.headers, host);
        }
        let (body, gate) = RequestBody::new(incoming, framing.expects_continue);
        let mut request = Request::from_parts(parts, body);
        let head = Head::default();
        hyper::ext::on_informational(&mut request, {
            let (head, gate) = (head.clone(), gate.clone());
            move |response| {
                head.inform();
                if response.status() == StatusCode::CONTINUE
                    && let Some(gate) = &gate
                {
                    gate.cancel();
                }
            }
        });

        let flow = Flow::new(cuttable, gate);
        let stream = GuestStream::new(stream, head.clone(), permit);
        let exchange = self.exchange((stream, head), request, flow.clone(), ending.clone());
        let mut response = exchange.await?;
        let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if upgraded && !framing.upgrade {
            return Err(DialError::PortClosed);
        }
        let alive = || dial::alive_check(Arc::clone(&self.node), target.id.clone(), ending.clone());
        let until_close = headers::ends_with_connection(response.headers());
        headers::to_client(response.headers_mut(), upgraded);
        // The version belongs to the connection, not to the message; many simple servers inside use HTTP/1.0.
        *response.version_mut() = Version::HTTP_11;
        if upgraded {
            let guest_upgrade = hyper::upgrade::on(&mut response);
            flow.finish();
            self.tasks.spawn(relay::relay(
                client_upgrade,
                guest_upgrade,
                client,
                ending.clone(),
                alive(),
                self.stop.clone(),
            ));
            return Ok(response.map(|_| ResponseBody::local(Full::new(Bytes::new()))));
        }
        flow.stream();
        let alive = until_close.then(alive);
        Ok(response.map(|incoming| ResponseBody::guest(GuestBody::new(incoming, flow, ending, alive))))
    }

    /// Sends the request and waits for the head of the response while the sandbox is running.
    async fn exchange(
        &self,
        (stream, head): (GuestStream, Head),
        request: Request<RequestBody>,
        flow: Flow,
        ending: CancellationToken,
    ) -> Result<Response<Incoming>, DialError> {
        let closed = |error: hyper::Error, ending: &CancellationToken| {
            tracing::debug!(%error, "no response from the sandbox");
            if ending.is_cancelled() {
                DialError::Gone
            } else {
                DialError::PortClosed
            }
        };
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(GUEST_BUFFER_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| closed(error, &ending))?;
        let stop = self.stop.clone();
        self.tasks.spawn(flow::drive(
            connection.with_upgrades(),
            flow.clone(),
            ending.clone(),
            stop,
        ));
        // If this future is dropped because the client disconnected, the connection into the sandbox is closed too.
        let guard = flow.abort_on_drop();
        let response = tokio::select! {
            biased;
            () = ending.cancelled() => Err(DialError::Gone),
            () = head.stalled() => {
                tracing::debug!("timeout while reading the head of the response");
                Err(DialError::PortClosed)
            }
            response = sender.send_request(request) => response.map_err(|error| closed(error, &ending)),
        }?;
        head.complete();
        guard.release();
        Ok(response)
    }
}

/// The answer for a sandbox that could not be reached.
fn instead(error: DialError, target: &Target) -> Answer {
    match error {
        DialError::Gone => Answer::NotFound(target.id.clone()),
        DialError::PortClosed => Answer::PortClosed(target.id.clone(), target.port),
        DialError::Unreachable => Answer::Unavailable,
    }
}

/// Checks whether the request may be forwarded; otherwise returns the answer.
fn admit<F>(request: &Request<ClientBody>, target: &Target, find: F) -> Result<Access, Answer>
where
    F: FnOnce(&SandboxId) -> Option<Access>,
{
    if target.port == agent::PORT && route::is_control_path(request.uri().path()) {
        return Err(Answer::Reserved(request.uri().path().to_owned()));
    }
    if *request.method() == Method::CONNECT {
        return Err(Answer::BadRequest("CONNECT is not supported".to_owned()));
    }
    let access = find(&target.id).ok_or_else(|| Answer::NotFound(target.id.clone()))?;
    // The agent checks its own token, which the traffic token must not replace.
    if let Some(token) = access.traffic_token.as_ref().filter(|_| target.port != agent::PORT) {
        let sent = request.headers().get(TRAFFIC_TOKEN_HEADER);
        let sent = sent.ok_or_else(|| Answer::TokenMissing(target.id.clone()))?;
        if !headers::is(token, sent) {
            return Err(Answer::TokenWrong(target.id.clone()));
        }
    }
    Ok(access)
}
