//! The reference pages of the API in `docs/api/`, written from the OpenAPI document, so that no operation, parameter or
//! status is missing there or out of date. `tidy` compares the pages with what this module would write.
//!
//! Operations that answer 501 share one page; every other operation is on the page of its tag.

mod schema;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use self::schema::Schemas;

/// How the summary of an operation begins that answers 501.
const NOT_BUILT: &str = "Not built yet: ";

/// The pages by the tag of their operations.
const PAGES: [Page; 9] = [
    Page {
        tag: "sandboxes",
        name: "sandboxes",
        title: "Sandboxes API",
        description: "Every operation on sandboxes, such as create, connect, list, timeouts, network, logs, metrics, kill.",
        introduction: "The guides describe what these operations do: [lifecycle](../sandboxes/lifecycle.md), [logs and \
                       metrics](../sandboxes/logs-and-metrics.md), [network](../network.md).",
    },
    Page {
        tag: "templates",
        name: "templates",
        title: "Templates API",
        description: "Every operation on templates that is available, with parameters and statuses.",
        introduction: "[Templates](../templates.md) describes names, tags and builds.",
    },
    Page {
        tag: "events",
        name: "events",
        title: "Events and webhooks API",
        description: "Every operation on lifecycle events of sandboxes and on webhooks.",
        introduction: "[Events](../events.md) describes what is told, how it is sent, and how a receiver verifies it.",
    },
    Page {
        tag: "teams",
        name: "teams",
        title: "Team metrics API",
        description: "How many sandboxes of a team ran, how many were started per second, and the limits of a team.",
        introduction: "[Logs and metrics](../sandboxes/logs-and-metrics.md#metrics-of-a-team) describes what is counted, \
                       [limits of teams](../configuration.md#limits-of-teams) what is limited.",
    },
    Page {
        tag: "keys",
        name: "keys",
        title: "Teams and keys API",
        description: "Every operation on teams, API keys and access tokens.",
        introduction: "[Teams and keys](../teams-and-keys.md) describes how they are used, and the commands of the \
                       operator.",
    },
    Page {
        tag: "secrets",
        name: "secrets",
        title: "Secrets API",
        description: "Every operation on secrets that headers of requests refer to by name.",
        introduction: "[Secrets](../secrets.md) describes how headers with secrets are set on requests of sandboxes. No \
                       response has the value of a secret.",
    },
    Page {
        tag: "injection rules",
        name: "injection-rules",
        title: "Injection rules API",
        description: "Every operation on saved injection rules.",
        introduction: "[Injection](../injection.md) describes the keys of a rule, how requests match, and how requests \
                       are signed. The injections of a sandbox are part of [the sandboxes API](sandboxes.md).",
    },
    Page {
        tag: "documentation",
        name: "documentation",
        title: "Documentation API",
        description: "The documentation tool endpoint for agents, POST /mcp.",
        introduction: "The endpoint speaks the Model Context Protocol, and needs no credentials.",
    },
    Page {
        tag: "platform",
        name: "platform",
        title: "Platform API",
        description: "The health check and the OpenAPI document.",
        introduction: "These operations need no credentials. [Operations](../operations.md#health) describes how to \
                       monitor a platform.",
    },
];

/// How the descriptions of responses begin that [the API](docs/api/index.md) describes once, for all operations.
const COMMON: [&str; 9] = [
    "The request is invalid; `message` explains why",
    "The credentials are missing or invalid",
    "X-Team-ID names a team",
    "The body did not arrive in time",
    "The body is larger than",
    "A rate limit of the team is exceeded",
    "Internal error",
    "The database is unavailable, the platform is starting",
    "The request could not be answered in time",
];

/// The page of the operations that answer 501.
const NOT_AVAILABLE: &str = "docs/api/not-available.md";

#[derive(Clone, Copy)]
struct Page {
    tag: &'static str,
    name: &'static str,
    title: &'static str,
    description: &'static str,
    introduction: &'static str,
}

/// One operation of the document.
struct Operation<'a> {
    method: String,
    path: &'a str,
    body: &'a Value,
}

