//! Out of a sandbox.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use formats::percent;
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use protocol::filesystem::{self, EntryInfo, EntryResponse, ListDirRequest, ListDirResponse, PathRequest, file_type};

use super::super::agent::{self, CallError};
use super::super::host_files::{Folder, is_name};
use super::{Copy, DEPTH_MAX, joined, last_name};
use crate::requests;
use crate::stdio::Output;

/// Largest error that is read.
const REFUSAL_MAX: usize = 64 << 10;
/// What the operator is told about links.
pub(super) const LINK: &str = "a link, which is not copied";
/// What the operator is told about entries that are neither file nor folder.
pub(super) const SPECIAL: &str = "neither a file nor a folder";

/// A folder that is still to be copied.
struct Pending {
    from: String,
    /// The folder in which it is created, and its name there.
    parent: std::rc::Rc<Folder>,
    name: String,
    mode: u32,
    depth: usize,
}

impl Copy<'_> {
    /// Copies a file or a folder to a path of the host.
    pub(super) async fn download(&mut self, from: &str, target: &Path) -> Result<()> {
        let entry = self.stat(from).await?;
        let (folder, name) = if target.is_dir() {
            (Folder::open(target)?, last_name(from)?.to_owned())
        } else {
            let name = super::host_name(target)?.to_owned();
            let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty());
            (Folder::open(parent.unwrap_or(Path::new(".")))?, name)
        };
        if !is_name(&name) {
            bail!("{name:?} is not a name for a file");
        }
        match entry.kind {
            file_type::DIRECTORY => {
                self.download_all(Pending {
                    from: from.to_owned(),
                    parent: folder.into(),
                    name,
                    mode: entry.mode,
                    depth: 0,
                })
                .await
            }
            file_type::FILE => {
                self.count()?;
                self.file(from, &folder, &name, entry.mode).await.map_err(Into::into)
            }
            _ => bail!("{}: {SPECIAL}", agent::shown(from)),
        }
    }

    /// Copies a folder with all that it contains. An entry that fails does not end the copy.
    async fn download_all(&mut self, first: Pending) -> Result<()> {
        let mut pending = vec![first];
        while let Some(next) = pending.pop() {
            self.count()?;
            let made = next.parent.make(&next.name, next.mode);
            let folder = match made.with_context(|| format!("create the folder {:?}", next.name)) {
                Ok(folder) => std::rc::Rc::new(folder),
                Err(error) if next.depth == 0 => return Err(error),
                Err(error) => {
                    self.fail(&next.from, CallError::Refused(told(&error))).await?;
                    continue;
                }
            };
            let entries = match self.list(&next.from).await {
                Ok(entries) => entries,
                Err(error) if next.depth == 0 => return Err(error.into()),
                Err(error) => {
                    self.fail(&next.from, error).await?;
                    continue;
                }
            };
            for entry in entries {
                let from = joined(&next.from, &entry.name);
                if !is_name(&entry.name) {
                    let error = anyhow!("the sandbox gave a name that is none: {:?}", agent::shown(&entry.name));
                    self.fail(&next.from, CallError::Refused(told(&error))).await?;
                } else if entry.symlink_target.is_some() {
                    self.skip(&from, LINK);
                } else if entry.kind == file_type::DIRECTORY {
                    if next.depth + 1 >= DEPTH_MAX {
                        bail!(
                            "{}: more than {DEPTH_MAX} folders inside each other",
                            agent::shown(&from)
                        );
                    }
                    pending.push(Pending {
                        from,
                        parent: std::rc::Rc::clone(&folder),
                        name: entry.name,
                        mode: entry.mode,
                        depth: next.depth + 1,
                    });
                } else if entry.kind == file_type::FILE {
                    self.count()?;
                    if let Err(error) = self.file(&from, &folder, &entry.name, entry.mode).await {
                        if self.left == 0 {
                            return Err(error.into());
                        }
                        self.fail(&from, error).await?;
                    }
                } else {
                    self.skip(&from, SPECIAL);
                }
            }
        }
        Ok(())
    }

    /// Copies one file.
    async fn file(&mut self, from: &str, folder: &Folder, name: &str, mode: u32) -> Result<(), CallError> {
        let response = self.get(from).await?;
        let mut body = response.into_body();
        let mut file = folder.create(mode).map_err(CallError::Failed)?;
        self.progress.begin(from);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| anyhow!("the connection to the sandbox was lost"))?;
            let Ok(data) = frame.into_data() else { continue };
            self.take(data.len())?;
            file.write(&data)?;
        }
        file.finish(name)?;
        self.progress.end();
        Ok(())
    }

    /// Counts bytes that came out of the sandbox.
    fn take(&mut self, length: usize) -> Result<()> {
        let Some(left) = self.left.checked_sub(length as u64) else {
            self.left = 0;
            bail!("more than the bound of this copy, which --max-size raises: files with holes are copied as zeros");
        };
        self.left = left;
        self.progress.add(length);
        Ok(())
    }

    /// Writes a file to stdout.
    pub(super) async fn download_to_stdout(&mut self, from: &str) -> Result<()> {
        if self.stat(from).await?.kind == file_type::DIRECTORY {
            bail!("{} is a folder, and stdout takes only a file", agent::shown(from));
        }
        let mut body = self.get(from).await?.into_body();
        let stdout = Output::to(std::io::stdout())?;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| anyhow!("the connection to the sandbox was lost"))?;
            let Ok(data) = frame.into_data() else { continue };
            self.take(data.len())?;
            if !stdout.write(data).await {
                break;
            }
        }
        if !stdout.finish().await? {
            bail!("stdout was closed before the end of the file");
        }
        Ok(())
    }

    /// Asks for a file.
    async fn get(&mut self, path: &str) -> Result<Response<Incoming>, CallError> {
        let request = format!("/files?path={}{}", percent::encode(path), self.username());
        let body = agent::whole(bytes::Bytes::new());
        let response = self
            .agent
            .send(Method::GET, &request, "application/octet-stream", &[], body)
            .await?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        let body = requests::whole(response.into_body(), REFUSAL_MAX).await?;
        Err(CallError::Refused(told(&agent::refusal(status, &body))))
    }

    pub(super) fn username(&self) -> String {
        self.user
            .map(|user| format!("&username={}", percent::encode(user)))
            .unwrap_or_default()
    }

    pub(super) async fn stat(&mut self, path: &str) -> Result<EntryInfo, CallError> {
        let request = PathRequest { path: path.to_owned() };
        let method = format!("{}Stat", filesystem::SERVICE);
        let response: EntryResponse = self.agent.call(&method, &request).await?;
        Ok(response.entry.unwrap_or_default())
    }

    async fn list(&mut self, path: &str) -> Result<Vec<EntryInfo>, CallError> {
        let request = ListDirRequest {
            path: path.to_owned(),
            depth: 1,
        };
        let method = format!("{}ListDir", filesystem::SERVICE);
        let response: ListDirResponse = self.agent.call(&method, &request).await?;
        Ok(response.entries)
    }
}

/// An error of one entry, after which the connection can be used.
pub(super) fn told(error: &anyhow::Error) -> protocol::connect::Error {
    protocol::connect::Error::new(protocol::connect::Code::Unknown, format!("{error:#}"))
}
