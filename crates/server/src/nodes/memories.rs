//! What goes on with the memory of snapshots of one node, apart from what is done with it.

use std::collections::HashMap;

use model::id::BuildId;
use parking_lot::Mutex;
use tokio::sync::watch;

/// What goes on with the memories of a node.
#[derive(Debug, Default)]
pub(crate) struct NodeMemories {
    /// Whether they are being copied, and have to be looked at again afterwards.
    pub(crate) copying: Mutex<Option<bool>>,
    /// The memories that are on their way to the node: whether that has ended.
    pub(crate) arriving: Mutex<HashMap<BuildId, watch::Receiver<bool>>>,
    /// The memories that are being removed to save space: what brings one again waits for the end of that.
    leaving: Mutex<HashMap<BuildId, watch::Receiver<()>>>,
    /// Held while what the node has is read and noted, and while a memory is removed to save space.
    pub(crate) listing: tokio::sync::Mutex<()>,
}

/// A memory that is being removed from a node, until this is dropped.
#[derive(Debug)]
pub(crate) struct Leaving<'a> {
    memories: &'a NodeMemories,
    build: BuildId,
    /// Ends the wait of those that bring it again.
    _end: watch::Sender<()>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.memories.leaving.lock().remove(&self.build);
    }
}

impl NodeMemories {
    /// Begins to remove a memory, unless it is on its way to the node.
    pub(crate) fn begin_to_leave(&self, build: &BuildId) -> Option<Leaving<'_>> {
        let arriving = self.arriving.lock();
        if arriving.contains_key(build) {
            return None;
        }
        let (end, ended) = watch::channel(());
        self.leaving.lock().insert(build.clone(), ended);
        Some(Leaving {
            memories: self,
            build: build.clone(),
            _end: end,
        })
    }

    /// What to wait for before a memory is brought to the node, if it is being removed. [`Self::arriving`] must be locked.
    pub(crate) fn leaves(&self, build: &BuildId) -> Option<watch::Receiver<()>> {
        self.leaving.lock().get(build).cloned()
    }
}

/// The memories that a node is known to have.
#[derive(Debug, Default)]
pub(crate) struct HeldMemories {
    /// When a sandbox was started from each last, as far as it was in this session, in microseconds since the Unix epoch; 0 otherwise.
    used_us: HashMap<BuildId, i64>,
}

impl HeldMemories {
    /// Notes what the node has said that it has.
    pub(super) fn replace(&mut self, builds: impl Iterator<Item = BuildId>) {
        let known = std::mem::take(&mut self.used_us);
        let with_time = |build: BuildId| {
            let used_us = known.get(&build).copied().unwrap_or(0);
            (build, used_us)
        };
        self.used_us = builds.map(with_time).collect();
    }

    /// Whether it has this memory.
    pub(crate) fn has(&self, build: &BuildId) -> bool {
        self.used_us.contains_key(build)
    }

    /// As [`Self::has`], for a sandbox that is started from it now. For some time after that nobody removes it to save space.
    pub(crate) fn begin_use(&mut self, build: &BuildId, now_us: i64) -> bool {
        let used_us = self.used_us.get_mut(build);
        used_us.map(|used_us| *used_us = now_us).is_some()
    }

    /// Notes that it has a memory, which is used now.
    pub(crate) fn insert(&mut self, build: BuildId, now_us: i64) {
        self.used_us.insert(build, now_us);
    }

    /// Notes that it has no such memory any more.
    pub(crate) fn remove(&mut self, build: &BuildId) {
        self.used_us.remove(build);
    }

    /// When this memory was used last, in microseconds since the Unix epoch; 0 if that was before this session.
    pub(crate) fn used_us(&self, build: &BuildId) -> i64 {
        self.used_us.get(build).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(number: u8) -> BuildId {
        format!("11111111-2222-4333-8444-{number:012}").parse().unwrap()
    }

    #[test]
    fn what_a_node_says_again_is_known_to_have_been_used() {
        let mut held = HeldMemories::default();
        held.replace([build(1), build(2)].into_iter());
        assert!(held.begin_use(&build(1), 7) && !held.begin_use(&build(3), 7));
        held.insert(build(4), 8);
        held.replace([build(1), build(4), build(5)].into_iter());
        let times: Vec<(bool, i64)> = (1..=5)
            .map(|n| (held.has(&build(n)), held.used_us(&build(n))))
            .collect();
        assert_eq!(times, [(true, 7), (false, 0), (false, 0), (true, 8), (true, 0)]);
    }

    /// One that arrives is not removed, and one that is removed arrives afterwards.
    #[tokio::test]
    async fn a_memory_does_not_come_and_go_at_the_same_time() {
        let memories = NodeMemories::default();
        let (_tell, arrives) = watch::channel(false);
        memories.arriving.lock().insert(build(1), arrives);
        assert!(memories.begin_to_leave(&build(1)).is_none());
        assert!(memories.leaves(&build(1)).is_none());
        let leaving = memories.begin_to_leave(&build(2)).unwrap();
        let mut gone = memories.leaves(&build(2)).unwrap();
        assert!(!gone.has_changed().unwrap());
        drop(leaving);
        assert!(gone.changed().await.is_err(), "the wait has ended");
        assert!(memories.leaves(&build(2)).is_none());
    }
}
