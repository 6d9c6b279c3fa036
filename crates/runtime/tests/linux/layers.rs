//! Disks of sandboxes that became layers or could not. What is on a disk is written with `debugfs`, which can write what
//! no program in a sandbox can.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use model::id::LayerId;
use protocol::node::Committed;
use runtime::container::ContainerDriver;
use runtime::driver::{Driver as _, StartDisk, StartError, StartRequest};
use runtime::rootfs::{Layer, Part, Rootfs};
use runtime::stored::{CommitRequest, LayerError};

use crate::loops::{loop_numbers_of, loops_of, mounts_of};
use crate::{agent_pid, clean, data_dir_of, disk_of, end, id, request, start, until};

fn order(merge: bool) -> CommitRequest {
    CommitRequest {
        has_processes: false,
        disk: disk_of(&id("ione")),
        merge,
        keep_free_bytes: 1 << 20,
    }
}

/// Starts a sandbox, writes to its file system and ends it.
fn ended(container: &ContainerDriver, write: impl FnOnce(&Path)) -> String {
    let id = id("ione");
    let started = start(container, &id);
    write(Path::new(&format!("/proc/{}/root", agent_pid(&started.sandbox))));
    end(&started.sandbox);
    drop(started);
    until(|| container.clean(&id));
    let image = data_dir_of(container).join(format!("disks/{}.img", disk_of(&id)));
    let image = image.to_str().unwrap().to_owned();
    until(|| loops_of(&image) == 0);
    image
}

/// Runs a command in a directory of the disk.
#[expect(clippy::disallowed_methods, reason = "a program of the host, in a test")]
fn debugfs(image: &str, directory: &str, command: &str) {
    let file = format!("{image}.commands");
    fs::write(&file, format!("cd {directory}\n{command}\n")).unwrap();
    let output = Command::new("/sbin/debugfs")
        .args(["-w", "-f", &file, image])
        .output()
        .unwrap();
    fs::remove_file(file).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    // It prints its version there.
    assert_eq!(errors.lines().count(), 1, "{command}: {errors}");
}

pub(crate) fn stored(container: &ContainerDriver) -> Vec<String> {
    let entries = fs::read_dir(data_dir_of(container).join("layers")).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// A layer of what is written to the file system of a sandbox. The owners are those that root of the sandbox would be.
pub(crate) fn write_layer(container: &ContainerDriver, write: impl FnOnce(&Path)) -> LayerId {
    ended(container, write);
    let committed = container.storage().commit(&order(false), &|| false).unwrap();
    clean(container, &id("ione"));
    committed.layer
}

pub(crate) fn what_is_on_the_disk_is_checked(container: &ContainerDriver) {
    let write = |root: &Path| fs::write(root.join("etc/passwd"), "changed").unwrap();
    for (directory, command, want) in [
        ("root/upper/etc", "mknod device b 8 0", "/etc/device: a device"),
        ("usr/upper", "mknod device c 1 3", "/usr/device: a device"),
        (
            "root/upper",
            "ea_set etc trusted.overlay.redirect /var",
            "/etc: only a part of it is stored",
        ),
        (
            "root/upper/etc",
            "sif passwd uid 65536",
            "/etc/passwd: its owner is not a user",
        ),
    ] {
        let image = ended(container, write);
        debugfs(&image, directory, command);
        match container.storage().commit(&order(false), &|| false) {
            Err(LayerError::Refused(why)) => assert!(why.starts_with(want), "{why}"),
            other => panic!("{command}: {other:?}"),
        }
        assert_eq!(stored(container), [""; 0]);
        until(|| loops_of(&image) == 0);
        container.storage().remove_disk(&disk_of(&id("ione"))).unwrap();
    }
    // The same without any of that.
    ended(container, write);
    let committed = container.storage().commit(&order(false), &|| false).unwrap();
    let layers = data_dir_of(container).join("layers");
    let path = layers.join(committed.layer.as_str());
    assert_eq!(fs::read(path.join("root/etc/passwd")).unwrap(), b"changed");
    assert!(path.join("usr").is_dir());
    let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&layers).unwrap());
    assert_eq!(mode & 0o7777, 0o700);
    assert_eq!(container.storage().commit(&order(true), &|| false).unwrap(), committed);
    assert_eq!(stored(container), [committed.layer.as_str()]);
}

