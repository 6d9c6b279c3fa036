//! Routes requests from clients to ports of sandboxes.
//!
//! [`route::route`] determines the target of a request and [`Ingress::serve`] forwards it over HTTP/1.1, on a connection
//! that was kept after an earlier request to the same port ([`pool`]) or a new one; calls of gRPC over HTTP/2 ([`grpc`]).
//! Both directions are streamed at the same time and never collected, and upgrades are relayed as bytes.
//!
//! Invariants: when a sandbox ends, its streams are aborted (reset, or a body without its end) and never closed cleanly,
//! because clients take a clean end for "the command finished". Every failure before the head of the response is a 502, by
//! which a client can tell whether the sandbox has ended, the port is closed, or its server gave no answer ([`unanswered`]).

mod access;
pub mod answer;
pub mod client;
mod connection_limit;
mod connector;
mod dial;
mod failure;
mod fair;
mod flow;
mod grpc;
mod guest;
mod headers;
mod pool;
mod relay;
mod request_body;
mod response_body;
pub mod route;
mod tls;
mod unanswered;

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::ext::Protocol;
use model::id::SandboxId;
use protocol::agent;
use protocol::node::{DialError, NodeApi};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use access::is_token;
pub use access::{Access, TRAFFIC_TOKEN_HEADER};
use answer::Answer;
use client::ClientConnection;
use connector::{Connector, Inside};
pub use dial::Dial;
use dial::OfNode;
use failure::{Failure, closed, unanswered};
use flow::Flow;
use headers::Framing;
use pool::{Lease, Pool};
pub use request_body::{ClientBody, DelayedEnd, PendingUpload};
use request_body::{Discards, RequestBody};
use response_body::GuestBody;
pub use response_body::{BodyError, ResponseBody};
use route::Target;
pub use unanswered::Unanswered;

