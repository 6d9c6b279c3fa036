//! What is left of sandboxes whose end was answered is taken down after it, and awaited by what needs that.

use std::path::Path;
use std::sync::Arc;

use model::id::SandboxId;
use node::Node;
use protocol::node::{Image, NodeApi};
use tokio::task::JoinSet;

use super::layers::{above_base, passes, start};
use super::snapshots::attached;
use super::{disks, open};

/// Sandboxes that end at the same time: more than are taken down at a time, which is one for each processor.
fn sandboxes() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get) + 2
}

async fn kill_all(node: &Arc<Node>, ids: Vec<SandboxId>) {
    let mut killing: JoinSet<()> = ids
        .into_iter()
        .map(|id| {
            let node = Arc::clone(node);
            async move { node.kill(&id).await.unwrap() }
        })
        .collect();
    while let Some(killed) = killing.join_next().await {
        killed.unwrap();
    }
}

pub(super) async fn is_over_before_the_node_is(data_dir: &Path) {
    let host = open(data_dir).await;
    let first = start(&host.node, "ifirst", Image::Base).await;
    passes(&host.node, &first, "echo layer > /home/user/file").await;
    let layer = host.node.commit(&first, false).await.unwrap().layer;
    let mut ids = Vec::new();
    for number in 0..sandboxes() {
        let image = above_base(std::slice::from_ref(&layer));
        let id = start(&host.node, &format!("idown{number}"), image).await;
        // Files in memory, and on disk, which is written out when it is unmounted.
        passes(
            &host.node,
            &id,
            "head -c 2000000 /dev/urandom | tee /dev/shm/a > /home/user/a",
        )
        .await;
        ids.push(id);
    }
    assert_eq!((attached(data_dir), disks(data_dir)), (ids.len(), ids.len()));
    kill_all(&host.node, ids).await;
    // A layer that they used is removed at once, and not when something looks for it later.
    host.node.remove_layer(&layer).await.unwrap();
    assert_eq!(std::fs::read_dir(data_dir.join("layers")).unwrap().count(), 0);
    assert_eq!(disks(data_dir), 0);

    // The same ids, and a node that ends right after.
    let mut ids = Vec::new();
    for number in 0..sandboxes() {
        ids.push(start(&host.node, &format!("idown{number}"), Image::Base).await);
    }
    kill_all(&host.node, ids).await;
    host.node.release().await;
    assert_eq!((attached(data_dir), disks(data_dir)), (0, 0));
}
