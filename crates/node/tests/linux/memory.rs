//! Snapshots with memory: made of sandboxes that go on, started in others, damaged and removed.

use std::fs;
use std::path::{Path, PathBuf};

use model::id::{BuildId, LayerId};
use protocol::node::{CopiedMemory, Image, NodeApi, NodeEvent, StartSandbox, WantedState};

use super::checkpoints::until_without_groups;
use super::layers::{above_base, passes};
use super::pause::{count, counting, goes_on, processes};
use super::{Host, disks, open, request, running, wanted};

const BUILD: &str = "11111111-2222-4333-8444-555555555555";
const OTHER: &str = "11111111-2222-4333-8444-666666666666";
const THIRD: &str = "11111111-2222-4333-8444-777777777777";
/// Holds a file whose name is gone, while it has another one: CRIU gives it a name for the copy.
const HOLD: &str = "cd; echo kept >first; (setsid sh -c 'exec 3<first; : >held; while :; do sleep 1; done' >/dev/null 2>&1 &) </dev/null; \
    until [ -e held ]; do sleep 0.02; done; ln first other; rm first held; echo removed >removed";

/// Starts a sandbox from the files, and from the memory if there is one, and makes it the one of `host`.
async fn start(host: &mut Host, name: &str, layer: &LayerId, memory: &BuildId) -> bool {
    host.id = format!("i{name}{}", std::process::id()).parse().unwrap();
    let request = StartSandbox {
        image: above_base(std::slice::from_ref(layer)),
        memory: Some(memory.clone()),
        ..request(&host.id)
    };
    host.node.start(request).await.unwrap().is_restored
}

async fn end(host: &Host) {
    host.node.kill(&host.id).await.unwrap();
    assert_eq!(processes(&host.id), []);
    until_without_groups(&host.id).await;
}

fn image(data_dir: &Path, build: &BuildId) -> PathBuf {
    let entries = fs::read_dir(data_dir.join("memories")).unwrap();
    let mut found = entries.map(|entry| entry.unwrap().path());
    let found = found.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(build.as_str()));
    found.unwrap().join("image")
}

/// Waits for the log entry that says why it was started from its files.
async fn why(host: &mut Host) -> String {
    loop {
        if let NodeEvent::Log(entry) = host.event().await
            && entry.fields["event_type"] == "memory_not_restored"
        {
            assert_eq!(entry.id, host.id);
            return entry.fields["reason"].clone();
        }
    }
}

