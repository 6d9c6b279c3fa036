//! What a start and a restore make in the same way before the sandbox has processes: its groups, its disk, its overlays, its
//! fixtures, and its files of `/proc`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use model::resources::Resources;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::FsOpenFlags;

use super::fixtures;
use super::held::Launcher;
use super::root::{BASE, HOST_DEV, SKELETON, STORED};
use super::steps::{During, Stages};
use crate::boot_id::BootId;
use crate::cgroup::open::Entry;
use crate::disk;
use crate::figures::Figures;
use crate::processors::View;
use crate::rootfs::{Layer, Overlay, Rootfs};
use crate::slot::Name;
use crate::sys::{self, attr};
use crate::{base, mounting, mounts, place, skeleton};

/// What the file systems of a sandbox are made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) name: &'a Name,
    /// First id of the sandbox's range.
    pub(super) base_id: u32,
    /// A user namespace with the sandbox's ids.
    pub(super) user: BorrowedFd<'a>,
    pub(super) rootfs: &'a Rootfs,
    /// Size of the disk, in MiB, if it is to be created. Otherwise it exists.
    pub(super) new_disk_mb: Option<u32>,
    pub(super) processors: &'a View,
    pub(super) boot_id: &'a BootId,
}

/// The file systems of a sandbox, not attached yet.
#[derive(Debug)]
pub(super) struct FileSystems {
    /// In the order of the root file system.
    pub(super) overlays: Vec<OwnedFd>,
    pub(super) fixtures: OwnedFd,
    pub(super) figures: Option<Figures>,
    /// The overlays have mounts of their own of it. To let go of this one takes time.
    pub(super) disk: OwnedFd,
}

