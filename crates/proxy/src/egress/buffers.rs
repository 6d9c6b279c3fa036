//! Buffers for datagrams, so that an idle flow has none.

use parking_lot::Mutex;

/// Largest datagram.
pub(super) const DATAGRAM_MAX: usize = 65_535;
/// Buffers that are kept.
const BUFFERS_KEPT: usize = 16;

/// Buffers that are not in use.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    pub(super) fn take(&self) -> Vec<u8> {
        let buffer = self.0.lock().pop();
        buffer.unwrap_or_else(|| vec![0; DATAGRAM_MAX])
    }

    pub(super) fn put(&self, buffer: Vec<u8>) {
        let mut buffers = self.0.lock();
        if buffers.len() < BUFFERS_KEPT {
            buffers.push(buffer);
        }
    }
}
