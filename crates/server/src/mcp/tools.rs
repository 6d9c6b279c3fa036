//! The four tools.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use docs::command::{self, CommandError};
use docs::{QUERY_MAX_BYTES, catalogue, nearest_routes, search_index};
use http::{header, request};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::message::{Refusal, RpcError, shown};
use crate::peers::ClientPeer;
use crate::readers::{Readers, processor_time};
use crate::settings::McpSettings;

/// Results of a search that does not say how many, and the bounds of what it can say.
const LIMIT_DEFAULT: usize = 10;
const LIMIT: (u64, u64) = (1, 50);
/// Processor time of a command.
const COMMAND_TIME: Duration = Duration::from_millis(200);
/// Commands at the same time, so that searches find a thread.
const COMMANDS: usize = 1;
/// Suffixes that are always accepted, besides the configured one: the neutral name and that of the service whose
/// clients may know these tools.
const SUFFIXES: [&str; 2] = ["svc", "sufy"];
/// Longest path of a page that is looked up, in bytes.
const PATH_MAX_BYTES: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tool {
    Search,
    List,
    Get,
    Filesystem,
}

/// Every tool with its name before the suffix; the first of each is the one that is listed.
const NAMES: [(&str, Tool); 5] = [
    ("search_docs", Tool::Search),
    ("search", Tool::Search),
    ("list_docs", Tool::List),
    ("get_doc_content", Tool::Get),
    ("query_docs_filesystem", Tool::Filesystem),
];

/// The tools over the embedded pages.
#[derive(Debug)]
pub(super) struct Tools {
    suffix: String,
    command_wait: Duration,
    turns: Arc<Semaphore>,
    readers: Arc<Readers>,
}

/// The address of the pages as the client of a request reaches them, or only its path if it is not known.
pub(super) fn docs_url(parts: &request::Parts, is_tls: bool) -> String {
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let host = header(header::HOST.as_str())
        .or_else(|| parts.uri.authority().map(http::uri::Authority::as_str))
        .and_then(|host| host.parse::<http::uri::Authority>().ok());
    let is_tls = is_tls || header("x-forwarded-proto").is_some_and(|proto| proto.eq_ignore_ascii_case("https"));
    let scheme = if is_tls { "https" } else { "http" };
    host.map_or_else(|| "/docs".to_owned(), |host| format!("{scheme}://{host}/docs"))
}

/// The address of a page.
fn url(base: &str, route: &str) -> String {
    format!("{base}{}", if route == "/" { "" } else { route })
}

impl Tools {
    pub(super) fn new(settings: &McpSettings, readers: Arc<Readers>) -> Self {
        Self {
            readers,
            suffix: settings.suffix.clone(),
            command_wait: settings.command_wait,
            turns: Arc::new(Semaphore::new(COMMANDS)),
        }
    }

    fn name(&self, tool: Tool) -> String {
        let (name, _) = NAMES
            .iter()
            .find(|(_, other)| *other == tool)
            .expect("every tool has a name");
        format!("{name}_{}", self.suffix)
    }

    fn tool(&self, name: &str) -> Option<Tool> {
        let (_, tool) = NAMES.iter().find(|(known, _)| {
            name.strip_prefix(known)
                .and_then(|rest| rest.strip_prefix('_'))
                .is_some_and(|suffix| suffix == self.suffix || SUFFIXES.contains(&suffix))
        })?;
        Some(*tool)
    }

    /// What a client shows to the model that uses the tools.
    pub(super) fn instructions(&self) -> String {
        format!(
            "Documentation of this Ringfence server, in the version that runs. Search with {}, read a page with {}, or \
             look through all pages with {}.",
            self.name(Tool::Search),
            self.name(Tool::Get),
            self.name(Tool::Filesystem)
        )
    }

    /// The tools, as `tools/list` returns them.
    pub(super) fn describe(&self) -> Vec<Value> {
        let describe = |tool, title: &str, description: &str, properties: Value, required: &[&str]| {
            json!({
                "name": self.name(tool),
                "title": title,
                "description": description,
                "inputSchema": {"type": "object", "properties": properties, "required": required},
                "annotations": {
                    "title": title,
                    "readOnlyHint": true,
                    "destructiveHint": false,
                    "idempotentHint": true,
                    "openWorldHint": false,
                },
            })
        };
        vec![
            describe(
                Tool::Search,
                "Search the documentation",
                "Searches all pages of the Ringfence documentation and returns the best matches with their route, URL \
                 and the words around the match.",
                json!({
                    "query": {"type": "string", "description": "words or a question", "maxLength": QUERY_MAX_BYTES},
                    "limit": {
                        "type": "integer",
                        "description": "maximum number of matches; values outside of 1 to 50 are taken as the nearest bound",
                        "default": LIMIT_DEFAULT,
                    },
                }),
                &["query"],
            ),
            describe(
                Tool::List,
                "List the documentation",
                "Lists all pages of the Ringfence documentation with title, description, route and URL.",
                json!({}),
                &[],
            ),
            describe(
                Tool::Get,
                "Read a page",
                "Returns the whole content of a page in Markdown.",
                json!({"path": {
                    "type": "string",
                    "description": "route of the page as search and list return it, such as /network; not the path of a file",
                }}),
                &["path"],
            ),
            describe(
                Tool::Filesystem,
                "Look through the documentation",
                &format!(
                    "Runs a read-only command over the pages as Markdown files, in a virtual file system with the root /: \
                     {}. Quotes work as in a shell; pipes, redirections, substitutions and file name patterns do not.",
                    command::USAGE
                ),
                json!({"command": {
                    "type": "string",
                    "description": "such as: rg -C 2 \"timeout\" /",
                    "maxLength": command::COMMAND_MAX_BYTES,
                }}),
                &["command"],
            ),
        ]
    }

