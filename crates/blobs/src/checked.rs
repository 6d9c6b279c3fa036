//! Content whose name says nothing about it, with its SHA-256 as the last 32 bytes of the object.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};

/// Bytes of the checksum.
pub const CHECKSUM: u64 = 32;
const BUFFER: usize = 256 << 10;

/// A reader that appends a checksum to its content.
#[derive(Debug)]
pub struct Appending<R> {
    content: R,
    hasher: Sha256,
    /// What is left to be read of the checksum, once the content is at its end.
    end: Option<io::Cursor<Vec<u8>>>,
}

impl<R> Appending<R> {
    /// Wraps a reader of content, at whose end the checksum follows.
    pub fn new(content: R) -> Self {
        Self {
            content,
            hasher: Sha256::new(),
            end: None,
        }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Appending<R> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.end.is_none() {
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.content).poll_read(cx, buf))?;
            let read = buf.filled().get(before..).unwrap_or_default();
            this.hasher.update(read);
            if !read.is_empty() || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            this.end = Some(io::Cursor::new(this.hasher.clone().finalize().to_vec()));
        }
        match &mut this.end {
            Some(end) => Pin::new(end).poll_read(cx, buf),
            None => Poll::Ready(Ok(())),
        }
    }
}

/// Writes the content of an object of `size` bytes to `to`, checks it, and returns its length. What was written is
/// worthless unless that succeeds.
///
/// # Errors
/// When one of the two fails, or the checksum is that of other content.
pub async fn copy(
    mut object: impl AsyncRead + Unpin,
    size: u64,
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<u64> {
    let corrupt = || io::Error::new(io::ErrorKind::InvalidData, "the content does not match its checksum");
    let length = size.checked_sub(CHECKSUM).ok_or_else(corrupt)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    let mut content = (&mut object).take(length);
    let mut copied = 0;
    loop {
        let read = content.read(&mut buffer).await?;
        if read == 0 {
            break;
        }
        let piece = buffer.get(..read).unwrap_or_default();
        hasher.update(piece);
        to.write_all(piece).await?;
        copied += read as u64;
    }
    let mut checksum = Vec::new();
    object.take(CHECKSUM + 1).read_to_end(&mut checksum).await?;
    if copied == length && checksum == hasher.finalize().as_slice() {
        Ok(copied)
    } else {
        Err(corrupt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn of(content: &[u8]) -> Vec<u8> {
        let mut object = Vec::new();
        Appending::new(content).read_to_end(&mut object).await.unwrap();
        object
    }

    #[tokio::test]
    async fn what_was_changed_or_cut_anywhere_is_refused() {
        for content in [&b""[..], b"some content", &vec![7; BUFFER + 1]] {
            let object = of(content).await;
            let size = object.len() as u64;
            assert_eq!(size, content.len() as u64 + CHECKSUM);
            let mut copied = Vec::new();
            assert_eq!(
                copy(&object[..], size, &mut copied).await.unwrap(),
                content.len() as u64
            );
            assert_eq!(copied, content);
            for at in [0, object.len() / 2, object.len() - 1] {
                let mut changed = object.clone();
                changed[at] ^= 1;
                assert!(copy(&changed[..], size, &mut Vec::new()).await.is_err(), "{at}");
                assert!(copy(&object[..at], size, &mut Vec::new()).await.is_err(), "{at}");
                assert!(copy(&object[..at], at as u64, &mut Vec::new()).await.is_err(), "{at}");
            }
            let longer = [&object[..], b"x"].concat();
            assert!(copy(&longer[..], size, &mut Vec::new()).await.is_err());
        }
    }
}
