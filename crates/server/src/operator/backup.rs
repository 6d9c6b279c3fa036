//! Holding what a backup copies: for as long as the client reads the response, nothing that is stored is removed.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;

use super::context::{ErrorResponse, Operator};

/// How long a collection in progress, or another backup, is waited for.
const WAIT: Duration = Duration::from_secs(60);
/// How often a sign of life is sent, which is also how a client that is gone is noticed.
const BEAT: Duration = Duration::from_secs(5);

/// Begins to hold what is stored, and answers when that has begun. The body has no end.
pub(super) async fn hold(State(operator): State<Operator>) -> Result<Response, ErrorResponse> {
    let held = tokio::time::timeout(WAIT, operator.builds.hold()).await;
    let held = held.map_err(|_| {
        let why = "another backup is being made, or unused layers are being removed: try again later";
        ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why.to_owned())
    })?;
    tracing::info!("a backup has begun: nothing that is stored is removed meanwhile");
    let beats = stream::unfold((held, Duration::ZERO), |(held, pause)| async move {
        tokio::time::sleep(pause).await;
        Some((Ok::<_, Infallible>(Bytes::from_static(b"\n")), (held, BEAT)))
    });
    Ok(Body::from_stream(beats).into_response())
}
