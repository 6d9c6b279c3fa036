//! Copying paused sandboxes to the blob store, in the background: a pause is answered before, and a resume or the end of the
//! sandbox interrupts it at once.
//!
//! What fails is tried again, less and less often, until the sandbox is not paused any more or its node has another session,
//! which looks for all that have no copy.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use blobs::CopyOf;
use model::id::SandboxId;
use model::lifecycle::State;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::entry::SandboxEntry;
use super::registry::is_kept;
use crate::chain::Chain;
use crate::nodes::ServedNode;
use crate::outcome::CopyOutcome;
use crate::parcels::{Packing, ParcelError, Parcels};

/// Shortest and longest pause before a copy, or the removal of copies, is tried again.
pub(super) const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long it is tried to remove the copies of a sandbox. What is left then is found by the next round of all copies.
const REMOVAL: Duration = Duration::from_secs(8 * 60);
/// How long a request may take to arrive at the blob store that was given up here.
const ON_ITS_WAY: Duration = Duration::from_secs(5);

impl Sandboxes {
    /// Copies every sandbox of a node that is paused on disk and has no copy of that, or a damaged one, in the background.
    pub(crate) async fn pack_all(self: &Arc<Self>, node: &Arc<ServedNode>) {
        if self.parcels.is_none() || !node.makes_parcels {
            return;
        }
        match node.rows.sandbox_list_packed(false).await {
            Ok(ids) => {
                for id in ids {
                    if let Some(entry) = self.tracked.registry.get(&id) {
                        self.pack_later(&entry);
                    }
                }
            }
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot list the sandboxes that have no copy in the blob store");
            }
        }
    }

    /// Copies a sandbox in the background, if it is paused on disk by then.
    pub(super) fn pack_later(self: &Arc<Self>, entry: &Arc<SandboxEntry>) {
        let Some(parcels) = &self.parcels else { return };
        // A node that has nothing of it cannot make another copy.
        if !entry.node.makes_parcels || !is_kept(entry) || entry.node.lacks.lock().contains(&entry.id) {
            return;
        }
        match parcels.packing.lock().entry(entry.id.clone()) {
            // What copies it looks again afterwards.
            Entry::Occupied(mut packing) => {
                packing.get_mut().again = true;
                return;
            }
            Entry::Vacant(first) => {
                first.insert(Packing::default());
            }
        }
        let (sandboxes, parcels, id) = (Arc::clone(self), Arc::clone(parcels), entry.id.clone());
        self.work.spawn(async move {
            loop {
                // It may have moved to another node, or be another session's.
                if let Some(entry) = sandboxes.tracked.registry.get(&id) {
                    sandboxes.pack(&parcels, &entry).await;
                }
                let mut packing = parcels.packing.lock();
                match packing.get_mut(&id) {
                    Some(packing) if packing.again => *packing = Packing::default(),
                    _ => {
                        packing.remove(&id);
                        return;
                    }
                }
            }
        });
    }

    /// Has a copy that was found to be damaged be made again by the node that has the sandbox: at once if that is served here, and
    /// otherwise when it is.
    pub(super) async fn pack_again(self: &Arc<Self>, id: &SandboxId, parcel: &str) {
        match self.store().sandbox_parcel_damaged(id, parcel).await {
            Ok(true) => {
                tracing::error!(sandbox.id = %id, "the copy of a paused sandbox in the blob store is damaged, and is made again once its node is there");
            }
            // Another one has come in its place, or it is known.
            Ok(false) => {}
            Err(error) => {
                self.tracked
                    .store_failed(&error, id, "cannot note that the copy of a sandbox is damaged");
            }
        }
        if let Some(entry) = self.tracked.registry.get(id) {
            self.pack_later(&entry);
        }
    }

    /// Copies a sandbox, as often as it takes.
    async fn pack(self: &Arc<Self>, parcels: &Parcels, entry: &Arc<SandboxEntry>) {
        parcels.given_up.lock().remove(&entry.id);
        let mut pause = RETRY.0;
        while is_kept(entry) {
            let copying = async {
                let _turn = parcels.upload_turn(&Some(entry.team.clone())).await;
                self.pack_once(parcels, entry).await
            };
            let copied = tokio::select! {
                biased;
                () = self.until_interrupted(entry) => return self.remove_what_comes_later(&entry.id),
                copied = copying => copied,
            };
            if copied.is_err() {
                parcels.upload_failed(&entry.id, self.clock.now_us());
            }
            match copied {
                Ok(()) => return,
                // It would be the same again.
                Err(error @ ParcelError::Invalid(_)) => {
                    parcels.given_up.lock().insert(entry.id.clone());
                    tracing::error!(sandbox.id = %entry.id, error = %Chain(&error), "a paused sandbox is not copied to the blob store until its next pause");
                    return;
                }
                Err(error) if pause == RETRY.0 => {
                    tracing::warn!(sandbox.id = %entry.id, error = %Chain(&error), "cannot copy a paused sandbox to the blob store yet, it is tried again");
                }
                Err(error) => {
                    tracing::debug!(sandbox.id = %entry.id, error = %Chain(&error), "cannot copy a paused sandbox yet");
                }
            }
            tokio::select! {
                biased;
                () = self.until_interrupted(entry) => return self.remove_what_comes_later(&entry.id),
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(RETRY.1),
            }
        }
    }

    async fn until_interrupted(&self, entry: &SandboxEntry) {
        tokio::select! {
            () = entry.left_pause() => {}
            () = entry.node.over.cancelled() => {}
            () = self.work.stopping().cancelled() => {}
        }
    }

    async fn pack_once(&self, parcels: &Parcels, entry: &SandboxEntry) -> Result<(), ParcelError> {
        let id = &entry.id;
        let (Some(row), Some(parcel)) = (
            self.store().sandbox_by_id(id).await?,
            self.store().sandbox_parcel(id).await?,
        ) else {
            return Ok(());
        };
        let is_complete = parcel.current.is_some() && !parcel.is_damaged;
        if row.state != State::Paused || is_complete {
            return Ok(());
        }
        if let Some(bytes) = parcels.upload(&entry.node, &row, parcel.is_damaged).await? {
            parcels.metrics.copy_upload(CopyOutcome::Complete, self.clock.now_us());
            tracing::info!(sandbox.id = %id, bytes, "a paused sandbox was copied to the blob store");
        }
        Ok(())
    }

    /// Removes what is on its way to the blob store when the copying of a sandbox is interrupted, if that was by its end: the rest is
    /// removed then, and this is not there yet.
    fn remove_what_comes_later(self: &Arc<Self>, id: &SandboxId) {
        let (sandboxes, id) = (Arc::clone(self), id.clone());
        self.work.spawn(async move {
            if sandboxes.work.pause(ON_ITS_WAY).await {
                sandboxes.remove_parcels_without_row(&id).await;
            }
        });
    }

    /// Removes the copies of a sandbox if it has no row, on any node.
    pub(super) async fn remove_parcels_without_row(&self, id: &SandboxId) {
        if self.parcels.is_none() {
            return;
        }
        match self.store().sandbox_by_id(id).await {
            Ok(None) => self.remove_parcels_of(id),
            Ok(Some(_)) => {}
            Err(error) => self
                .tracked
                .store_failed(&error, id, "whether a sandbox has left copies is not known yet"),
        }
    }

    /// Removes the copies of a sandbox that had this row and has ended, in the background.
    pub(super) fn remove_parcels(&self, row: &SandboxRow) {
        // Without a pause there is no copy.
        if row.paused_us.is_some() {
            self.remove_parcels_of(&row.id);
        }
    }

    fn remove_parcels_of(&self, id: &SandboxId) {
        let Some(parcels) = &self.parcels else { return };
        parcels.arrived.lock().remove(id);
        parcels.given_up.lock().remove(id);
        let (parcels, work, id) = (Arc::clone(parcels), Arc::clone(&self.work), id.clone());
        let of = CopyOf::Sandbox(id.clone());
        self.work.spawn(async move {
            let removing = async {
                let mut pause = RETRY.0;
                loop {
                    let removed = tokio::select! {
                        biased;
                        _turn = parcels.removals.acquire() => parcels.remove(&of).await,
                        () = work.stopping().cancelled() => return,
                    };
                    match removed {
                        Ok(objects) => {
                            tracing::debug!(sandbox.id = %id, objects, "removed the copies of a sandbox");
                            return;
                        }
                        Err(error) if pause == RETRY.0 => {
                            tracing::warn!(sandbox.id = %id, error = %Chain(&error), "cannot remove the copies of a sandbox yet, it is tried again");
                        }
                        Err(error) => {
                            tracing::debug!(sandbox.id = %id, error = %Chain(&error), "cannot remove the copies of a sandbox yet");
                        }
                    }
                    if !work.pause(pause).await {
                        return;
                    }
                    pause = (pause * 2).min(RETRY.1);
                }
            };
            let _ = tokio::time::timeout(REMOVAL, removing).await;
        });
    }
}
