//! The documentation as web pages at `/docs`, and as texts for agents at `/llms.txt`.
//!
//! These are pages for people and not operations of the API, so they are not part of the OpenAPI document. They need no
//! credentials: they are the same for every reader. The content is rendered once, at the first request. Pages load nothing
//! from elsewhere and run one script, which copies blocks: their content security policy allows it by its digest. An address
//! would allow more, because files of sandboxes are served at the same origin.
//!
//! `/` leads a browser to the pages, unless it may sign in to the dashboard. Other clients get the answer of a path that is no operation, as before.

use std::sync::{Arc, LazyLock};

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{any, get};
use axum::{Extension, Router};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use docs::web::{Asset, BASE, RenderedPages, SCRIPT, SearchResult};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::error::ApiError;
use super::state::ApiState;
use crate::peers::ClientPeer;
use crate::readers::Readers;

/// Maximum length of a search, in characters; the form has the same limit.
const QUERY_MAX: usize = 200;
/// Results on one page.
const RESULTS: usize = 20;
/// What a page may load: its style, its icon and its script.
static CONTENT_SECURITY_POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let digest = BASE64_STANDARD.encode(Sha256::digest(SCRIPT));
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{digest}'; style-src 'self'; img-src 'self'; form-action 'self'; \
         base-uri 'none'; frame-ancestors 'none'"
    );
    HeaderValue::try_from(policy).expect("a policy is ASCII")
});

static SITE: LazyLock<RenderedPages> = LazyLock::new(|| RenderedPages::new(docs::catalogue()));

/// The routes of the documentation.
pub(super) fn routes() -> Router<ApiState> {
    Router::new()
        .route(BASE, get(show))
        .route(&format!("{BASE}/"), get(async || Redirect::permanent(BASE)))
        .route(&format!("{BASE}/search"), get(search))
        .route(&format!("{BASE}/{{*path}}"), get(show))
        .route("/", any(first))
        .route("/llms.txt", get(show))
        .route("/llms-full.txt", get(show))
}

#[derive(Debug, Deserialize)]
struct Search {
    #[serde(default)]
    q: String,
}

async fn show(uri: Uri, headers: HeaderMap) -> Response {
    let path = uri.path();
    if let Some(asset) = SITE.asset(path) {
        return answer(asset, &headers);
    }
    // An address with a slash at its end is the same page.
    if let Some(exact) = path.strip_suffix('/').filter(|path| SITE.asset(path).is_some()) {
        return Redirect::permanent(exact).into_response();
    }
    (StatusCode::NOT_FOUND, shown(&SITE.missing())).into_response()
}

/// `/`, which no operation has: who reads HTML and asks for no JSON is a person with a browser.
async fn first(method: Method, headers: HeaderMap) -> Response {
    if (method == Method::GET || method == Method::HEAD) && prefers_pages(&headers) {
        let varies = [(header::VARY, HeaderValue::from_static("accept"))];
        return (varies, Redirect::temporary(BASE)).into_response();
    }
    ApiError::unknown_path("/").into_response()
}

/// Whether a client names HTML among what it accepts, and not JSON.
pub(crate) fn prefers_pages(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter();
    let accepted: Vec<&str> = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|value| value.split(';').next().unwrap_or_default().trim())
        .collect();
    let has = |wanted: &str| accepted.iter().any(|value| value.eq_ignore_ascii_case(wanted));
    has("text/html") && !has("application/json")
}

async fn search(
    State(readers): State<Arc<Readers>>,
    Extension(client): Extension<ClientPeer>,
    query: Result<Query<Search>, QueryRejection>,
) -> Result<Response, ApiError> {
    let query = query.map(|query| query.0.q).unwrap_or_default();
    let query: String = query.trim().chars().take(QUERY_MAX).collect();
    let render = move || {
        let answer = ::docs::search_index().search(&query, RESULTS);
        let note = answer.note();
        let results: Vec<SearchResult> = answer
            .hits
            .into_iter()
            .map(|hit| SearchResult {
                page: hit.page,
                headings: hit.headings,
                anchor: hit.anchor,
                snippet: hit.snippet,
            })
            .collect();
        SITE.results(&query, &results, note.as_deref())
    };
    let page = readers.run(client, render).await.map_err(ApiError::too_many_requests)?;
    Ok(shown(&page))
}

/// An asset, or 304 if the client has it.
fn answer(asset: &Asset, request: &HeaderMap) -> Response {
    let caching = if asset.is_immutable {
        "public, max-age=31536000, immutable"
    } else {
        // Clients may keep it, and ask whether it is current: an upgrade changes the pages.
        "no-cache"
    };
    let tag = HeaderValue::from_str(&asset.etag).expect("a tag is hexadecimal digits in quotes");
    let common = [
        (header::CACHE_CONTROL, HeaderValue::from_static(caching)),
        (header::ETAG, tag),
    ];
    if has_tag(request, &asset.etag) {
        return (StatusCode::NOT_MODIFIED, common).into_response();
    }
    (common, shown(asset)).into_response()
}

/// Whether `If-None-Match` names a tag.
pub(crate) fn has_tag(request: &HeaderMap, tag: &str) -> bool {
    let values = request.get_all(header::IF_NONE_MATCH).iter();
    let mut tags = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    tags.any(|known| {
        let known = known.trim();
        known == "*" || known.strip_prefix("W/").unwrap_or(known) == tag
    })
}

fn shown(asset: &Asset) -> Response {
    let headers: [(HeaderName, HeaderValue); 4] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(asset.content_type)),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, asset.body.clone()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_prefer_pages() {
        let mut headers = HeaderMap::new();
        assert!(!prefers_pages(&headers));
        for (value, expected) in [
            ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", true),
            ("Text/HTML", true),
            ("*/*", false),
            ("application/json, text/plain, */*", false),
            ("application/json, text/html", false),
        ] {
            headers.insert(header::ACCEPT, HeaderValue::from_static(value));
            assert_eq!(prefers_pages(&headers), expected, "{value}");
        }
    }

    #[test]
    fn tags_are_compared_one_by_one() {
        let mut headers = HeaderMap::new();
        assert!(!has_tag(&headers, "\"a\""));
        for (value, expected) in [
            ("\"a\"", true),
            ("W/\"a\"", true),
            ("\"b\", \"a\"", true),
            ("*", true),
            ("\"b\"", false),
            ("a", false),
        ] {
            headers.insert(header::IF_NONE_MATCH, HeaderValue::from_static(value));
            assert_eq!(has_tag(&headers, "\"a\""), expected, "{value}");
        }
    }
}
