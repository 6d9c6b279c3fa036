//! What a request to the API is about, by its path: a sandbox, a template that is built, or none of them.

use http::Method;
use model::id::SandboxId;

/// The sandbox that a path of the API is about.
pub(super) fn sandbox_in(path: &str) -> Option<SandboxId> {
    let mut parts = path.strip_prefix('/')?.split('/');
    let first = parts.next()?;
    let resource = if first == "v2" { parts.next()? } else { first };
    (resource == "sandboxes").then_some(())?;
    SandboxId::from_path(parts.next()?).ok()
}

/// The template of a request that has to reach the server which builds it: about its files, or its builds in progress.
pub(super) fn template_worked_on<'a>(method: &Method, path: &'a str) -> Option<&'a str> {
    let parts: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
    let parts = parts.strip_prefix(&["v2"]).unwrap_or(&parts);
    match parts {
        ["templates", id, "files", _] => Some(*id),
        ["templates", id, "builds", _] | ["templates", id, "builds", _, "cancel"] if method == Method::POST => {
            Some(*id)
        }
        _ => None,
    }
}

/// Whether a request creates a sandbox.
pub(super) fn creates(method: &Method, path: &str) -> bool {
    *method == Method::POST && matches!(path, "/sandboxes" | "/v2/sandboxes")
}

/// Whether a request resumes a sandbox that is paused.
pub(super) fn resumes(method: &Method, path: &str) -> bool {
    *method == Method::POST && (path.ends_with("/connect") || path.ends_with("/resume"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_requests_are_about_a_sandbox() {
        let id = "i0123456789abcdefghi";
        for path in [
            "/sandboxes/ID",
            "/sandboxes/ID/pause",
            "/v2/sandboxes/ID/logs",
            "/v2/sandboxes/ID",
        ] {
            let found = sandbox_in(&path.replace("ID", id));
            assert_eq!(found.map(|id| id.to_string()).as_deref(), Some(id), "{path}");
        }
        for path in [
            "/",
            "/sandboxes",
            "/v2/sandboxes",
            "/templates/ID",
            "/sandboxes//ID",
            "/v3/x/ID",
        ] {
            assert_eq!(sandbox_in(&path.replace("ID", id)), None, "{path}");
        }
        for (method, path, expected) in [
            (Method::GET, "/templates/a/files/h", Some("a")),
            (Method::PUT, "/templates/a/files/h", Some("a")),
            (Method::POST, "/v2/templates/a/builds/b", Some("a")),
            (Method::POST, "/templates/a/builds/b/cancel", Some("a")),
            (Method::GET, "/templates/a/builds/b/status", None),
            (Method::GET, "/templates/a", None),
            (Method::POST, "/v3/templates", None),
        ] {
            assert_eq!(template_worked_on(&method, path), expected, "{method} {path}");
        }
        assert!(creates(&Method::POST, "/sandboxes") && creates(&Method::POST, "/v2/sandboxes"));
        assert!(!creates(&Method::GET, "/sandboxes") && !creates(&Method::POST, "/sandboxes/x"));
    }
}
