//! Disk space reserved for the database.
//!
//! Revoking a key and ending a sandbox need a write to the database. Both must work even when the disk is full.

use std::time::Duration;

use store::Store;
use store::error::StoreError;
use tokio_util::sync::CancellationToken;

use crate::chain::Chain;

/// Pause between attempts. Within it, only logs could use up the reserve, and they stop by themselves.
const PAUSE: Duration = Duration::from_secs(5);

/// Keeps space reserved for the database until `stop` is cancelled, and logs when the disk is full and when it has
/// space again.
pub(crate) async fn reserve(store: Store, stop: CancellationToken) {
    let mut is_short = false;
    loop {
        match store.reserve_space().await {
            Ok(()) if is_short => {
                tracing::info!("disk space is reserved for the database again");
                is_short = false;
            }
            Ok(()) => {}
            Err(_) if is_short => {}
            Err(error @ StoreError::Full { .. }) => {
                tracing::error!(
                    error = %Chain(&error),
                    "the disk of the database is full: essential writes use the reserved space; free some disk space"
                );
                is_short = true;
            }
            Err(error) => {
                // Most likely the file system does not support it, which does not change.
                tracing::warn!(error = %Chain(&error), "cannot reserve disk space for the database");
                return;
            }
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}
