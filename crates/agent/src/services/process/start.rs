//! `Start`: from a request to a running process with a record.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use protocol::agent::AgentEvent;
use protocol::connect::{Code, Error};
use protocol::process::{DataEvent, ProcessConfig, Pty, PtySize, StartRequest};
use rustix::process::Signal;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::events::{self, EventStream, Events};
use super::memory_kills::MemoryKills;
use super::stdio::{self, Ownership};
use super::table::{Process, Table};
use super::{output, program};
use crate::caller::Accounts;
use crate::services::events::EventQueue;
use crate::settings::AgentSettings;
use crate::spawner::request::{DEFAULT_PATH, Failure, Request};
use crate::spawner_client::{SpawnError, SpawnerClient, describe};
use crate::transport::rpc::{Call, Writer};
use crate::users::User;

/// What is reported of a user's name, which the sandbox's root makes up.
const USER_MAX: usize = 64;

/// Everything about a start that is known before the process exists.
struct Job {
    request: Request,
    cwd: PathBuf,
    config: ProcessConfig,
    tag: Option<String>,
    pty: Option<Pty>,
    stdin: bool,
    until_exit: bool,
    user: String,
    deadline: Option<Instant>,
    share: Option<OwnedSemaphorePermit>,
}

/// Starts processes at the request of clients.
pub(crate) struct Starter {
    pub(crate) accounts: Rc<Accounts>,
    pub(crate) settings: Rc<RefCell<AgentSettings>>,
    pub(crate) spawner: Rc<SpawnerClient>,
    pub(crate) event_queue: Rc<EventQueue>,
    pub(crate) table: Rc<Table>,
    pub(crate) memory_kills: MemoryKills,
    /// Tasks that outlive the request that began them.
    pub(crate) tasks: TaskTracker,
}

impl Starter {
    /// Starts a process and streams its events.
    pub(super) async fn start(
        self: &Rc<Self>,
        call: &Call,
        writer: Writer,
        message: StartRequest,
    ) -> Result<EventStream, Error> {
        let deferred = self.settings.borrow().deferred_trust();
        if let Some(mut installed) = deferred {
            // The certificate of the egress gateway is there before the first process.
            let _ = installed.changed().await;
        }
        let user = self.accounts.user_of(&call.caller)?;
        let config = message.process.unwrap_or_default();
        let cwd = self.working_directory(&user, config.cwd.as_deref().unwrap_or_default())?;
        let job = Job {
            request: Request {
                uid: user.uid,
                gid: user.gid,
                groups: self.accounts.users.groups(&user),
                terminal: message.pty.is_some(),
                cwd: cwd.as_os_str().as_bytes().to_vec(),
                argv: [&config.cmd]
                    .into_iter()
                    .chain(&config.args)
                    .map(|text| text.as_bytes().to_vec())
                    .collect(),
                env: self.environment(&user, &config.envs)?,
            },
            cwd,
            config,
            tag: message.tag,
            pty: message.pty,
            stdin: message.stdin.unwrap_or(true),
            until_exit: call.until_exit,
            user: user.name,
            deadline: call.deadline,
            share: call.take_share(),
        };
        // The listener exists before the process, so that no early output is lost. The start itself is a task of its
        // own, because it must go through once it began, even when the client is gone.
        let (listener, events) = Process::channel();
        let started = self.tasks.spawn_local(self.clone().launch(job, listener)).await;
        let process = started.map_err(|_| Error::new(Code::Internal, "starting the process failed"))??;
        Ok(events::stream(process.pid, Events::Live(events, process), call, writer))
    }

