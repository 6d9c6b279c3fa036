//! Requests about sandboxes whose node another server serves: forwarding them there, and answering those that come from there.
//!
//! A forwarded request is what the client has sent, over HTTP/1.1, or HTTP/2 for a call of gRPC, on a stream between the two
//! servers ([`link::ServerLink`]). The server that has the sandbox checks credentials, limits and tokens, as if the client had
//! come to it; this one checks nothing and changes nothing. One header, [`HEAD`], says what the request is about and who the
//! client is. It is believed on such a stream alone, which only a server can open, and whatever a client has sent under its name
//! is replaced. A request that arrived on one is never forwarded again.
//!
//! Both servers stream in both directions and hold no more than a window of a stream. What ends a forwarded request: its client,
//! the sandbox, either server. Opening a stream takes 5 seconds at most, and a server that does not answer pings for 15 is given
//! up with all that waits for it.

mod paths;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::IntoResponse as _;
use bytes::Bytes;
use formats::percent::{self, Plus};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use link::ServerLink;
use model::id::{SandboxId, TeamId};
use model::limits::BODY_MAX_BYTES;
use proxy::ingress::answer::Answer;
use proxy::ingress::route::Target;
use proxy::ingress::{ClientBody, Ingress, refusal};
use tokio::sync::OwnedSemaphorePermit;
use tower::ServiceExt as _;

use self::paths::{creates, resumes, sandbox_in, template_worked_on};
use super::Gateway;
use super::forwarding::to_others::API;
use super::forwarding::{
    ANSWERED, Forwarded, Forwarding, HEAD, HERE, Head, HeadOwner, NOT_HERE, is_of_template_file, path_of,
};
use crate::api::{ApiError, SIGNED_MAX_BYTES, Unplaced, credential, find_own_template, read_limited};
use crate::authentication::{Owner, SessionOwner};
use crate::operator::FromServer;
use crate::others::Location;
use crate::peers::ClientPeer;

/// How many servers are asked to create a sandbox at most, besides this one, and until when after the request. One that is not
/// reached takes half of that.
const ASKED: (usize, Duration) = (3, Duration::from_secs(10));

/// What became of a create request at another server.
enum Asked {
    /// The server has answered, with a sandbox or without.
    Answered(Response<Body>),
    /// The server has no room, or was not reached, which its answer says.
    Refused(Option<Response<Body>>),
    /// The server has not answered.
    Unknown,
}

/// The right to hold the body of a request here, before that is answered.
struct Holding {
    /// How long it may be, in bytes, which is as long as where it is answered. Clients of JavaScript do not say it before.
    most: usize,
    _turn: Option<OwnedSemaphorePermit>,
}

/// A request whose body was read, so that several servers can be asked.
struct Repeatable {
    parts: Parts,
    body: Bytes,
}

impl Repeatable {
    async fn read(request: Request<ClientBody>, holding: &Holding) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let body = read_limited(&parts.headers, Body::new(body), holding.most).await?;
        Ok(Self {
            parts,
            body: body.into(),
        })
    }

    /// The request as it came.
    fn again(&self, ingress: &Ingress) -> Request<ClientBody> {
        Request::from_parts(self.parts.clone(), ingress.body_of(self.body.clone()))
    }
}