pub(crate) fn a_layer_that_does_not_fit_is_not_stored(container: &ContainerDriver) {
    ended(container, |_| {});
    let full = CommitRequest {
        keep_free_bytes: u64::MAX,
        ..order(false)
    };
    let error = container.storage().commit(&full, &|| false).unwrap_err();
    assert!(matches!(error, LayerError::Full(_)), "{error:?}");
    assert_eq!(stored(container), [""; 0]);
    // A start from a layer that is not there fails, and leaves nothing.
    container.storage().remove_disk(&disk_of(&id("ione"))).unwrap();
    let missing = LayerId::from_hash(&[1; 32]);
    let on = |rootfs| StartRequest {
        disk: StartDisk::New {
            disk: disk_of(&id("ione")),
            rootfs,
        },
        ..request(&id("ione"))
    };
    let request = on(Rootfs::without_base(std::slice::from_ref(&missing)));
    let error = container.start(&request).unwrap_err();
    assert!(matches!(error, StartError::NoLayer(layer) if layer == missing));
    assert!(container.find().unwrap().is_empty());
    // Nor can one lead elsewhere.
    let mut rootfs = Rootfs::base();
    rootfs.overlays[0].layers[0] = Layer::Stored {
        layer: missing,
        part: Part::Usr,
    };
    assert!(container.start(&on(rootfs)).is_err());
}

/// Interrupts a commit, which then leaves nothing but the disk. One that is complete before, as on a busy machine, leaves its
/// layer, and it is tried again without that.
fn interrupted(container: &ContainerDriver, image: &str, attempt: impl Fn() -> Result<Committed, LayerError>) {
    for _ in 0..10 {
        let outcome = attempt();
        until(|| loops_of(image) == 0);
        match outcome {
            Ok(committed) => {
                assert_eq!(stored(container), [committed.layer.as_str()]);
                container.storage().remove_layer(&committed.layer).unwrap();
            }
            Err(error) => {
                assert!(matches!(error, LayerError::Failed(_)), "{error:?}");
                assert_eq!(stored(container), [""; 0]);
                return;
            }
        }
    }
    panic!("it is never interrupted");
}

pub(crate) fn a_commit_that_is_killed_leaves_nothing(container: &ContainerDriver) {
    let image = ended(container, |root| {
        let data: Vec<u8> = (0..40_u32 << 20)
            .map(|at| u8::try_from(at >> 8 & 0xff).unwrap() | 1)
            .collect();
        fs::write(root.join("etc/passwd"), data).unwrap();
    });
    let lock = data_dir_of(container).join("launchers.lock");
    let holders = || -> BTreeSet<i32> {
        let pids = fs::read_dir("/proc").unwrap();
        let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid| fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|file| file == lock))
            .collect()
    };
    let before = holders();
    let killed = || {
        std::thread::scope(|scope| {
            let commit = scope.spawn(|| container.storage().commit(&order(false), &|| false));
            until(|| !stored(container).is_empty());
            // Its mount is in no mount table. Those of the host may have mounts of other loop devices.
            until(|| loops_of(&image) > 0 || commit.is_finished());
            let new: Vec<i32> = holders().difference(&before).copied().collect();
            if let [process] = new[..] {
                let mounts = fs::read_to_string(format!("/proc/{process}/mountinfo")).unwrap_or_default();
                assert_eq!(mounts_of(&mounts, &loop_numbers_of(&image)), [""; 0]);
                let process = rustix::process::Pid::from_raw(process).unwrap();
                let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            } else {
                assert!(new.is_empty(), "{new:?}");
            }
            commit.join().unwrap()
        })
    };
    interrupted(container, &image, killed);
    // One that is cancelled ends soon.
    let cancelled = || {
        let since = Instant::now();
        let begun = || !stored(container).is_empty();
        let outcome = container.storage().commit(&order(false), &begun);
        assert!(since.elapsed() < Duration::from_secs(60));
        outcome
    };
    interrupted(container, &image, cancelled);
    // The disk is still good.
    let committed = container.storage().commit(&order(false), &|| false).unwrap();
    assert!(committed.bytes > 40 << 20, "{committed:?}");
    clean(container, &id("ione"));
}
