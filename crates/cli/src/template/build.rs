//! `ringfence template build`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Seek as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use dockerfile::{Base, Kind, Plan, TEXT_MAX};
use http::Method;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::client::Client;
use super::context::Context;
use super::progress::Progress;
use super::recipe::Recipe;
use crate::args::BuildArgs;
use crate::output::{self, Format};
use crate::signals::Signals;
use crate::transfer::login;

/// Delay between two questions for the status.
const PAUSE: Duration = Duration::from_millis(250);
/// How many questions in a row may fail, while the platform restarts.
const FAILURES_MAX: u32 = 240;
/// The build argument that names what a recipe begins with.
const BASE_ARG: &str = "BASE";
/// Exit code of a build that a signal has cancelled, as shells have it for SIGINT.
const INTERRUPTED: u8 = 130;

/// What a template is built from.
enum From {
    Image(String),
    Archive(fs::File, String),
    Dockerfile {
        text: String,
        args: BTreeMap<String, String>,
        /// The archive that it begins with, and its hash.
        base: Option<(fs::File, String)>,
        files: Vec<(usize, fs::File, String)>,
    },
}

/// Builds a template and waits until it is ready. A recipe in the directory of the Dockerfile has what `args` leave open.
pub(super) async fn run(client: &Client, mut args: BuildArgs) -> Result<ExitCode> {
    let begun = Instant::now();
    if args.from_image.is_none() && args.from_archive.is_none() && args.file.is_none() {
        Recipe::of(&args.path)?.complete(&mut args);
    }
    let args = &args;
    let from = from(args)?;
    let logins = logins(args)?;
    let mut request = json!({"cpuCount": args.cpu, "memoryMB": args.memory});
    if let Some(name) = &args.name {
        request["name"] = json!(name);
    }
    let mut signals = Signals::listen()?;
    let made = client.json(Method::POST, "/v3/templates", Some(&request)).await?;
    let (Some(template), Some(build)) = (made["templateID"].as_str(), made["buildID"].as_str()) else {
        bail!("the platform answered without the id of a template");
    };
    let is_id = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    ensure!(
        is_id(template) && is_id(build),
        "the platform answered with invalid ids"
    );
    let mut progress = Progress::new();
    let to_end = Box::pin(build_to_end(client, args, from, logins, template, build, &mut progress));
    let ended = tokio::select! {
        biased;
        signal = signals.next() => Err(signal),
        ended = to_end => Ok(ended),
    };
    let ended = match ended {
        Ok(ended) => ended?,
        Err(signal) => {
            progress.line(&format!("{signal}: cancelling the build"));
            tokio::select! {
                biased;
                signal = signals.next() => bail!("{signal}: the build may go on"),
                cancelled = cancel(client, template, build) => cancelled?,
            }
        }
    };
    progress.clear();
    let took = begun.elapsed().as_secs_f64();
    let status = ended["status"].as_str().unwrap_or_default();
    // The output of a step may follow, in lines of its own.
    let reason = ended["reason"]["message"].as_str().map(|reason| {
        let lines: Vec<String> = reason.lines().map(output::printable).collect();
        lines.join("\n  ")
    });
    match args.format {
        Format::Json => output::json(&json!({
            "templateID": template,
            "buildID": build,
            "names": made["names"],
            "status": status,
            "reason": ended["reason"],
            "seconds": (took * 1000.0).round() / 1000.0,
        }))?,
        Format::Text if status == "ready" => output::line(&format!("template {template} is ready after {took:.1} s"))?,
        Format::Text => {}
    }
    if status == "ready" {
        return Ok(ExitCode::SUCCESS);
    }
    let reason = reason.unwrap_or_else(|| format!("unknown status {status:?}"));
    if signals.has_arrived() {
        output::error(&anyhow!("after {took:.1} s {reason}"));
        return Ok(ExitCode::from(INTERRUPTED));
    }
    bail!("the build failed after {took:.1} s: {reason}")
}

