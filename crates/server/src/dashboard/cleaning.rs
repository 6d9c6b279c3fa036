//! Answers of the API for the page: without the values that give access to a sandbox or to the team.
//!
//! An answer is parsed only where its bytes contain the name of such a value, and unchanged otherwise. The names are looked
//! for as they are: the API writes JSON with one serializer, which escapes quotes, backslashes and control characters, so no
//! letter of a name is ever written as `\u0061`. Whoever puts a name into a log or into metadata causes the parsing, which
//! takes many times the memory of the answer and some time. So large answers are parsed on threads of their own, few at the
//! same time, and few wait for that: the others are told to ask again.

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use memchr::memmem;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::passing::{confine, only};
use crate::api::ApiError;

/// Headers of answers of the API.
const FROM_API: [HeaderName; 10] = [
    header::CONTENT_TYPE,
    header::LINK,
    header::RETRY_AFTER,
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
    HeaderName::from_static("server-timing"),
    HeaderName::from_static("x-next-token"),
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("x-total-running"),
];
/// Names of values that give access, anywhere in an answer of the API.
const SECRET_NAMES: [&str; 3] = ["apiKey", "envdAccessToken", "trafficAccessToken"];
/// Largest answer of the API that is read, in bytes. Lists have pages, and logs limits, below it.
const ANSWER_MAX: usize = 16 * 1024 * 1024;
/// Largest answer that is parsed on the thread of its connection, in bytes: well below a millisecond, and what an answer with
/// a new sandbox or key takes.
const AT_ONCE_MAX: usize = 64 * 1024;
/// Number of large answers that are parsed at the same time, and that wait for it or are parsed.
const LARGE: (usize, usize) = (2, 16);

/// Removes what gives access from answers of the API.
#[derive(Debug)]
pub(super) struct Cleaner {
    /// One for each large answer that is parsed.
    parsing: Semaphore,
    /// One for each large answer that is parsed or waits for it.
    places: Semaphore,
}

/// Why an answer was not cleaned, and so is not given.
#[derive(Debug, thiserror::Error)]
enum CleaningError {
    #[error("too many large answers are read at the same time")]
    Busy,
    #[error("an answer of the API is not JSON")]
    Json(#[from] serde_json::Error),
    #[error("the thread that cleans an answer failed")]
    Thread(#[from] tokio::task::JoinError),
}

impl From<CleaningError> for ApiError {
    fn from(error: CleaningError) -> Self {
        match error {
            CleaningError::Busy => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many large answers are read at the same time: try again in a second, or ask for less",
            )
            .retry_after(1),
            error @ (CleaningError::Json(_) | CleaningError::Thread(_)) => Self::internal().caused_by(error),
        }
    }
}

impl Default for Cleaner {
    fn default() -> Self {
        Self {
            parsing: Semaphore::new(LARGE.0),
            places: Semaphore::new(LARGE.1),
        }
    }
}

impl Cleaner {
    /// Makes the answer of the API one for the page.
    pub(super) async fn clean(&self, response: Response) -> Response {
        let (mut parts, body) = response.into_parts();
        parts.headers = only(&parts.headers, &FROM_API);
        let is_json = parts
            .headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
        let mut response = match Limited::new(body, ANSWER_MAX).collect().await {
            Ok(body) if is_json => match self.without_secrets(body.to_bytes()).await {
                Ok(bytes) => Response::from_parts(parts, Body::from(bytes)),
                Err(error) => ApiError::from(error).into_response(),
            },
            Ok(body) => {
                parts.headers.insert(
                    header::CONTENT_TYPE,
                    HeaderValue::from_static("text/plain; charset=utf-8"),
                );
                Response::from_parts(parts, Body::from(body.to_bytes()))
            }
            Err(error) if error.is::<LengthLimitError>() => ApiError::new(
                StatusCode::BAD_GATEWAY,
                format!("the answer is larger than {ANSWER_MAX} bytes: ask for less"),
            )
            .into_response(),
            Err(error) => {
                tracing::warn!(error, "an answer of the API was cut");
                ApiError::internal().into_response()
            }
        };
        confine(response.headers_mut());
        response
    }

