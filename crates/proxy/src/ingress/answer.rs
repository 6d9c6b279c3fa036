//! Error responses of the proxy.
//!
//! Clients compare the status, the integer `code` of the JSON body, and `message`, either a fragment (`was not found`: the
//! sandbox has ended, do not retry; `port is not open`, of the agent's port: the sandbox runs, its agent does not) or the
//! whole text. So
//! messages are exactly those that clients expect, and further information is in `detail`. Browsers receive a page
//! instead, in which all values are escaped.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use model::id::SandboxId;
use serde_json::{Map, Value, json};

use super::access::TRAFFIC_TOKEN_HEADER;
use super::unanswered::Unanswered;

/// The error, with the values that its body contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The sandbox is unknown, paused, ended or ending.
    NotFound(SandboxId),
    /// The sandbox is paused, and the request lacks the token that would resume it.
    ResumeRefused(SandboxId),
    /// The sandbox is paused, and could not be resumed in time.
    Transitioning(SandboxId),
    /// The sandbox is paused, and could not be resumed lately.
    ResumeDelayed {
        /// The sandbox.
        id: SandboxId,
        /// Seconds until the next attempt.
        seconds: u32,
    },
    /// The sandbox is paused, and nothing that it could be resumed from is available at present.
    ResumeImpossible(SandboxId),
    /// The sandbox is paused, and a limit of its team keeps it from being resumed.
    ResumeLimited {
        /// The sandbox.
        id: SandboxId,
        /// The limit that was reached, and what the client can do.
        why: String,
    },
    /// The sandbox runs, but no server listens on the port.
    PortClosed(SandboxId, u16),
    /// The sandbox runs, and the server on the port gave no answer.
    Unanswered(SandboxId, u16, Unanswered),
    /// The sandbox runs, and the server of a port in `httpsPorts` does not speak TLS.
    NoTls(SandboxId, u16),
    /// The sandbox requires its traffic token, which is missing.
    TokenMissing(SandboxId),
    /// The traffic token is wrong.
    TokenWrong(SandboxId),
    /// A control route of the agent, which only the host may use, with the requested path.
    Reserved(String),
    /// The request cannot be proxied, for this reason.
    BadRequest(String),
    /// The signature matches no running sandbox.
    BadSignature,
    /// The peer sent too many invalid signatures.
    RateLimited {
        /// Seconds until the next attempt.
        seconds: u64,
    },
    /// The sandbox has reached its limit of concurrent requests.
    TooManyConnections {
        /// The sandbox.
        id: SandboxId,
        /// The limit.
        limit: usize,
    },
    /// The platform is starting or stopping, or its connection limit is reached.
    Unavailable,
}

impl Answer {
    /// The answer as a response: a page for browsers, JSON for other clients.
    #[must_use]
    pub fn response(&self, request: &HeaderMap) -> Response<Full<Bytes>> {
        self.rendered(wants_page(request))
    }

