//! A driver whose sandboxes are plain child processes that run a stub of the agent: nothing is isolated, limited or
//! counted. For tests alone. It has what a driver must have, and beside that the [`Storage`] that all have.
//!
//! ```text
//!   disks/<disk>.img               an empty file
//!   sandboxes/<id>/disk            which disk it has
//!   sandboxes/<id>/process         the identity of its process
//!   sandboxes/<id>/control         the agent's control channel
//!   sandboxes/<id>/8080            the one port on which something listens inside
//! ```

#![expect(clippy::disallowed_methods, reason = "a driver starts programs")]

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use model::id::SandboxId;
use protocol::node::SandboxStream;
use runtime::driver::{Capabilities, DialFuture, Driver, Found, Sandbox, StartDisk, StartError, StartRequest, Started};
use runtime::identity::ProcessIdentity;
use runtime::settings::DriverSettings;
use runtime::storage::Storage;
use runtime::usage::Capacity;
use rustix::process::Signal;

/// Maximum number of sandboxes.
pub(crate) const SANDBOXES_MAX: usize = 2;
/// Id of a sandbox whose start fails halfway.
pub(crate) const BROKEN: &str = "ibroken";

/// The driver of a directory.
#[derive(Debug)]
pub(crate) struct Processes {
    dir: PathBuf,
    storage: Storage,
    /// The memory that the host has left, in bytes.
    pub(crate) memory_bytes: AtomicU64,
}

impl Processes {
    pub(crate) fn open(dir: &Path) -> Arc<Self> {
        fs::create_dir_all(dir.join("sandboxes")).unwrap();
        let settings = DriverSettings {
            base: false,
            ..DriverSettings::new(dir.to_owned())
        };
        Arc::new(Self {
            dir: dir.to_owned(),
            storage: Storage::open(&settings).unwrap(),
            memory_bytes: AtomicU64::new(1),
        })
    }

    fn home(&self, id: &SandboxId) -> PathBuf {
        self.dir.join("sandboxes").join(id.as_str())
    }

    /// Sorted entries of one of the two directories.
    pub(crate) fn entries(&self, part: &str) -> Vec<String> {
        let entries = fs::read_dir(self.dir.join(part)).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Driver for Processes {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent_starts: 1,
            concurrent_restores: 1,
            ..Capabilities::default()
        }
    }

    fn storage(&self) -> &Storage {
        &self.storage
    }

    fn start(&self, request: &StartRequest) -> Result<Started, StartError> {
        let begun = Instant::now();
        let home = self.home(&request.id);
        if home.exists() {
            return Err(StartError::Exists(request.id.clone()));
        }
        if self.entries("sandboxes").len() == SANDBOXES_MAX {
            return Err(StartError::Full);
        }
        fs::create_dir(&home)?;
        let disk = request.disk.id();
        fs::write(home.join("disk"), disk.as_str())?;
        match &request.disk {
            StartDisk::New { .. } => fs::write(self.storage.disk_path(disk), "")?,
            StartDisk::Kept(_) if self.storage.disk_path(disk).exists() => {}
            StartDisk::Kept(_) => return Err(io::Error::from(io::ErrorKind::NotFound).into()),
        }
        if request.id.as_str() == BROKEN {
            return Err(io::Error::other("broken sandbox").into());
        }
        let (boot, theirs) = UnixStream::pair()?;
        let mut child = Command::new("/proc/self/exe")
            .arg("agent")
            .arg(&home)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()?;
        let process = ProcessIdentity::of(child.id().cast_signed())?;
        fs::write(home.join("process"), process.to_string())?;
        let pidfd = process
            .open()
            .ok_or_else(|| io::Error::other("the agent exited immediately"))?;
        std::thread::spawn(move || child.wait());
        Ok(Started {
            sandbox: Arc::new(Process { home, pidfd }),
            boot: boot.into(),
            stages: vec![("spawn", begun.elapsed())],
        })
    }

    fn find(&self) -> io::Result<Vec<Found>> {
        let found = self.entries("sandboxes").into_iter().map(|name| {
            let id: SandboxId = name.parse().map_err(io::Error::other)?;
            let home = self.home(&id);
            let disk = fs::read_to_string(home.join("disk"))?;
            let process = fs::read_to_string(home.join("process")).unwrap_or_default();
            let pidfd = ProcessIdentity::parse(&process).and_then(|process| process.open());
            Ok(Found {
                disk: disk.parse().map_err(io::Error::other)?,
                alive: pidfd.map(|pidfd| Arc::new(Process { home, pidfd }) as Arc<dyn Sandbox>),
                id,
            })
        });
        found.collect()
    }

    fn clean(&self, id: &SandboxId) -> bool {
        let home = self.home(id);
        let process = fs::read_to_string(home.join("process")).unwrap_or_default();
        if ProcessIdentity::parse(&process).is_some_and(|process| process.is_running()) {
            return false;
        }
        match fs::remove_dir_all(home) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    fn capacity(&self) -> io::Result<Capacity> {
        Ok(Capacity {
            memory_available_bytes: self.memory_bytes.load(Ordering::Relaxed),
            disk_available_bytes: 2,
        })
    }

    fn dismantle(&self) {
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

#[derive(Debug)]
struct Process {
    home: PathBuf,
    pidfd: OwnedFd,
}

impl Sandbox for Process {
    fn ended(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn dial(&self, port: u16) -> DialFuture<'_> {
        Box::pin(async move {
            let stream = tokio::net::UnixStream::connect(self.home.join(port.to_string())).await?;
            Ok(SandboxStream::remote(stream))
        })
    }

    fn control(&self) -> io::Result<OwnedFd> {
        let socket = UnixStream::connect(self.home.join("control"))?;
        socket.set_nonblocking(true)?;
        Ok(socket.into())
    }

    fn respawn(&self) -> io::Result<()> {
        // The stub checks for this file before it reports again that there is no spawner.
        fs::write(self.home.join("spawner"), "")
    }

    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}
