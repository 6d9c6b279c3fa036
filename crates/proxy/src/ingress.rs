//! From a request outside to a port inside a sandbox.
//!
//! [`route::route`] says which sandbox a request means and [`Ingress::serve`] carries it there: a fresh HTTP/1.1
//! connection per request, both directions streamed at the same time and never collected, upgrades relayed as bytes.
//!
//! What must stay true: a stream of a sandbox that ends is cut (reset, or a body without its end) and never finished,
//! because clients read a clean end as "the command finished". And whatever goes wrong before the response's head is
//! one of two 502 answers, which tell a client whether the sandbox is gone or only its port closed.

pub mod answer;
mod body;
pub mod client;
mod dial;
mod flow;
mod headers;
mod relay;
pub mod route;

use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use model::id::SandboxId;
use protocol::agent;
use protocol::node::{DialError, NodeApi, SandboxStream};
use secrecy::{ExposeSecret, SecretString};
use subtle::ConstantTimeEq;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use answer::Answer;
pub use body::{BodyError, ResponseBody};
use body::{GuestBody, RequestBody};
use client::ClientConnection;
use flow::Flow;
use route::Target;

/// Header that carries the traffic token of a sandbox that is not public.
pub const TRAFFIC_TOKEN_HEADER: &str = "e2b-traffic-access-token";

/// What the platform knows of a running sandbox, as far as its traffic is concerned.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The token that requests to any port but the agent's must carry; none when the sandbox is public.
    pub traffic_token: Option<SecretString>,
}

/// Carries requests into sandboxes.
#[derive(Clone)]
pub struct Ingress {
    node: Arc<dyn NodeApi>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl std::fmt::Debug for Ingress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ingress").finish_non_exhaustive()
    }
}

impl Ingress {
    /// An ingress that dials through `node` and runs its connections on `tasks`; all streams are cut once `stop` is
    /// cancelled.
    #[must_use]
    pub fn new(node: Arc<dyn NodeApi>, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self { node, tasks, stop }
    }

    /// Answers `request` from the sandbox it is for, or in its place. `find` tells what is known of a sandbox that
    /// takes traffic, and `None` for any other.
    ///
    /// The client's connection is taken from the request's extensions ([`ClientConnection`]); without one an HTTP/1
    /// stream that must be cut is only dropped.
    pub async fn serve<F>(&self, request: Request<Incoming>, target: &Target, find: F) -> Response<ResponseBody>
    where
        F: FnOnce(&SandboxId) -> Option<Access>,
    {
        if let Some(answer) = refusal(&request, target, find) {
            return self.answer(request, &answer);
        }
        let dialled = match self.node.ending(&target.id) {
            Some(mut ending) => dial::dial(self.node.as_ref(), target, &mut ending)
                .await
                .map(|stream| (stream, ending)),
            None => Err(DialError::Gone),
        };
        let (stream, ending) = match dialled {
            Ok(dialled) => dialled,
            Err(error) => return self.answer(request, &instead(error, target)),
        };
        let headers = request.headers().clone();
        match self.forward(request, target, stream, ending).await {
            Ok(response) => response,
            Err(error) => instead(error, target).response(&headers).map(ResponseBody::own),
        }
    }

