//! Answers that the proxy gives in place of a sandbox.
//!
//! SDKs branch on the status, on the integer `code` of the JSON body, and on two fragments of `message`: `was not
//! found` (the sandbox is gone, do not retry) and `port is not open` (it lives, the service does not). People get a
//! page instead, and every value in it is escaped.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use model::id::SandboxId;
use serde_json::{Map, Value, json};

/// What went wrong, with what the body names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The sandbox is unknown, ended or ending.
    NotFound(SandboxId),
    /// It runs, and the port does not serve HTTP.
    PortClosed(SandboxId, u16),
    /// It takes traffic only with its token, which was not sent.
    TokenMissing(SandboxId),
    /// The token sent is not the sandbox's.
    TokenWrong(SandboxId),
    /// A route of the agent that is the host's alone, with the path asked for.
    Reserved(String),
    /// The request cannot be proxied; the text says why.
    BadRequest(String),
    /// No running sandbox made this signature.
    BadSignature,
    /// The platform is starting or stopping.
    Unavailable,
}

impl Answer {
    /// The answer as a response, for a person or for a program by the request's headers.
    #[must_use]
    pub fn response(&self, request: &HeaderMap) -> Response<Full<Bytes>> {
        let status = self.status();
        let (content_type, body) = if wants_page(request) {
            ("text/html; charset=utf-8", self.page())
        } else {
            ("application/json; charset=utf-8", self.json(status).to_string())
        };
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        // A page of the caller's must be able to read why its call failed; nothing here is a secret.
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) | Self::PortClosed(..) => StatusCode::BAD_GATEWAY,
            Self::TokenMissing(_) | Self::TokenWrong(_) => StatusCode::FORBIDDEN,
            Self::Reserved(_) => StatusCode::NOT_FOUND,
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::BadSignature => StatusCode::UNAUTHORIZED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn message(&self) -> String {
        match self {
            Self::NotFound(_) => "The sandbox was not found: it has ended, or it never existed".to_owned(),
            Self::PortClosed(..) => "The sandbox runs, but the port is not open".to_owned(),
            Self::TokenMissing(_) => format!(
                "The sandbox takes traffic only with its token: header '{}' is missing",
                super::TRAFFIC_TOKEN_HEADER
            ),
            Self::TokenWrong(_) => format!(
                "The sandbox takes traffic only with its token: the one in header '{}' is invalid",
                super::TRAFFIC_TOKEN_HEADER
            ),
            Self::Reserved(_) => "This route belongs to the platform and cannot be reached from outside".to_owned(),
            Self::BadRequest(why) => why.clone(),
            Self::BadSignature => "No running sandbox made this signature".to_owned(),
            Self::Unavailable => "The platform is not ready, try again in a moment".to_owned(),
        }
    }

    fn json(&self, status: StatusCode) -> Value {
        let mut body = Map::new();
        if let Some(id) = self.sandbox() {
            body.insert("sandboxId".to_owned(), json!(id.as_str()));
        }
        body.insert("message".to_owned(), json!(self.message()));
        match self {
            Self::PortClosed(_, port) => {
                body.insert("port".to_owned(), json!(port));
            }
            Self::Reserved(path) => {
                body.insert("path".to_owned(), json!(path));
            }
            _ => {}
        }
        body.insert("code".to_owned(), json!(status.as_u16()));
        Value::Object(body)
    }

    fn sandbox(&self) -> Option<&SandboxId> {
        match self {
            Self::NotFound(id) | Self::PortClosed(id, _) | Self::TokenMissing(id) | Self::TokenWrong(id) => Some(id),
            Self::Reserved(_) | Self::BadRequest(_) | Self::BadSignature | Self::Unavailable => None,
        }
    }

    fn page(&self) -> String {
        let title = match self {
            Self::NotFound(_) => "Sandbox Not Found",
            Self::PortClosed(..) => "Closed Port Error",
            Self::TokenMissing(_) => "Missing Traffic Access Token",
            Self::TokenWrong(_) => "Invalid Traffic Access Token",
            Self::Reserved(_) => "Endpoint Not Available",
            Self::BadRequest(_) => "Bad Request",
            Self::BadSignature => "Invalid Signature",
            Self::Unavailable => "Not Ready",
        };
        let detail = match self {
            Self::PortClosed(_, port) => format!("<p>There is no service running on port {port}.</p>"),
            Self::Reserved(path) => format!("<p><code>{}</code></p>", escape(path)),
            _ => String::new(),
        };
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

/// Whether the request comes from a person at a browser rather than from a program or a script in a page.
fn wants_page(headers: &HeaderMap) -> bool {
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::to_ascii_lowercase)
    };
    let accept = text("accept").unwrap_or_default();
    if accept.contains("application/json") && !accept.contains("text/html") {
        return false;
    }
    let by_script = match text("sec-fetch-mode").as_deref() {
        Some("cors" | "no-cors" | "same-origin" | "websocket") => true,
        Some("navigate") => false,
        _ => headers.contains_key("x-requested-with"),
    };
    let agent = text("user-agent").unwrap_or_default();
    let browsers = ["mozilla", "chrome", "safari", "firefox", "edge", "opera", "msie"];
    !by_script && browsers.iter().any(|name| agent.contains(name))
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