/// Forwards requests to sandboxes.
#[derive(Clone)]
pub struct Ingress {
    connector: Connector,
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
        Self::through(Arc::new(OfNode(node)), tasks, stop)
    }

    /// As [`Self::new`], with something else that connects.
    #[must_use]
    pub fn through(dial: Arc<dyn Dial>, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self {
            connector: Connector::new(dial, tasks, stop),
        }
    }

    /// Sets limits on connections into sandboxes, in total and per sandbox.
    #[must_use]
    pub fn limited(mut self, total: usize, per_sandbox: usize) -> Self {
        self.connector.limit(total, per_sandbox);
        self
    }

    /// Forwards `request` to its sandbox and returns the response, or an error response of the proxy. `find` returns the
    /// access rules of a running sandbox, and `None` for any other id.
    ///
    /// The client's connection is taken from the extensions of the request ([`ClientConnection`]); without it, an HTTP/1
    /// stream that has to be aborted is only dropped.
    pub async fn serve<F>(&self, mut request: Request<ClientBody>, target: &Target, find: F) -> Response<ResponseBody>
    where
        F: FnOnce(&SandboxId) -> Option<Arc<Access>>,
    {
        let access = match admit(&request, target, find) {
            Ok(access) => access,
            Err(answer) => return self.answer(request.headers(), &answer),
        };
        headers::remove_tokens(request.headers_mut(), &access, target.port);
        let masked = headers::masked_host(&access, target.port);
        let page = answer::wants_page(request.headers());
        let is_https = target.port != agent::PORT && access.https_ports.contains(&target.port);
        let inside = Inside {
            ending: access.ending.clone(),
            is_https,
        };
        match self.forward(request, target, inside, masked).await {
            Ok(response) => response,
            Err(answer) => answer.rendered(page).map(ResponseBody::local),
        }
    }

    /// The body of a request of a client. If the response is sent early, the rest of the body is read and discarded, on
    /// the runtime of the caller.
    #[must_use]
    pub fn body(&self, version: Version, headers: &HeaderMap, incoming: Incoming) -> ClientBody {
        let waits = version < Version::HTTP_2 && headers.contains_key(header::EXPECT);
        // A gRPC server that fails a call sends the status as the head of a response without a body, and its clients
        // expect the end of the stream in the same frame.
        let takes_early_end = grpc::is_call(version, headers);
        ClientBody::new(incoming, waits, takes_early_end, self.discards())
    }

    /// The body of a request that was read as a whole.
    #[must_use]
    pub fn body_of(&self, bytes: Bytes) -> ClientBody {
        ClientBody::of_bytes(bytes, self.discards())
    }

    fn discards(&self) -> Discards {
        Discards {
            runtime: Handle::current(),
            tasks: self.connector.tasks.clone(),
            stop: self.connector.stop.clone(),
        }
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
        inside: Inside,
        masked: Option<HeaderValue>,
    ) -> Result<Response<ResponseBody>, Answer> {
        let client = request.extensions().get::<ClientConnection>().cloned();
        let client_upgrade = hyper::upgrade::on(&mut request);
        // An HTTP/2 connection has other streams; an error of the body resets only this one.
        let cuttable = client.clone().filter(|_| request.version() < Version::HTTP_2);

        let (mut parts, incoming) = request.into_parts();
        // What stays are the names of the headers as the client wrote them, which go on as they are.
        parts.extensions.remove::<ClientConnection>();
        parts.extensions.remove::<Protocol>();
        let is_plain = target.port != agent::PORT && !inside.is_https;
        let is_call = is_plain && grpc::is_call(parts.version, &parts.headers);
        let framing = headers::to_guest(&mut parts, !incoming.is_end_stream(), target.port != agent::PORT);
        if let Some(host) = masked {
            headers::mask_host(&mut parts.headers, host);
        }
        let (body, gate) = RequestBody::new(incoming, framing.expects_continue);
        let upload = body.upload();
        let flow = Flow::new(cuttable, gate);
        let request = Request::from_parts(parts, body);
        let (mut response, lease) = if is_call {
            self.connector.call(request, target, &inside.ending).await?
        } else {
            self.exchange(request, target, &flow, framing, &inside).await?
        };
        let ending = inside.ending;
        let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if upgraded && !framing.upgrade {
            return Err(unanswered(Unanswered::Invalid, target));
        }
        let alive = || dial::alive_check(Arc::clone(&self.connector.node), target.id.clone(), ending.clone());
        let until_close = !is_call && headers::ends_with_connection(response.headers());
        // A server that responds before it has the whole request may not read the rest of it.
        let keeps = framing.keeps && upload.is_complete() && headers::keeps_connection(&response);
        headers::to_client(response.headers_mut(), upgraded);
        // The version belongs to the connection, not to the message; many simple servers inside use HTTP/1.0.
        *response.version_mut() = Version::HTTP_11;
        if upgraded {
            let guest_upgrade = hyper::upgrade::on(&mut response);
            lease.finish(&flow, false);
            self.connector.tasks.spawn(relay::relay(
                client_upgrade,
                guest_upgrade,
                client,
                ending.clone(),
                alive(),
                self.connector.stop.clone(),
            ));
            return Ok(response.map(|_| ResponseBody::local(Full::new(Bytes::new()))));
        }
        flow.stream();
        let alive = until_close.then(alive);
        Ok(response.map(|incoming| ResponseBody::guest(GuestBody::new(incoming, lease, keeps, flow, ending, alive))))
    }

    /// Sends the request and waits for the head of the response while the sandbox is running. A kept connection that the
    /// server has closed meanwhile is replaced by a new one, if the request was not sent or may be sent twice.
    async fn exchange(
        &self,
        mut request: Request<RequestBody>,
        target: &Target,
        flow: &Flow,
        framing: Framing,
        inside: &Inside,
    ) -> Result<(Response<Incoming>, Lease), Answer> {
        let ending = &inside.ending;
        let is_repeatable = !framing.has_body && request.method().is_idempotent();
        let reuses = !framing.upgrade && !framing.expects_continue;
        // Whether a connection to this server was kept, which speaks HTTP then.
        let mut has_spoken = false;
        if let Some(lease) = reuses
            .then(|| self.connector.pool.take(target, inside.is_https, is_repeatable))
            .flatten()
        {
            has_spoken = true;
            let copy = is_repeatable.then(|| without_body(&request));
            match self.send(lease, request, flow, ending).await {
                Ok(both) => return Ok(both),
                Err(failure) => {
                    let answer = failure.answer(target);
                    let again = failure.unsent.or(copy.filter(|_| failure.is_untouched));
                    request = again.ok_or(answer)?;
                    tracing::debug!("a kept connection was closed by the server");
                }
            }
        }
        let lease = self.connector.connect(target, inside).await?;
        let mut failure = match self.send(lease, request, flow, ending).await {
            Ok(both) => return Ok(both),
            Err(failure) => failure,
        };
        let is_silent = failure.error == DialError::PortClosed && failure.unanswered == Unanswered::Closed;
        let may_be_tls = is_silent && !has_spoken && !inside.is_https && target.port != agent::PORT;
        if may_be_tls && self.connector.speaks_tls(target, ending).await {
            failure.unanswered = Unanswered::Tls;
        }
        Err(failure.answer(target))
    }

    /// Sends the request on a connection and waits for the head of the response. If this future is dropped because the
    /// client disconnected, the connection is closed too.
    async fn send(
        &self,
        mut lease: Lease,
        mut request: Request<RequestBody>,
        flow: &Flow,
        ending: &CancellationToken,
    ) -> Result<(Response<Incoming>, Lease), Failure> {
        let pressing = lease.waiting();
        let is_new = lease.is_new();
        let Some(upstream) = lease.upstream() else {
            return Err(Failure::unsent(request));
        };
        let head = upstream.head.clone();
        upstream.link.set_flow(Some(flow.clone()));
        if !is_new {
            // Not ready only for the moment in which its task completes the previous exchange, unless the server does not
            // read what was sent to it.
            let is_ready = upstream.sender.is_ready() || {
                let ready = tokio::time::timeout(pool::PATIENCE, upstream.sender.ready());
                matches!(ready.await, Ok(Ok(())))
            };
            if !is_ready {
                return Err(Failure::unsent(request));
            }
            head.restart();
        }
        hyper::ext::on_informational(&mut request, {
            let (head, flow) = (head.clone(), flow.clone());
            move |response| {
                head.inform();
                if response.status() == StatusCode::CONTINUE {
                    flow.open_gate();
                }
            }
        });
        let response = upstream.sender.try_send_request(request);
        // The driver of the connection watches for the end of the sandbox, and then there is an error.
        let result = tokio::select! {
            biased;
            response = response => response,
            never = press(pressing) => match never {},
        };
        match result {
            Ok(response) => {
                head.complete();
                lease.answered();
                Ok((response, lease))
            }
            Err(mut failed) => Err(Failure {
                error: closed(failed.error(), ending),
                unanswered: Unanswered::after(&head),
                unsent: failed.take_message().filter(|_| !ending.is_cancelled()),
                is_untouched: head.is_untouched() && !ending.is_cancelled(),
            }),
        }
    }
}

