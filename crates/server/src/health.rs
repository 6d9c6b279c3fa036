//! Whether sandboxes can be created, as far as that is known without creating one: the database answers.
//!
//! Health checks come often and from anybody, so an answer counts for a moment, and those who ask meanwhile share it.

use std::time::Duration;

use store::Store;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::chain::Chain;

/// How long an answer counts.
const AGE: Duration = Duration::from_secs(1);

/// The health of the platform.
#[derive(Debug)]
pub(crate) struct Health {
    store: Store,
    /// When the database was last checked, and whether it answered.
    last: Mutex<Option<(Instant, bool)>>,
}

impl Health {
    pub(crate) fn new(store: Store) -> Self {
        Self {
            store,
            last: Mutex::default(),
        }
    }

    /// Whether the database answers. Takes some seconds at most.
    pub(crate) async fn has_database(&self) -> bool {
        let mut last = self.last.lock().await;
        if let Some((at, answers)) = *last
            && at.elapsed() < AGE
        {
            return answers;
        }
        let pinged = self.store.ping().await;
        let answered = last.is_none_or(|(_, answered)| answered);
        match &pinged {
            Ok(()) if !answered => tracing::info!("the database answers again"),
            Err(error) if answered => {
                tracing::error!(error = %Chain(error), "the database does not answer: no sandbox can be created");
            }
            Ok(()) | Err(_) => {}
        }
        *last = Some((Instant::now(), pinged.is_ok()));
        pinged.is_ok()
    }
}
