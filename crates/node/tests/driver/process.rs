//! A driver whose sandboxes are plain child processes that run a stub of the agent: nothing is isolated, limited or
//! counted. For tests alone.
//!
//! ```text
//!   disks/<disk>                   an empty file
//!   kept/<id>                      which disk is kept of it
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
use std::time::{Duration, Instant};

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use protocol::node::{Committed, LayerInfo, MemoryInfo, SandboxStream};
use runtime::driver::{
    ArchiveError, Capabilities, CommitError, CommitRequest, CopyRequest, DialFuture, Driver, Fork, Found, KeptDisk,
    Objects, Sandbox, StartDisk, StartError, StartRequest, Started, UnpackRequest, WriteError,
};
use runtime::egress::EgressSockets;
use runtime::growth::Disk;
use runtime::identity::ProcessIdentity;
use runtime::page_out::PagedOut;
use runtime::rootfs::Rootfs;
use runtime::sockets::Uncharged;
use runtime::usage::{Capacity, HostPulse, HostUncharged, Usage};
use rustix::process::Signal;

/// Maximum number of sandboxes.
pub(crate) const SANDBOXES_MAX: usize = 2;
/// Id of a sandbox whose start fails halfway.
pub(crate) const BROKEN: &str = "ibroken";

/// The driver of a directory.
#[derive(Debug)]
pub(crate) struct Processes {
    dir: PathBuf,
}

impl Processes {
    pub(crate) fn open(dir: &Path) -> Arc<Self> {
        for part in ["sandboxes", "disks", "kept"] {
            fs::create_dir_all(dir.join(part)).unwrap();
        }
        Arc::new(Self { dir: dir.to_owned() })
    }

    fn home(&self, id: &SandboxId) -> PathBuf {
        self.dir.join("sandboxes").join(id.as_str())
    }

    fn disk(&self, disk: &DiskId) -> PathBuf {
        self.dir.join("disks").join(disk.as_str())
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
            limits: false,
            disk_limits: false,
            uncharged_memory: false,
            process_counter: false,
            freeze: false,
            images: false,
            layers: false,
            egress: false,
        }
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
            StartDisk::New { .. } => fs::write(self.disk(disk), "")?,
            StartDisk::Kept(_) if self.disk(disk).exists() => {}
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

    fn remove_disk(&self, disk: &DiskId) -> io::Result<()> {
        match fs::remove_file(self.disk(disk)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn has_image(&self, _: &SandboxId, _: &DiskId) -> bool {
        false
    }

    fn forget_image(&self, _: &SandboxId, _: &DiskId) -> io::Result<()> {
        Ok(())
    }

    fn copy_fork(&self, _: &Fork, _: &Fork, _: &dyn Fn() -> bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn rootfs_of(&self, _: &DiskId) -> io::Result<Rootfs> {
        Ok(Rootfs::base())
    }

    fn keep_memory(&self, _: &BuildId, _: &Fork) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn memories(&self) -> io::Result<Vec<MemoryInfo>> {
        Ok(Vec::new())
    }

    fn copy_memory(&self, _: &BuildId, _: &Fork, _: &dyn Fn() -> bool) -> Result<(), StartError> {
        Err(StartError::Unrestorable("there is none".to_owned()))
    }

    fn remove_memory(&self, _: &BuildId) -> io::Result<()> {
        Ok(())
    }

    fn commit(&self, _: &CommitRequest, _: &dyn Fn() -> bool) -> Result<Committed, CommitError> {
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    fn layers(&self) -> io::Result<Vec<LayerInfo>> {
        Ok(Vec::new())
    }

    fn remove_layer(&self, _: &LayerId) -> io::Result<()> {
        Ok(())
    }

    fn pack_layer(&self, layer: &LayerId, _: OwnedFd, _: &dyn Fn() -> bool) -> Result<(), ArchiveError> {
        Err(ArchiveError::NoLayer(layer.clone()))
    }

    fn unpack_layer(&self, _: &UnpackRequest, _: OwnedFd, _: &dyn Fn() -> bool) -> Result<u64, ArchiveError> {
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    fn sweep_disks(&self, keep: &[DiskId]) -> io::Result<()> {
        for disk in self.entries("disks") {
            let disk: DiskId = disk.parse().map_err(io::Error::other)?;
            if !keep.contains(&disk) {
                self.remove_disk(&disk)?;
            }
        }
        Ok(())
    }

    fn keep(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        fs::write(self.dir.join("kept").join(id.as_str()), disk.as_str())
    }

    fn save(&self, _: &SandboxId, disk: &DiskId, _: &dyn Fn() -> bool) -> io::Result<u64> {
        Ok(fs::metadata(self.disk(disk))?.len())
    }

    fn kept(&self) -> io::Result<Vec<KeptDisk>> {
        let kept = self.entries("kept").into_iter().map(|name| {
            let disk = fs::read_to_string(self.dir.join("kept").join(&name))?;
            Ok(KeptDisk {
                id: name.parse().map_err(io::Error::other)?,
                disk: disk.parse().map_err(io::Error::other)?,
                is_saved: false,
            })
        });
        kept.collect()
    }

    fn forget(&self, id: &SandboxId, _: &DiskId) -> io::Result<()> {
        match fs::remove_file(self.dir.join("kept").join(id.as_str())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn capacity(&self) -> io::Result<Capacity> {
        Ok(Capacity {
            memory_available_bytes: 1,
            disk_available_bytes: 2,
        })
    }

    fn disk_available(&self) -> io::Result<u64> {
        Ok(2)
    }

    fn processes_created(&self) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn uncharged(&self) -> io::Result<HostUncharged> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn pulse(&self) -> HostPulse {
        HostPulse::default()
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

    fn settle(&self) -> io::Result<()> {
        Ok(())
    }

    fn page_out(&self, _: &dyn Fn() -> bool) -> io::Result<Option<PagedOut>> {
        Ok(None)
    }

    fn usage(&self) -> io::Result<Usage> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn processes(&self) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn work_time(&self) -> io::Result<Duration> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn processes_created(&self) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn limit_cpu(&self, _: Option<u32>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn memory_kills(&self) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn disk(&self) -> io::Result<Disk> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn allow_disk(&self, _: &Disk, _: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn uncharged(&self, _: u64) -> io::Result<Uncharged> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn objects(&self) -> io::Result<Objects> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn egress(&self) -> io::Result<EgressSockets> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn freeze(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn freeze_to_write(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn is_frozen(&self) -> io::Result<bool> {
        Ok(false)
    }

    fn thaw(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn write_processes(
        &self,
        _: &mut dyn FnMut(),
        _: &mut dyn FnMut() -> io::Result<()>,
        _: &Arc<runtime::cancel::Cancel>,
    ) -> Result<(), WriteError> {
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    fn fork(&self, _: &Fork, _: &dyn Fn() -> bool) -> Result<Duration, WriteError> {
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    fn copy_disk(&self, _: &CopyRequest, _: &dyn Fn() -> bool) -> Result<Duration, CommitError> {
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    fn wake(&self) -> io::Result<()> {
        Ok(())
    }

    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}