impl Gateway {
    /// Answers a request about a sandbox on a node of another server; gives it back where there is none.
    pub(super) async fn forward_traffic(
        &self,
        request: Request<ClientBody>,
        target: &Target,
        client: ClientPeer,
    ) -> Result<Response<Body>, Request<ClientBody>> {
        let Some(forwarding) = self.forwarding.get() else {
            return Err(request);
        };
        // What is refused whoever has the sandbox is refused here.
        if self.services.registry.get(&target.id).is_some() || refusal(&request, target).is_some() {
            return Err(request);
        }
        match forwarding.is_at_another(&target.id, client).await {
            Location::Here => return Err(request),
            // It may be brought to a node of this server.
            Location::Away if self.is_on_absent_node(&target.id) => return Err(request),
            Location::Away => return Ok(self.proxy_answer(&request, &Answer::Unavailable)),
            Location::At(_) => {}
        }
        let head = Head::of(Some(target.id.clone()), Some(target.port), client);
        let wants = request.headers().clone();
        let (method, port) = (request.method().clone(), target.port);
        let response = match forwarding.send(request, &head, target, &forwarding.traffic).await {
            Forwarded::Answered(response) => response,
            // A limit of this server.
            Forwarded::Unsent(response) if response.status() == StatusCode::TOO_MANY_REQUESTS => response,
            other @ (Forwarded::NotThere(_) | Forwarded::Unsent(_) | Forwarded::Lost) => {
                if let Forwarded::NotThere(_) = &other {
                    forwarding.others.forget(&target.id);
                }
                drop(other);
                let answer = if self.has_ended(forwarding, &target.id).await {
                    Answer::NotFound(target.id.clone())
                } else {
                    Answer::Unavailable
                };
                self.ingress.answer(&wants, &answer).map(Body::new)
            }
        };
        let status = response.status().as_u16();
        tracing::debug!(sandbox.id = %target.id, port, %method, status, "sandbox traffic was forwarded");
        Ok(response)
    }

    /// Answers a request to the API about a sandbox on a node of another server; gives it back where there is none.
    pub(super) async fn forward_api(
        &self,
        request: Request<ClientBody>,
    ) -> Result<Response<Body>, Request<ClientBody>> {
        let Some(forwarding) = self.forwarding.get().filter(|_| self.is_ready()) else {
            return Err(request);
        };
        let Some(client) = client_of(&request) else {
            return Err(request);
        };
        // A server that is being stopped waits for what it has forwarded as for what it answers itself.
        let _answering = self.requests.token();
        if creates(request.method(), request.uri().path()) && forwarding.others.is_several() {
            let Some(holding) = self.may_hold_body(&request).await else {
                // It is refused here, and what it sends is not read.
                return Err(request);
            };
            return Ok(Box::pin(self.create_anywhere(forwarding, request, client, holding)).await);
        }
        if let Some(template) = template_worked_on(request.method(), request.uri().path())
            && forwarding.others.is_several()
            && let id = self.id_of_template(template, &request).await
            && let Some(link) = forwarding.others.home_of(&id)
        {
            return Ok(Box::pin(self.build_at_home(forwarding, request, client, &link)).await);
        }
        let Some(id) = sandbox_in(request.uri().path()) else {
            return Err(request);
        };
        if self.services.registry.get(&id).is_some() {
            return Err(request);
        }
        let link = match forwarding.is_at_another(&id, client).await {
            // A server that is gone may have had the node, which is at none then.
            Location::At(link)
                if self.services.sandboxes.parcels.is_some()
                    && resumes(request.method(), request.uri().path())
                    && !forwarding.others.is_there(link.other()) =>
            {
                return Err(request);
            }
            Location::At(link) => link,
            Location::Away
                if resumes(request.method(), request.uri().path())
                    && forwarding.others.is_several()
                    && self.services.sandboxes.parcels.is_some() =>
            {
                let Some(holding) = self.may_hold_body(&request).await else {
                    // As where there is no other server.
                    return Err(request);
                };
                return Ok(Box::pin(self.resume_anywhere(forwarding, request, client, holding)).await);
            }
            Location::Here | Location::Away => return Err(request),
        };
        let mut head = Head::of(Some(id.clone()), None, client);
        head.owner = owner_of(&request);
        let target = Target { id, port: API };
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let response = match forwarding.send(request, &head, &target, &forwarding.api).await {
            Forwarded::Answered(response) => response,
            Forwarded::NotThere(response) => {
                forwarding.others.forget(&target.id);
                response
            }
            Forwarded::Unsent(_) | Forwarded::Lost => {
                let error = if self.has_ended(forwarding, &target.id).await {
                    ApiError::no_sandbox(&target.id)
                } else {
                    ApiError::other_server_away(&target.id)
                };
                error.into_response()
            }
        };
        let status = response.status().as_u16();
        tracing::info!(server.id = %link.other(), %method, path, status, "forwarded");
        Ok(response)
    }

