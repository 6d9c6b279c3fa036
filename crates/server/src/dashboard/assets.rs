//! The files of the pages, embedded in the program.
//!
//! They have nothing of a team in them, so they need no session. Each is kept compressed as well; browsers ask with the tag
//! whether what they have is current, because an upgrade changes the files.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::LazyLock;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use sha2::{Digest as _, Sha256};

use crate::api::has_tag;

/// Names and contents of all files.
const FILES: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/dashboard_assets.rs"));
/// The page.
const PAGE: &str = "index.html";

static ASSETS: LazyLock<HashMap<&'static str, Asset>> = LazyLock::new(|| {
    FILES
        .iter()
        .map(|(name, content)| (*name, Asset::new(name, content)))
        .collect()
});

#[derive(Debug)]
struct Asset {
    content: &'static [u8],
    /// Absent for what does not get smaller.
    compressed: Option<Bytes>,
    content_type: &'static str,
    tag: HeaderValue,
}

impl Asset {
    fn new(name: &str, content: &'static [u8]) -> Self {
        let content_type = match name.rsplit_once('.').map(|(_, end)| end) {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            _ => "application/octet-stream",
        };
        let digest = hex::encode(Sha256::digest(content));
        Self {
            content,
            compressed: compress(content).filter(|bytes| bytes.len() < content.len()),
            content_type,
            tag: HeaderValue::try_from(format!("\"{}\"", &digest[..32])).expect("digits in quotes"),
        }
    }

    fn response(&self, request: &HeaderMap) -> Response {
        let common = [
            (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (header::ETAG, self.tag.clone()),
            (header::VARY, HeaderValue::from_static("accept-encoding")),
        ];
        if has_tag(request, self.tag.to_str().unwrap_or_default()) {
            return (StatusCode::NOT_MODIFIED, common).into_response();
        }
        let content_type = [(header::CONTENT_TYPE, HeaderValue::from_static(self.content_type))];
        match self.compressed.clone().filter(|_| accepts_gzip(request)) {
            Some(bytes) => {
                let encoding = [(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))];
                (common, content_type, encoding, Body::from(bytes)).into_response()
            }
            None => (common, content_type, Body::from(self.content)).into_response(),
        }
    }
}

fn compress(content: &[u8]) -> Option<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(content).ok()?;
    encoder.finish().ok().map(Bytes::from)
}

fn accepts_gzip(request: &HeaderMap) -> bool {
    let values = request.get_all(header::ACCEPT_ENCODING).iter();
    let mut encodings = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    encodings.any(|encoding| {
        let (name, weight) = encoding.split_once(';').unwrap_or((encoding, ""));
        let weight: String = weight.split_whitespace().collect();
        name.trim().eq_ignore_ascii_case("gzip") && !matches!(weight.as_str(), "q=0" | "q=0.0" | "q=0.00" | "q=0.000")
    })
}

/// The page, at whichever address below the base: its script reads the address.
pub(super) fn page(request: &HeaderMap) -> Response {
    asset(PAGE, request).expect("a test compares the list of files")
}

/// A file by its name.
pub(super) fn asset(name: &str, request: &HeaderMap) -> Option<Response> {
    ASSETS.get(name).map(|asset| asset.response(request))
}

/// The page for browsers that may not sign in over their connection.
pub(super) fn refused(why: &str) -> Response {
    let html = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Ringfence</title><h1>Not over this connection</h1>\
         <p>{}.</p><p><a href=\"/docs/operations\">How to run the platform</a></p>",
        capitalized(why)
    );
    let content_type = [(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    )];
    (StatusCode::FORBIDDEN, content_type, html).into_response()
}

fn capitalized(text: &str) -> String {
    let mut rest = text.chars();
    rest.next()
        .map(|first| first.to_uppercase().chain(rest).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest first view, compressed, in bytes.
    const FIRST_VIEW_MAX: usize = 100_000;

    #[test]
    fn the_files_are_there_and_small() {
        assert!(ASSETS.contains_key(PAGE));
        let sent = ASSETS
            .values()
            .map(|asset| asset.compressed.as_ref().map_or(asset.content.len(), Bytes::len));
        let all: usize = sent.sum();
        assert!(all <= FIRST_VIEW_MAX, "{all}");
    }

    #[test]
    fn a_browser_that_has_a_file_gets_it_no_second_time() {
        let response = page(&HeaderMap::new());
        assert_eq!(response.status(), StatusCode::OK);
        assert!(!response.headers().contains_key(header::CONTENT_ENCODING));
        let mut request = HeaderMap::new();
        request.insert(header::IF_NONE_MATCH, response.headers()[header::ETAG].clone());
        assert_eq!(page(&request).status(), StatusCode::NOT_MODIFIED);
    }

    #[test]
    fn compression_is_for_those_that_ask() {
        let mut request = HeaderMap::new();
        for (value, expected) in [
            ("gzip, br", true),
            ("br;q=1, GZIP;q=0.5", true),
            ("gzip; q=0", false),
            ("br", false),
        ] {
            request.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(value));
            assert_eq!(accepts_gzip(&request), expected, "{value}");
        }
    }
}
