//! Standard streams on threads of their own: a stream that blocks must delay neither signals nor the other streams.
//!
//! The threads are not waited for at the end: one that waits for input would keep the program from ending.

use std::io::{self, Read as _, Write};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

/// Bytes that are read at a time.
const CHUNK: usize = 32 << 10;
/// Pieces that wait between a thread and the program.
const QUEUE: usize = 4;

/// Reads stdin until its end or until nobody takes what was read.
///
/// # Errors
/// When there is no thread.
pub(crate) fn read_stdin() -> Result<mpsc::Receiver<Bytes>> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let read = move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; CHUNK];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => {
                    if sender.blocking_send(Bytes::copy_from_slice(&buffer[..length])).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    };
    let thread = std::thread::Builder::new().name("stdin".to_owned()).spawn(read);
    thread.context("start a thread for stdin")?;
    Ok(receiver)
}

/// An output stream that a thread writes.
#[derive(Debug)]
pub(crate) struct Output {
    pieces: mpsc::Sender<Bytes>,
    outcome: oneshot::Receiver<io::Result<()>>,
}

impl Output {
    /// Begins to write to a stream.
    ///
    /// # Errors
    /// When there is no thread.
    pub(crate) fn to(mut stream: impl Write + Send + 'static) -> Result<Self> {
        let (pieces, mut receiver) = mpsc::channel::<Bytes>(QUEUE);
        let (told, outcome) = oneshot::channel();
        let write = move || {
            let mut written = Ok(());
            while let Some(piece) = receiver.blocking_recv() {
                written = stream.write_all(&piece).and_then(|()| stream.flush());
                if written.is_err() {
                    break;
                }
            }
            // First, so that who is refused a piece finds out why.
            let _ = told.send(written);
            drop(receiver);
        };
        let thread = std::thread::Builder::new().name("output".to_owned()).spawn(write);
        thread.context("start a thread for output")?;
        Ok(Self { pieces, outcome })
    }

    /// Gives it a piece. False if the stream cannot be written any more.
    pub(crate) async fn write(&self, piece: Bytes) -> bool {
        self.pieces.send(piece).await.is_ok()
    }

    /// Waits until everything is written. True unless the reader has gone away.
    ///
    /// # Errors
    /// When the stream cannot be written for another reason.
    pub(crate) async fn finish(self) -> Result<bool> {
        drop(self.pieces);
        match self.outcome.await {
            Ok(Ok(())) => Ok(true),
            Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Ok(Err(error)) => Err(error).context("write output"),
            Err(_) => Ok(false),
        }
    }
}