pub(super) async fn goes_on_in_others(data_dir: &Path) {
    let (build, other): (BuildId, BuildId) = (BUILD.parse().unwrap(), OTHER.parse().unwrap());
    let mut host = counting(data_dir).await;
    let parent = host.id.clone();
    passes(&host.node, &parent, HOLD).await;
    let counted = goes_on(&host, 0).await;
    let copied = host.node.copy_disk(&parent, true).await.unwrap();
    assert_eq!((&copied.memory, &copied.image), (&CopiedMemory::Copied, &Image::Base));
    let committed = host.node.commit_copy(&copied.disk, false, Some(&build)).await.unwrap();
    let bytes = committed.memory_bytes.unwrap();
    let layer = committed.layer.layer;
    let kept = host.node.memories().await.unwrap();
    assert_eq!(kept.len(), 1);
    assert_eq!((&kept[0].build, kept[0].bytes), (&build, bytes));
    assert!(bytes > 1 << 20, "{bytes}");
    goes_on(&host, counted).await;
    passes(
        &host.node,
        &parent,
        "cd; [ -e other ]; [ ! -e first ]; ! ls -a | grep link_remap; rm removed",
    )
    .await;
    assert_eq!(fs::read_dir(data_dir.join("kept")).unwrap().count(), 0);

    // The next platform has it as well, and more than one goes on from it, after the end of the first.
    host.node.release().await;
    drop(host);
    host = open(data_dir).await;
    let adopted = host
        .node
        .reconcile(vec![wanted(&parent, WantedState::Running)])
        .await
        .unwrap();
    assert_eq!(adopted, [running(&parent)]);
    assert_eq!(disks(data_dir), 2);
    host.id.clone_from(&parent);
    end(&host).await;
    for name in ["one", "two"] {
        if !start(&mut host, name, &layer, &build).await {
            panic!("{}", why(&mut host).await);
        }
        let now = count(&host).await;
        assert!(now >= counted, "{now} {counted}");
        goes_on(&host, now).await;
        let inside =
            "cd; [ -e removed ]; [ $(cat other) = kept ]; ! ls -a | grep link_remap; grep -q MemTotal /proc/meminfo";
        passes(&host.node, &host.id, inside).await;
    }
    // The files of a snapshot of it lie above what its disk lies above, and what it has removed does not come back.
    passes(&host.node, &host.id, "cd; rm removed; echo more >more").await;
    let copied = host.node.copy_disk(&host.id, true).await.unwrap();
    assert_eq!((&copied.memory, &copied.image), (&CopiedMemory::Copied, &Image::Base));
    let committed = host.node.commit_copy(&copied.disk, false, Some(&other)).await.unwrap();
    assert!(committed.memory_bytes.is_some());
    let second = committed.layer.layer;
    // Without a build it is removed, and with one it is kept without a layer.
    let layers = host.node.layers().await.unwrap().len();
    for third in [None, Some(&THIRD.parse::<BuildId>().unwrap())] {
        let before = disks(data_dir);
        let copied = host.node.copy_disk(&host.id, true).await.unwrap();
        assert_eq!(copied.memory, CopiedMemory::Copied);
        let kept = host.node.keep_copy(&copied.disk, third).await.unwrap();
        assert_eq!(kept.is_some(), third.is_some());
        assert!(host.node.keep_copy(&copied.disk, third).await.is_err());
        assert_eq!(disks(data_dir), before + usize::from(third.is_some()));
        assert_eq!(
            host.node.memories().await.unwrap().len(),
            2 + usize::from(third.is_some())
        );
    }
    assert_eq!(host.node.layers().await.unwrap().len(), layers);
    end(&host).await;
    assert!(start(&mut host, "alone", &layer, &THIRD.parse().unwrap()).await);
    goes_on(&host, counted).await;
    passes(&host.node, &host.id, "cd; [ -e more ]; [ ! -e removed ]").await;
    end(&host).await;
    host.node.remove_memory(&THIRD.parse().unwrap()).await.unwrap();
    assert!(start(&mut host, "three", &second, &other).await);
    goes_on(&host, counted).await;
    passes(&host.node, &host.id, "cd; [ -e more ]; [ ! -e removed ]").await;
    end(&host).await;
    host.id = format!("ione{}", std::process::id()).parse().unwrap();
    end(&host).await;

    // A damaged checkpoint is not used, nor one that is not there: the files are.
    let core = image(data_dir, &other).join("core-1.img");
    let whole = fs::read(&core).unwrap();
    fs::write(&core, &whole[..whole.len() / 2]).unwrap();
    assert!(!start(&mut host, "four", &second, &other).await);
    let reason = why(&mut host).await;
    assert!(reason.contains("core-1.img"), "{reason}");
    passes(
        &host.node,
        &host.id,
        "cd; [ -e more ]; [ ! -e removed ]; [ $(cat n) -gt 0 ]; ! ls -a | grep link_remap",
    )
    .await;
    end(&host).await;
    host.node.remove_memory(&other).await.unwrap();
    host.node.remove_memory(&other).await.unwrap();
    assert!(!start(&mut host, "five", &second, &other).await);
    let reason = why(&mut host).await;
    assert!(reason.contains("does not have"), "{reason}");
    assert_eq!(disks(data_dir), 2, "of the sandbox, and of the first snapshot");
    end(&host).await;
    host.node.remove_memory(&build).await.unwrap();
    for layer in [&layer, &second] {
        host.node.remove_layer(layer).await.unwrap();
    }
    assert_eq!(host.node.memories().await.unwrap(), []);
    assert_eq!(fs::read_dir(data_dir.join("memories")).unwrap().count(), 0);
    host.node.reconcile(Vec::new()).await.unwrap();
    assert_eq!(disks(data_dir), 0);
}
