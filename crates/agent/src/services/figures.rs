//! `/proc/meminfo`, `stat`, `uptime`, `loadavg` and `vmstat` of the sandbox, made when they are read.
//!
//! The kernel's own are the whole host's: a program that sizes itself by them is killed at the sandbox's limits. The
//! host mounts a file system over them whose requests come here ([`protocol::figures`]). A file's text is made when it
//! is read from its beginning, and kept until it was read to its end, so that it is of one moment however it is read.
//! Without readers nothing is made, kept or woken.
//!
//! A process that opens one of these files waits for this program's one thread; so that thread itself must never open a
//! file by a name that the sandbox decides about, other than on the blocking threads.

mod counters;
mod load;
mod texts;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use protocol::figures::{FILES, Operation, REQUEST_MAX, Request, answer};
use rustix::time::ClockId;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys;
use counters::Counters;
use load::Load;

/// Requests that are answered before other tasks of the agent get their turn.
const AT_ONCE: usize = 16;
/// Texts that are kept for readers which have not come to the end. One that is no longer there is made anew.
const KEPT: usize = 32;

/// Answers for the files until the kernel's side is gone.
pub(crate) struct Figures {
    kernel: AsyncFd<OwnedFd>,
    handles: Cell<u64>,
    texts: RefCell<VecDeque<(u64, Rc<str>)>>,
    idle: Cell<u64>,
    load: Load,
}

impl Figures {
    /// # Errors
    /// Those of registering the descriptor with the event loop.
    pub(crate) fn new(kernel: OwnedFd) -> io::Result<Rc<Self>> {
        rustix::io::ioctl_fionbio(&kernel, true)?;
        Ok(Rc::new(Self {
            kernel: sys::watch(kernel, Interest::READABLE)?,
            handles: Cell::new(0),
            texts: RefCell::default(),
            idle: Cell::new(0),
            load: Load::default(),
        }))
    }

    /// # Errors
    /// Those of the event loop, and the end of the file system.
    pub(crate) async fn serve(&self) -> io::Result<()> {
        loop {
            let mut ready = self.kernel.readable().await?;
            // Not kept while there are no requests.
            let mut buffer = vec![0; REQUEST_MAX];
            for _ in 0..AT_ONCE {
                let length = match rustix::io::read(self.kernel.get_ref(), &mut buffer) {
                    Ok(length) => length,
                    Err(rustix::io::Errno::AGAIN) => {
                        ready.clear_ready();
                        break;
                    }
                    // The request was taken back.
                    Err(rustix::io::Errno::NOENT | rustix::io::Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                };
                let Some(request) = Request::parse(&buffer[..length]) else {
                    continue;
                };
                if let Some(bytes) = self.reply(&request).await {
                    // Refused when the reader is gone.
                    let _ = rustix::io::write(self.kernel.get_ref(), &bytes);
                }
            }
            drop(ready);
            tokio::task::yield_now().await;
        }
    }

    async fn reply(&self, request: &Request<'_>) -> Option<Vec<u8>> {
        match request.operation() {
            Operation::Open => {
                self.handles.set(self.handles.get() + 1);
                Some(request.opened(self.handles.get()))
            }
            Operation::Read {
                file,
                handle,
                offset,
                size,
            } => {
                let text = self.text(file, handle, offset).await;
                let from = usize::try_from(offset).map_or(text.len(), |offset| offset.min(text.len()));
                let to = from.saturating_add(size).min(text.len());
                if from == text.len() {
                    self.forget(handle);
                }
                Some(request.data(&text.as_bytes()[from..to]))
            }
            other => {
                if let Operation::Release { handle } = other {
                    self.forget(handle);
                }
                let now = rustix::time::clock_gettime(ClockId::Realtime).tv_sec;
                answer(request, u64::try_from(now).unwrap_or(0))
            }
        }
    }

    /// The text that a reader finds: a new one at the beginning of a file, behind it the one that it has begun to read.
    async fn text(&self, file: usize, handle: u64, offset: u64) -> Rc<str> {
        let kept = |(owner, text): &(u64, Rc<str>)| (*owner == handle).then(|| text.clone());
        if offset > 0
            && let Some(text) = self.texts.borrow().iter().find_map(kept)
        {
            return text;
        }
        let text: Rc<str> = self.make(FILES.get(file).copied().unwrap_or_default()).await.into();
        let mut texts = self.texts.borrow_mut();
        texts.retain(|(owner, _)| *owner != handle);
        if texts.len() == KEPT {
            texts.pop_front();
        }
        texts.push_back((handle, text.clone()));
        text
    }

    fn forget(&self, handle: u64) {
        self.texts.borrow_mut().retain(|(owner, _)| *owner != handle);
    }

    async fn make(&self, file: &str) -> String {
        let counters = Counters::read();
        match file {
            "meminfo" => texts::meminfo(&counters),
            "vmstat" => texts::vmstat(&counters),
            "uptime" => texts::uptime(&counters, self.idle(&counters)),
            "stat" => {
                let tasks = self.load.sample(&counters).await.tasks;
                texts::stat(&counters, self.idle(&counters), tasks)
            }
            _ => texts::loadavg(&self.load.sample(&counters).await),
        }
    }

    /// Microseconds for which the processors of the sandbox were idle. Within a period of the quota more can be used
    /// than time goes by; what was reported once is not taken back.
    fn idle(&self, counters: &Counters) -> u64 {
        let all = counters.up_us.saturating_mul(counters.processors.len() as u64);
        let idle = all.saturating_sub(counters.used_us()).max(self.idle.get());
        self.idle.set(idle);
        idle
    }
}
