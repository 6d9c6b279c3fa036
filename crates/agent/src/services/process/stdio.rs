//! Standard input, output and error of a process: its ends, and those of the agent.
//!
//! The user of the process owns its terminal or pipes, so that its programs can open `/dev/stdin`, `/dev/stdout` and
//! `/dev/stderr`, which opens the file anew and is a matter of permissions. Both ends of a pipe are one inode with mode
//! 0600. So programs of this user, and of no other, can also open the agent's direction of these pipes: they can take
//! away their own output or add to their own input. The open file of the agent, with its flags, stays out of reach.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};

use bytes::Bytes;
use protocol::process::{DataEvent, PtySize};
use rustix::fs::Uid;
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;

use super::input::Input;
use crate::sys;

/// Bytes of one event of a pipe: half of what the kernel keeps in it.
pub(super) const PIPE_CHUNK: usize = 32 * 1024;
/// Bytes of one event of a terminal.
const TERMINAL_CHUNK: usize = 16 * 1024;

/// Where output comes from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    Stdout,
    Stderr,
    Terminal,
}

impl Source {
    pub(super) fn event(self, bytes: Bytes) -> DataEvent {
        let mut event = DataEvent::default();
        match self {
            Self::Stdout => event.stdout = Some(bytes),
            Self::Stderr => event.stderr = Some(bytes),
            Self::Terminal => event.pty = Some(bytes),
        }
        event
    }

    pub(super) fn chunk(self) -> usize {
        match self {
            Self::Stdout | Self::Stderr => PIPE_CHUNK,
            Self::Terminal => TERMINAL_CHUNK,
        }
    }
}

/// The agent's ends.
pub(super) struct Ends {
    pub(super) input: Input,
    pub(super) outputs: Vec<(Rc<AsyncFd<OwnedFd>>, Source)>,
}

/// The output pipes of a process for as long as they are read, and the user who owns all pipes of the process.
#[derive(Default)]
pub(crate) struct Ownership {
    uid: u32,
    outputs: Vec<Weak<AsyncFd<OwnedFd>>>,
}

impl Ownership {
    pub(super) fn new(ends: &Ends, uid: u32) -> Self {
        let outputs = ends.outputs.iter();
        let outputs = outputs.filter(|(_, source)| !matches!(source, Source::Terminal));
        Self {
            uid,
            outputs: outputs.map(|(file, _)| Rc::downgrade(file)).collect(),
        }
    }

    /// Makes the user the owner of the pipes again: those that a restore from disk has made belong to root.
    pub(super) fn renew(&self, input: &Input) {
        let outputs = self.outputs.iter().filter_map(Weak::upgrade);
        for file in outputs.chain(input.pipe()) {
            hand_over(file.get_ref(), self.uid);
        }
    }
}

/// Creates pipes for a process of this user. Without `stdin` it reads nothing.
pub(super) fn pipes(stdin: bool, uid: u32) -> io::Result<([OwnedFd; 3], Ends)> {
    let (stdin, input) = if stdin {
        let (reader, writer) = pipe(uid)?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        (reader, Input::open_pipe(sys::watch(writer, Interest::WRITABLE)?))
    } else {
        (OwnedFd::from(File::open("/dev/null")?), Input::Nothing)
    };
    let mut outputs = Vec::new();
    let mut output = |source| -> io::Result<OwnedFd> {
        let (reader, writer) = pipe(uid)?;
        rustix::io::ioctl_fionbio(&reader, true)?;
        outputs.push((Rc::new(sys::watch(reader, Interest::READABLE)?), source));
        Ok(writer)
    };
    let stdio = [stdin, output(Source::Stdout)?, output(Source::Stderr)?];
    Ok((stdio, Ends { input, outputs }))
}

fn pipe(uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    hand_over(&reader, uid);
    Ok((reader, writer))
}

/// Makes a user the owner of a pipe or terminal. A process whose user cannot be one runs all the same.
fn hand_over(file: &OwnedFd, uid: u32) {
    let _ = rustix::fs::fchown(file, Some(Uid::from_raw(uid)), None);
}

/// Creates a terminal for a process of this user.
pub(super) fn terminal(size: PtySize, uid: u32) -> io::Result<([OwnedFd; 3], Ends)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    rustix::termios::tcsetwinsize(&master, window_size(size))?;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    hand_over(&slave, uid);
    rustix::io::ioctl_fionbio(&master, true)?;
    let master = Rc::new(sys::watch(master, Interest::READABLE | Interest::WRITABLE)?);
    let stdio = [slave.try_clone()?, slave.try_clone()?, slave];
    let outputs = vec![(master.clone(), Source::Terminal)];
    Ok((
        stdio,
        Ends {
            input: Input::Terminal(master, Mutex::new(())),
            outputs,
        },
    ))
}

/// A size in the kernel's form; larger numbers become the largest that it can have.
pub(super) fn window_size(size: PtySize) -> Winsize {
    let clamp = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    Winsize {
        ws_row: clamp(size.rows),
        ws_col: clamp(size.cols),
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// Why there are no ends for a new process. Where terminals are lacking, the kernel speaks of space on a disk and the C library
/// of a resource.
pub(super) fn no_ends(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EAGAIN) => "terminal limit of the sandbox reached".to_owned(),
        _ => error.to_string(),
    }
}