    /// Whether the body of a request that creates or resumes a sandbox may be held before the request is answered: its client is
    /// known, or few others do that sign theirs, whose signature is that of the body.
    async fn may_hold_body(&self, request: &Request<ClientBody>) -> Option<Holding> {
        if self.known_team(request).await.is_some() {
            return Some(Holding {
                most: BODY_MAX_BYTES,
                _turn: None,
            });
        }
        self.services.signatures.token(request.headers())?.ok()?;
        let turn = Arc::clone(&self.unknown_bodies).try_acquire_owned().ok()?;
        Some(Holding {
            most: SIGNED_MAX_BYTES,
            _turn: Some(turn),
        })
    }

    /// The team that a request has the credential of; none without a valid one, and where that is not known.
    async fn known_team(&self, request: &Request<ClientBody>) -> Option<TeamId> {
        if let Some(SessionOwner(owner)) = request.extensions().get() {
            return Some(owner.team.clone());
        }
        let credential = credential(request.headers()).ok()?;
        let owner = self.services.authenticator.owner(&credential).await.ok()?;
        Some(owner.team)
    }

    /// The id of the template that a path names, by which its server is found: a template has many names and one id. What is no
    /// name of a template of the client's team stays as it is, such as the id in an address for an upload, which needs no key.
    async fn id_of_template(&self, text: &str, request: &Request<ClientBody>) -> String {
        let Some(team) = self.known_team(request).await else {
            return text.to_owned();
        };
        let name = percent::decode(text, Plus::Plus).unwrap_or_else(|_| text.to_owned());
        let found = find_own_template(&name, &team, &self.services.store).await;
        found.map_or(name, |row| row.id.to_string())
    }

    /// Whether a sandbox is gone that was forwarded to without success: no server has it.
    async fn has_ended(&self, forwarding: &Forwarding, id: &SandboxId) -> bool {
        let is_nowhere = matches!(forwarding.others.find(id, None).await, Location::Here);
        is_nowhere && self.services.registry.get(id).is_none()
    }

    /// Has the server answer that builds a template, if it is another one: it has the files and the layers of earlier builds.
    async fn build_at_home(
        &self,
        forwarding: &Forwarding,
        request: Request<ClientBody>,
        client: ClientPeer,
        link: &Arc<ServerLink>,
    ) -> Response<Body> {
        match self.ask(forwarding, request, client, link).await {
            Forwarded::Answered(response) | Forwarded::NotThere(response) => response,
            Forwarded::Unsent(_) | Forwarded::Lost => ApiError::build_server_away().into_response(),
        }
    }

    /// Creates a sandbox on a node of this server, or of another one if those here have no room or clearly less. What is known of
    /// others is old, so it decides who is asked first, and a server refuses what those that were asked have refused.
    async fn create_anywhere(
        &self,
        forwarding: &Forwarding,
        request: Request<ClientBody>,
        client: ClientPeer,
        holding: Holding,
    ) -> Response<Body> {
        let request = match Repeatable::read(request, &holding).await {
            Ok(request) => request,
            Err(error) => return error.into_response(),
        };
        let until = Instant::now() + ASKED.1;
        let own = self.services.sandboxes.nodes.room();
        let mut others = forwarding.others.best_first().into_iter().take(ASKED.0).peekable();
        let mut refused_there = None;
        if let Some((_, link)) = others.next_if(|(room, _)| room.is_clearly_better(own)) {
            match self.create_at(forwarding, &request, client, &link).await {
                Asked::Answered(response) => return response,
                Asked::Refused(answer) => refused_there = answer,
                Asked::Unknown => return ApiError::create_unknown().into_response(),
            }
        }
        // What is told is what this server says, unless another one can do it.
        let refused = self.answer_from_api_here(request.again(&self.ingress)).await;
        if refused.extensions().get::<Unplaced>().is_none() {
            return refused;
        }
        for (_, link) in others.take_while(|_| Instant::now() < until) {
            match self.create_at(forwarding, &request, client, &link).await {
                Asked::Answered(response) => return response,
                Asked::Refused(answer) => refused_there = refused_there.or(answer),
                Asked::Unknown => return ApiError::create_unknown().into_response(),
            }
        }
        // A server without nodes does not know why those of others refuse.
        match refused_there {
            Some(why) if !self.services.sandboxes.nodes.has_any() => why,
            _ => refused,
        }
    }