/// Cancels a build, and returns its status, which is another one if it has ended before.
async fn cancel(client: &Client, template: &str, build: &str) -> Result<Value> {
    let path = format!("/templates/{template}/builds/{build}");
    let cancelled = client.send(Method::POST, &format!("{path}/cancel"), None).await;
    let status = client
        .json(Method::GET, &format!("{path}/status?limit=0"), None)
        .await?;
    match status["status"].as_str() {
        Some("waiting" | "building") => {
            cancelled.context("cancel the build")?;
            Ok(status)
        }
        _ => Ok(status),
    }
}

/// Uploads what a build needs, starts it and waits for its end. Returns its last status.
async fn build_to_end(
    client: &Client,
    args: &BuildArgs,
    from: From,
    logins: Vec<(String, Value)>,
    template: &str,
    build: &str,
    progress: &mut Progress,
) -> Result<Value> {
    let mut start = json!({"force": args.no_cache, "startCmd": args.start_cmd, "readyCmd": args.ready_cmd});
    match from {
        From::Image(reference) => {
            start["fromImage"] = json!(reference);
            start["fromImageRegistry"] = json!(logins.into_iter().next().map(|(_, login)| login));
        }
        From::Archive(file, hash) => {
            upload(client, progress, template, "the archive", &hash, file).await?;
            start["fromArchive"] = json!(hash);
        }
        From::Dockerfile {
            text,
            args: given,
            base,
            files,
        } => {
            if let Some((file, hash)) = base {
                upload(client, progress, template, "the archive", &hash, file).await?;
            }
            let mut hashes = Map::new();
            for (line, file, hash) in files {
                let what = format!("files of line {line}");
                upload(client, progress, template, &what, &hash, file).await?;
                hashes.insert(line.to_string(), json!(hash));
            }
            let logins = logins.into_iter();
            let registries: Vec<Value> = logins
                .map(|(host, login)| json!({"host": host, "credentials": login}))
                .collect();
            start["fromDockerfile"] = json!({
                "dockerfile": text,
                "buildArgs": given,
                "target": args.target,
                "files": hashes,
                "registries": registries,
            });
        }
    }
    let path = format!("/v2/templates/{template}/builds/{build}");
    client.send(Method::POST, &path, Some(&start)).await?;
    follow(client, progress, template, build).await
}

/// The credentials that the platform is to have, by registry. None are sent that were not asked for.
fn logins(args: &BuildArgs) -> Result<Vec<(String, Value)>> {
    if let Some(reference) = &args.from_image {
        let is_of = |host: &str| reference.strip_prefix(host).is_some_and(|rest| rest.starts_with('/'));
        if let Some(other) = args.registry_login.iter().find(|host| !is_of(host)) {
            bail!(
                "{reference} does not begin with {other}/, so it is not fetched with the credentials for that registry"
            );
        }
    }
    let known = args.registry_login.iter().map(|host| {
        let login = login::known(host)?;
        let login = login.with_context(|| format!("there are no credentials for {host}: run `docker login {host}`"))?;
        Ok((host.clone(), login::body(&login)))
    });
    known.collect()
}

fn from(args: &BuildArgs) -> Result<From> {
    if let Some(reference) = &args.from_image {
        return Ok(From::Image(reference.clone()));
    }
    if let Some(path) = &args.from_archive {
        let (file, hash) = archive(path)?;
        return Ok(From::Archive(file, hash));
    }
    let path = args.file.clone().unwrap_or_else(|| args.path.join("Dockerfile"));
    let text = read_text(&path)?;
    #[expect(
        clippy::disallowed_methods,
        reason = "arguments of a build that are named in a flag, and no configuration"
    )]
    let mut given = build_args(&args.build_arg, |name| std::env::var(name).ok());
    let base = match &args.base_archive {
        Some(archive_path) => {
            ensure!(
                !given.contains_key(BASE_ARG),
                "--base-archive sets the build argument {BASE_ARG}: leave it out of --build-arg"
            );
            let (file, hash) = archive(archive_path)?;
            given.insert(BASE_ARG.to_owned(), format!("archive:{hash}"));
            Some((file, hash))
        }
        None => None,
    };
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let shown = || path.display().to_string();
    let plan = Plan::parse(&text, args.target.as_deref(), &given, &format!("linux/{arch}")).with_context(shown)?;
    let context = Context::open(&args.path, &path)?;
    let mut files = Vec::new();
    let needed = plan.stages.iter().zip(plan.needed());
    let needed: Vec<_> = needed.filter_map(|(stage, needed)| needed.then_some(stage)).collect();
    if let Some((_, hash)) = &base {
        let is_used = needed
            .iter()
            .any(|stage| matches!(&stage.base, Base::Archive(own) if own == hash));
        ensure!(
            is_used,
            "{}: no stage begins with the archive: write `ARG {BASE_ARG}` and `FROM ${BASE_ARG}`",
            path.display()
        );
    }
    for instruction in needed.iter().flat_map(|stage| &stage.instructions) {
        let Kind::Copy(copy) = &instruction.kind else { continue };
        let line = instruction.line;
        let archive = context.archive(copy, plan.escape);
        let archive = archive.with_context(|| format!("{}: line {line}", path.display()))?;
        files.extend(archive.map(|(file, hash)| (line, file, hash)));
    }
    Ok(From::Dockerfile {
        text,
        args: given,
        base,
        files,
    })
}