    /// Calls a tool. What the tool itself refuses is a result, so that a model reads it.
    pub(super) async fn call(&self, params: &Value, base: &str, client: ClientPeer) -> Result<Value, Refusal> {
        let Some(name) = params.get("name").and_then(Value::as_str) else {
            return Err(RpcError::invalid_params("params.name is required and must be a string").into());
        };
        let Some(tool) = self.tool(name) else {
            let known = [Tool::Search, Tool::List, Tool::Get, Tool::Filesystem].map(|tool| self.name(tool));
            return Err(RpcError::invalid_params(format!(
                "unknown tool {}; known are {}",
                shown(name),
                known.join(", ")
            ))
            .into());
        };
        let none = json!({});
        let arguments = match params.get("arguments") {
            None | Some(Value::Null) => &none,
            Some(arguments @ Value::Object(_)) => arguments,
            Some(_) => return Err(RpcError::invalid_params("params.arguments must be an object").into()),
        };
        let outcome = match tool {
            Tool::Search => {
                let query = required(arguments, "query", QUERY_MAX_BYTES)?.to_owned();
                let (limit, base, list) = (limit(arguments)?, base.to_owned(), self.name(Tool::List));
                let search = move || search(&query, limit, &base, &list);
                Ok(self.readers.run(client, search).await.map_err(Refusal::Wait)?)
            }
            Tool::List => Ok(list(base)),
            Tool::Get => get(required(arguments, "path", PATH_MAX_BYTES)?),
            Tool::Filesystem => {
                let command = required(arguments, "command", command::COMMAND_MAX_BYTES)?;
                self.run(command.to_owned(), client).await.map_err(Refusal::Wait)?
            }
        };
        let (text, is_error) = match outcome {
            Ok(text) => (text, false),
            Err(text) => (text, true),
        };
        Ok(json!({"content": [{"type": "text", "text": text}], "isError": is_error}))
    }

    async fn run(&self, command: String, client: ClientPeer) -> Result<Result<String, String>, Duration> {
        let wait = self.command_wait;
        let turn = tokio::time::timeout(wait, Arc::clone(&self.turns).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Ok(Err(
                "too many commands at the same time: try again in a moment".to_owned()
            ));
        };
        let run = move || {
            let (begun, used) = (Instant::now(), processor_time());
            let late = || processor_time().saturating_sub(used) > COMMAND_TIME || begun.elapsed() > wait;
            let result = command::run(&command, &late);
            drop(turn);
            result.map_err(|error: CommandError| error.to_string())
        };
        self.readers.run(client, run).await
    }
}

fn search(query: &str, limit: usize, base: &str, list: &str) -> String {
    let answer = search_index().search(query, limit);
    let note = answer.note();
    if answer.hits.is_empty() {
        let what = note.unwrap_or_else(|| format!("No page answers {}.", shown(query)));
        return format!("{what} Try other words, or list all pages with {list}.");
    }
    let mut text = note.map(|note| format!("{note}\n\n")).unwrap_or_default();
    for (number, hit) in (1..).zip(&answer.hits) {
        let _ = write!(text, "{number}. {}", hit.page.title);
        for heading in &hit.headings {
            let _ = write!(text, " > {heading}");
        }
        let fragment = hit
            .anchor
            .as_ref()
            .map(|anchor| format!("#{anchor}"))
            .unwrap_or_default();
        let _ = write!(
            text,
            "\n   Route: {}\n   URL: {}{fragment}\n   {}\n\n",
            hit.page.route,
            url(base, hit.page.route),
            if hit.snippet.is_empty() {
                hit.page.description
            } else {
                &hit.snippet
            },
        );
    }
    text.truncate(text.trim_end().len());
    text
}

fn list(base: &str) -> String {
    let mut text = String::new();
    for page in catalogue().pages() {
        let _ = write!(
            text,
            "{}\n   {}\n   Route: {}\n   URL: {}\n\n",
            page.title,
            page.description,
            page.route,
            url(base, page.route)
        );
    }
    text.truncate(text.trim_end().len());
    text
}