    fn working_directory(&self, user: &User, cwd: &str) -> Result<PathBuf, Error> {
        let path = self.accounts.resolve(user, cwd)?;
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let message = format!("cwd '{}' does not exist", path.display());
                Err(Error::new(Code::InvalidArgument, message))
            }
            // Whether the user may enter it, only the user can find out.
            _ => Ok(path),
        }
    }

    /// Environment of a new process as `KEY=value`, in which later sources replace earlier ones.
    fn environment(&self, user: &User, envs: &BTreeMap<String, String>) -> Result<Vec<Vec<u8>>, Error> {
        let home = user.home.to_string_lossy().into_owned();
        let basics = [
            ("PATH", DEFAULT_PATH),
            ("HOME", &home),
            ("USER", &user.name),
            ("LOGNAME", &user.name),
        ];
        let mut merged: BTreeMap<String, String> = basics
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        merged.extend(self.settings.borrow().env());
        merged.extend(envs.iter().map(|(key, value)| (key.clone(), value.clone())));
        let entries: Vec<Vec<u8>> = merged
            .into_iter()
            .map(|(key, value)| format!("{key}={value}").into_bytes())
            .collect();
        if entries.iter().any(|entry| entry.contains(&0)) {
            return Err(Error::new(
                Code::InvalidArgument,
                "environment variables must not contain NUL bytes",
            ));
        }
        Ok(entries)
    }

    async fn launch(self: Rc<Self>, job: Job, listener: mpsc::Sender<DataEvent>) -> Result<Rc<Process>, Error> {
        let uid = job.request.uid;
        let (stdio, ends) = match job.pty {
            Some(pty) => stdio::terminal(pty.size.unwrap_or_default(), uid),
            None => stdio::pipes(job.stdin, uid),
        }
        .map_err(|error| start_error(&job, &stdio::no_ends(&error), Code::FailedPrecondition))?;
        let kills_before = self.memory_kills.count();
        let spawned = self
            .spawner
            .spawn(&job.request, [&stdio[0], &stdio[1], &stdio[2]])
            .await;
        drop(stdio);
        let pid = match spawned {
            Ok(pid) => pid,
            Err(error) => {
                self.event_queue.record(&AgentEvent::ProcessFailed {
                    command: program::name(&job.config).to_owned(),
                    reason: error.to_string(),
                });
                return Err(spawn_error(&job, &error));
            }
        };
        let since = Instant::now();
        self.event_queue.record(&AgentEvent::ProcessStart {
            pid,
            command: program::name(&job.config).to_owned(),
            user: job.user.chars().take(USER_MAX).collect(),
            pty: job.pty.is_some(),
        });
        let ownership = Ownership::new(&ends, uid);
        let process = Process::new(pid, job.config, job.tag, ends.input, ownership, listener, job.share);
        let process = Rc::new(process);
        let id = self.table.insert(process.clone());
        let readers: Vec<_> = ends
            .outputs
            .into_iter()
            .map(|(file, source)| {
                let relay = output::relay(self.table.clone(), file, source, process.clone(), job.until_exit);
                self.tasks.spawn_local(relay)
            })
            .collect();
        if let Some(deadline) = job.deadline {
            self.tasks.spawn_local(end_at(deadline, process.clone()));
        }
        let ended = process.clone();
        let starter = self.clone();
        self.tasks.spawn_local(async move {
            ended.reaped().await;
            // Before the output's end, which may be long after, with other processes that were killed in between.
            if ended.was_killed_by_another() && starter.memory_kills.explains(kills_before) {
                ended.note_out_of_memory();
            }
            for reader in readers {
                if let Ok(Some(still_open)) = reader.await {
                    starter.tasks.spawn_local(output::discard(still_open));
                }
            }
            starter.table.retire(id);
            starter.event_queue.record(&end_of(&ended, since));
        });
        Ok(process)
    }
}

fn end_of(process: &Process, since: Instant) -> AgentEvent {
    let end = process.end().cloned().unwrap_or_default();
    let [stdout_bytes, stderr_bytes, pty_bytes] = process.written();
    AgentEvent::ProcessEnd {
        pid: process.pid,
        command: program::name(&process.config).to_owned(),
        exit_code: end.exit_code,
        status: end.status,
        stdout_bytes,
        stderr_bytes,
        pty_bytes,
        duration_ms: u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
    }
}

/// Kills a process, and only this one, at its deadline.
async fn end_at(deadline: Instant, process: Rc<Process>) {
    tokio::select! {
        () = tokio::time::sleep_until(deadline) => {
            process.waive_output();
            let _ = process.signal(Signal::KILL);
        }
        () = process.over() => {}
    }
}

fn spawn_error(job: &Job, error: &SpawnError) -> Error {
    match error {
        SpawnError::NoSpawner => Error::new(Code::Unavailable, error.to_string()),
        SpawnError::Refused { failure, errno } => {
            let (what, code) = match failure {
                Failure::Process => ("fork".to_owned(), Code::FailedPrecondition),
                Failure::Terminal => ("set up terminal".to_owned(), Code::InvalidArgument),
                Failure::User => ("switch user".to_owned(), Code::InvalidArgument),
                Failure::Directory => (format!("chdir {}", job.cwd.display()), Code::InvalidArgument),
            };
            // A request that cannot be carried out at all is not a matter of the sandbox's state.
            let code = if *errno == libc::EINVAL {
                Code::InvalidArgument
            } else {
                code
            };
            start_error(job, &format!("{what}: {}", describe(*failure, *errno)), code)
        }
    }
}

fn start_error(job: &Job, reason: &str, code: Code) -> Error {
    let command = std::iter::once(&job.config.cmd).chain(&job.config.args);
    let command: Vec<&str> = command.map(String::as_str).collect();
    let command = shorten(command.join(" "));
    let message = match job.pty {
        None => format!("error starting process '{command}': {reason}"),
        Some(pty) => {
            let PtySize { cols, rows } = pty.size.unwrap_or_default();
            let directory = Path::display(&job.cwd);
            format!(
                "error starting pty with command '{command}' in dir '{directory}' with '{cols}' cols and '{rows}' rows: {reason}"
            )
        }
    };
    Error::new(code, message)
}

/// Keeps an error message of a size that a reader can use.
fn shorten(mut text: String) -> String {
    const LIMIT: usize = 1024;
    if text.len() > LIMIT {
        text.truncate(text.floor_char_boundary(LIMIT));
        text.push('…');
    }
    text
}
