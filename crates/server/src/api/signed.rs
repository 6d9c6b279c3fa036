//! The layer that verifies signed requests, before their handlers see them.
//!
//! Only the operations that clients sign accept a signature: those on injection rules, and creating a sandbox. There it
//! takes precedence over an API key, because some clients send both.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::Method;

use super::body::read_limited;
use super::error::ApiError;
use super::state::ApiState;
use crate::authentication::Owner;
use crate::peers::ClientPeer;
use crate::signature::SignatureError;

/// Largest body of a signed request, in bytes. It is hashed once for each form of a signature, before anybody is known to
/// have signed it.
pub(crate) const SIGNED_MAX_BYTES: usize = 1024 * 1024;

/// Extension of a request: the owner of the access key that signed it.
#[derive(Debug, Clone)]
pub(super) struct Signer(pub(super) Owner);

/// Whether an operation accepts signed requests.
fn accepts_signatures(method: &Method, path: &str) -> bool {
    let is_rule = path == "/injection-rules" || path.starts_with("/injection-rules/");
    is_rule || (*method == Method::POST && matches!(path, "/sandboxes" | "/v2/sandboxes"))
}

/// Verifies the signature of a request that has one.
pub(super) async fn verify(State(state): State<ApiState>, request: Request, next: Next) -> Response {
    if !accepts_signatures(request.method(), request.uri().path()) {
        return next.run(request).await;
    }
    let Some(token) = state.signatures.token(request.headers()) else {
        return next.run(request).await;
    };
    let peer = request.extensions().get::<ClientPeer>().and_then(|client| client.peer);
    let verified = async {
        let token = token?;
        let key = state.signatures.key(&token).await?;
        let attempt = state.signatures.begin(peer).map_err(ApiError::too_many_requests)?;
        let (parts, body) = request.into_parts();
        let body = read_limited(&parts.headers, body, SIGNED_MAX_BYTES).await?;
        let owner = state.signatures.verify(&token, key, &parts, &body)?;
        state.signatures.succeeded(&attempt);
        let mut request = Request::from_parts(parts, Body::from(body));
        request.extensions_mut().insert(Signer(owner));
        Ok::<_, ApiError>(request)
    };
    match verified.await {
        Ok(request) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

impl From<SignatureError> for ApiError {
    fn from(error: SignatureError) -> Self {
        match error {
            SignatureError::Store(error) => error.into(),
            SignatureError::Unreadable(_) => Self::internal().caused_by(error),
            SignatureError::Malformed
            | SignatureError::UnknownKey
            | SignatureError::Mismatch
            | SignatureError::Date
            | SignatureError::NoDate => Self::unauthenticated(format!("invalid signed token: {error}")),
        }
    }
}
