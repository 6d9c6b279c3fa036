//! Compares the pages of a checkpoint with their checksums while CRIU copies them into processes: in a process of its own, which
//! the conductor asks before anything that was restored runs. Both read the same pages of the file, so a disk reads them once.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::net::SocketType;

use super::child::{Unfinished, end_with, pair, reported, run_child};
use crate::checkpoint::sums;
use crate::setup;
use crate::sys::{self, Cloned};
use crate::wire;

/// What a report of damage begins with.
const DAMAGED: &[u8] = b"damaged ";

/// A comparison that goes on. It is ended on drop, and with this process.
#[derive(Debug)]
pub(super) struct PagesCheck {
    report: OwnedFd,
    _process: Unfinished,
}

impl PagesCheck {
    /// Begins to compare the pages of the checkpoint in a directory.
    ///
    /// # Errors
    /// When no process can be created.
    pub(super) fn begin(checkpoint: &Path) -> io::Result<Self> {
        let (ours, theirs) = pair(SocketType::SEQPACKET)?;
        let parent = rustix::process::getpid();
        match sys::clone3(0, None)? {
            Cloned::Child => {
                drop(ours);
                run_child(&theirs, |socket| {
                    let compared = end_with(parent).and_then(|()| sums::check_pages(checkpoint));
                    let report = match compared {
                        Ok(()) => setup::READY.to_vec(),
                        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                            [DAMAGED, error.to_string().as_bytes()].concat()
                        }
                        Err(error) => return Err(setup::failure("compare the pages with their checksums", error)),
                    };
                    let _ = wire::send(socket, &report, &[]);
                    sys::exit_now(0)
                })
            }
            Cloned::Parent { pidfd, .. } => Ok(Self {
                report: ours,
                _process: Unfinished::new(pidfd),
            }),
        }
    }

    /// Waits until all is compared. Returns what is damaged, if anything is.
    ///
    /// # Errors
    /// When the pages cannot be read.
    pub(super) fn damage(&self) -> io::Result<Option<String>> {
        match wire::receive(self.report.as_fd())? {
            Some((report, _)) if report == setup::READY => Ok(None),
            Some((report, fds)) => match report.strip_prefix(DAMAGED) {
                Some(why) => Ok(Some(String::from_utf8_lossy(why).into_owned())),
                None => Err(reported(Some((report, fds)))),
            },
            None => Err(reported(None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::is_alone;
    use crate::cancel::Cancel;

    #[test]
    fn damage_is_reported() {
        if !is_alone("launcher::pages::tests::damage_is_reported") {
            return;
        }
        let checkpoint = tempfile::tempdir().unwrap();
        let pages = checkpoint.path().join("pages-1.img");
        std::fs::write(&pages, vec![7; 8 << 20]).unwrap();
        sums::write(checkpoint.path(), &Cancel::new().unwrap()).unwrap();
        let damage = || PagesCheck::begin(checkpoint.path()).unwrap().damage();
        assert_eq!(damage().unwrap(), None);

        std::fs::write(&pages, vec![8; 8 << 20]).unwrap();
        let why = damage().unwrap().unwrap();
        assert!(why.contains("the checksum of pages-1.img is wrong"), "{why}");

        // What could not be compared is not whole.
        std::fs::remove_file(checkpoint.path().join("sums.json")).unwrap();
        assert!(damage().unwrap_err().to_string().contains("compare the pages"));
    }
}