impl Operation<'_> {
    fn summary(&self) -> String {
        let text = self.body["summary"].as_str().unwrap_or_default();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn id(&self) -> &str {
        self.body["operationId"].as_str().unwrap_or_default()
    }

    fn tag(&self) -> &str {
        self.body["tags"][0].as_str().unwrap_or_default()
    }
}

/// Path and text of each reference page.
pub(crate) fn pages() -> Result<Vec<(String, String)>> {
    let document = serde_json::from_str(&server::api::document()).context("the OpenAPI document is not JSON")?;
    pages_of(&document)
}

fn pages_of(document: &Value) -> Result<Vec<(String, String)>> {
    let operations = operations(document)?;
    let (missing, built): (Vec<_>, Vec<_>) = operations
        .into_iter()
        .partition(|operation| operation.summary().starts_with(NOT_BUILT));
    let mut pages = Vec::new();
    for (place, page) in PAGES.iter().enumerate() {
        let own: Vec<_> = built.iter().filter(|operation| operation.tag() == page.tag).collect();
        if !own.is_empty() {
            let text = reference(document, page, 1 + place, &own)?;
            pages.push((format!("docs/api/{}.md", page.name), text));
        }
    }
    if let Some(lost) = built
        .iter()
        .find(|operation| !PAGES.iter().any(|page| page.tag == operation.tag()))
    {
        bail!("{} has the tag {:?}, which has no page", lost.id(), lost.tag());
    }
    pages.push((NOT_AVAILABLE.to_owned(), not_available(&missing)));
    Ok(pages)
}

fn operations(document: &Value) -> Result<Vec<Operation<'_>>> {
    let paths = document["paths"].as_object().context("the document has no paths")?;
    let mut operations = Vec::new();
    for (path, item) in paths {
        for (method, body) in item.as_object().context("a path is not an object")? {
            if ["get", "put", "post", "delete", "patch"].contains(&method.as_str()) {
                operations.push(Operation {
                    method: method.to_uppercase(),
                    path,
                    body,
                });
            }
        }
    }
    Ok(operations)
}

fn front_matter(title: &str, description: &str, order: usize) -> String {
    format!("---\ntitle: {title}\ndescription: {description}\norder: {order}\n---\n\n# {title}\n\n")
}

