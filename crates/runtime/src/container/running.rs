//! A sandbox of the container driver.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::net::AddressFamily;
use rustix::process::Signal;

use super::state::ContainerDriver;
use crate::cancel::{Cancel, Raced};
use crate::cgroup::Freezer;
use crate::checkpoint::save::Subject;
use crate::driver::{DialFuture, HeldMounts, Objects, Sandbox, WriteError};
use crate::egress::EgressSockets;
use crate::growth::{self, Disk};
use crate::netns::SocketMaker;
use crate::page_out::{self, PagedOut};
use crate::process::has_ended;
use crate::process_counter::ProcessesOf;
use crate::slot::Name;
use crate::sockets::{NETLINK_SOCKETS_MAX, Uncharged};
use crate::stored::{CopyRequest, Fork, LayerError};
use crate::usage::{self, Meter, Usage};
use crate::{dial, disk, kept, open_files, sockets, spawners};

/// A sandbox of this driver.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) name: Name,
    pub(super) pid: i32,
    pub(super) agent: OwnedFd,
    pub(super) net: OwnedFd,
    /// Opened at the first measurement.
    pub(super) meter: OnceLock<Meter>,
    /// None where they cannot be counted.
    pub(super) processes: Option<ProcessesOf>,
    pub(super) sockets: Arc<SocketMaker>,
    pub(super) driver: std::sync::Weak<ContainerDriver>,
    /// What an attempt to write it that was given up still does.
    pub(super) ending: Mutex<Option<JoinHandle<()>>>,
}

impl Running {
    fn work_processes(&self) -> io::Result<Vec<i32>> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        open_files::processes(driver.tree.work_freezer(&self.name)?.group())
    }

    /// What was read by the agent's pid, unless the agent has ended and the pid may have been reused.
    fn still_runs<T>(&self, read: T) -> io::Result<T> {
        if has_ended(self.agent.as_fd())? {
            Err(io::ErrorKind::NotFound.into())
        } else {
            Ok(read)
        }
    }

    pub(super) fn subject<'a>(&'a self, driver: &'a ContainerDriver) -> Subject<'a> {
        Subject {
            tree: &driver.tree,
            name: &self.name,
            pid: self.pid,
            agent: self.agent.as_fd(),
            net: self.net.as_fd(),
            sockets: &self.sockets,
        }
    }

    /// Has its file system write everything to its disk.
    pub(super) fn write_out(&self) -> io::Result<()> {
        let root = crate::files::open_dir(Path::new(&format!("/proc/{}/root", self.pid)))?;
        if has_ended(self.agent.as_fd())? {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(rustix::fs::syncfs(&root)?)
    }

    /// Ends what an attempt to write it has left, on another thread.
    pub(super) fn end_later(&self, end: impl FnOnce() + Send + 'static) {
        let ending = std::thread::Builder::new().name("end-dump".to_owned()).spawn(end);
        // Without a thread it was dropped, which does the same.
        *self.ending.lock() = ending.ok();
    }

    /// Waits for that, so that there is one at most.
    ///
    /// # Errors
    /// When this is cancelled, or there can be no thread.
    pub(super) fn until_ended(&self, cancel: &Cancel) -> io::Result<()> {
        let Some(ending) = self.ending.lock().take() else {
            return Ok(());
        };
        match cancel.race(move || drop(ending.join()))? {
            Raced::Done(()) => Ok(()),
            Raced::Cancelled(ending) => {
                *self.ending.lock() = Some(ending);
                Err(Cancel::error())
            }
        }
    }

    pub(super) fn meter(&self) -> io::Result<&Meter> {
        if let Some(meter) = self.meter.get() {
            return Ok(meter);
        }
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let meter = Meter::open(&driver.tree, &self.name)?;
        Ok(self.meter.get_or_init(|| meter))
    }
}