    /// The answer as a page or as JSON.
    pub(super) fn rendered(&self, page: bool) -> Response<Full<Bytes>> {
        let status = self.status();
        let (content_type, body) = if page {
            ("text/html; charset=utf-8", self.page())
        } else {
            ("application/json; charset=utf-8", self.json(status).to_string())
        };
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        // Scripts of other origins must be able to read the error; it contains no secrets.
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        let retry_after = match self {
            Self::RateLimited { seconds } => Some(HeaderValue::from(*seconds)),
            Self::ResumeDelayed { seconds, .. } => Some(HeaderValue::from(*seconds)),
            _ => None,
        };
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, seconds);
        }
        response
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) | Self::PortClosed(..) | Self::Unanswered(..) | Self::NoTls(..) => {
                StatusCode::BAD_GATEWAY
            }
            Self::TokenMissing(_) | Self::TokenWrong(_) | Self::ResumeRefused(_) => StatusCode::FORBIDDEN,
            Self::Transitioning(_) | Self::ResumeDelayed { .. } => StatusCode::CONFLICT,
            Self::Reserved(_) => StatusCode::NOT_FOUND,
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::BadSignature => StatusCode::UNAUTHORIZED,
            Self::RateLimited { .. } | Self::TooManyConnections { .. } | Self::ResumeLimited { .. } => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::Unavailable | Self::ResumeImpossible(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn message(&self) -> String {
        match self {
            Self::NotFound(_) => "The sandbox was not found".to_owned(),
            Self::ResumeRefused(_) => "This sandbox can't be resumed with the credentials provided. Check your access \
                                       token and try again."
                .to_owned(),
            Self::Transitioning(_) | Self::ResumeDelayed { .. } => {
                "The sandbox is still transitioning. Try again in a moment.".to_owned()
            }
            Self::ResumeImpossible(_) => "The sandbox is paused, and cannot be resumed at present".to_owned(),
            Self::ResumeLimited { why, .. } => why.clone(),
            Self::PortClosed(..) => "The sandbox is running but port is not open".to_owned(),
            Self::Unanswered(.., why) => why.message().to_owned(),
            Self::NoTls(..) => "The sandbox is running but the server on this port does not speak TLS".to_owned(),
            Self::TokenMissing(_) => format!(
                "Sandbox is secured with traffic access token. Token header '{}' is missing",
                TRAFFIC_TOKEN_HEADER
            ),
            Self::TokenWrong(_) => format!(
                "Sandbox is secured with traffic access token. Provided token in header '{}' is invalid",
                TRAFFIC_TOKEN_HEADER
            ),
            Self::Reserved(_) => {
                "This endpoint is reserved for the E2B control plane and is not reachable through the \
                                  sandbox URL"
                    .to_owned()
            }
            Self::BadRequest(why) => why.clone(),
            Self::BadSignature => "The signature matches no running sandbox".to_owned(),
            Self::RateLimited { seconds } => format!("Too many invalid signatures, try again in {seconds} s"),
            Self::TooManyConnections { limit, .. } => {
                format!("The sandbox has too many concurrent incoming connections (limit: {limit})")
            }
            Self::Unavailable => "The platform is not ready, try again later".to_owned(),
        }
    }

    /// Additional information besides the message, for people.
    fn detail(&self) -> Option<&'static str> {
        Some(match self {
            Self::NotFound(_) => "The sandbox is paused, has ended, belongs to another platform, or never existed.",
            Self::PortClosed(..) => {
                "No server listens on this port. A server that has just been started may need some time."
            }
            Self::Unanswered(.., why) => why.detail(),
            Self::NoTls(..) => {
                "The port is in httpsPorts of the sandbox. Start an HTTPS server on it, or create the sandbox without it."
            }
            Self::TokenMissing(_) | Self::TokenWrong(_) => {
                "It was created with allowPublicTraffic off. Its trafficAccessToken came with the answer to its \
                 create, and comes with every connect."
            }
            Self::BadSignature => "The link has expired, was modified, or belongs to a sandbox that has ended.",
            Self::ResumeRefused(_) => {
                "The sandbox is paused, and traffic resumes it. That takes the same token as traffic to it while it runs, \
                 as header."
            }
            // The reason is for its owner, who finds it in the details of the sandbox.
            Self::ResumeDelayed { .. } => {
                "The sandbox is paused and could not be resumed lately. It is not tried again before the time in Retry-After."
            }
            Self::ResumeImpossible(_) => "Its owner gets the reason with a resume over the API.",
            Self::Reserved(_)
            | Self::BadRequest(_)
            | Self::RateLimited { .. }
            | Self::TooManyConnections { .. }
            | Self::Transitioning(_)
            | Self::ResumeLimited { .. }
            | Self::Unavailable => return None,
        })
    }

    fn json(&self, status: StatusCode) -> Value {
        let mut body = Map::new();
        if let Some(id) = self.sandbox() {
            body.insert("sandboxId".to_owned(), json!(id.as_str()));
        }
        body.insert("message".to_owned(), json!(self.message()));
        match self {
            Self::PortClosed(_, port) | Self::Unanswered(_, port, _) | Self::NoTls(_, port) => {
                body.insert("port".to_owned(), json!(port));
            }
            Self::TooManyConnections { limit, .. } => {
                body.insert("connectionLimit".to_owned(), json!(limit));
            }
            Self::Reserved(path) => {
                body.insert("path".to_owned(), json!(path));
            }
            _ => {}
        }
        if let Some(detail) = self.detail() {
            body.insert("detail".to_owned(), json!(detail));
        }
        body.insert("code".to_owned(), json!(status.as_u16()));
        Value::Object(body)
    }

    fn sandbox(&self) -> Option<&SandboxId> {
        match self {
            Self::NotFound(id)
            | Self::PortClosed(id, _)
            | Self::Unanswered(id, ..)
            | Self::NoTls(id, _)
            | Self::TokenMissing(id)
            | Self::TokenWrong(id)
            | Self::ResumeRefused(id)
            | Self::Transitioning(id)
            | Self::ResumeDelayed { id, .. }
            | Self::ResumeImpossible(id)
            | Self::ResumeLimited { id, .. }
            | Self::TooManyConnections { id, .. } => Some(id),
            Self::Reserved(_)
            | Self::BadRequest(_)
            | Self::BadSignature
            | Self::RateLimited { .. }
            | Self::Unavailable => None,
        }
    }

    fn page(&self) -> String {
        let title = match self {
            Self::NotFound(_) => "Sandbox Not Found",
            Self::Transitioning(_) | Self::ResumeDelayed { .. } => "Sandbox Still Transitioning",
            Self::ResumeRefused(_) | Self::ResumeImpossible(_) => "Unable to Resume Sandbox",
            Self::ResumeLimited { .. } => "Sandbox Limit Reached",
            Self::PortClosed(..) => "Closed Port Error",
            Self::Unanswered(..) => "No Answer on This Port",
            Self::NoTls(..) => "No TLS on This Port",
            Self::TokenMissing(_) => "Missing Traffic Access Token",
            Self::TokenWrong(_) => "Invalid Traffic Access Token",
            Self::Reserved(_) => "Endpoint Not Available",
            Self::BadRequest(_) => "Bad Request",
            Self::BadSignature => "Invalid Signature",
            Self::RateLimited { .. } => "Too Many Requests",
            Self::TooManyConnections { .. } => "Too Many Connections",
            Self::Unavailable => "Not Ready",
        };
        let mut detail = match self {
            Self::PortClosed(_, port) => format!("<p>There is no service running on port {port}.</p>"),
            Self::Reserved(path) => format!("<p><code>{}</code></p>", escape(path)),
            _ => String::new(),
        };
        if let Some(text) = self.detail() {
            detail.push_str(&format!("<p>{}</p>", escape(text)));
        }
        let sandbox = self
            .sandbox()
            .map(|id| format!("<p>Sandbox <code>{}</code></p>", escape(id.as_str())))
            .unwrap_or_default();
        format!(
            "<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>body{{font-family:\
             system-ui,sans-serif;max-width:40rem;margin:15vh auto;padding:0 1rem;line-height:1.5}}</style></head>\
             <body><h1>{title}</h1><p>{}</p>{sandbox}{detail}</body></html>",
            escape(&self.message())
        )
    }
}

/// Whether the request is a navigation of a browser and not one of a program or script.
pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::to_ascii_lowercase)
    };
    let browsers = ["mozilla", "chrome", "safari", "firefox", "edge", "opera", "msie"];
    if !text("user-agent").is_some_and(|agent| browsers.iter().any(|name| agent.contains(name))) {
        return false;
    }
    let accept = text("accept").unwrap_or_default();
    if accept.contains("application/json") && !accept.contains("text/html") {
        return false;
    }
    let by_script = match text("sec-fetch-mode").as_deref() {
        Some("cors" | "no-cors" | "same-origin" | "websocket") => true,
        Some("navigate") => false,
        _ => headers.contains_key("x-requested-with"),
    };
    !by_script
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}
