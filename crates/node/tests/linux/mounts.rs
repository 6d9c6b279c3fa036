//! What is mounted in a sandbox that was started, and in one whose processes were restored.

use std::path::Path;

use model::lifecycle::Kept;
use protocol::node::NodeApi;
use testkit::mounts::{changes, differences};

use super::checkpoints::{pause, resume};
use super::pause::{counting, goes_on, output};
use super::{Host, disks, run};

/// What is mounted in a sandbox.
const LIST: &str = include_str!("../../../runtime/tests/mounts.txt");

async fn mounts_of(host: &Host) -> String {
    output(&run(&host.node, &host.id, "cat /proc/self/mountinfo").await)
}

pub(super) async fn are_those_of_the_list(data_dir: &Path) {
    let host = counting(data_dir).await;
    let started = mounts_of(&host).await;
    assert_eq!(differences(LIST, &started), [""; 0], "{started}");
    let counted = goes_on(&host, 0).await;
    for _ in 0..2 {
        assert_eq!(pause(&host).await.kept, Kept::Checkpoint);
        resume(&host, Kept::Checkpoint).await.unwrap();
        goes_on(&host, counted).await;
        let restored = mounts_of(&host).await;
        assert_eq!(differences(LIST, &restored), [""; 0], "{restored}");
        assert_eq!(changes(&started, &restored), [""; 0]);
    }
    host.node.kill(&host.id).await.unwrap();
    host.node.release().await;
    assert_eq!(disks(data_dir), 0);
}
