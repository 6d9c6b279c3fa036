//! The way of a request: cross-origin rules, token gate, Basic user, service.

use std::cell::RefCell;
use std::rc::Rc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use protocol::agent::{CONTROL_PATHS, EVENTS_PATH, INIT_PATH};
use protocol::connect::{Code, Error};

use crate::caller::{Accounts, Caller};
use crate::services::control::Control;
use crate::services::events::EventService;
use crate::services::files::Files;
use crate::services::filesystem::Filesystem;
use crate::services::metrics::Metrics;
use crate::services::process::ProcessService;
use crate::settings::AgentSettings;
use crate::transport::http::{self as answers, Body, Query, header_text};
use crate::transport::rpc;
use crate::transport::server::{Handler, Peer};

/// The services by their routes, and the authentication before them.
pub(crate) struct Router {
    pub(crate) settings: Rc<RefCell<AgentSettings>>,
    pub(crate) accounts: Rc<Accounts>,
    pub(crate) control: Control,
    pub(crate) events: EventService,
    pub(crate) files: Files,
    pub(crate) filesystem: Filesystem,
    pub(crate) metrics: Metrics,
    pub(crate) processes: ProcessService,
}

impl Handler for Router {
    async fn answer(&self, peer: &Peer, request: Request<Incoming>) -> Response<Body> {
        if let Some(response) = answers::preflight(&request) {
            return response;
        }
        let cross_origin = request.headers().contains_key(header::ORIGIN);
        let is_head = request.method() == Method::HEAD;
        let mut response = match self.admit(peer, &request) {
            Ok(caller) => Box::pin(self.route(peer, caller, request)).await,
            Err(refusal) => {
                answers::read_on(request.into_body()).await;
                *refusal
            }
        };
        if cross_origin {
            answers::allow_any_origin(response.headers_mut());
        }
        if is_head {
            response = answers::head_of(response);
        }
        response
    }
}

impl Router {
    /// Authenticates a request: returns its caller, or a refusal. A refusal is boxed because it is rare and large.
    fn admit(&self, peer: &Peer, request: &Request<Incoming>) -> Result<Caller, Box<Response<Body>>> {
        const REFUSAL: &str = "unauthorized access, please provide a valid access token or method signing if supported";
        let path = request.uri().path();
        if matches!(peer, Peer::Client) {
            if CONTROL_PATHS.contains(&path) {
                return Err(Box::new(not_found()));
            }
            let exempt = matches!(
                (request.method(), path),
                (&Method::GET | &Method::HEAD, "/health" | "/files") | (&Method::POST, "/files")
            );
            let token = request
                .headers()
                .get("x-access-token")
                .map(header::HeaderValue::as_bytes);
            if !exempt && !self.settings.borrow().admits(token) {
                return Err(Box::new(answers::error(StatusCode::UNAUTHORIZED, REFUSAL)));
            }
        }
        let Some(name) = basic_user(request.headers()) else {
            return Ok(Caller::default());
        };
        match self.accounts.users.find(&name) {
            Some(user) => Ok(Caller { user: Some(user) }),
            None => {
                let error = Error::new(Code::Unauthenticated, format!("invalid username: '{name}'"));
                Err(Box::new(rpc::error_for(request.headers(), &error)))
            }
        }
    }

    async fn route(&self, peer: &Peer, caller: Caller, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        if let Some(method) = path.strip_prefix(protocol::process::SERVICE) {
            let served = self.processes.serve(caller, method, request).await;
            return served.unwrap_or_else(not_found);
        }
        if let Some(method) = path.strip_prefix(protocol::filesystem::SERVICE) {
            let served = self.filesystem.serve(caller, method, request).await;
            return served.unwrap_or_else(not_found);
        }
        let method = match *request.method() {
            Method::HEAD => &Method::GET,
            ref method => method,
        };
        match (path.as_str(), method, peer) {
            ("/health", &Method::GET, _) => answers::no_content(),
            ("/envs", &Method::GET, _) => answers::json(StatusCode::OK, &self.settings.borrow().env()),
            ("/files", &Method::GET | &Method::POST, _) => {
                let query = Query::parse(request.uri().query());
                self.files.serve(peer, &query, request).await
            }
            ("/metrics", &Method::GET, _) => self.metrics.serve().await,
            ("/files/compose", &Method::POST, _) => self.files.compose(request).await,
            (INIT_PATH, &Method::POST, Peer::Host(_)) => self.control.init(request).await,
            (EVENTS_PATH, &Method::GET, Peer::Host(connection)) => self.events.serve(connection.clone()),
            ("/health" | "/envs" | "/metrics", _, _) => wrong_method("GET, HEAD"),
            ("/files", _, _) => wrong_method("GET, HEAD, POST"),
            ("/files/compose", _, _) => wrong_method("POST"),
            _ => not_found(),
        }
    }
}

/// The name in a Basic authorization; the password is ignored.
fn basic_user(headers: &HeaderMap) -> Option<String> {
    let (scheme, encoded) = header_text(headers, header::AUTHORIZATION)?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    // Clients send no password. Without one a name may have a group, as in `1000:1000`.
    let name = decoded
        .strip_suffix(':')
        .or_else(|| decoded.split_once(':').map(|(name, _)| name));
    name.map(str::to_owned)
}

fn not_found() -> Response<Body> {
    answers::text(StatusCode::NOT_FOUND, "404 page not found")
}

fn wrong_method(allowed: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response
        .headers_mut()
        .insert(header::ALLOW, header::HeaderValue::from_static(allowed));
    response
}
