//! Disks that outlive the processes of their sandboxes.

use std::fs;
use std::path::Path;
use std::process::Command;

use runtime::container::ContainerDriver;
use runtime::driver::{Driver as _, StartDisk, StartError, StartRequest, Started};
use runtime::stored::KeptDisk;

use super::loops::loops_of;
use super::{agent_pid, data_dir_of, disk_of, end, id, request, start, until};

/// Files of `base` in directories that a sandbox copies up when it writes the first, and in those that it does not.
const WRITTEN: [&str; 2] = ["etc/passwd", "usr/lib/os-release"];
const BESIDE: [&str; 4] = ["etc/group", "etc/skel/.profile", "usr/bin/env", "bin/sh"];

fn on_kept_disk() -> StartRequest {
    StartRequest {
        disk: StartDisk::Kept(disk_of(&id("ione"))),
        ..request(&id("ione"))
    }
}

fn root(started: &Started) -> String {
    format!("/proc/{}/root", agent_pid(&started.sandbox))
}

/// Ends a sandbox and keeps its disk, as a pause does.
fn end_and_keep(container: &ContainerDriver, started: Started) {
    let (id, disk) = (id("ione"), disk_of(&id("ione")));
    container.storage().keep(&id, &disk).unwrap();
    started.sandbox.sync().unwrap();
    end(&started.sandbox);
    drop(started);
    until(|| container.clean(&id));
    assert!(container.storage().save(&id, &disk, &|| false).unwrap() > 0);
    let is_saved = true;
    assert_eq!(container.storage().kept().unwrap(), [KeptDisk { id, disk, is_saved }]);
    assert!(container.find().unwrap().is_empty());
    assert_eq!(loops_of(&image(container)), 0);
}

fn image(container: &ContainerDriver) -> String {
    let image = data_dir_of(container).join(format!("disks/{}.img", disk_of(&id("ione"))));
    image.to_str().unwrap().to_owned()
}

/// A sandbox that has written, and was paused.
fn kept(container: &ContainerDriver) {
    let started = start(container, &id("ione"));
    for file in WRITTEN {
        fs::write(format!("{}/{file}", root(&started)), "written").unwrap();
    }
    fs::remove_file(format!("{}/etc/shells", root(&started))).unwrap();
    end_and_keep(container, started);
}

fn has_what_it_had(started: &Started) {
    let root = root(started);
    for file in WRITTEN {
        assert_eq!(fs::read_to_string(format!("{root}/{file}")).unwrap(), "written");
    }
    assert!(!Path::new(&format!("{root}/etc/shells")).exists(), "a deleted file");
    for file in BESIDE {
        assert!(Path::new(&format!("{root}/{file}")).exists(), "{file}");
    }
}

pub(crate) fn a_sandbox_is_started_again_on_its_disk(container: &ContainerDriver) {
    kept(container);
    for _ in 0..2 {
        let started = container.start(&on_kept_disk()).unwrap();
        has_what_it_had(&started);
        assert!(!container.storage().kept().unwrap()[0].is_saved, "it is in use");
        // Nothing else can use it meanwhile.
        let again = container.start(&StartRequest {
            id: id("itwo"),
            ..on_kept_disk()
        });
        assert!(matches!(again, Err(StartError::Failed(_))), "{again:?}");
        until(|| container.clean(&id("itwo")));
        end_and_keep(container, started);
    }
    // It is swept, unless a sandbox still has it.
    let disk = disk_of(&id("ione"));
    container.storage().sweep_disks(std::slice::from_ref(&disk)).unwrap();
    assert_eq!(container.storage().kept().unwrap().len(), 1);
    container.storage().forget(&id("ione"), &disk).unwrap();
    container.storage().remove_disk(&disk).unwrap();
    assert_eq!(container.storage().kept().unwrap(), []);
    assert!(!Path::new(&image(container)).exists());
    let gone = container.start(&on_kept_disk());
    assert!(matches!(gone, Err(StartError::Failed(_))), "{gone:?}");
    until(|| container.clean(&id("ione")));
}

#[expect(clippy::disallowed_methods, reason = "a program of the host, in a test")]
pub(crate) fn a_kept_disk_fits_another_version_of_base(container: &ContainerDriver) {
    kept(container);
    // The same files in other directories, as after a restart of the host.
    let base = data_dir_of(container).join("base");
    let current = fs::read_link(base.join("current")).unwrap();
    // Copied where the driver does not look: it removes versions that nobody uses.
    let copy = data_dir_of(container).join("copy");
    let copied = Command::new("cp")
        .arg("-a")
        .arg(base.join(&current))
        .arg(&copy)
        .status();
    assert!(copied.unwrap().success());
    // First, because the driver itself goes back to the version of the host's packages while that is there.
    fs::remove_dir_all(base.join(&current)).unwrap();
    std::os::unix::fs::symlink("other", base.join("next")).unwrap();
    fs::rename(copy, base.join("other")).unwrap();
    fs::rename(base.join("next"), base.join("current")).unwrap();
    let started = container.start(&on_kept_disk()).unwrap();
    has_what_it_had(&started);
    end_and_keep(container, started);
    let started = container.start(&on_kept_disk()).unwrap();
    has_what_it_had(&started);
}

#[expect(clippy::disallowed_methods, reason = "a program of the host, in a test")]
pub(crate) fn a_kept_disk_that_was_cut_off_is_repaired(container: &ContainerDriver) {
    kept(container);
    // As the kernel leaves it while it is mounted, with numbers that are not those of its files.
    for command in ["ssv state 0", "ssv free_blocks_count 7", "freei <11>"] {
        let output = Command::new("/sbin/debugfs")
            .args(["-w", "-R", command, &image(container)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let started = container.start(&on_kept_disk()).unwrap();
    has_what_it_had(&started);
    end_and_keep(container, started);
    let checked = Command::new("/sbin/e2fsck")
        .args(["-f", "-n", &image(container)])
        .output()
        .unwrap();
    assert!(checked.status.success(), "{checked:?}");
}
