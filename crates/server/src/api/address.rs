//! Recognizes API requests that carry headers for routing to a sandbox.

use http::{Method, request};
use proxy::ingress::route::Api;
use serde_json::Value;

use super::auth::API_KEY;
use crate::keys::hash_api_key;

/// The host name of the API, and its operations that require a key.
#[derive(Debug)]
pub(crate) struct ApiAddress {
    host: String,
    routes: Vec<(Method, Vec<Segment>)>,
}

/// One part of a path between slashes.
#[derive(Debug)]
enum Segment {
    Fixed(String),
    /// A parameter, which matches any text.
    Any,
}

impl ApiAddress {
    /// The API of a domain, which may have a port, with the operations of an `OpenAPI` document. Operations without
    /// credentials are left out: a key does not identify them, and agents have a `/health` too.
    pub(super) fn new(domain: &str, document: &Value) -> Self {
        let name = domain.rsplit_once(':').map_or(domain, |(name, _)| name);
        let mut routes = Vec::new();
        for (path, item) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let is_open = operation["security"].as_array().is_some_and(Vec::is_empty);
                if let Ok(method) = Method::from_bytes(method.to_ascii_uppercase().as_bytes())
                    && !is_open
                {
                    routes.push((method, segments(path)));
                }
            }
        }
        Self {
            host: format!("api.{name}"),
            routes,
        }
    }
}

fn segments(path: &str) -> Vec<Segment> {
    let segment = |text: &str| {
        if text.starts_with('{') {
            Segment::Any
        } else {
            Segment::Fixed(text.to_owned())
        }
    };
    path.split('/').map(segment).collect()
}

fn fits(route: &[Segment], path: &str) -> bool {
    let mut parts = path.split('/');
    let all = route.iter().all(|segment| match (segment, parts.next()) {
        (Segment::Fixed(text), Some(part)) => text == part,
        (Segment::Any, Some(part)) => !part.is_empty(),
        (_, None) => false,
    });
    all && parts.next().is_none()
}

impl Api for ApiAddress {
    fn is_at(&self, host: &str) -> bool {
        host.trim_end_matches('.').eq_ignore_ascii_case(&self.host)
    }

    fn takes(&self, request: &request::Parts) -> bool {
        let mut keys = request.headers.get_all(API_KEY).iter();
        let key = keys.next().and_then(|key| key.to_str().ok());
        let has_form = key.is_some_and(|key| hash_api_key(key.trim()).is_ok()) && keys.next().is_none();
        let path = request.uri.path();
        has_form
            && self
                .routes
                .iter()
                .any(|(method, route)| *method == request.method && fits(route, path))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn address() -> ApiAddress {
        let document = json!({"paths": {
            "/health": {"get": {"security": []}},
            "/sandboxes": {"get": {}, "post": {}},
            "/sandboxes/{sandboxID}/connect": {"post": {}},
        }});
        ApiAddress::new("sandbox.test:3000", &document)
    }

    #[test]
    fn the_api_host_is_recognized() {
        let address = address();
        for (host, is_it) in [
            ("api.sandbox.test", true),
            ("API.Sandbox.test.", true),
            ("sandbox.test", false),
            ("api.other.test", false),
            ("x.api.sandbox.test", false),
            ("api", false),
            ("", false),
        ] {
            assert_eq!(address.is_at(host), is_it, "{host}");
        }
    }

    #[test]
    fn path_method_and_key_must_all_match() {
        const KEY: &str = "e2b_0000000000000000000000000000000000000001";
        let address = address();
        for (method, path, keys, taken) in [
            ("POST", "/sandboxes/iabc/connect", &[KEY] as &[&str], true),
            ("POST", "/sandboxes/iabc/connect?x=1", &[KEY], true),
            ("POST", "/sandboxes/i%61bc/connect", &[KEY], true),
            ("GET", "/sandboxes", &[KEY], true),
            ("GET", "/sandboxes/", &[KEY], false),
            ("GET", "/sandboxes/iabc/connect", &[KEY], false),
            ("POST", "/sandboxes//connect", &[KEY], false),
            ("POST", "/sandboxes/iabc/connect/more", &[KEY], false),
            ("POST", "/process.Process/Start", &[KEY], false),
            // Agents have this route too, and it needs no key.
            ("GET", "/health", &[KEY], false),
            ("GET", "/sandboxes", &[], false),
            ("GET", "/sandboxes", &["a key of some application"], false),
            ("GET", "/sandboxes", &["e2b_"], false),
            ("GET", "/sandboxes", &["e2b_xyz"], false),
            ("GET", "/sandboxes", &[KEY, KEY], false),
        ] {
            let mut request = http::Request::builder().method(method).uri(path);
            for key in keys {
                request = request.header("x-api-key", *key);
            }
            let parts = request.body(()).expect("a request").into_parts().0;
            assert_eq!(address.takes(&parts), taken, "{method} {path} {keys:?}");
        }
    }
}
