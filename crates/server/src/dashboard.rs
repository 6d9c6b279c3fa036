//! The dashboard: pages of a browser for one team, or for the operator, at `/dashboard` on the address of the API.
//!
//! The pages are files that are the same for everybody ([`assets`]). What they show comes from the public API, with the
//! session in the place of a key ([`sessions`]): `/dashboard/api/…` is that API, and `/dashboard/agent/{sandbox}/…` the agent
//! of a sandbox. Nothing here can do what a key of the team cannot. The operator's sessions reach `/dashboard/operator-api/…`
//! instead, a part of what the operator's socket offers: the nodes, and all teams' sandboxes by their figures, never their
//! contents.
//!
//! Who attacks this and how it ends:
//! - A page of another origin, of a sandbox too, makes the browser send requests with its cookie: [`guard`] refuses them.
//!   Sandboxes are on the same site as this page, so `SameSite` does not keep them off.
//! - A sandbox answers with a page, a script or headers for this origin: [`passing`] lets through bytes, never a document,
//!   and a few headers.
//! - Someone reads the traffic: there is no sign-in but over HTTPS or on this machine, unless the operator allows it.
//! - A page that was taken over reads what it gets: no answer has a key or a token of a sandbox, except for a key that was
//!   created by that request. The cookie cannot be read by scripts, and its session ends with the key that opened it.
//!
//! This module decides what a request is ([`Dashboard::admit`]); the gateway, which has the API and the way into sandboxes,
//! does the rest.

mod assets;
mod cleaning;
mod guard;
mod passing;
mod sessions;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse as _, Redirect, Response};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header, request};
use model::id::SandboxId;
use model::lifecycle::State;
use protocol::agent;
use proxy::ingress::ClientBody;
use proxy::ingress::route::Target;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::json;
use store::Store;

use self::cleaning::Cleaner;
use self::guard::Client;
use self::passing::Reading;
pub(crate) use self::passing::{at_own_origin, from_agent, without_cookies};
use self::sessions::{Actor, CODE_LIFETIME, CODE_PREFIX, Codes, LIFETIME, Session, Sessions};
use crate::api::{ApiError, prefers_pages, read_limited};
use crate::authentication::{Authenticator, Credential, Owner, SessionOwner, StoredCredential};
use crate::clock::{Clock, rfc3339};
use crate::keys::ACCESS_TOKEN_PREFIX;
use crate::peers::{ClientPeer, PeerRates};
use crate::sandboxes::Sandboxes;
use crate::settings::DashboardSettings;

/// Path of the pages; everything else is below it.
const BASE: &str = "/dashboard";
/// Largest body of a sign-in, in bytes.
const SIGN_IN_MAX: usize = 4096;
/// Attempts to sign in of one peer: a burst, and the interval of further ones. Keys cannot be guessed; this bounds the work.
const SIGN_INS: (u32, Duration) = (20, Duration::from_secs(3));
/// Calls of an agent that the pages need. A name of a method follows those with a slash.
const AGENT_PATHS: [&str; 5] = [
    "files",
    "health",
    "metrics",
    "filesystem.Filesystem/",
    "process.Process/",
];

/// Services that the dashboard uses.
#[derive(Debug)]
pub(crate) struct DashboardServices {
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) authenticator: Arc<Authenticator>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    /// Domain of the traffic of sandboxes, with its port.
    pub(crate) domain: String,
}

/// The dashboard of all teams.
#[derive(Debug)]
pub(crate) struct Dashboard {
    settings: DashboardSettings,
    services: DashboardServices,
    sessions: Sessions,
    codes: Codes,
    sign_ins: PeerRates,
    cleaner: Cleaner,
}

/// What becomes of a request.
#[derive(Debug)]
pub(crate) enum Visit {
    /// The dashboard itself has answered.
    Answered(Response),
    /// The API answers this request; [`Dashboard::cleaned`] makes the response.
    Api(Request<ClientBody>),
    /// The operator API answers this request; [`Dashboard::cleaned`] makes the response.
    Operator(Request<ClientBody>),
    /// The agent of a sandbox answers this request; [`from_agent`] makes the response.
    Agent(AgentCall),
}

