//! Messages of requests in memory, and the bound on all of them together.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::connect::{Code, Error};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::http::read_on;

/// The longest message that is read, in bytes. Arguments and environment of a process end at about 2 MiB.
pub(crate) const MESSAGE_LIMIT: usize = 16 * 1024 * 1024;
/// What all messages in memory may come to, in bytes: the margin that a sandbox has for its agent. What goes beyond
/// that is taken from the workload, which must not be able to bring it about by itself.
const MEMORY_LIMIT: usize = 64 * 1024 * 1024;

/// The memory for messages, shared by everything that reads them.
#[derive(Debug, Clone)]
pub(crate) struct MessageMemory(Arc<Semaphore>);

/// A message and its share of the memory that messages may take.
pub(crate) struct Message {
    pub(crate) bytes: Bytes,
    pub(crate) share: OwnedSemaphorePermit,
}

impl Default for MessageMemory {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MEMORY_LIMIT)))
    }
}

impl MessageMemory {
    /// Reserves memory for a message, which is given back when the permit is dropped.
    ///
    /// # Errors
    /// `resource_exhausted` when there is not that much. Clients tell their users to try again later, which helps here and
    /// with no other limit.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let full = |_| Error::new(Code::ResourceExhausted, "too many large requests at once");
        self.0.clone().try_acquire_many_owned(bytes).map_err(full)
    }

    /// Reads a whole request body of at most [`MESSAGE_LIMIT`] bytes.
    ///
    /// # Errors
    /// `invalid_argument` when it is longer, or when the connection ends first; `resource_exhausted` when too much is being
    /// read at once.
    pub(crate) async fn read(&self, mut body: Incoming) -> Result<Message, Error> {
        let mut share = self.reserve(0)?;
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Error::new(Code::InvalidArgument, format!("read request: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            let room = if bytes.len() + data.len() > MESSAGE_LIMIT {
                let message = format!("message is larger than the limit of {MESSAGE_LIMIT} bytes");
                Err(Error::new(Code::InvalidArgument, message))
            } else {
                self.reserve(data.len())
            };
            match room {
                Ok(more) => share.merge(more),
                Err(refusal) => {
                    // Not kept any longer, but read to its end: a client that is still sending would not see the
                    // answer.
                    drop((bytes, share, data));
                    read_on(body).await;
                    return Err(refusal);
                }
            }
            if bytes.is_empty() {
                // The usual small request is one frame, which need not be copied.
                bytes = BytesMut::from(data);
            } else {
                bytes.extend_from_slice(&data);
            }
        }
        Ok(Message {
            bytes: bytes.freeze(),
            share,
        })
    }
}