/// Opens an archive that a build begins with, and returns its hash too.
fn archive(path: &Path) -> Result<(fs::File, String)> {
    let read = || format!("read {}", path.display());
    let mut file = fs::File::open(path).with_context(read)?;
    ensure!(file.metadata()?.is_file(), "{} is not a file", path.display());
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).with_context(read)? {
            0 => break,
            length => hash.update(&buffer[..length]),
        }
    }
    file.rewind()?;
    Ok((file, hex::encode(hash.finalize())))
}

fn read_text(path: &Path) -> Result<String> {
    let file = fs::File::open(path).with_context(|| format!("read {}", path.display()))?;
    let mut text = String::new();
    let most = u64::try_from(TEXT_MAX)? + 1;
    file.take(most)
        .read_to_string(&mut text)
        .with_context(|| format!("read {}", path.display()))?;
    Ok(text)
}

/// Arguments of the build. A name alone takes its value from the environment, and is left out if there is none.
fn build_args(given: &[String], variable: impl Fn(&str) -> Option<String>) -> BTreeMap<String, String> {
    let pairs = given.iter().filter_map(|argument| match argument.split_once('=') {
        Some((name, value)) => Some((name.to_owned(), value.to_owned())),
        None => Some((argument.clone(), variable(argument)?)),
    });
    pairs.collect()
}

async fn upload(
    client: &Client,
    progress: &mut Progress,
    template: &str,
    what: &str,
    hash: &str,
    file: fs::File,
) -> Result<()> {
    let bytes = file.metadata()?.len();
    progress.show(&format!("uploading {what}"));
    let sent = client.upload(template, hash, file).await?;
    progress.line(&if sent {
        format!("uploaded {what}, {bytes} bytes")
    } else {
        format!("uploaded before: {what}")
    });
    Ok(())
}

/// Writes the log until the build has ended, and returns its last status.
async fn follow(client: &Client, progress: &mut Progress, template: &str, build: &str) -> Result<Value> {
    let mut seen = 0;
    let mut failures = 0;
    loop {
        let path = format!("/templates/{template}/builds/{build}/status?logsOffset={seen}");
        let status = match client.json(Method::GET, &path, None).await {
            Ok(status) => status,
            Err(error) if failures >= FAILURES_MAX => return Err(error),
            Err(_) => {
                failures += 1;
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        failures = 0;
        let entries = status["logEntries"].as_array().map(Vec::as_slice).unwrap_or_default();
        seen += entries.len();
        for entry in entries {
            progress.entry(entry);
        }
        let has_ended = !matches!(status["status"].as_str(), Some("waiting" | "building"));
        if has_ended && entries.is_empty() {
            return Ok(status);
        }
        if !has_ended {
            progress.show(status["status"].as_str().unwrap_or_default());
            tokio::time::sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_may_come_from_the_environment() {
        let variable = |name: &str| (name == "B").then(|| "two".to_owned());
        let given = ["A=one=1", "B", "C"].map(str::to_owned);
        let want = [("A", "one=1"), ("B", "two")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(build_args(&given, variable), BTreeMap::from(want));
    }
}