/// A request to an agent.
#[derive(Debug)]
pub(crate) struct AgentCall {
    pub(crate) request: Request<ClientBody>,
    pub(crate) target: Target,
    /// What the browser is told about the answer.
    pub(crate) reading: Reading,
}

/// What is at a path below the base.
#[derive(Debug, PartialEq, Eq)]
enum Location<'a> {
    Page,
    Asset(&'a str),
    Service(Service<'a>),
}

/// What answers a page's own requests: only with a session, but for the sign-in.
#[derive(Debug, PartialEq, Eq)]
enum Service<'a> {
    Session,
    Api(&'a str),
    Operator(&'a str),
    Agent { id: &'a str, path: &'a str },
}

impl<'a> Location<'a> {
    fn of(path: &'a str) -> Self {
        let Some(below) = path.strip_prefix(BASE).and_then(|path| path.strip_prefix('/')) else {
            return Self::Page;
        };
        Self::Service(match below.split_once('/') {
            Some(("assets", name)) => return Self::Asset(name),
            Some(("api", path)) => Service::Api(path),
            Some(("operator-api", path)) => Service::Operator(path),
            Some(("agent", rest)) => {
                let (id, path) = rest.split_once('/').unwrap_or((rest, ""));
                Service::Agent { id, path }
            }
            None if below == "session" => Service::Session,
            Some(_) | None => return Self::Page,
        })
    }
}

impl Dashboard {
    pub(crate) fn new(settings: DashboardSettings, services: DashboardServices) -> Self {
        Self {
            settings,
            services,
            sessions: Sessions::default(),
            codes: Codes::default(),
            sign_ins: PeerRates::new(SIGN_INS.0, SIGN_INS.1),
            cleaner: Cleaner::default(),
        }
    }

    /// Whether a request to the address of the API is for the dashboard. `/` is for a browser that may sign in here.
    pub(crate) fn takes<B>(&self, request: &Request<B>, client: ClientPeer) -> bool {
        let path = request.uri().path();
        let is_below = path
            .strip_prefix(BASE)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let is_first = || {
            path == "/"
                && matches!(*request.method(), Method::GET | Method::HEAD)
                && prefers_pages(request.headers())
                && self.refusal_of(Client::of(client, request.headers())).is_none()
        };
        self.settings.is_enabled && (is_below || is_first())
    }

    /// Decides what becomes of a request that [`Self::takes`]. `is_ready` is whether the server answers requests.
    pub(crate) async fn admit(&self, request: Request<ClientBody>, peer: ClientPeer, is_ready: bool) -> Visit {
        let (parts, body) = request.into_parts();
        let mut visit = match self.visit(parts, body, peer, is_ready).await {
            Ok(visit) => visit,
            Err(error) => Visit::Answered(error.into_response()),
        };
        if let Visit::Answered(response) = &mut visit {
            passing::protect(response.headers_mut());
        }
        visit
    }

    /// Makes an answer of the API one for the page: without what gives access to a sandbox or to the team.
    pub(crate) async fn cleaned(&self, response: Response) -> Response {
        self.cleaner.clean(response).await
    }

    async fn visit(
        &self,
        parts: request::Parts,
        body: ClientBody,
        peer: ClientPeer,
        is_ready: bool,
    ) -> Result<Visit, ApiError> {
        let client = Client::of(peer, &parts.headers);
        let path = parts.uri.path().to_owned();
        if path == "/" {
            let varies = [(header::VARY, HeaderValue::from_static("accept"))];
            return Ok(Visit::Answered((varies, Redirect::temporary(BASE)).into_response()));
        }
        guard::refuse_workers(&parts.headers)?;
        let location = Location::of(&path);
        let is_read = matches!(parts.method, Method::GET | Method::HEAD);
        let refusal = self.refusal_of(client);
        match (location, refusal) {
            (Location::Page | Location::Asset(_), _) if !is_read => Err(ApiError::wrong_method()),
            (Location::Page, None) => Ok(Visit::Answered(assets::page(&parts.headers))),
            (Location::Page, Some(why)) => Ok(Visit::Answered(assets::refused(why))),
            (Location::Asset(name), None) => {
                let found = assets::asset(name, &parts.headers).ok_or_else(|| ApiError::unknown_path(&path))?;
                Ok(Visit::Answered(found))
            }
            (Location::Service(_), None) if !is_ready => Err(ApiError::not_ready()),
            (Location::Service(service), None) => self.serve(service, parts, body, peer, client).await,
            (Location::Asset(_) | Location::Service(_), Some(why)) => Err(ApiError::forbidden(why)),
        }
    }

    /// Decides what becomes of a request that only the page itself may make.
    async fn serve(
        &self,
        service: Service<'_>,
        parts: request::Parts,
        body: ClientBody,
        peer: ClientPeer,
        client: Client,
    ) -> Result<Visit, ApiError> {
        let is_download = matches!(service, Service::Agent { path: "files", .. }) && parts.method == Method::GET;
        guard::check(&parts, client, is_download)?;
        if service == Service::Session && parts.method == Method::POST {
            return Ok(Visit::Answered(self.sign_in(&parts, body, peer, client).await?));
        }
        let session = self.session(&parts.headers, client).await?;
        match service {
            Service::Session => Ok(Visit::Answered(self.answer_session(&parts, &session, client).await?)),
            Service::Api(path) => {
                let owner = owner_of(&session)?.clone();
                let mut parts = passing::to_api(&parts, path)?;
                parts.extensions.insert(peer);
                parts.extensions.insert(SessionOwner(owner));
                Ok(Visit::Api(Request::from_parts(parts, body)))
            }
            Service::Operator(path) => {
                if let Actor::Team { .. } = session.actor {
                    return Err(ApiError::forbidden(
                        "this session is one of a team: sign in with a code of `ringfence dashboard`",
                    ));
                }
                Ok(Visit::Operator(Request::from_parts(
                    passing::to_operator(&parts, path)?,
                    body,
                )))
            }
            Service::Agent { id, path } => self.agent_call(&parts, body, session, id, path).await,
        }
    }

    /// Why a client may not sign in, unless it may.
    fn refusal_of(&self, client: Client) -> Option<&'static str> {
        let is_private = client.is_https || client.is_local || self.settings.allows_http;
        (!is_private).then_some(
            "the dashboard is served over HTTPS or to this machine only: set up TLS (tls, acme), use an SSH tunnel, or set \
             dashboard.allow_http where the network is trusted",
        )
    }

    async fn sign_in(
        &self,
        parts: &request::Parts,
        body: ClientBody,
        peer: ClientPeer,
        client: Client,
    ) -> Result<Response, ApiError> {
        if let Some(peer) = peer.peer {
            self.sign_ins.take(peer).map_err(ApiError::too_many_requests)?;
        }
        let body = read_limited(&parts.headers, Body::new(body), SIGN_IN_MAX).await?;
        let actor = self.actor(&sent_credential(&body)?).await?;
        let (token, session) = self
            .sessions
            .begin(actor, self.services.clock.now_us())
            .map_err(|error| ApiError::internal().caused_by(error))?;
        let mut response = self.shown(&session).await?;
        let cookie = client.cookie(&parts.headers).set(&token, LIFETIME);
        response.headers_mut().insert(header::SET_COOKIE, cookie);
        Ok(response)
    }

    /// Whom a credential lets in.
    async fn actor(&self, sent: &SecretString) -> Result<Actor, ApiError> {
        let text = sent.expose_secret();
        if text.starts_with(CODE_PREFIX) {
            if !self.codes.take(text) {
                let why =
                    "invalid code: each opens one session, within five minutes; get another with `ringfence dashboard`";
                return Err(ApiError::unauthenticated(why));
            }
            tracing::info!("the operator signed in to the dashboard");
            return Ok(Actor::Operator);
        }
        let credential = if text.starts_with(ACCESS_TOKEN_PREFIX) {
            Credential::AccessToken(text.into())
        } else {
            Credential::ApiKey(text.into())
        };
        let owner = self.services.authenticator.owner(&credential).await?;
        self.services
            .authenticator
            .record_use(credential.kind(), &owner.credential);
        tracing::info!(team.id = %owner.team, key.id = owner.credential, "signed in to the dashboard");
        let credential = StoredCredential::of(&credential)?;
        Ok(Actor::Team { credential, owner })
    }

    /// A code by which the operator signs in once, and how long it is good for; `None` where there is no dashboard.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub(crate) fn operator_code(&self) -> Option<Result<(String, Duration), getrandom::Error>> {
        let issue = || Ok((self.codes.issue()?, CODE_LIFETIME));
        self.settings.is_enabled.then(issue)
    }

    /// Shows the session, or ends it.
    async fn answer_session(
        &self,
        parts: &request::Parts,
        session: &Arc<Session>,
        client: Client,
    ) -> Result<Response, ApiError> {
        match parts.method {
            Method::GET => self.shown(session).await,
            Method::DELETE => {
                self.sessions.end(session);
                let cookie = client.cookie(&parts.headers).set("", Duration::ZERO);
                Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response())
            }
            _ => Err(ApiError::wrong_method()),
        }
    }

    /// The session of a request, if the key that opened it is still valid.
    async fn session(&self, headers: &HeaderMap, client: Client) -> Result<Arc<Session>, ApiError> {
        let now_us = self.services.clock.now_us();
        let cookie = client.cookie(headers);
        let session = cookie
            .values(headers)
            .find_map(|token| self.sessions.find(token, now_us))
            .ok_or_else(|| ApiError::unauthenticated("not signed in: sign in with an API key or an access token"))?;
        let Actor::Team { credential, .. } = &session.actor else {
            return Ok(session);
        };
        let owner = self.services.authenticator.owner_of_stored(credential).await?;
        // A key that was revoked and a team that is gone end what they opened.
        let Some(owner) = owner else {
            self.sessions.end(&session);
            return Err(ApiError::unauthenticated(
                "the key of this session was revoked: sign in with another one",
            ));
        };
        self.services
            .authenticator
            .record_use(credential.kind(), &owner.credential);
        Ok(session)
    }

    /// What the pages know of their session.
    async fn shown(&self, session: &Session) -> Result<Response, ApiError> {
        let team = match &session.actor {
            Actor::Operator => None,
            Actor::Team { owner, .. } => {
                let team = self.services.store.team_by_id(&owner.team).await?;
                Some(team.ok_or_else(|| ApiError::no_team(&owner.team))?)
            }
        };
        let body = json!({
            "team": team.map(|team| json!({"id": team.id.as_str(), "name": team.name})),
            "isOperator": matches!(session.actor, Actor::Operator),
            "domain": self.services.domain,
            "expiresAt": rfc3339(session.expires_us),
            "version": env!("CARGO_PKG_VERSION"),
        });
        Ok(axum::Json(body).into_response())
    }

    /// A call of the agent of a sandbox of the session's team, which must be running: a page that is left open must not
    /// keep a sandbox awake, or wake one.
    async fn agent_call(
        &self,
        parts: &request::Parts,
        body: ClientBody,
        session: Arc<Session>,
        id: &str,
        path: &str,
    ) -> Result<Visit, ApiError> {
        let is_method = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_known = AGENT_PATHS.iter().any(|known| match path.strip_prefix(known) {
            Some(name) if known.ends_with('/') => is_method(name),
            Some(rest) => rest.is_empty(),
            None => false,
        });
        if !is_known || !matches!(parts.method, Method::GET | Method::POST) {
            return Err(ApiError::unknown_path(parts.uri.path()));
        }
        let id: SandboxId = SandboxId::from_path(id)?;
        let team = &owner_of(&session)?.team;
        let sandboxes = &self.services.sandboxes;
        let (state, token) = match sandboxes.entry_of_team(&id, team).await {
            Ok(entry) => (entry.state(), entry.access_token.clone()),
            // The server that has it answers the call.
            Err(error) => {
                let elsewhere = sandboxes.agent_elsewhere(&id, team).await?;
                elsewhere.ok_or_else(|| ApiError::absent(error, &id))?
            }
        };
        if state != State::Running {
            return Err(ApiError::not_running(&id, state));
        }
        let reading = Reading {
            session,
            file: (path == "files").then(|| passing::file_name(&parts.uri)),
        };
        let mut parts = passing::to_agent(parts, path)?;
        passing::add_token(&mut parts.headers, token.expose_secret());
        let target = Target { id, port: agent::PORT };
        let request = Request::from_parts(parts, body);
        Ok(Visit::Agent(AgentCall {
            request,
            target,
            reading,
        }))
    }
}