fn not_available(operations: &[Operation<'_>]) -> String {
    let mut text = front_matter(
        "Operations that are not available yet",
        "Operations that clients know and that this platform answers with 501, and what they would do.",
        9,
    );
    text.push_str(
        "Published clients know these operations, but this platform does not have them yet. They check credentials, and \
         then answer 501 with the `error_code` `not_built` and a message that names the operation.\n\n\
         | Operation | Request | Purpose |\n|---|---|---|\n",
    );
    for operation in operations {
        let summary = operation.summary();
        let purpose = summary.strip_prefix(NOT_BUILT).unwrap_or(&summary);
        let _ = writeln!(
            text,
            "| `{}` | `{} {}` | {purpose} |",
            operation.id(),
            operation.method,
            operation.path
        );
    }
    text
}

fn reference(document: &Value, page: &Page, order: usize, operations: &[&Operation<'_>]) -> Result<String> {
    let schemas = Schemas::of(document);
    let mut used = BTreeSet::new();
    let mut text = front_matter(page.title, page.description, order);
    let _ = write!(
        text,
        "{} [The API](index.md) describes credentials, errors and limits that all operations share.\n\n\
         | Operation | Request |\n|---|---|\n",
        page.introduction
    );
    for operation in operations {
        let id = operation.id();
        let _ = writeln!(text, "| [{id}](#{id}) | `{} {}` |", operation.method, operation.path);
    }
    for operation in operations {
        describe(&mut text, &schemas, operation, &mut used)?;
    }
    let own = schemas.reachable(&used);
    if !own.is_empty() {
        text.push_str("\n## Objects\n");
        for name in &own {
            let _ = write!(text, "\n### {name}\n\n{}", schemas.table(name)?);
        }
    }
    Ok(text)
}

fn describe(
    text: &mut String,
    schemas: &Schemas<'_>,
    operation: &Operation<'_>,
    used: &mut BTreeSet<String>,
) -> Result<()> {
    let body = operation.body;
    let _ = write!(
        text,
        "\n## {}\n\n`{} {}`\n\n{}\n",
        operation.id(),
        operation.method,
        operation.path,
        operation.summary()
    );
    if let Some(description) = body["description"].as_str() {
        let _ = write!(text, "\n{description}\n");
    }
    if body["deprecated"] == true {
        text.push_str("\nDeprecated.\n");
    }
    if body["security"].as_array().is_some_and(Vec::is_empty) {
        text.push_str("\nNo credentials are needed.\n");
    }
    if let Some(parameters) = body["parameters"].as_array().filter(|all| !all.is_empty()) {
        text.push_str("\n| Parameter | In | Type | Description |\n|---|---|---|---|\n");
        for parameter in parameters {
            let required = if parameter["required"] == true {
                ", required"
            } else {
                ""
            };
            let schema = &parameter["schema"];
            let own = parameter["description"]
                .as_str()
                .or_else(|| schema["description"].as_str());
            let _ = writeln!(
                text,
                "| `{}` | {}{required} | {} | {} |",
                parameter["name"].as_str().unwrap_or_default(),
                parameter["in"].as_str().unwrap_or_default(),
                schemas.kind(schema, used),
                schemas.notes(schema, own),
            );
        }
    }
    if let Some(schema) = body.pointer("/requestBody/content/application~1json/schema") {
        let required = if body["requestBody"]["required"] == true {
            ""
        } else {
            ", which may be absent"
        };
        let _ = write!(text, "\nBody{required}: {}.\n", schemas.kind(schema, used));
    }
    let responses = body["responses"]
        .as_object()
        .with_context(|| format!("{} has no responses", operation.id()))?;
    text.push_str("\n| Status | Meaning | Body |\n|---|---|---|\n");
    let mut common = Vec::new();
    for (status, response) in responses {
        let description = response["description"].as_str().unwrap_or_default();
        if COMMON.iter().any(|begin| description.starts_with(begin)) {
            common.push(status.as_str());
            continue;
        }
        let content = response["content"]
            .as_object()
            .and_then(|content| content.iter().next());
        let kind = match content {
            None => "none".to_owned(),
            Some((media, content)) if media == "application/json" => schemas.kind(&content["schema"], used),
            Some((media, _)) => format!("`{media}`"),
        };
        let mut meaning = schema::one_line(description);
        if let Some(headers) = response["headers"].as_object() {
            for (name, header) in headers {
                let description = schema::one_line(header["description"].as_str().unwrap_or_default());
                let _ = write!(meaning, ". Header `{name}`: {description}");
            }
        }
        let _ = writeln!(text, "| {status} | {meaning} | {kind} |");
    }
    if !common.is_empty() {
        let _ = write!(
            text,
            "\nAlso {}, as described for [all operations](index.md#errors).\n",
            common.join(", ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation of the document without a page would be one that no reader finds.
    #[test]
    fn every_operation_has_a_page() {
        let document: Value = serde_json::from_str(&server::api::document()).expect("the document is JSON");
        let pages = pages_of(&document).expect("pages");
        for operation in operations(&document).expect("operations") {
            let heading = format!("\n## {}\n\n`{} {}`", operation.id(), operation.method, operation.path);
            let row = format!("| `{}` | `{} {}` |", operation.id(), operation.method, operation.path);
            let found = pages
                .iter()
                .filter(|(_, text)| text.contains(&heading) || text.contains(&row));
            assert_eq!(found.count(), 1, "{} is not on exactly one page", operation.id());
        }
    }

    #[test]
    fn an_operation_with_an_unknown_tag_is_an_error() {
        let document = serde_json::json!({
            "paths": {"/x": {"get": {"operationId": "get_x", "tags": ["new"], "summary": "Gets it.", "responses": {}}}}
        });
        let error = pages_of(&document).expect_err("no page").to_string();
        assert_eq!(error, "get_x has the tag \"new\", which has no page");
    }
}