impl Sandbox for Running {
    fn ended(&self) -> BorrowedFd<'_> {
        self.agent.as_fd()
    }

    fn dial(&self, port: u16) -> DialFuture<'_> {
        Box::pin(async move { Ok(dial::dial(&self.sockets, self.net.as_fd(), port).await?.into()) })
    }

    fn control(&self) -> io::Result<OwnedFd> {
        let socket = self.sockets.stream(self.net.as_fd(), AddressFamily::UNIX)?;
        let address = rustix::net::SocketAddrUnix::new_abstract_name(protocol::agent::CONTROL_SOCKET.as_bytes())?;
        rustix::net::connect(&socket, &address)?;
        let peer = rustix::net::sockopt::socket_peercred(&socket)?;
        // The pid is the agent's as long as the agent lives.
        if peer.pid.as_raw_nonzero().get() == self.pid && !has_ended(self.agent.as_fd())? {
            Ok(socket)
        } else {
            Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "another process listens on the agent's socket",
            ))
        }
    }

    fn respawn(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        // Where the kernel does not list children, a spawner that was only stopped remains; that is better than no new
        // one.
        let _ = spawners::end_all(self.pid, self.agent.as_fd());
        driver
            .launchers
            .respawn(self.name.to_string(), self.agent.as_fd())
            .inspect_err(|_| {
                // Kill what the failed attempt left in the sandbox.
                let _ = spawners::end_all(self.pid, self.agent.as_fd());
            })
    }

    fn usage(&self) -> io::Result<Usage> {
        self.meter()?.read(self.pid, self.agent.as_fd())
    }

    fn work_time(&self) -> io::Result<Duration> {
        self.meter()?.work_time()
    }

    fn processes(&self) -> io::Result<u64> {
        self.meter()?.processes()
    }

    fn processes_created(&self) -> io::Result<u64> {
        self.processes.as_ref().ok_or(io::ErrorKind::Unsupported)?.read()
    }

    fn limit_cpu(&self, milli_cores: Option<u32>) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        driver.tree.limit_cpu(&self.name, milli_cores)
    }

    fn memory_kills(&self) -> io::Result<u64> {
        self.meter()?.memory_kills()
    }

    fn sync(&self) -> io::Result<()> {
        self.write_out()?;
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        kept::sync(&driver.storage.disk_path(&self.name.disk))
    }

    fn disk(&self) -> io::Result<Disk> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        growth::read(&driver.storage.disk_path(&self.name.disk), self.pid, self.agent.as_fd())
    }

    fn allow_disk(&self, disk: &Disk, allowance: Option<u64>) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let device = driver.loops.of(&driver.storage.disk_path(&self.name.disk))?;
        growth::allow(&device, disk, allowance)
    }

    fn uncharged(&self, enough: u64) -> io::Result<Uncharged> {
        let mut held = sockets::held_by_others(self.pid, enough)?;
        if held.netlink_sockets > NETLINK_SOCKETS_MAX {
            // That decides, and they are made faster than the rest can be measured.
            return self.still_runs(held);
        }
        if sockets::most_of_inet(self.pid)? > enough {
            let meter = self.meter()?;
            let diagnosis = self.sockets.diagnosis(self.net.as_fd())?;
            // The counters are not read at the same time, so the larger charge counts.
            let charged = meter.sockets()?;
            let of_inet = sockets::held_by_inet(&diagnosis)?;
            held.bytes += of_inet.saturating_sub(charged.max(meter.sockets()?));
        }
        let processes = self.work_processes()?;
        held.open_files = open_files::count(&processes);
        held.files_bytes = open_files::uncharged(&processes, enough / 4);
        self.still_runs(held)
    }

    fn objects(&self) -> io::Result<Objects> {
        self.still_runs(Objects {
            sockets: sockets::allocated(self.pid)?,
            files: open_files::count(&self.work_processes()?),
        })
    }

    fn egress(&self) -> io::Result<EgressSockets> {
        EgressSockets::open(&self.sockets, self.net.as_fd())
    }

    fn settle(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        driver.tree.settle(&self.name)
    }

    fn freeze(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        driver.tree.freezer(&self.name)?.freeze()
    }

    fn freeze_to_write(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        self.subject(&driver).stop()
    }

    fn is_frozen(&self) -> io::Result<bool> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        if driver.tree.can_freeze() {
            driver.tree.freezer(&self.name)?.is_frozen()
        } else {
            Ok(false)
        }
    }

    fn thaw(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        // A platform may have ended while it moved the memory of this one.
        driver.tree.allow_swap(&self.name, false)?;
        driver.tree.freezer(&self.name)?.thaw()
    }

    fn page_out(&self, goes_on: &dyn Fn() -> bool) -> io::Result<Option<PagedOut>> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        if !driver.page_out || !page_out::has_swap() {
            return Ok(None);
        }
        let before_bytes = self.usage()?.memory_used_bytes;
        driver.tree.allow_swap(&self.name, true)?;
        let groups = [driver.tree.work_freezer(&self.name)?, driver.tree.freezer(&self.name)?];
        let took = page_out::page_out(&groups.each_ref().map(Freezer::group), goes_on);
        // The kernel writes them without waiting, and keeps them until the memory is needed.
        if took.is_ok() && goes_on() {
            driver.tree.reclaim(&self.name)?;
        }
        driver.tree.allow_swap(&self.name, false)?;
        Ok(Some(PagedOut {
            before_bytes,
            after_bytes: self.usage()?.memory_used_bytes,
            took: took?,
        }))
    }

    fn write_processes(
        &self,
        stopped: &mut dyn FnMut(),
        complete: &mut dyn FnMut() -> io::Result<()>,
        cancel: &Arc<Cancel>,
    ) -> Result<(), WriteError> {
        let driver = self.driver.upgrade();
        let driver = driver.ok_or(io::Error::from(io::ErrorKind::NotConnected))?;
        driver.write_processes(self, stopped, complete, cancel)
    }

    fn fork(&self, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, WriteError> {
        let driver = self.driver.upgrade();
        let driver = driver.ok_or(io::Error::from(io::ErrorKind::NotConnected))?;
        driver.fork(self, to, is_cancelled)
    }

    fn copy_disk(&self, request: &CopyRequest, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, LayerError> {
        let driver = self.driver.upgrade();
        let driver = driver.ok_or(io::Error::from(io::ErrorKind::NotConnected))?;
        driver.copy_disk(self, request, is_cancelled)
    }

    fn wake(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        self.subject(&driver).wake_agent(None)
    }

    fn hold_mounts(&self) -> io::Result<HeldMounts> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        // The memory of its processes is free before that, so this is more than is held.
        let memory_bytes = usage::charged(&driver.tree, &self.name)?;
        let disk_bytes = disk::held_bytes(&driver.storage.disk_path(&self.name.disk))?;
        let mounts = rustix::fs::open(
            format!("/proc/{}/ns/mnt", self.pid),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        self.still_runs(HeldMounts {
            bytes: memory_bytes.saturating_add(disk_bytes),
            mounts: mounts?,
        })
    }

    fn kill(&self) {
        // A process frozen by version 2 can be killed.
        // Ends all processes of the sandbox: the agent is the first of their pid namespace.
        let _ = rustix::process::pidfd_send_signal(&self.agent, Signal::KILL);
    }
}
