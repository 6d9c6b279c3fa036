//! The FUSE file system with the sandbox's own `/proc` files: created by the launcher, which also answers its requests
//! until the files have been looked up and the agent runs ([`protocol::figures`]).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use protocol::figures::{REQUEST_MAX, Request, answer};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::FsOpenFlags;
use rustix::time::ClockId;

use crate::{mounting, mounts};

/// The file system of one sandbox, not attached yet.
#[derive(Debug)]
pub(crate) struct Figures {
    /// The descriptor on which the kernel sends requests.
    pub(crate) kernel: OwnedFd,
    /// The mount of the file system with the figures.
    pub(crate) mount: OwnedFd,
}

impl Figures {
    /// Creates the file system; `None` where the kernel has no FUSE.
    pub(crate) fn make(dev: &Path) -> io::Result<Option<Self>> {
        let kernel = match rustix::fs::open(dev.join("fuse"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => return Ok(None),
            other => other?,
        };
        let fs = match rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC) {
            Err(Errno::NODEV) => return Ok(None),
            other => other?,
        };
        // Read-only, so that reading does not change access times.
        for flag in ["ro", "allow_other", "default_permissions"] {
            rustix::mount::fsconfig_set_flag(&fs, flag)?;
        }
        let number = kernel.as_raw_fd().to_string();
        for (key, value) in [
            ("fd", number.as_str()),
            ("rootmode", "40000"),
            ("user_id", "0"),
            ("group_id", "0"),
        ] {
            rustix::mount::fsconfig_set_string(&fs, key, value)?;
        }
        rustix::mount::fsconfig_create(&fs)?;
        let mount = mounting::mount(&fs, mounts::FIGURES)?;
        Ok(Some(Self { kernel, mount }))
    }

    /// Answers one request.
    pub(crate) fn answer(&self) -> io::Result<()> {
        let mut buffer = vec![0; REQUEST_MAX];
        let length = match rustix::io::read(&self.kernel, &mut buffer) {
            // The request was cancelled.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => return Ok(()),
            other => other?,
        };
        let now = rustix::time::clock_gettime(ClockId::Realtime).tv_sec;
        let request = Request::parse(&buffer[..length]).ok_or(io::ErrorKind::InvalidData)?;
        let Some(bytes) = answer(&request, u64::try_from(now).unwrap_or(0)) else {
            return Ok(());
        };
        match rustix::io::write(&self.kernel, &bytes) {
            Err(Errno::NOENT) => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }
}

/// Whether this host supports the file system.
pub(crate) fn are_possible(dev: &Path) -> bool {
    matches!(Figures::make(dev), Ok(Some(_)))
}
