//! Disk space for the database, held ahead of need.
//!
//! Keys are revoked and sandboxes end by a write to the database. Neither may depend on what else fills the disk.

use std::time::Duration;

use store::Store;
use store::error::StoreError;
use tokio_util::sync::CancellationToken;

use crate::chain::Chain;

/// Pause between attempts: in less than that, what is held is not used up by anything but logs, which stop by
/// themselves.
const PAUSE: Duration = Duration::from_secs(5);

/// Holds space for the database until `stop` is cancelled, and says when there is none and when there is again.
pub(crate) async fn reserve(store: Store, stop: CancellationToken) {
    let mut is_short = false;
    loop {
        match store.reserve_space().await {
            Ok(()) if is_short => {
                tracing::info!("the database has disk space ahead of need again");
                is_short = false;
            }
            Ok(()) => {}
            Err(_) if is_short => {}
            Err(error @ StoreError::Full { .. }) => {
                tracing::error!(
                    error = %Chain(&error),
                    "the disk of the database is full: keys and ends of sandboxes use the space that was held for them"
                );
                is_short = true;
            }
            Err(error) => {
                // A file system that holds nothing ahead, most likely; it stays like that.
                tracing::warn!(error = %Chain(&error), "no disk space can be held for the database");
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
