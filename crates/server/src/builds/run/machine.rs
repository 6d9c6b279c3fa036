//! The sandbox of one step of a build.
//!
//! It is started like any other, with the limits of the template and behind the gateway, and has no row: no client can
//! use it, and the node ends it after a restart of the platform. It ends with the step, whatever happens.

use std::collections::VecDeque;
use std::io;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use model::id::SandboxId;
use model::log::Level;
use protocol::agent::Init;
use protocol::connect;
use protocol::image::Progress;
use protocol::node::{Committed, Image, NodeError, StartSandbox};
use protocol::process::ProcessConfig;
use secrecy::ExposeSecret as _;
use serde::Serialize;
use tokio::io::AsyncReadExt as _;

use super::super::context::BuildContext;
use super::super::recipe::{BuildFailure, Job};
use crate::agent::{Agent, AgentError, Ended, EndsWith, Output, Pieces};
use crate::chain::Chain;
use crate::clock::rfc3339;
use crate::ids::new_sandbox_id;

/// The binary with the programs, in every sandbox.
const PROGRAMS: &str = "/run/ringfence/agent";
/// Where programs get their jobs: in memory, so that no layer has one.
const JOB_FILE: &str = "/dev/shm/ringfence-job";
/// Maximum length of a line in the log, in bytes. What exceeds it becomes further lines.
const LINE_MAX: usize = 4096;
/// How many of the last lines of a command are told with its failure.
const TOLD_LINES: usize = 8;
/// Maximum length of such a line, in characters.
const TOLD_LINE_MAX: usize = 300;
/// Maximum length of a command in a reason, in characters.
const TOLD_COMMAND_MAX: usize = 1000;
/// Maximum length of a line of a program, in bytes.
const REPORT_MAX: usize = 1 << 20;
/// Size of a piece of an upload, in bytes.
const PIECE: usize = 128 << 10;

fn internal(what: &str, error: &(dyn std::error::Error + 'static)) -> BuildFailure {
    tracing::error!(error = %Chain(error), "a build failed: {what}");
    BuildFailure::internal()
}

/// A running sandbox of a build.
pub(super) struct Machine<'a> {
    context: &'a BuildContext,
    id: SandboxId,
    step: String,
}

impl<'a> Machine<'a> {
    /// Starts a sandbox for a step.
    pub(super) async fn start(
        context: &'a BuildContext,
        job: &Job,
        step: &str,
        image: Image,
    ) -> Result<Self, BuildFailure> {
        let machine = Self {
            id: new_sandbox_id().map_err(|error| internal("no id for a sandbox", &error))?,
            context,
            step: step.to_owned(),
        };
        let id = &machine.id;
        let init = Init {
            env_vars: None,
            access_token: Some(context.tokens.access_token(id).expose_secret().to_owned()),
            timestamp: Some(rfc3339(context.clock.now_us())),
            default_user: Some("user".to_owned()),
            sandbox_id: Some(id.as_str().to_owned()),
            template_id: Some(job.template.as_str().to_owned()),
            cpu_count: Some(context.resources.cpu_count),
            memory_mb: Some(context.resources.memory_mb),
            ..Init::default()
        };
        let request = StartSandbox {
            id: id.clone(),
            template: job.template.clone(),
            image,
            resources: context.resources,
            init,
            egress: context.egress.clone(),
            memory: None,
            owner: None,
            deadline: None,
            permit: None,
        };
        match context.start(request).await {
            Ok(_) => Ok(machine),
            Err(error) => Err(machine.failed("the sandbox of the step did not start", &error)),
        }
    }

