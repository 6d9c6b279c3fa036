//! A sandbox that the operator has entered, and the ways to it.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use http::{HeaderValue, Method};
use hyper::upgrade::Upgraded;
use protocol::process::ProcessConfig;
use server::operator::OperatorAccess;

use super::agent::Agent;
use crate::args::ProcessArgs;
use crate::config;
use crate::data_dir::DataDir;
use crate::operator;

/// A sandbox that the operator has entered.
#[derive(Debug)]
pub(super) struct Inside<'a> {
    dir: &'a DataDir,
    pub(super) id: String,
    token: HeaderValue,
    /// Disk of the sandbox, in MiB.
    pub(super) disk_mb: u32,
}

impl<'a> Inside<'a> {
    /// Enters a sandbox with a command.
    pub(super) async fn enter(dir: &'a DataDir, id: &str, command: &str, resume: bool) -> Result<Self> {
        operator::check_id(id)?;
        let path = format!("/sandboxes/{id}/access?command={command}&resume={resume}");
        let access: OperatorAccess = operator::ask(dir, Method::POST, &path).await?;
        let mut token = HeaderValue::from_str(&access.token).context("read the token of the sandbox")?;
        token.set_sensitive(true);
        Ok(Self {
            dir,
            id: id.to_owned(),
            token,
            disk_mb: access.disk_mb,
        })
    }

    /// A stream to a port.
    pub(super) async fn stream(&self, port: u16) -> Result<Upgraded> {
        operator::stream(self.dir, &format!("/sandboxes/{}/ports/{port}", self.id)).await
    }

    /// A connection to the agent, on behalf of a user.
    pub(super) async fn agent(&self, user: Option<&str>) -> Result<Agent> {
        let stream = self.stream(protocol::agent::PORT).await?;
        Agent::connect(stream, self.token.clone(), user).await
    }
}

/// What the arguments say about a process.
pub(super) fn process_config(args: &ProcessArgs, command: &[String]) -> Result<ProcessConfig> {
    let mut envs = BTreeMap::new();
    for (name, value) in &args.env {
        let value = match value {
            Some(value) => value.clone(),
            None => config::passed_on(name)
                .with_context(|| format!("--env {name}: there is no such variable in the environment"))?,
        };
        envs.insert(name.clone(), value);
    }
    let (program, rest) = command.split_first().context("there is no command")?;
    Ok(ProcessConfig {
        cmd: program.clone(),
        args: rest.to_vec(),
        envs,
        cwd: args.cwd.clone(),
    })
}