/// A copy of a request that has no body.
fn without_body(request: &Request<RequestBody>) -> Request<RequestBody> {
    let mut copy = Request::new(RequestBody::default());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

/// Closes kept connections to the port once a new one has waited too long for its response.
async fn press(waiting: Option<(Pool, Target)>) -> Infallible {
    if let Some((pool, target)) = waiting {
        tokio::time::sleep(pool::PATIENCE).await;
        pool.close_idle(&target);
    }
    std::future::pending().await
}

/// The answer to a request that is never forwarded, whatever its sandbox.
#[must_use]
pub fn refusal<B>(request: &Request<B>, target: &Target) -> Option<Answer> {
    if target.port == agent::PORT && route::is_control_path(request.uri().path()) {
        return Some(Answer::Reserved(request.uri().path().to_owned()));
    }
    (*request.method() == Method::CONNECT).then(|| Answer::BadRequest("CONNECT is not supported".to_owned()))
}

/// Checks whether the request may be forwarded; otherwise returns the answer.
fn admit<F>(request: &Request<ClientBody>, target: &Target, find: F) -> Result<Arc<Access>, Answer>
where
    F: FnOnce(&SandboxId) -> Option<Arc<Access>>,
{
    if let Some(refusal) = refusal(request, target) {
        return Err(refusal);
    }
    let access = find(&target.id).ok_or_else(|| Answer::NotFound(target.id.clone()))?;
    // The agent checks its own token, which the traffic token must not replace.
    if let Some(token) = access.traffic_token.as_ref().filter(|_| target.port != agent::PORT) {
        let sent = request.headers().get(TRAFFIC_TOKEN_HEADER);
        let sent = sent.ok_or_else(|| Answer::TokenMissing(target.id.clone()))?;
        if !is_token(token, sent) {
            return Err(Answer::TokenWrong(target.id.clone()));
        }
    }
    Ok(access)
}