    fn agent(&self) -> Agent<'_> {
        Agent {
            node: &self.context.node,
            id: &self.id,
            token: self.context.tokens.access_token(&self.id),
            work: &self.context.work,
        }
    }

    /// A failure that is not the fault of the build: its cause is for the operator as well.
    fn failed(&self, what: &str, error: &(dyn std::error::Error + 'static)) -> BuildFailure {
        tracing::error!(sandbox.id = %self.id, error = %Chain(error), "a build failed: {what}");
        BuildFailure::at(&self.step, format!("{what}: {}", Chain(error)))
    }

    /// What the agent answered: its refusals, such as of a user or a directory that does not exist, are for the client,
    /// in words that clients look for.
    fn refused(&self, command: &str, error: AgentError) -> BuildFailure {
        match error {
            AgentError::Message(connect::Error { code, message }) => {
                let code = serde_json::to_value(code).unwrap_or_default();
                let code = code.as_str().unwrap_or("unknown");
                let why = format!("failed to run command '{command}': command failed: {code}: {message}");
                BuildFailure::at(&self.step, why)
            }
            error => self.failed("a command could not be run", &error),
        }
    }

    /// Runs a command, with its output in the log under a prefix. What it has left in the background ends with the sandbox.
    pub(super) async fn run(&self, user: &str, command: ProcessConfig, prefix: &str) -> Result<Ran, BuildFailure> {
        self.follow(user, command, EndsWith::Exit, prefix).await
    }

    /// Runs a command until its end in this sense, with its output in the log under a prefix.
    pub(super) async fn follow(
        &self,
        user: &str,
        command: ProcessConfig,
        ends: EndsWith,
        prefix: &str,
    ) -> Result<Ran, BuildFailure> {
        let prefixes = Some([format!("{prefix} [stdout]: "), format!("{prefix} [stderr]: ")]);
        self.run_with(user, command, ends, prefixes).await
    }

    /// Runs a command without its output in the log.
    pub(super) async fn run_silently(&self, user: &str, command: ProcessConfig) -> Result<Ran, BuildFailure> {
        self.run_with(user, command, EndsWith::Exit, None).await
    }

    async fn run_with(
        &self,
        user: &str,
        command: ProcessConfig,
        ends: EndsWith,
        prefixes: Option<[String; 2]>,
    ) -> Result<Ran, BuildFailure> {
        let shown = command.args.last().unwrap_or(&command.cmd);
        let shown: String = shown.chars().take(TOLD_COMMAND_MAX).collect();
        let mut output = LogOutput {
            log: StepLog {
                context: self.context,
                step: &self.step,
                prefixes,
                last: VecDeque::new(),
            },
            stdout: Lines::default(),
            stderr: Lines::default(),
        };
        let ended = self.agent().run(user, command, ends, &mut output).await;
        output.finish();
        match ended {
            Ok(ended) => Ok(Ran {
                code: ended.code,
                last: output.log.last.into(),
            }),
            Err(error) => Err(self.refused(&shown, error)),
        }
    }

    /// Runs a command and returns what it writes, at most `most` bytes of it.
    pub(super) async fn output_of(
        &self,
        user: &str,
        command: ProcessConfig,
        most: usize,
    ) -> Result<(Ended, String), BuildFailure> {
        let bytes = Vec::new();
        let mut output = Kept { bytes, most };
        let shown = command.cmd.clone();
        let ended = self.agent().run(user, command, EndsWith::Exit, &mut output).await;
        let ended = ended.map_err(|error| self.refused(&shown, error))?;
        Ok((ended, String::from_utf8_lossy(&output.bytes).into_owned()))
    }

    /// Writes a file of the host into the sandbox, as its root.
    pub(super) async fn upload(&self, path: &str, file: &Path) -> Result<(), BuildFailure> {
        let mut file = tokio::fs::File::open(file)
            .await
            .map_err(|error| self.failed("an uploaded archive cannot be read", &error))?;
        let length = file.metadata().await.map(|metadata| metadata.len());
        let length = length.map_err(|error| self.failed("an uploaded archive cannot be read", &error))?;
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let read = async move {
            loop {
                let mut piece = BytesMut::with_capacity(PIECE);
                let result = match file.read_buf(&mut piece).await {
                    Ok(0) => return,
                    Ok(_) => Ok(piece.freeze()),
                    Err(error) => Err(error),
                };
                if sender.send(result).await.is_err() {
                    return;
                }
            }
        };
        let agent = self.agent();
        let (sent, ()) = tokio::join!(agent.upload("root", path, length, Pieces(receiver)), read);
        sent.map_err(|error| self.failed("an uploaded archive could not be sent into the sandbox", &error))
    }

    /// Writes a file into the sandbox, as its root.
    pub(super) async fn write(&self, path: &str, content: Bytes) -> Result<(), BuildFailure> {
        let length = content.len() as u64;
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        // There is room for one.
        let _ = sender.send(Ok(content)).await;
        drop(sender);
        let sent = self.agent().upload("root", path, length, Pieces(receiver)).await;
        sent.map_err(|error| self.failed("a file could not be sent into the sandbox", &error))
    }

    /// Runs one of the programs with a job, and returns its result. No command of a user may have run before.
    pub(super) async fn program(&self, name: &str, job: &impl Serialize) -> Result<Progress, BuildFailure> {
        let job = serde_json::to_vec(job).map_err(|error| self.failed("a job cannot be encoded", &error))?;
        self.write(JOB_FILE, Bytes::from(job)).await?;
        self.execute(name, JOB_FILE.to_owned()).await
    }

    /// As [`Machine::program`], after commands of users: they may have left anything where files of jobs are. The job must
    /// have no secrets.
    pub(super) async fn late_program(&self, name: &str, job: &impl Serialize) -> Result<Progress, BuildFailure> {
        let job = serde_json::to_string(job).map_err(|error| self.failed("a job cannot be encoded", &error))?;
        self.execute(name, job).await
    }

    async fn execute(&self, name: &str, job: String) -> Result<Progress, BuildFailure> {
        let agent = self.agent();
        let command = ProcessConfig {
            cmd: PROGRAMS.to_owned(),
            args: vec![name.to_owned(), job],
            cwd: Some("/".to_owned()),
            ..ProcessConfig::default()
        };
        let mut output = Report {
            context: self.context,
            step: &self.step,
            line: BytesMut::new(),
            last: None,
        };
        let ended = agent.run("root", command, EndsWith::Output, &mut output).await;
        let ended = ended.map_err(|error| self.failed("a program of the platform could not be run", &error))?;
        match (ended.code, output.last) {
            (0, Some(result)) => Ok(result),
            (0, None) => Err(BuildFailure::at(&self.step, format!("{name} gave no result"))),
            (code, _) => {
                let reason = ended.stderr.trim();
                Err(BuildFailure::at(
                    &self.step,
                    if reason.is_empty() {
                        format!("{name} ended with {code}")
                    } else {
                        reason.to_owned()
                    },
                ))
            }
        }
    }

    /// Ends the sandbox and stores what it wrote as a layer.
    pub(super) async fn commit(self, merge: bool) -> Result<Committed, BuildFailure> {
        let committed = self.context.commit(&self.id, merge).await;
        committed.map_err(|error| match error {
            NodeError::Refused(why) => BuildFailure::at(&self.step, why),
            error => self.failed("the files of the step could not be stored", &error),
        })
    }

    /// Ends the sandbox. One that is dropped ends with the build.
    pub(super) async fn end(self) {
        if let Err(error) = self.context.kill(&self.id).await {
            tracing::error!(sandbox.id = %self.id, error = %Chain(&error), "cannot end a sandbox of a build");
        }
    }
}

