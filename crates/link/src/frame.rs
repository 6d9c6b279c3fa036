//! Frames: a length of four bytes, big-endian, and so many bytes of JSON.
//!
//! Fields that a reader does not know are ignored, so that a newer peer may send more.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Maximum size of a frame of a call, in bytes: a list of some ten thousand sandboxes with their policies.
pub(crate) const CALL_MAX: u32 = 64 << 20;
/// Maximum size of a frame of an answer or an event, in bytes: samples of some ten thousand sandboxes.
pub(crate) const ANSWER_MAX: u32 = 16 << 20;
/// Maximum size of a frame before a peer has shown who it is, in bytes.
pub(crate) const HELLO_MAX: u32 = 64 << 10;

/// A value as a frame.
pub(crate) fn encode(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, value)?;
    let length = u32::try_from(frame.len() - 4).ok().filter(|length| *length <= CALL_MAX);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a frame is too large"))?;
    frame[..4].copy_from_slice(&length.to_be_bytes());
    Ok(frame)
}

/// How many bytes follow the head of a frame of at most `max` bytes.
pub(crate) fn length(head: [u8; 4], max: u32) -> io::Result<usize> {
    let length = u32::from_be_bytes(head);
    if length > max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the peer announces a frame of {length} bytes, and {max} are accepted"),
        ));
    }
    Ok(length as usize)
}

/// Writes a value as a frame.
pub(crate) async fn write_frame(stream: &mut (impl AsyncWrite + Unpin), value: &impl Serialize) -> io::Result<()> {
    stream.write_all(&encode(value)?).await?;
    stream.flush().await
}

/// Reads the bytes of a frame of at most `max` bytes. Memory is taken as they arrive, whatever length was announced.
pub(crate) async fn read_bytes(stream: &mut (impl AsyncRead + Unpin), max: u32) -> io::Result<Vec<u8>> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    let length = length(head, max)?;
    let mut text = Vec::new();
    let read = stream.take(length as u64).read_to_end(&mut text).await?;
    if read < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(text)
}

/// Reads a value from a frame of at most `max` bytes.
pub(crate) async fn read_frame<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin), max: u32) -> io::Result<T> {
    Ok(serde_json::from_slice(&read_bytes(stream, max).await?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_frame_is_bounded_before_its_bytes_are_read() {
        let (mut near, mut far) = tokio::io::duplex(1024);
        write_frame(&mut near, &vec![1, 2, 3]).await.unwrap();
        assert_eq!(read_frame::<Vec<u8>>(&mut far, 16).await.unwrap(), [1, 2, 3]);
        near.write_u32(17).await.unwrap();
        let error = read_frame::<Vec<u8>>(&mut far, 16).await.unwrap_err();
        assert!(error.to_string().contains("a frame of 17 bytes"), "{error}");
    }

    #[tokio::test]
    async fn a_frame_that_is_cut_is_no_value() {
        let (mut near, mut far) = tokio::io::duplex(1024);
        near.write_u32(3).await.unwrap();
        near.write_all(b"12").await.unwrap();
        drop(near);
        let error = read_frame::<u32>(&mut far, 16).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