impl Launcher {
    /// Creates the sandbox's own groups and its agent's.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(super) fn agent_groups(&self, name: &Name, limits: &Resources) -> io::Result<Entry> {
        self.tree.create(name, limits).during("create the cgroups")
    }

    /// Creates the groups of the workload.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(super) fn work_groups(&self, name: &Name, limits: &Resources) -> io::Result<Entry> {
        let work = self.tree.create_work(name, limits);
        work.during("create the workload's cgroups")
    }

    /// Makes the file systems of a sandbox.
    ///
    /// # Errors
    /// When the disk, or a layer, is not there, and those of the kernel.
    pub(super) fn file_systems(&mut self, wanted: &Wanted<'_>, stages: &mut Stages) -> io::Result<FileSystems> {
        let disk = match wanted.new_disk_mb {
            Some(disk_mb) => self.make_disk(wanted.name, wanted.rootfs, disk_mb)?,
            None => self.kept_disk(wanted.name)?,
        };
        sys::mount_setattr(disk.as_fd(), false, attr::IDMAP, Some(wanted.user)).during("map the disk's ids")?;
        stages.end("disk");
        Ok(FileSystems {
            overlays: self.overlays(wanted, disk.as_fd())?,
            figures: self.make_figures()?,
            fixtures: self
                .make_fixtures(wanted.processors, wanted.boot_id)
                .during("create the fixtures")?,
            disk,
        })
    }

    fn make_figures(&self) -> io::Result<Option<Figures>> {
        if self.figures {
            Figures::make(Path::new(HOST_DEV)).during("mount the FUSE file system")
        } else {
            Ok(None)
        }
    }

    /// The fixtures of a run with these processors, not attached yet.
    fn make_fixtures(&mut self, processors: &View, boot_id: &BootId) -> io::Result<OwnedFd> {
        let fixtures = match self.spare_fixtures.take() {
            Some(fixtures) => fixtures,
            None => self.fixtures.make()?,
        };
        fixtures::add_run(fixtures.as_fd(), boot_id)?;
        fixtures::add_processors(fixtures.as_fd(), processors)?;
        Ok(fixtures)
    }

    /// Mounts the overlays of a sandbox, in their order.
    fn overlays(&self, wanted: &Wanted<'_>, disk: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
        // Once for all overlays: a detached mount cannot be attached again.
        let _disk_at = if self.layer_fds {
            None
        } else {
            Some(Attached::at(place::DISK, disk).during("attach the disk")?)
        };
        // Opened once, so that all layers are of one version.
        let base = if wanted.rootfs.has_base() {
            format!("{BASE}/{}", base::CURRENT)
        } else {
            place::EMPTY.to_owned()
        };
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let base = rustix::fs::open(base, flags, Mode::empty()).during("open the base")?;
        let overlays = wanted.rootfs.overlays.iter();
        let mounted = overlays.map(|overlay| {
            let mount = self.overlay(overlay, base.as_fd(), disk, wanted);
            mount.during(&format!("mount {}", overlay.target))
        });
        mounted.collect()
    }

    /// Mounts a disk that exists.
    fn kept_disk(&self, name: &Name) -> io::Result<OwnedFd> {
        let image = disk::open(self.data_dir.as_fd(), &name.disk).during("open the disk")?;
        let mounted = self.loops.mount(image.as_fd(), !self.settings.reserve_disks);
        mounted.during("mount the disk")
    }

    fn make_disk(&mut self, name: &Name, rootfs: &Rootfs, disk_mb: u32) -> io::Result<OwnedFd> {
        let spare = self.spare.take().filter(|spare| spare.disk_mb == disk_mb);
        let disk = match spare.map(|spare| spare.into_disk(&name.disk)) {
            Some(Ok(disk)) => disk,
            // Its file may have been removed.
            Some(Err(_)) | None => {
                let index = self.template(disk_mb)?;
                let image = self.templates[index]
                    .instantiate(self.data_dir.as_fd(), &name.disk, self.settings.reserve_disks)
                    .during("create the disk")?;
                self.loops
                    .mount(image.as_fd(), !self.settings.reserve_disks)
                    .during("mount the disk")?
            }
        };
        for overlay in &rootfs.overlays {
            disk::make_upper(disk.as_fd(), &overlay.upper).during("create an upper")?;
        }
        Ok(disk)
    }

    /// An overlay with the ids of its layers mapped into the sandbox, not attached yet. Where overlayfs takes layers by
    /// path only, the disk is attached at [`place::DISK`], and the others get a path during the mount.
    fn overlay(
        &self,
        Overlay { layers, upper, .. }: &Overlay,
        base: BorrowedFd<'_>,
        disk: BorrowedFd<'_>,
        wanted: &Wanted<'_>,
    ) -> io::Result<OwnedFd> {
        let (user, base_id) = (wanted.user, wanted.base_id);
        let lowers = layers
            .iter()
            .map(|layer| match layer {
                Layer::BaseRoot => mapped_layer(base, "root", user),
                Layer::BaseUsr => mapped_layer(base, "usr", user),
                Layer::HostUsr => match mapped_layer(base, base::HOST, user) {
                    // The usual case: /usr itself can have mapped ids.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => mapped_layer(CWD, "/usr", user),
                    copy => copy,
                },
                Layer::Stored { layer, part } => {
                    mapped_layer(CWD, &format!("{STORED}/{layer}/{}", part.as_str()), user)
                }
                Layer::Skeleton(part) => mapped_layer(CWD, &format!("{SKELETON}/{}", skeleton::name(*part)), user),
            })
            .collect::<io::Result<Vec<_>>>()?;
        let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (key, value) in [
            ("index", "on"),
            ("nfs_export", "on"),
            ("metacopy", "off"),
            ("redirect_dir", "off"),
        ] {
            rustix::mount::fsconfig_set_string(&fs, key, value)?;
        }
        if self.layer_fds {
            // What a new one has otherwise, and the mount table shows it when the disk is mounted again, too.
            rustix::mount::fsconfig_set_string(&fs, "uuid", "on")?;
            for lower in &lowers {
                rustix::mount::fsconfig_set_fd(&fs, "lowerdir+", lower)?;
            }
            for part in ["upper", "work"] {
                let dir = crate::files::open_dir_at(disk, &format!("{upper}/{part}"))?;
                rustix::mount::fsconfig_set_fd(&fs, format!("{part}dir"), &dir)?;
            }
            return create_as(&fs, base_id);
        }
        let attached = lowers
            .iter()
            .enumerate()
            .map(|(index, lower)| Attached::at(&format!("{}/{index}", place::LAYERS), lower.as_fd()))
            .collect::<io::Result<Vec<_>>>()?;
        let paths: Vec<&str> = attached.iter().map(|lower| lower.0.as_str()).collect();
        rustix::mount::fsconfig_set_string(&fs, "lowerdir", paths.join(":"))?;
        for part in ["upper", "work"] {
            rustix::mount::fsconfig_set_string(&fs, format!("{part}dir"), format!("{}/{upper}/{part}", place::DISK))?;
        }
        create_as(&fs, base_id)
    }
}

/// A mount that is attached in the launcher until this is dropped.
#[derive(Debug)]
pub(super) struct Attached(String);

impl Attached {
    /// Attaches a mount at a path of the launcher.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(super) fn at(path: &str, mount: BorrowedFd<'_>) -> io::Result<Self> {
        mounting::attach(mount, CWD, path)?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.as_str(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// A clone of one of the launcher's mounts with its ids mapped, read-only.
fn mapped_layer(dir: BorrowedFd<'_>, path: &str, user: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let layer = mounting::clone(dir, path)?;
    sys::mount_setattr(layer.as_fd(), false, attr::IDMAP | attr::RDONLY, Some(user))?;
    Ok(layer)
}

/// Creates and mounts an overlay with the file-system ids of the sandbox's root: an id that is not in the layers' maps
/// could not create the work directory, and overlayfs would fall back to read-only.
fn create_as(fs: &OwnedFd, base_id: u32) -> io::Result<OwnedFd> {
    sys::set_ids(base_id, base_id, 0)?;
    let created = rustix::mount::fsconfig_create(fs);
    sys::set_ids(0, 0, 0)?;
    created?;
    mounting::mount(fs, mounts::OVERLAY)
}