/// A command that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ran {
    /// Its exit code; -1 if a signal ended it.
    pub(super) code: i32,
    /// The last lines of its output. Of a command whose output is in the log, no others than those that are there.
    last: Vec<String>,
}

impl Ran {
    /// The failure of a build because of the command: its exit code, and the last lines of its output.
    pub(super) fn failure(&self, step: &str, what: &str) -> BuildFailure {
        let ended = format!("{what} ended with exit code {}", self.code);
        BuildFailure::at(step, self.told(ended))
    }

    /// A text with the last lines of the output below it.
    pub(super) fn told(&self, mut text: String) -> String {
        for line in &self.last {
            text.push('\n');
            text.push_str(line);
        }
        text
    }

    /// The last lines of the output, in their order.
    pub(super) fn last(&self) -> &[String] {
        &self.last
    }
}

/// Lines of a stream that arrives in pieces.
#[derive(Default)]
struct Lines {
    rest: BytesMut,
}

impl Lines {
    fn take(&mut self, piece: &[u8], mut log: impl FnMut(&str)) {
        self.rest.extend_from_slice(piece);
        loop {
            let end = self.rest.iter().take(LINE_MAX).position(|&byte| byte == b'\n');
            let line = match end {
                Some(end) => self.rest.split_to(end + 1),
                None if self.rest.len() >= LINE_MAX => self.rest.split_to(LINE_MAX),
                None => return,
            };
            Self::log(&line, &mut log);
        }
    }

