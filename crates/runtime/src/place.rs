//! Places in a launcher's root file system, from which the mount namespace of a sandbox is copied.

/// Mount point of the new tree.
pub(crate) const NEW: &str = "/new";
/// Where the fixtures of a sandbox are attached to take parts of them.
pub(crate) const FIXTURES: &str = "/fixtures";
/// Where a sysfs of the sandbox's own is attached to take parts of it.
pub(crate) const SYSFS: &str = "/sysfs";
/// An empty directory.
pub(crate) const EMPTY: &str = "/empty";
/// Mount points of layers, for kernels whose overlayfs needs a path for each.
pub(crate) const LAYERS: &str = "/layers";
/// Mount point of the disk, for the same kernels.
pub(crate) const DISK: &str = "/disk";
/// The agent's binary.
pub(crate) const AGENT: &str = "/agent";
/// Directories of the cgroups that sandboxes see, by number.
pub(crate) const CGROUPS: &str = "/cgroups";
/// Where a child attaches its FUSE file system to take the `/proc` files.
pub(crate) const FIGURES: &str = "/figures";