    /// Resumes a sandbox on a node of this server, or of another one if those here cannot have it: its own node is at none.
    async fn resume_anywhere(
        &self,
        forwarding: &Forwarding,
        request: Request<ClientBody>,
        client: ClientPeer,
        holding: Holding,
    ) -> Response<Body> {
        let request = match Repeatable::read(request, &holding).await {
            Ok(request) => request,
            Err(error) => return error.into_response(),
        };
        let until = Instant::now() + ASKED.1;
        let refused = self.answer_from_api_here(request.again(&self.ingress)).await;
        if refused.status() != StatusCode::SERVICE_UNAVAILABLE {
            return refused;
        }
        let others = forwarding.others.best_first().into_iter().take(ASKED.0);
        for (_, link) in others.take_while(|_| Instant::now() < until) {
            let asked = self.ask(forwarding, request.again(&self.ingress), client, &link);
            match asked.await {
                Forwarded::Answered(response) if response.status() != StatusCode::SERVICE_UNAVAILABLE => {
                    return response;
                }
                Forwarded::Answered(_) | Forwarded::NotThere(_) | Forwarded::Unsent(_) => {}
                // It may be resumed. To try again shows that.
                Forwarded::Lost => return refused,
            }
        }
        refused
    }

    /// Has another server create a sandbox.
    async fn create_at(
        &self,
        forwarding: &Forwarding,
        request: &Repeatable,
        client: ClientPeer,
        link: &Arc<ServerLink>,
    ) -> Asked {
        let request = request.again(&self.ingress);
        match self.ask(forwarding, request, client, link).await {
            Forwarded::Answered(response) => {
                let status = response.status().as_u16();
                tracing::info!(server.id = %link.other(), status, "a create request was forwarded");
                Asked::Answered(response)
            }
            Forwarded::NotThere(response) => Asked::Refused(Some(response)),
            Forwarded::Unsent(_) => Asked::Refused(None),
            Forwarded::Lost => Asked::Unknown,
        }
    }

    /// Sends a request of a client that is about no sandbox to a server.
    async fn ask(
        &self,
        forwarding: &Forwarding,
        request: Request<ClientBody>,
        client: ClientPeer,
        link: &Arc<ServerLink>,
    ) -> Forwarded {
        let head = Head {
            owner: owner_of(&request),
            ..Head::of(None, None, client)
        };
        forwarding.send_to(link, request, &head, &forwarding.api).await
    }

    /// Answers a request that another server has forwarded.
    pub(super) async fn answer_forwarded(&self, request: Request<Incoming>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let head = parts.headers.remove(HEAD);
        let head: Option<Head> = head.and_then(|head| serde_json::from_slice(head.as_bytes()).ok());
        let body = self.ingress.body(parts.version, &parts.headers, body);
        let Some(head) = head else {
            return self
                .ingress
                .answer(
                    &parts.headers,
                    &Answer::BadRequest("the request was not forwarded by a server".to_owned()),
                )
                .map(Body::new);
        };
        if head.is_fork {
            return self.answer_fork(Request::from_parts(parts, body)).await;
        }
        if head.is_operator {
            return self.answer_operator(Request::from_parts(parts, body), &head).await;
        }
        let client = ClientPeer {
            peer: head.peer,
            is_loopback: head.is_loopback,
            is_tls: head.is_tls,
        };
        parts.extensions.insert(client);
        if let Some(HeadOwner { credential, team, user }) = head.owner {
            parts.extensions.insert(SessionOwner(Owner { credential, team, user }));
        }
        let request = Request::from_parts(parts, body);
        let is_create = head.sandbox.is_none();
        let is_here = head
            .sandbox
            .as_ref()
            .is_none_or(|id| self.services.registry.get(id).is_some());
        let mut response = match (head.sandbox, head.port) {
            (Some(id), Some(port)) if self.is_ready() => self.answer_from_sandbox(request, Target { id, port }).await,
            (Some(_), Some(_)) => self.proxy_answer(&request, &Answer::Unavailable),
            _ => self.answer_from_api_here(request).await,
        };
        let is_refused = is_create && response.extensions().get::<Unplaced>().is_some();
        let answered = if is_here && !is_refused { HERE } else { NOT_HERE };
        // Also in place of what a program in a sandbox has sent.
        response.headers_mut().insert(ANSWERED, answered);
        response
    }

