//! Into a sandbox.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use formats::percent;
use futures_util::stream;
use http::{Method, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use protocol::connect::Code;
use protocol::filesystem::{self, EntryResponse, PathRequest, file_type};
use protocol::process::ProcessConfig;
use tokio::sync::mpsc;

use super::super::agent::{self, CallError, RequestBody};
use super::super::host_files::{Folder, Found, ReadFile};
use super::super::process::{CommandEvent, Running};
use super::super::progress::PAUSE;
use super::download::{LINK, SPECIAL, told};
use super::{Copy, DEPTH_MAX, host_name, joined};
use crate::requests;
use crate::stdio;

/// Largest response that is read.
const ANSWER_MAX: usize = 64 << 10;
/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;
/// Paths in the arguments of one `chmod`.
const CHMOD_MAX: usize = 200;
/// The permission bits that the agent gives to files and folders.
const FILE_MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

/// Permission bits that are to be set in the sandbox: those of files first, because those of a folder may close it.
#[derive(Debug, Default)]
struct Modes {
    files: BTreeMap<u32, Vec<String>>,
    folders: BTreeMap<u32, Vec<String>>,
}

/// A folder that is still to be copied.
struct Pending {
    /// The folder that has it, and its name there; the first one is open already.
    parent: Option<(Rc<Folder>, String)>,
    open: Option<Folder>,
    to: String,
    depth: usize,
}

impl Copy<'_> {
    /// Copies a file or a folder of the host.
    pub(super) async fn upload(&mut self, source: &Path, target: &str) -> Result<()> {
        let shown = source.display();
        let found = std::fs::metadata(source).with_context(|| format!("read {shown}"))?;
        let to = self.target(target, || host_name(source)).await?;
        let mut modes = Modes::default();
        if found.is_dir() {
            let first = Pending {
                parent: None,
                open: Some(Folder::open(source)?),
                to,
                depth: 0,
            };
            self.upload_all(first, &mut modes).await?;
        } else if found.is_file() {
            let file = ReadFile::open(source)?;
            self.count()?;
            self.send_file(file, &to, &mut modes).await?;
        } else {
            bail!("{shown}: {SPECIAL}; - copies stdin");
        }
        self.set_modes(modes).await
    }

    /// Copies stdin to a file.
    pub(super) async fn upload_stdin(&mut self, target: &str) -> Result<()> {
        let to = self
            .target(target, || {
                bail!("{} is a folder: stdin needs the name of a file", agent::shown(target))
            })
            .await?;
        self.progress.begin(&to);
        let input = stdio::read_stdin()?;
        let pieces = stream::unfold(input, |mut input: mpsc::Receiver<Bytes>| async move {
            let piece = input.recv().await?;
            Some((Ok::<_, io::Error>(Frame::data(piece)), input))
        });
        self.post(&to, StreamBody::new(pieces).boxed_unsync()).await?;
        self.progress.end();
        Ok(())
    }

    /// The path to copy to: below a folder that exists, and otherwise the target itself.
    async fn target<'b>(&mut self, target: &str, name: impl FnOnce() -> Result<&'b str>) -> Result<String> {
        match self.stat(target).await {
            Ok(entry) if entry.kind == file_type::DIRECTORY => Ok(joined(target, name()?)),
            Ok(_) => Ok(target.to_owned()),
            Err(CallError::Refused(error)) if error.code == Code::NotFound => Ok(target.to_owned()),
            Err(error) => Err(error.into()),
        }
    }

    async fn upload_all(&mut self, first: Pending, modes: &mut Modes) -> Result<()> {
        let mut pending = vec![first];
        while let Some(next) = pending.pop() {
            self.count()?;
            let opened = match (next.open, &next.parent) {
                (Some(folder), _) => Ok(folder),
                (None, Some((parent, name))) => parent.enter(name),
                (None, None) => bail!("a folder without a place"),
            };
            let folder = match opened {
                Ok(folder) => Rc::new(folder),
                Err(error) => {
                    self.fail(&next.to, CallError::Refused(told(&error))).await?;
                    continue;
                }
            };
            if let Err(error) = self.make_folder(&next.to).await {
                if next.depth == 0 {
                    return Err(error.into());
                }
                self.fail(&next.to, error).await?;
                continue;
            }
            let mode = folder.mode()?;
            if mode != FOLDER_MODE {
                modes.folders.entry(mode).or_default().push(next.to.clone());
            }
            for found in folder.list()? {
                self.upload_entry(found?, &folder, &next.to, next.depth, &mut pending, modes)
                    .await?;
            }
        }
        Ok(())
    }

    async fn upload_entry(
        &mut self,
        found: (String, Found),
        folder: &Rc<Folder>,
        parent: &str,
        depth: usize,
        pending: &mut Vec<Pending>,
        modes: &mut Modes,
    ) -> Result<()> {
        let (name, kind) = found;
        let to = joined(parent, &name);
        match kind {
            Found::Link => self.skip(&to, LINK),
            Found::Special => self.skip(&to, SPECIAL),
            Found::Unnamed => self.skip(&to, "its name is not text"),
            Found::Folder if depth + 1 >= DEPTH_MAX => {
                bail!("{}: more than {DEPTH_MAX} folders inside each other", agent::shown(&to))
            }
            Found::Folder => pending.push(Pending {
                parent: Some((Rc::clone(folder), name)),
                open: None,
                to,
                depth: depth + 1,
            }),
            Found::File => {
                self.count()?;
                let sent = match folder.read(&name) {
                    Ok(file) => self.send_file(file, &to, modes).await,
                    Err(error) => Err(CallError::Refused(told(&error))),
                };
                if let Err(error) = sent {
                    self.fail(&to, error).await?;
                }
            }
        }
        Ok(())
    }

    async fn send_file(&mut self, file: ReadFile, to: &str, modes: &mut Modes) -> Result<(), CallError> {
        self.progress.begin(to);
        let (mode, counter) = (file.mode, self.progress.counter());
        let pieces = stream::unfold((file.file, counter), |(mut file, counter)| async move {
            let mut buffer = vec![0; CHUNK];
            match file.read(&mut buffer) {
                Ok(0) => None,
                Ok(length) => {
                    counter.add(length);
                    buffer.truncate(length);
                    Some((Ok(Frame::data(Bytes::from(buffer))), (file, counter)))
                }
                // The request is cut, so that the agent takes a part for no whole.
                Err(error) => Some((Err(error), (file, counter))),
            }
        });
        self.post(to, StreamBody::new(pieces).boxed_unsync()).await?;
        self.progress.end();
        if mode != FILE_MODE {
            modes.files.entry(mode).or_default().push(to.to_owned());
        }
        Ok(())
    }

    async fn post(&mut self, to: &str, body: RequestBody) -> Result<(), CallError> {
        let request = format!("/files?path={}{}", percent::encode(to), self.username());
        let sending = self
            .agent
            .send(Method::POST, &request, "application/octet-stream", &[], body);
        let mut sending = std::pin::pin!(sending);
        let response = loop {
            tokio::select! {
                response = &mut sending => break response?,
                () = tokio::time::sleep(PAUSE) => self.progress.show(),
            }
        };
        let status = response.status();
        let body = requests::whole(response.into_body(), ANSWER_MAX).await?;
        match status {
            StatusCode::OK => Ok(()),
            status => Err(CallError::Refused(told(&agent::refusal(status, &body)))),
        }
    }

    async fn make_folder(&mut self, path: &str) -> Result<(), CallError> {
        let request = PathRequest { path: path.to_owned() };
        let method = format!("{}MakeDir", filesystem::SERVICE);
        let made: Result<EntryResponse, CallError> = self.agent.call(&method, &request).await;
        match made {
            Ok(_) => Ok(()),
            Err(CallError::Refused(error)) if error.code == Code::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sets permission bits with a program of the sandbox, which may have none: then the operator is told.
    async fn set_modes(&mut self, modes: Modes) -> Result<()> {
        for (mode, paths) in modes.files.into_iter().chain(modes.folders) {
            for paths in paths.chunks(CHMOD_MAX) {
                let mut args = vec![format!("{mode:o}"), "--".to_owned()];
                args.extend_from_slice(paths);
                if !self.chmod(args).await? {
                    self.tell(&format!(
                        "the permission bits {mode:o} could not be set with the program chmod of the sandbox"
                    ));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn chmod(&mut self, args: Vec<String>) -> Result<bool> {
        let config = ProcessConfig {
            cmd: "chmod".to_owned(),
            args,
            ..ProcessConfig::default()
        };
        let Ok(mut chmod) = Running::start(self.inside, self.user, config, None, false).await else {
            return Ok(false);
        };
        loop {
            if let CommandEvent::End(end) = chmod.next().await? {
                return Ok(end.exited && end.exit_code == 0);
            }
        }
    }
}