    async fn without_secrets(&self, bytes: Bytes) -> Result<Bytes, CleaningError> {
        if !has_secret_name(&bytes) {
            return Ok(bytes);
        }
        if bytes.len() <= AT_ONCE_MAX {
            return Ok(cleaned(&bytes)?);
        }
        let _place = self.places.try_acquire().map_err(|_| CleaningError::Busy)?;
        let _turn = self.parsing.acquire().await.map_err(|_| CleaningError::Busy)?;
        Ok(tokio::task::spawn_blocking(move || cleaned(&bytes)).await??)
    }
}

fn has_secret_name(bytes: &[u8]) -> bool {
    SECRET_NAMES
        .iter()
        .any(|name| memmem::find(bytes, name.as_bytes()).is_some())
}

fn cleaned(bytes: &[u8]) -> Result<Bytes, serde_json::Error> {
    let mut value: Value = serde_json::from_slice(bytes)?;
    remove_secrets(&mut value);
    Ok(serde_json::to_vec(&value)?.into())
}

fn remove_secrets(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|name, _| !SECRET_NAMES.contains(&name.as_str()));
            map.values_mut().for_each(remove_secrets);
        }
        Value::Array(values) => values.iter_mut().for_each(remove_secrets),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    async fn body(response: Response) -> Bytes {
        response.into_body().collect().await.expect("a body").to_bytes()
    }

    /// An answer that contains a name, and is too large for the thread of a connection.
    fn large() -> Response {
        axum::Json(json!({"log": "x".repeat(AT_ONCE_MAX), "envdAccessToken": "t"})).into_response()
    }

    #[tokio::test]
    async fn answers_of_the_api_lose_what_gives_access() {
        let answer =
            json!([{"sandboxID": "i1", "envdAccessToken": "t", "x": {"trafficAccessToken": "t", "apiKey": "t"}}]);
        let mut response = axum::Json(answer).into_response();
        for (name, value) in [
            ("access-control-allow-origin", "*"),
            ("set-cookie", "a=b"),
            ("x-next-token", "n"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        let response = Cleaner::default().clean(response).await;
        assert_eq!(response.headers()["x-next-token"], "n");
        assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
        for absent in ["access-control-allow-origin", "set-cookie"] {
            assert!(!response.headers().contains_key(absent), "{absent}");
        }
        assert_eq!(&body(response).await[..], br#"[{"sandboxID":"i1","x":{}}]"#);
        let response = Cleaner::default().clean(large()).await;
        let left: Value = serde_json::from_slice(&body(response).await).expect("JSON");
        assert_eq!(left, json!({"log": "x".repeat(AT_ONCE_MAX)}));
    }

    #[tokio::test]
    async fn an_answer_without_the_names_is_not_parsed() {
        let cleaner = Cleaner::default();
        let _places = cleaner.places.try_acquire_many(16).expect("all of them");
        // A parser would refuse the first, and write the second otherwise.
        for unchanged in ["{\"log\": \"…", " {\"b\" : 1, \"a\" : 2} "] {
            let sent = unchanged.repeat(AT_ONCE_MAX);
            let response = ([(header::CONTENT_TYPE, "application/json")], sent.clone()).into_response();
            let response = cleaner.clean(response).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(body(response).await, sent);
        }
    }

    #[test]
    fn every_name_is_found_as_the_serializer_writes_it() {
        for name in SECRET_NAMES {
            for written in [
                serde_json::to_vec(&json!({name: "t"})),
                serde_json::to_vec_pretty(&json!([{"\u{1}\"\\": {name: "t"}}])),
            ] {
                let written = written.expect("JSON");
                assert!(has_secret_name(&written), "{name}");
                let left = cleaned(&written).expect("JSON");
                assert!(!has_secret_name(&left), "{name}");
            }
        }
    }

    #[tokio::test]
    async fn large_answers_wait_for_each_other_up_to_a_number() {
        let cleaner = Cleaner::default();
        let turns = cleaner.parsing.try_acquire_many(2).expect("all of them");
        let mut waiting: Vec<_> = (0..LARGE.1).map(|_| Box::pin(cleaner.clean(large()))).collect();
        for one in &mut waiting {
            assert!(futures_util::poll!(one).is_pending());
        }
        let refused = cleaner.clean(large()).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(!has_secret_name(&body(refused).await));
        // Others do not notice.
        let small = axum::Json(json!({"envdAccessToken": "t"})).into_response();
        assert_eq!(&body(cleaner.clean(small).await).await[..], b"{}");
        drop(turns);
        for one in waiting {
            assert_eq!(one.await.status(), StatusCode::OK);
        }
        assert_eq!(cleaner.places.available_permits(), LARGE.1);
    }
}