    /// Starts children of a fork for another server. As with [`Self::answer_operator`], the head is believed on streams that only a
    /// server can open, and no client can ask for that.
    async fn answer_fork(&self, request: Request<ClientBody>) -> Response<Body> {
        if !self.is_ready() {
            return self.proxy_answer(&request, &Answer::Unavailable);
        }
        // A server that is being stopped waits for it.
        let _answering = self.requests.token();
        let (parts, body) = request.into_parts();
        let wanted = match read_limited(&parts.headers, Body::new(body), BODY_MAX_BYTES).await {
            Ok(text) => serde_json::from_slice(&text),
            Err(error) => return error.into_response(),
        };
        let mut response = match wanted {
            Ok(wanted) => {
                let started = self.services.sandboxes.fork_for_other(&self.services.builds, wanted);
                axum::Json(started.await).into_response()
            }
            Err(error) => ApiError::invalid(format!("what is wanted of a fork: {error}")).into_response(),
        };
        response.headers_mut().insert(ANSWERED, HERE);
        response
    }

    /// Kills a sandbox for the operator, who has asked another server, or reads a part of a template as a file.
    ///
    /// No client can ask for that. The head is read from streams between servers alone, which only a server can open, and the
    /// server that opens one writes the head of each request itself, in place of whatever its client has sent under that name
    /// ([`Forwarding::send`]). At the ports for clients the header means nothing. And the head of the operator opens nothing of the
    /// operator API but the end of the sandbox that it names, and what templates consist of.
    async fn answer_operator(&self, mut request: Request<ClientBody>, head: &Head) -> Response<Body> {
        let path = request.uri().path();
        let is_known = match &head.sandbox {
            Some(id) => request.method() == Method::DELETE && path == path_of(id),
            None => request.method() == Method::GET && is_of_template_file(path),
        };
        if !is_known || head.port.is_some() {
            let why = "of the operator's requests, only those are forwarded that kill a sandbox or read a template"
                .to_owned();
            return self.proxy_answer(&request, &Answer::BadRequest(why));
        }
        if !self.is_ready() {
            return self.proxy_answer(&request, &Answer::Unavailable);
        }
        let id = head.sandbox.as_ref();
        let is_here = id.is_none_or(|id| self.services.registry.get(id).is_some());
        // A server that is being stopped waits for it.
        let _answering = self.requests.token();
        request.extensions_mut().insert(FromServer);
        let mut response = match self.operator.clone().oneshot(request.map(Body::new)).await {
            Ok(response) => response,
            Err(infallible) => match infallible {},
        };
        let answered = if is_here { HERE } else { NOT_HERE };
        response.headers_mut().insert(ANSWERED, answered);
        response
    }
}

/// The client of a request to the API. What a reverse proxy says of its connection is not in a forwarded request.
fn client_of(request: &Request<ClientBody>) -> Option<ClientPeer> {
    let client = request.extensions().get::<ClientPeer>().copied()?;
    let proto = request.headers().get("x-forwarded-proto").map(HeaderValue::as_bytes);
    Some(ClientPeer {
        is_tls: client.is_tls || proto.is_some_and(|proto| proto.eq_ignore_ascii_case(b"https")),
        ..client
    })
}

fn owner_of(request: &Request<ClientBody>) -> Option<HeadOwner> {
    let SessionOwner(owner) = request.extensions().get::<SessionOwner>()?;
    Some(HeadOwner {
        credential: owner.credential.clone(),
        team: owner.team.clone(),
        user: owner.user.clone(),
    })
}