    fn finish(&mut self, mut log: impl FnMut(&str)) {
        let line = self.rest.split();
        Self::log(&line, &mut log);
    }

    fn log(line: &[u8], log: &mut impl FnMut(&str)) {
        let text = String::from_utf8_lossy(line);
        // What a progress bar wrote over is not shown.
        let text = text.trim_end().rsplit('\r').next().unwrap_or_default().trim_end();
        if !text.is_empty() {
            log(text);
        }
    }
}

/// Where the lines of a command get to.
struct StepLog<'a> {
    context: &'a BuildContext,
    step: &'a str,
    /// What lines of both streams begin with in the log of the build; none if they are not there.
    prefixes: Option<[String; 2]>,
    last: VecDeque<String>,
}

impl StepLog<'_> {
    fn line(&mut self, stream: usize, text: &str) {
        if let Some(prefixes) = &self.prefixes {
            let line = format!("{}{text}", prefixes[stream]);
            // A reason says nothing that the log has left out.
            if !self.context.log(Level::Info, Some(self.step), line) {
                return;
            }
        }
        if self.last.len() == TOLD_LINES {
            self.last.pop_front();
        }
        self.last.push_back(text.chars().take(TOLD_LINE_MAX).collect());
    }
}

/// Writes the output of a command into the log of the build, and keeps its last lines.
struct LogOutput<'a> {
    log: StepLog<'a>,
    stdout: Lines,
    stderr: Lines,
}

impl LogOutput<'_> {
    fn finish(&mut self) {
        self.stdout.finish(|line| self.log.line(0, line));
        self.stderr.finish(|line| self.log.line(1, line));
    }
}

impl Output for LogOutput<'_> {
    async fn take(&mut self, piece: Bytes) -> io::Result<()> {
        self.stdout.take(&piece, |line| self.log.line(0, line));
        Ok(())
    }

    fn take_error(&mut self, piece: &[u8]) {
        self.stderr.take(piece, |line| self.log.line(1, line));
    }
}

/// Keeps the first of an output.
struct Kept {
    bytes: Vec<u8>,
    most: usize,
}

impl Output for Kept {
    async fn take(&mut self, piece: Bytes) -> io::Result<()> {
        let room = self.most.saturating_sub(self.bytes.len());
        self.bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        Ok(())
    }
}

/// The lines of a program of the platform.
struct Report<'a> {
    context: &'a BuildContext,
    step: &'a str,
    line: BytesMut,
    last: Option<Progress>,
}

impl Output for Report<'_> {
    async fn take(&mut self, piece: Bytes) -> io::Result<()> {
        self.line.extend_from_slice(&piece);
        while let Some(end) = self.line.iter().position(|&byte| byte == b'\n') {
            let line = self.line.split_to(end + 1);
            match serde_json::from_slice(&line) {
                Ok(Progress::Log { message }) => {
                    self.context.log(Level::Info, Some(self.step), message);
                }
                Ok(Progress::State { message }) => {
                    self.context.log(Level::Debug, Some(self.step), message);
                }
                Ok(result) => self.last = Some(result),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        if self.line.len() > REPORT_MAX {
            Err(io::Error::other("a line is too long"))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_becomes_lines_of_bounded_length() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        for piece in [&b"one\ntw"[..], b"o\r\n\n  \n", b"10%\r50%\r100%\n", b"\xff\n", b"last"] {
            lines.take(piece, |line| seen.push(line.to_owned()));
        }
        lines.finish(|line| seen.push(line.to_owned()));
        lines.finish(|line| seen.push(line.to_owned()));
        assert_eq!(seen, ["one", "two", "100%", "\u{fffd}", "last"]);

        let mut seen = Vec::new();
        let mut lines = Lines::default();
        lines.take(&vec![b'x'; 2 * LINE_MAX + 1], |line| seen.push(line.len()));
        lines.finish(|line| seen.push(line.len()));
        assert_eq!(seen, [LINE_MAX, LINE_MAX, 1]);
    }
}
