//! File systems of a sandbox that are held while it is ended: what takes time to unmount is taken down afterwards.

use super::*;

pub(crate) fn outlive_their_sandbox(container: &ContainerDriver) {
    let id = id("iheld");
    let started = start(container, &id);
    let image = data_dir_of(container).join(format!("disks/{}.img", disk_of(&id)));
    let image = image.to_string_lossy();
    let held = started.sandbox.hold_mounts().unwrap();
    // The agent, and an empty file system.
    assert!(held.bytes > 100 << 10 && held.bytes < 64 << 20, "{held:?}");
    end(&started.sandbox);
    // Nothing of it runs, and its groups are empty, but its disk is in use.
    assert!(started.sandbox.hold_mounts().is_err());
    clean(container, &id);
    assert_eq!(loops_of(&image), 1, "the disk is attached while its mounts are held");
    drop(held);
    until(|| loops_of(&image) == 0);
}
