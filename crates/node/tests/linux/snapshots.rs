//! Copies of the disks of sandboxes that run, and the layers that are made of them.

use std::fs;
use std::path::Path;

use model::id::SandboxId;
use protocol::node::{NodeApi, NodeError, WantedState};

use tokio_util::sync::CancellationToken;

use super::layers::{above_base, passes, start};
use super::pause::{counting, goes_on};
use super::{Host, disks, open, running, until, wanted};

/// Writes two files in turn, so that the first has the number of the second or the next one at every moment, and a third
/// that is always complete: a line, and the same line again. Each name is given to a whole file.
const WRITER: &str = "i=0; while :; do i=$((i+1)); \
    echo $i >a.new; mv a.new a; echo $i >b.new; mv b.new b; \
    head -c 300000 /dev/urandom >c.data; { sha256sum c.data; } >c.sum; mkdir -p d/$i; rm -rf d/$((i-3)); ln -f a e.$((i%7)); done";

/// Whether a copy has what its sandbox had at one moment: of two files that are written in turn, the second is never ahead
/// nor more than one behind.
const CHECK: &str = r#"
cd /home/user
a=$(cat a); b=$(cat b); n=$(cat n)
[ "$a" -ge "$b" ]; [ $((a - b)) -le 1 ]; [ "$n" -gt 0 ]; [ "$b" -gt 0 ]
[ "$(cat many | wc -c)" = 12000000 ]; [ "$(sha256sum <many)" = "$(cat many.sum)" ]
[ "$(find tree -type f | wc -l)" = 500 ]
for link in e.*; do [ -f "$link" ]; done
ls -d d/* >/dev/null
"#;

async fn write(host: &Host) {
    let fill = "cd; head -c 12000000 /dev/urandom >many; sha256sum <many >many.sum; mkdir tree; \
        for i in $(seq 500); do echo $i >tree/$i; done";
    let answer = host.run(fill).await;
    assert!(answer.contains("exit status 0"), "{answer}");
    let answer = host
        .run(&format!(
            "(setsid sh -c '{WRITER}' >/dev/null 2>&1 &) </dev/null; while [ ! -e e.1 ]; do sleep 0.02; done"
        ))
        .await;
    assert!(answer.contains("exit status 0"), "{answer}");
}

/// Disks in the data directory that are in use, those of launchers excepted.
pub(super) fn attached(data_dir: &Path) -> usize {
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let of_us = devices.filter(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        file.starts_with(data_dir.to_str().unwrap()) && !file.contains("spare-")
    });
    of_us.count()
}

pub(super) async fn copies_a_disk_in_use(data_dir: &Path) {
    let host = counting(data_dir).await;
    write(&host).await;
    let before = (host.agent().await, host.spawner().await);
    let mut layers = Vec::new();
    for round in 0..5 {
        let count = goes_on(&host, 0).await;
        let copied = host.node.copy_disk(&host.id, false).await.unwrap();
        assert_eq!(disks(data_dir), 2, "the disk of the sandbox, and the copy");
        assert_eq!(attached(data_dir), 1, "the copy is in use by nobody");
        // The same processes go on where they were.
        goes_on(&host, count).await;
        assert_eq!((host.agent().await, host.spawner().await), before);
        check(data_dir, &copied.disk);

        let committed = host.node.commit_copy(&copied.disk, false, None).await.unwrap();
        assert_eq!(disks(data_dir), 1, "the copy is gone");
        assert!(host.node.commit_copy(&copied.disk, false, None).await.is_err());
        let child = start(
            &host.node,
            &format!("ichild{round}"),
            above_base(std::slice::from_ref(&committed.layer.layer)),
        )
        .await;
        passes(&host.node, &child, CHECK).await;
        host.node.kill(&child).await.unwrap();
        // Its disk is given back after that.
        until(|| attached(data_dir) == 1 && disks(data_dir) == 1).await;
        layers.push(committed.layer.layer);
    }
    // A copy that is committed after its sandbox has ended is as good as any.
    let copied = host.node.copy_disk(&host.id, false).await.unwrap();
    host.node.kill(&host.id).await.unwrap();
    let committed = host.node.commit_copy(&copied.disk, false, None).await.unwrap();
    let child = start(
        &host.node,
        "ichild",
        above_base(std::slice::from_ref(&committed.layer.layer)),
    )
    .await;
    passes(&host.node, &child, CHECK).await;
    // What is below it counts as well, and a merged layer has both.
    passes(
        &host.node,
        &child,
        "echo more >/home/user/more; rm /home/user/many /usr/bin/yes; echo changed >/etc/motd",
    )
    .await;
    let copied = host.node.copy_disk(&child, false).await.unwrap();
    let merged = host.node.commit_copy(&copied.disk, true, None).await.unwrap();
    host.node.kill(&child).await.unwrap();
    let grandchild = start(
        &host.node,
        "igrand",
        above_base(std::slice::from_ref(&merged.layer.layer)),
    )
    .await;
    let both = "cd /home/user; [ -e more ]; [ ! -e many ]; [ -e many.sum ]; [ ! -e /usr/bin/yes ]; [ $(cat /etc/motd) = changed ]";
    passes(&host.node, &grandchild, both).await;
    host.node.kill(&grandchild).await.unwrap();
    let gone: SandboxId = "ichild".parse().unwrap();
    assert!(matches!(
        host.node.copy_disk(&gone, false).await,
        Err(NodeError::NotFound(_))
    ));
    for layer in layers.iter().chain([&committed.layer.layer, &merged.layer.layer]) {
        host.node.remove_layer(layer).await.unwrap();
    }
    host.node.reconcile(Vec::new()).await.unwrap();
    assert_eq!(disks(data_dir), 0);
}

/// The file system of a copy has no errors but that it was mounted, and files that have no name any more.
fn check(data_dir: &Path, disk: &model::id::DiskId) {
    let image = data_dir.join(format!("disks/{disk}.img"));
    let repaired = data_dir.join("checked.img");
    fs::copy(image, &repaired).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test looks from outside")]
    let check = std::process::Command::new("/sbin/e2fsck")
        .args(["-f", "-p"])
        .arg(&repaired)
        .output()
        .unwrap();
    fs::remove_file(&repaired).unwrap();
    // With `-p`, everything that it would not repair without asking is an exit code of 4 and more.
    let told = String::from_utf8_lossy(&check.stdout);
    assert!(check.status.code().is_some_and(|code| code < 4), "{told}");
}

pub(super) async fn copies_do_not_outlive_the_platform(data_dir: &Path) {
    let host = counting(data_dir).await;
    let id = host.id.clone();
    host.node.copy_disk(&id, false).await.unwrap();
    assert_eq!(disks(data_dir), 2);
    // The platform ends without a word.
    host.node.release().await;
    drop(host);
    let host = open(data_dir).await;
    let adopted = host
        .node
        .reconcile(vec![wanted(&id, WantedState::Running)])
        .await
        .unwrap();
    assert_eq!(adopted, [running(&id)]);
    assert_eq!(disks(data_dir), 1);
    goes_on(&host, 0).await;
    // One that is paused is not copied, and goes on standing still.
    let paused = protocol::node::PauseSandbox {
        id: id.clone(),
        keep: model::lifecycle::Kept::Memory,
        is_written_next: false,
    };
    host.node.pause(paused, CancellationToken::new()).await.unwrap();
    host.node.copy_disk(&id, false).await.unwrap_err();
    assert_eq!(disks(data_dir), 1);
    host.node.kill(&id).await.unwrap();
}
