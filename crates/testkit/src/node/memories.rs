//! Copies of disks and the memory of snapshots of the fake node.

use std::sync::atomic::Ordering;
use std::time::Duration;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use protocol::node::{CommittedCopy, CopiedDisk, CopiedMemory, Image, LayerInfo, MemoryInfo, NodeError, StartSandbox};

use super::{FakeNode, SECRET};

/// The space that the memory of a snapshot takes, in bytes.
const MEMORY_BYTES: u64 = 3 << 20;

impl FakeNode {
    pub(super) async fn copy_of(&self, id: &SandboxId, memory: bool) -> Result<CopiedDisk, NodeError> {
        let behaviour = *self.copy.lock();
        self.behave(behaviour).await?;
        if !self.running.lock().contains(id) || self.paused.lock().contains(id) {
            return Err(NodeError::NotFound(id.clone()));
        }
        let image = {
            let started = self.started.lock();
            let of = started.iter().rev().find(|started| started.id == *id);
            let restored = of.and_then(|started| self.memories.lock().get(started.memory.as_ref()?).cloned());
            restored.or_else(|| of.map(|started| started.image.clone()))
        };
        let image = image.unwrap_or(Image::Base);
        let mut copies = self.copies.lock();
        let made = copies.len() + self.commits.lock().len();
        let disk = DiskId::from_random(&[u8::try_from(made).unwrap_or(u8::MAX); 20]);
        copies.insert(disk.clone(), id.clone());
        let memory = match (memory, self.copies_memory.load(Ordering::SeqCst)) {
            (false, _) => CopiedMemory::Unwanted,
            (true, false) => CopiedMemory::Missing("the fake node cannot copy processes".to_owned()),
            (true, true) => {
                self.copied_memory.lock().insert(disk.clone(), image.clone());
                CopiedMemory::Copied
            }
        };
        Ok(CopiedDisk {
            disk,
            image,
            stopped: Duration::from_millis(1),
            memory,
        })
    }

    pub(super) async fn commit_of(
        &self,
        disk: &DiskId,
        merge: bool,
        memory: Option<&BuildId>,
    ) -> Result<CommittedCopy, NodeError> {
        let of = self.copies.lock().get(disk).cloned();
        let of = of.ok_or_else(|| NodeError::failed(SECRET))?;
        let made = self.make_layer(&of, merge).await;
        let memory_bytes = self.keep_of(disk, memory.filter(|_| made.is_ok()))?;
        Ok(CommittedCopy {
            layer: made?,
            memory_bytes,
        })
    }

    pub(super) fn keep_of(&self, disk: &DiskId, memory: Option<&BuildId>) -> Result<Option<u64>, NodeError> {
        let copy = self.copies.lock().remove(disk);
        copy.ok_or_else(|| NodeError::failed(SECRET))?;
        let copied = self.copied_memory.lock().remove(disk);
        Ok(memory.zip(copied).map(|(build, image)| {
            self.memories.lock().insert(build.clone(), image);
            MEMORY_BYTES
        }))
    }

    /// Whether a sandbox goes on with the processes of a snapshot.
    pub(super) fn has_memory(&self, request: &StartSandbox) -> bool {
        let memories = self.memories.lock();
        request
            .memory
            .as_ref()
            .is_some_and(|build| memories.contains_key(build))
    }

    pub(super) fn layer_info(&self) -> Vec<LayerInfo> {
        let layers = self.layers.lock();
        let info = |(id, bytes): (&LayerId, &u64)| LayerInfo {
            id: id.clone(),
            bytes: *bytes,
        };
        layers.iter().map(info).collect()
    }

    pub(super) fn memory_info(&self) -> Vec<MemoryInfo> {
        let memories = self.memories.lock();
        let info = |build: &BuildId| MemoryInfo {
            build: build.clone(),
            bytes: MEMORY_BYTES,
        };
        memories.keys().map(info).collect()
    }
}