    /// Answers in place of a sandbox, and takes what is left of the request's body: a connection that is closed on
    /// unread bytes is reset, and the answer would be lost with it.
    pub fn answer(&self, request: Request<Incoming>, answer: &Answer) -> Response<ResponseBody> {
        let response = answer.response(request.headers()).map(ResponseBody::own);
        // Whoever waits to be told to send its body has not sent it, and HTTP/2 can end a stream alone.
        let sends = request.version() < Version::HTTP_2 && !request.headers().contains_key(header::EXPECT);
        let body = request.into_body();
        if sends && !body.is_end_stream() {
            let stop = self.stop.clone();
            self.tasks.spawn(async move {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = body::discard(body) => {}
                }
            });
        }
        response
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        target: &Target,
        stream: SandboxStream,
        ending: watch::Receiver<bool>,
    ) -> Result<Response<ResponseBody>, DialError> {
        let client = request.extensions().get::<ClientConnection>().cloned();
        let client_upgrade = hyper::upgrade::on(&mut request);
        // On HTTP/2 the connection carries other streams, and an error of the body resets this one alone.
        let cuttable = client.clone().filter(|_| request.version() < Version::HTTP_2);

        let (mut parts, incoming) = request.into_parts();
        parts.extensions.clear();
        let framing = headers::to_guest(&mut parts, !incoming.is_end_stream(), target.port != agent::PORT);
        let (body, gate) = RequestBody::new(incoming, framing.expects_continue);
        let mut request = Request::from_parts(parts, body);
        if let Some(gate) = gate.clone() {
            hyper::ext::on_informational(&mut request, move |response| {
                if response.status() == StatusCode::CONTINUE {
                    gate.cancel();
                }
            });
        }

        let flow = Flow::new(cuttable, gate);
        let mut response = self.exchange(stream, request, flow.clone(), ending.clone()).await?;
        let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if upgraded && !framing.upgrade {
            return Err(DialError::PortClosed);
        }
        let lives = || dial::lives(Arc::clone(&self.node), target.id.clone(), ending.clone());
        let until_close = headers::ends_with_connection(response.headers());
        headers::to_client(response.headers_mut(), upgraded);
        // The version is the connection's and not the message's; many simple servers inside speak HTTP/1.0.
        *response.version_mut() = Version::HTTP_11;
        if upgraded {
            let guest_upgrade = hyper::upgrade::on(&mut response);
            flow.finish();
            self.tasks.spawn(relay::relay(
                client_upgrade,
                guest_upgrade,
                client,
                ending.clone(),
                lives(),
                self.stop.clone(),
            ));
            return Ok(response.map(|_| ResponseBody::own(Full::new(Bytes::new()))));
        }
        flow.stream();
        let lives = until_close.then(lives);
        Ok(response.map(|incoming| ResponseBody::guest(GuestBody::new(incoming, flow, ending, lives))))
    }

    /// Sends the request and waits for the response's head, as long as the sandbox lives.
    async fn exchange(
        &self,
        stream: SandboxStream,
        request: Request<RequestBody>,
        flow: Flow,
        mut ending: watch::Receiver<bool>,
    ) -> Result<Response<Incoming>, DialError> {
        let closed = |error: hyper::Error, ending: &watch::Receiver<bool>| {
            tracing::debug!(%error, "no response from the sandbox");
            if dial::has_ended(ending) {
                DialError::Gone
            } else {
                DialError::PortClosed
            }
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| closed(error, &ending))?;
        let stop = self.stop.clone();
        self.tasks.spawn(flow::drive(
            connection.with_upgrades(),
            flow.clone(),
            ending.clone(),
            stop,
        ));
        // Whoever drops this call, because the client left, ends the connection into the sandbox too.
        let guard = flow.abort_on_drop();
        let response = tokio::select! {
            biased;
            () = dial::ended(&mut ending) => Err(DialError::Gone),
            response = sender.send_request(request) => response.map_err(|error| closed(error, &ending)),
        }?;
        guard.release();
        Ok(response)
    }
}

/// The answer in place of a sandbox that could not be reached.
fn instead(error: DialError, target: &Target) -> Answer {
    match error {
        DialError::Gone => Answer::NotFound(target.id.clone()),
        DialError::PortClosed => Answer::PortClosed(target.id.clone(), target.port),
    }
}

/// What can be answered without the sandbox.
fn refusal<F>(request: &Request<Incoming>, target: &Target, find: F) -> Option<Answer>
where
    F: FnOnce(&SandboxId) -> Option<Access>,
{
    if target.port == agent::PORT && route::is_control_path(request.uri().path()) {
        return Some(Answer::Reserved(request.uri().path().to_owned()));
    }
    if *request.method() == Method::CONNECT {
        return Some(Answer::BadRequest("tunnels into a sandbox are not offered".to_owned()));
    }
    let Some(access) = find(&target.id) else {
        return Some(Answer::NotFound(target.id.clone()));
    };
    // The agent has a gate of its own, which this token must not replace.
    let token = access.traffic_token.filter(|_| target.port != agent::PORT)?;
    let Some(sent) = request.headers().get(TRAFFIC_TOKEN_HEADER) else {
        return Some(Answer::TokenMissing(target.id.clone()));
    };
    let same: bool = token.expose_secret().as_bytes().ct_eq(sent.as_bytes()).into();
    (!same).then(|| Answer::TokenWrong(target.id.clone()))
}
