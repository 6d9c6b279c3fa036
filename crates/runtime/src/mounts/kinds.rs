//! The kinds of mounts: what an entry of the list says, and what follows from it.

use crate::sys::attr;

/// A mount, or several of a kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mount {
    /// The mount point. A word in braces stands for what is not the same in all sandboxes: [`Layout::each`] has the points of
    /// one.
    pub(crate) point: &'static str,
    pub(crate) source: Source,
    /// All attributes of the mount, also those that it gets from its source.
    pub(crate) attributes: u64,
    pub(crate) when: When,
}

/// What is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The first overlay of the root file system.
    Root,
    /// Each further overlay of the root file system, at its target.
    Overlay,
    /// A new file system of this type, with these options.
    New(&'static str, &'static [(&'static str, &'static str)]),
    /// A new file system in memory, of the size of the sandbox's shared memory.
    SharedMemory,
    /// What is at the mount point already, once more.
    Again,
    /// A path of the sandbox's fixtures.
    Fixture(&'static str),
    /// A fixture that hides what the kernel shows of the host there.
    Hidden(Cover),
    /// A path of sysfs that is the same in every network namespace.
    Sysfs(&'static str),
    /// The directory of each processor of the sandbox, in sysfs.
    Processor,
    /// A path of the sysfs of the sandbox's network namespace.
    SysfsOfNetwork(&'static str),
    /// Each control group that the sandbox sees.
    Group,
    /// A file of `/proc` that the agent serves ([`protocol::figures`]).
    Figure(&'static str),
    /// The agent's program.
    Agent,
}

/// What hides a file or a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cover {
    /// The sandbox's `/dev/null`.
    File,
    /// An empty directory.
    Directory,
}

/// Which sandboxes have a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// All sandboxes.
    Always,
    /// All sandboxes, where the kernel has something at the mount point.
    KernelHasIt,
    /// Sandboxes that see all processors of the host.
    AllProcessors,
    /// Sandboxes that see some processors of the host.
    SomeProcessors,
    /// Sandboxes whose agent serves files of `/proc`.
    Figures,
}

/// How a mount gets into a checkpoint, and out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// CRIU restores the mount.
    Restored,
    /// A checkpoint leaves the mount out, and a restore attaches it when the network of the sandbox exists.
    OfNetwork,
    /// CRIU notes a name for the mount, and attaches what the platform has for this name.
    External,
}

/// Attributes of mounts of the kernel's own file systems.
pub(super) const HARMLESS: u64 = attr::NOSUID | attr::NODEV | attr::NOEXEC;
/// Attributes of mounts of the kernel's own file systems that cannot be written.
pub(super) const UNCHANGED: u64 = HARMLESS | attr::RDONLY;
/// Attributes of the overlays.
pub(crate) const OVERLAY: u64 = attr::NODEV;
/// Attributes of the fixtures of a sandbox, from which its mounts are cloned.
pub(crate) const FIXTURES: u64 = attr::NOSUID;
/// Attributes of a sysfs from which mounts of a sandbox are cloned.
pub(crate) const SYSFS: u64 = UNCHANGED;
/// Attributes of the file system with files of `/proc`.
pub(crate) const FIGURES: u64 = UNCHANGED;

impl Source {
    /// How a mount of this source gets into a checkpoint, and out of it.
    pub(crate) const fn treatment(self) -> Treatment {
        match self {
            Self::Root | Self::New(..) | Self::SharedMemory | Self::Again => Treatment::Restored,
            Self::SysfsOfNetwork(_) => Treatment::OfNetwork,
            Self::Overlay
            | Self::Fixture(_)
            | Self::Hidden(_)
            | Self::Sysfs(_)
            | Self::Processor
            | Self::Group
            | Self::Figure(_)
            | Self::Agent => Treatment::External,
        }
    }

    /// The name of a mount of this source in an error.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Root | Self::Overlay => "an overlay",
            Self::New(..) | Self::SharedMemory => "a new file system",
            Self::Again => "a protected part",
            Self::Fixture(_) => "a fixture",
            Self::Hidden(_) => "a cover",
            Self::Sysfs(_) | Self::Processor => "a part of sysfs",
            Self::SysfsOfNetwork(_) => "a part of the network's sysfs",
            Self::Group => "a control group",
            Self::Figure(_) => "a file of the agent",
            Self::Agent => "the agent",
        }
    }
}

impl Cover {
    /// Path of the fixture.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::File => "dev/null",
            Self::Directory => "empty",
        }
    }
}
