//! `ringfence template`: templates of a team, through the REST API with an API key.
//!
//! Unlike sandboxes of all teams, templates have an owner that builds them, and whose names and limits count. So these
//! commands are an ordinary client, which may also be on another machine than the platform.

mod build;
mod client;
mod context;
mod progress;
mod recipe;
mod tar;

use std::process::ExitCode;

use anyhow::{Result, bail};
use http::Method;
use serde_json::Value;

use self::client::Client;
use crate::args::{AddArgs, TemplateCommand};
use crate::config::{Config, Sources};
use crate::credentials;
use crate::one_thread;
use crate::output::{self, Format};
use crate::transfer;

/// Runs the command.
///
/// # Errors
/// When no platform answers, or the request fails.
pub(crate) fn run(config: &Config, sources: &Sources, command: TemplateCommand) -> Result<ExitCode> {
    if let TemplateCommand::Transfer(command) = &command {
        return transfer::run(config, command);
    }
    let (url, key) = credentials::endpoint(None, config, sources)?;
    let client = Client::new(&url, &key)?;
    let runtime = one_thread::runtime()?;
    runtime.block_on(async {
        match command {
            TemplateCommand::Build(args) => return Box::pin(build::run(&client, *args)).await,
            TemplateCommand::Add(args) => return add(&client, &args).await,
            TemplateCommand::List { format } => list(&client, format).await,
            TemplateCommand::Show { name, format } => show(&client, &name, format).await,
            TemplateCommand::Delete { names } => return delete(&client, &names).await,
            TemplateCommand::Transfer(_) => Ok(()),
        }?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Builds a template that the program carries.
async fn add(client: &Client, args: &AddArgs) -> Result<ExitCode> {
    let unpacked = recipe::unpack(recipe::named(&args.template)?)?;
    let build = unpacked.build_args(args)?;
    if args.unless_present && is_ready(client, build.name.as_deref()).await? {
        return Ok(ExitCode::SUCCESS);
    }
    // The files stay until the end, because they are read when they are uploaded.
    Box::pin(build::run(client, build)).await
}

/// Whether sandboxes can be created from a template of the team.
async fn is_ready(client: &Client, name: Option<&str>) -> Result<bool> {
    let Some(name) = name else { return Ok(false) };
    let templates = client.json(Method::GET, "/templates", None).await?;
    let mut templates = templates.as_array().map(Vec::as_slice).unwrap_or_default().iter();
    Ok(templates.any(|template| {
        let names = template["aliases"].as_array().map(Vec::as_slice).unwrap_or_default();
        names.iter().any(|one| one == name) && template["buildStatus"] == "ready"
    }))
}

/// Whether the program carries a template with this name.
///
/// # Errors
/// When it does not; with those that it does.
pub(crate) fn require_carried(name: &str) -> Result<()> {
    recipe::named(name).map(|_| ())
}

async fn list(client: &Client, format: Format) -> Result<()> {
    let templates = client.json(Method::GET, "/templates", None).await?;
    if format == Format::Json {
        return output::json(&templates);
    }
    let header = [
        "NAME",
        "ID",
        "STATUS",
        "CPU",
        "MEMORY",
        "DISK",
        "SANDBOXES",
        "BUILDS",
        "UPDATED",
    ];
    let rows = templates.as_array().map(Vec::as_slice).unwrap_or_default();
    output::table(&header, rows.iter().map(row))
}

/// A value of a template as text.
fn shown(template: &Value, key: &str) -> String {
    match &template[key] {
        Value::String(text) => output::printable(text),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn names(template: &Value) -> String {
    let names = template["names"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<String> = names.iter().filter_map(Value::as_str).map(output::printable).collect();
    if names.is_empty() {
        "-".to_owned()
    } else {
        names.join(",")
    }
}

fn row(template: &Value) -> Vec<String> {
    vec![
        names(template),
        shown(template, "templateID"),
        shown(template, "buildStatus"),
        shown(template, "cpuCount"),
        format!("{} MiB", shown(template, "memoryMB")),
        format!("{} MiB", shown(template, "diskSizeMB")),
        shown(template, "spawnCount"),
        shown(template, "buildCount"),
        shown(template, "updatedAt"),
    ]
}

async fn show(client: &Client, name: &str, format: Format) -> Result<()> {
    let template = client.json(Method::GET, &path(name)?, None).await?;
    if format == Format::Json {
        return output::json(&template);
    }
    let mut text = String::new();
    let mut add = |name: &str, value: String| text.push_str(&format!("{name:<12} {value}\n"));
    add("id", shown(&template, "templateID"));
    add("names", names(&template));
    add("public", shown(&template, "public"));
    add("created", shown(&template, "createdAt"));
    add("sandboxes", shown(&template, "spawnCount"));
    for build in template["builds"].as_array().map(Vec::as_slice).unwrap_or_default() {
        add(
            "build",
            format!(
                "{} {} {} cores {} MiB {}",
                shown(build, "buildID"),
                shown(build, "status"),
                shown(build, "cpuCount"),
                shown(build, "memoryMB"),
                shown(build, "createdAt"),
            ),
        );
    }
    output::text(&text)
}

/// Deletes each, and goes on after one that fails.
async fn delete(client: &Client, names: &[String]) -> Result<ExitCode> {
    let mut failed = false;
    for name in names {
        let deleted = async { client.send(Method::DELETE, &path(name)?, None).await };
        match deleted.await {
            Ok(_) => output::line(&format!("deleted {name}"))?,
            Err(error) => {
                failed = true;
                output::error(&error.context(format!("delete {name}")));
            }
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The path of a template by its name or id.
fn path(name: &str) -> Result<String> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_part) {
        bail!("{name:?} is not the name or ID of a template; see `ringfence template list`");
    }
    Ok(format!("/templates/{}", name.replace('/', "%2F").replace(':', "%3A")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_part_of_a_path() {
        assert_eq!(path("team/a-b:v1").unwrap(), "/templates/team%2Fa-b%3Av1");
        for bad in ["", "a b", "a?b", "a%2F", "\u{e4}"] {
            assert!(path(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_template_lacks_is_a_dash() {
        let template = serde_json::json!({"templateID": "x\u{1b}", "names": [], "cpuCount": 2});
        let row = row(&template);
        assert_eq!(row[..4], ["-", "x\\u{1b}", "-", "2"]);
    }
}
