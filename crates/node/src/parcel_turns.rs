//! How many parcels of paused sandboxes are made or unpacked at the same time, and which sandboxes are arriving.

use std::collections::HashSet;
use std::sync::Arc;

use model::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// Parcels that are made at the same time, and those that are unpacked. Each encrypts or decrypts on a thread. These are as many as
/// a server asks for, which shares them between teams: so no parcel waits here behind those of one team.
const PACKED: usize = 2;
const UNPACKED: usize = 4;

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
            packing: Arc::new(Semaphore::new(PACKED)),
            unpacking: Arc::new(Semaphore::new(UNPACKED)),
            arriving: Mutex::default(),
        }
    }
}