impl ApiError {
    /// 409: the sandbox does not run, and a page does not resume it by looking at it.
    fn not_running(id: &SandboxId, state: State) -> Self {
        let why = format!("sandbox \"{id}\" is {}: resume it first", state.as_str());
        Self::new(StatusCode::CONFLICT, why)
    }
}

/// The credential in the body of a sign-in.
fn sent_credential(body: &[u8]) -> Result<SecretString, ApiError> {
    #[derive(serde::Deserialize)]
    struct SignIn {
        credential: String,
    }
    // The error of the library may quote the credential.
    let SignIn { credential } = serde_json::from_slice(body)
        .map_err(|_| ApiError::schema("the body of a sign-in must be {\"credential\": \"…\"}"))?;
    let credential = SecretString::from(credential);
    Ok(credential.expose_secret().trim().into())
}

/// The owner of a team's session.
fn owner_of(session: &Session) -> Result<&Owner, ApiError> {
    match &session.actor {
        Actor::Team { owner, .. } => Ok(owner),
        Actor::Operator => Err(ApiError::forbidden(
            "this session is the operator's, who has no team: sign in with a key of one",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_by_their_path() {
        for (path, place) in [
            ("/dashboard", Location::Page),
            ("/dashboard/", Location::Page),
            ("/dashboard/sandboxes/iabc/files", Location::Page),
            ("/dashboard/assets", Location::Page),
            ("/dashboard/assets/main.js", Location::Asset("main.js")),
            ("/dashboard/session", Location::Service(Service::Session)),
            ("/dashboard/session/x", Location::Page),
            (
                "/dashboard/api/v2/sandboxes",
                Location::Service(Service::Api("v2/sandboxes")),
            ),
            (
                "/dashboard/agent/iabc/files",
                Location::Service(Service::Agent {
                    id: "iabc",
                    path: "files",
                }),
            ),
            (
                "/dashboard/agent/iabc",
                Location::Service(Service::Agent { id: "iabc", path: "" }),
            ),
        ] {
            assert_eq!(Location::of(path), place, "{path}");
        }
    }

    #[test]
    fn a_credential_that_cannot_be_read_is_not_quoted() {
        let sent = sent_credential(br#"{"credential": " sk_e2b_00 "}"#).expect("a credential");
        assert_eq!(sent.expose_secret(), "sk_e2b_00");
        for wrong in [
            &b"e2b_secret"[..],
            br#"{"credential": ["e2b_secret"]}"#,
            br#""e2b_secret""#,
            b"",
        ] {
            let error = sent_credential(wrong).expect_err("not a sign-in");
            assert!(!format!("{error:?}").contains("secret"));
        }
    }
}
