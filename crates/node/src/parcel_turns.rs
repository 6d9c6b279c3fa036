//! How many parcels of paused sandboxes are made or unpacked at the same time, and which sandboxes are arriving.

use std::collections::HashSet;
use std::sync::Arc;

use model::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// Parcels that are made or unpacked at the same time. Each encrypts or decrypts on a thread.
const PARCELS: usize = 2;
/// What goes on with parcels.
#[derive(Debug)]
pub(crate) struct Parcels {
    pub(crate) packing: Arc<Semaphore>,
    pub(crate) unpacking: Arc<Semaphore>,
    /// The sandboxes that are being unpacked.
    pub(crate) arriving: Mutex<HashSet<SandboxId>>,
}

impl Default for Parcels {
    fn default() -> Self {
        Self {
            packing: Arc::new(Semaphore::new(PARCELS)),
            unpacking: Arc::new(Semaphore::new(PARCELS)),
            arriving: Mutex::default(),
        }
    }
}