/// A page by its route; also by its address, since that is what search and list show, and without the first slash.
fn get(path: &str) -> Result<String, String> {
    let route = path.trim();
    let route = match route.split_once("://") {
        Some((_, rest)) => rest.find('/').map_or("", |at| &rest[at..]),
        None => route,
    };
    let route = route.split(['#', '?']).next().unwrap_or_default();
    let route = route
        .strip_prefix("/docs")
        .filter(|rest| rest.is_empty() || rest.starts_with('/'))
        .unwrap_or(route);
    let route = format!("/{}", route.trim_matches('/'));
    if let Some(page) = catalogue().page(&route) {
        return Ok(page.body.to_owned());
    }
    let near = nearest_routes(&route);
    let hint = if near.is_empty() {
        "list all pages to find its route".to_owned()
    } else {
        format!("did you mean {}?", near.join(" or "))
    };
    let what = if route.ends_with(".md") {
        "paths are routes of pages, without .md"
    } else {
        "no such page"
    };
    Err(format!("{}: {what}; {hint}", shown(path)))
}

/// A required argument, a string of limited length.
fn required<'a>(arguments: &'a Value, name: &str, most: usize) -> Result<&'a str, RpcError> {
    match arguments.get(name) {
        Some(Value::String(text)) if text.len() > most => Err(RpcError::invalid_params(format!(
            "argument {name} must have at most {most} bytes, not {}",
            text.len()
        ))),
        Some(Value::String(text)) if text.trim().is_empty() => {
            Err(RpcError::invalid_params(format!("argument {name} must not be empty")))
        }
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Err(RpcError::invalid_params(format!("argument {name} is required"))),
        Some(_) => Err(RpcError::invalid_params(format!("argument {name} must be a string"))),
    }
}

/// The number of results: an integer, clamped.
fn limit(arguments: &Value) -> Result<usize, RpcError> {
    let wrong = || RpcError::invalid_params("argument limit must be an integer");
    let limit = match arguments.get("limit") {
        None | Some(Value::Null) => return Ok(LIMIT_DEFAULT),
        Some(Value::Number(number)) => number,
        Some(_) => return Err(wrong()),
    };
    let clamped = match (limit.as_u64(), limit.as_f64()) {
        (Some(number), _) => number.clamp(LIMIT.0, LIMIT.1),
        (None, Some(number)) if number.fract() == 0.0 && number < 0.0 => LIMIT.0,
        (None, Some(number)) if number.fract() == 0.0 => (1..=LIMIT.1)
            .rev()
            .find(|most| *most as f64 <= number)
            .unwrap_or(LIMIT.0),
        _ => return Err(wrong()),
    };
    Ok(usize::try_from(clamped).unwrap_or(LIMIT_DEFAULT))
}

#[cfg(test)]
mod tests {
    use http::Request;
    use serde_json::json;

    use super::{docs_url, get, limit, url};

    #[test]
    fn limits_are_clamped() {
        for (value, expected) in [
            (json!({}), Some(10)),
            (json!({"limit": null}), Some(10)),
            (json!({"limit": 1}), Some(1)),
            (json!({"limit": 0}), Some(1)),
            (json!({"limit": -7}), Some(1)),
            (json!({"limit": 50}), Some(50)),
            (json!({"limit": 51}), Some(50)),
            (json!({"limit": u64::MAX}), Some(50)),
            (json!({"limit": 1e300}), Some(50)),
            (json!({"limit": -1e300}), Some(1)),
            (json!({"limit": 5.0}), Some(5)),
            (json!({"limit": 5.5}), None),
            (json!({"limit": "5"}), None),
            (json!({"limit": true}), None),
        ] {
            assert_eq!(limit(&value).ok(), expected, "{value}");
        }
    }

    #[test]
    fn pages_are_found_by_route_and_address() {
        let page = get("/network").expect("a page");
        for path in [
            "network",
            "/network/",
            " /network ",
            "/network#dns",
            "/docs/network",
            "http://localhost:3000/docs/network#dns",
        ] {
            assert_eq!(get(path).as_ref(), Ok(&page), "{path}");
        }
        let error = get("/networks").expect_err("no page");
        assert!(error.contains("did you mean /network?"), "{error}");
        let error = get("/network.md").expect_err("a file");
        assert!(error.contains("without .md") && error.contains("/network?"), "{error}");
        for path in ["/../etc/passwd", "/docs/docs/network", "\u{0}", &"/x".repeat(500)] {
            assert!(get(path).is_err(), "{path:?}");
        }
    }

    #[test]
    fn addresses_of_pages() {
        let base = |headers: &[(&str, &str)], is_tls| {
            let mut request = Request::builder().uri("/mcp");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            docs_url(&request.body(()).expect("a request").into_parts().0, is_tls)
        };
        assert_eq!(base(&[("host", "localhost:3000")], false), "http://localhost:3000/docs");
        assert_eq!(base(&[("host", "a.example")], true), "https://a.example/docs");
        let forwarded = [("host", "a.example"), ("x-forwarded-proto", "https")];
        assert_eq!(base(&forwarded, false), "https://a.example/docs");
        assert_eq!(base(&[], false), "/docs");
        assert_eq!(base(&[("host", "a b\"<x>")], false), "/docs");
        assert_eq!(url("/docs", "/"), "/docs");
        assert_eq!(url("/docs", "/a/b"), "/docs/a/b");
    }
}
