//! The writable disk of a sandbox: a sparse file with an ext4 file system of its own, so that its size is a real limit.
//!
//! Creating a file system takes milliseconds and an external program, so it is created once per size, as a template. A
//! new disk consists of the template's few non-empty blocks and its own UUID: overlayfs disables `index` and
//! `nfs_export` for layers whose file systems share one. The template has `metadata_csum_seed`, so its checksums do not
//! depend on the UUID, except that of the superblock, which is recomputed here.
//!
//! Attaching a disk writes it out, and waits for that. So a launcher without work creates a disk in advance ([`Spare`]).
//!
//! The disk is attached to a loop device that clears itself, and mounted without being attached to a mount tree: only
//! the overlay of the sandbox refers to it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use model::id::DiskId;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::sys;

/// Uppers whose directories are part of every template: those of the template `base`.
const UPPERS: [&str; 2] = ["root", "usr"];
/// Directories that an overlay needs on its disk, below that of its upper.
const DIRECTORIES: [&str; 2] = ["upper", "work"];
/// Access to directories of a disk. That of `upper` is what a sandbox sees of the directory its overlay is mounted at.
const DIRECTORY_MODE: u32 = 0o755;
/// What the kernel keeps in `work` for the life of a disk, with the mode that it gives it. It uses one that is there, and
/// on a new disk each directory made costs a search for a free block; the other one, `work/work`, it makes anew at
/// every mount.
const INDEX: &str = "work/index";
const INDEX_MODE: u32 = 0;

/// Offset of the superblock in a file system.
const SUPERBLOCK: u64 = 1024;
/// Offsets in the superblock of its state, its UUID and its checksum (fs/ext4/ext4.h).
const STATE: u64 = 0x3a;
const UUID: usize = 0x68;
const CHECKSUM: usize = 0x3fc;
/// Block size in which the template is copied, in bytes: that of the file system.
const BLOCK: usize = 4096;
/// Pause between two looks at whether a check of a disk has ended.
const REPAIR_PAUSE: Duration = Duration::from_millis(10);
/// How much of a disk is copied between two looks at whether to continue, in bytes.
const COPIED_AT_ONCE: u64 = 64 << 20;
/// Number of retries when another process takes the free loop device first.
const LOOP_ATTEMPTS: usize = 64;

/// Path of the file of a disk, below the data directory.
pub(crate) fn path_of(disk: &DiskId) -> String {
    format!("disks/{disk}.img")
}

/// Opens the file of a disk that exists.
pub(crate) fn open(data_dir: BorrowedFd<'_>, disk: &DiskId) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(data_dir, path_of(disk), flags, Mode::empty())?)
}

/// Whether the file system of a disk was unmounted after its last change, and has no errors that the kernel knows of.
/// Without a journal, this is what says that it is consistent: the host may have lost power while it was mounted.
pub(crate) fn is_clean(image: &Path) -> io::Result<bool> {
    const VALID: u16 = 1;
    const ERRORS: u16 = 2;
    let mut state = [0; 2];
    File::open(image)?.read_exact_at(&mut state, SUPERBLOCK + STATE)?;
    let state = u16::from_le_bytes(state);
    Ok(state & VALID != 0 && state & ERRORS == 0)
}

/// Checks and repairs the file system of a disk that nothing has mounted. What was written out before it was cut off is
/// as it was; what was not may be lost, as on any computer.
///
/// # Errors
/// When `e2fsck` (Debian package `e2fsprogs`) is missing, cannot repair it, or is stopped by `is_stopped`.
pub(crate) fn repair(image: &Path, is_stopped: &dyn Fn() -> bool) -> io::Result<()> {
    /// Highest exit code of a file system that is now free of errors.
    const REPAIRED: i32 = 2;
    #[expect(
        clippy::disallowed_methods,
        reason = "only after the host lost power while a disk was in use"
    )]
    let mut check = Command::new("e2fsck")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args(["-f", "-y"])
        .arg(image)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("run e2fsck (package e2fsprogs): {e}")))?;
    let status = loop {
        if let Some(status) = check.try_wait()? {
            break status;
        }
        if is_stopped() {
            check.kill()?;
            check.wait()?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the check of the disk took too long",
            ));
        }
        std::thread::sleep(REPAIR_PAUSE);
    };
    match status.code() {
        Some(code) if code <= REPAIRED => Ok(()),
        _ => Err(io::Error::other(format!("e2fsck could not repair the disk ({status})"))),
    }
}

/// Space that a disk takes on the host, in bytes.
pub(crate) fn held_bytes(image: &Path) -> io::Result<u64> {
    Ok(std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(image)?).saturating_mul(512))
}

/// Has the host allocate all blocks of a disk now.
pub(crate) fn reserve(image: &Path, size: u64) -> io::Result<()> {
    let image = File::options().write(true).open(image)?;
    Ok(rustix::fs::fallocate(&image, FallocateFlags::empty(), 0, size)?)
}

/// Copies a disk that nothing changes meanwhile to a new file, with its holes. `may_continue` is asked again and again.
pub(crate) fn copy<E: From<io::Error>>(
    from: &Path,
    to: &Path,
    may_continue: &mut dyn FnMut() -> Result<(), E>,
) -> Result<(), E> {
    let source = File::open(from)?;
    let target = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    target.set_len(source.metadata()?.len())?;
    let mut at = 0;
    while let Some(start) = seek(&source, SeekFrom::Data(at))? {
        at = seek(&source, SeekFrom::Hole(start))?.unwrap_or(start);
        let mut next = start;
        while next < at {
            may_continue()?;
            next += copy_part(&source, &target, next, (at - next).min(COPIED_AT_ONCE))?;
        }
    }
    Ok(())
}

/// Copies a part of a file to the same place of another one, and returns how much. The host's file system shares blocks if
/// it can.
fn copy_part(from: &File, to: &File, at: u64, length: u64) -> io::Result<u64> {
    let (mut read, mut written) = (at, at);
    let length = usize::try_from(length).map_err(io::Error::other)?;
    match rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut written), length) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(copied) => Ok(copied as u64),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::XDEV) => {
            let mut buffer = vec![0; length.min(1 << 20)];
            from.read_exact_at(&mut buffer, at)?;
            to.write_all_at(&buffer, at)?;
            Ok(buffer.len() as u64)
        }
        Err(error) => Err(error.into()),
    }
}

/// Name of the template for disks of a size, below the data directory. The name changes with the layout.
fn template_path(disk_mb: u32) -> String {
    format!("disks/template-{disk_mb}-2")
}

/// Creates the template for disks of `disk_mb` MiB, unless it exists.
///
/// # Errors
/// When `mkfs.ext4` (Debian package `e2fsprogs`) is missing or fails, with what it printed.
pub(crate) fn make_template(data_dir: &Path, disk_mb: u32) -> io::Result<()> {
    let path = data_dir.join(template_path(disk_mb));
    if path.exists() {
        return Ok(());
    }
    // Of an earlier version.
    let _ = std::fs::remove_file(data_dir.join(format!("disks/template-{disk_mb}")));
    let unfinished = path.with_extension("new");
    let content = data_dir.join("disks/content");
    for upper in UPPERS {
        let dirs = DIRECTORIES.map(|dir| (dir, DIRECTORY_MODE)).into_iter();
        for (dir, mode) in dirs.chain([(INDEX, INDEX_MODE)]) {
            let dir = content.join(upper).join(dir);
            std::fs::create_dir_all(&dir)?;
            std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode))?;
        }
    }
    let file = File::create(&unfinished)?;
    file.set_len(u64::from(disk_mb) << 20)?;
    // One inode per 16 KiB, as mkfs itself chooses, and no space held back for root, which has no meaning here. No
    // journal: a disk outlives the processes of its sandbox only if it was unmounted and written out in full, and one
    // that the host lost power over while it was started again is repaired before it is used. Flexible groups of one: before its
    // first allocation, ext4 sets up the block bitmaps of eight of them, which took 1.1 ms with groups of 64, and takes
    // 0.3 ms.
    #[expect(
        clippy::disallowed_methods,
        reason = "once for each size of disk, and not on the create path"
    )]
    let output = Command::new("mkfs.ext4")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args([
            "-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-i", "16384", "-G", "1",
        ])
        .args([
            "-O",
            "^has_journal,^resize_inode,^orphan_file,metadata_csum,metadata_csum_seed,extent,64bit",
        ])
        .args(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d"])
        .arg(&content)
        .arg(&unfinished)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| io::Error::new(e.kind(), format!("run mkfs.ext4 (package e2fsprogs): {e}")))?;
    if !output.status.success() {
        return Err(io::Error::other(format!(
            "mkfs.ext4 failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    std::fs::rename(&unfinished, &path)?;
    std::fs::remove_dir_all(&content)
}

/// Creates the directories of an upper on a new disk, unless they are in its template. The disk's ids are not mapped
/// yet.
pub(crate) fn make_upper(disk: BorrowedFd<'_>, upper: &str) -> io::Result<()> {
    if UPPERS.contains(&upper) {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(DIRECTORY_MODE);
    let dirs = DIRECTORIES.map(|dir| format!("{upper}/{dir}"));
    for dir in std::iter::once(upper).chain(dirs.iter().map(String::as_str)) {
        rustix::fs::mkdirat(disk, dir, mode)?;
        // Independent of the umask of this process.
        rustix::fs::chmodat(disk, dir, mode, AtFlags::empty())?;
    }
    Ok(())
}

/// The non-empty blocks of a template, in memory.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) disk_mb: u32,
    extents: Vec<(u64, Vec<u8>)>,
}

impl Template {
    pub(crate) fn load(data_dir: BorrowedFd<'_>, disk_mb: u32) -> io::Result<Self> {
        let file: File = rustix::fs::openat(
            data_dir,
            template_path(disk_mb),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?
        .into();
        let mut extents: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut at = 0;
        while let Some(start) = seek(&file, SeekFrom::Data(at))? {
            at = seek(&file, SeekFrom::Hole(start))?.unwrap_or(start);
            let mut data = vec![0; usize::try_from(at - start).map_err(|_| io::ErrorKind::InvalidData)?];
            file.read_exact_at(&mut data, start)?;
            split_at_zeroes(start, &data, &mut extents);
        }
        match extents.first() {
            Some((0, block)) if block.len() >= BLOCK => Ok(Self { disk_mb, extents }),
            _ => Err(io::Error::other("disk template without a superblock")),
        }
    }

    /// Writes a new disk with a random UUID; an existing one is never overwritten. With `reserve`, the host allocates
    /// all of its blocks now, so that no write in the sandbox can ever fail because the host's disk is full.
    pub(crate) fn instantiate(&self, data_dir: BorrowedFd<'_>, disk: &DiskId, reserve: bool) -> io::Result<OwnedFd> {
        self.write(data_dir, &path_of(disk), reserve)
    }

    fn write(&self, data_dir: BorrowedFd<'_>, path: &str, reserve: bool) -> io::Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let image: File = rustix::fs::openat(data_dir, path, flags, Mode::from_raw_mode(0o600))?.into();
        let size = u64::from(self.disk_mb) << 20;
        image.set_len(size)?;
        if reserve {
            rustix::fs::fallocate(&image, FallocateFlags::empty(), 0, size)?;
        }
        for (offset, data) in &self.extents {
            image.write_all_at(data, *offset)?;
        }
        let (_, first) = &self.extents[0];
        let start = usize::try_from(SUPERBLOCK).unwrap_or_default();
        let mut superblock = first[start..start + 1024].to_vec();
        let mut uuid = [0; 16];
        rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty())?;
        superblock[UUID..UUID + 16].copy_from_slice(&uuid);
        let checksum = crc32c(&superblock[..CHECKSUM]);
        superblock[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        image.write_all_at(&superblock, SUPERBLOCK)?;
        Ok(image.into())
    }
}

/// A disk that was created before a sandbox needed it. Its file is removed if none does.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) disk_mb: u32,
    mount: OwnedFd,
    data_dir: OwnedFd,
    name: String,
    used: bool,
}

/// Beginning of the names of disks that belong to no sandbox yet.
const SPARE: &str = "spare-";

/// Whether a file among the disks is one that belongs to no sandbox: of a launcher that was killed, or of one that
/// runs, which then creates another.
pub(crate) fn is_spare(file_name: &std::ffi::OsStr) -> bool {
    file_name.as_encoded_bytes().starts_with(SPARE.as_bytes())
}

impl Spare {
    /// Creates and mounts a disk.
    pub(crate) fn make(data_dir: BorrowedFd<'_>, template: &Template, loops: &Loops) -> io::Result<Self> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!("disks/{SPARE}{:016x}", u64::from_ne_bytes(random));
        let image = template.write(data_dir, &name, false)?;
        let mount = loops.mount(image.as_fd(), true);
        if mount.is_err() {
            let _ = rustix::fs::unlinkat(data_dir, &name, AtFlags::empty());
        }
        Ok(Self {
            disk_mb: template.disk_mb,
            mount: mount?,
            data_dir: data_dir.try_clone_to_owned()?,
            name,
            used: false,
        })
    }

    /// Gives the disk to a sandbox. An existing disk is never overwritten.
    pub(crate) fn into_disk(mut self, disk: &DiskId) -> io::Result<OwnedFd> {
        let mount = self.mount.try_clone()?;
        let (dir, flags) = (&self.data_dir, RenameFlags::NOREPLACE);
        rustix::fs::renameat_with(dir, &self.name, dir, path_of(disk), flags)?;
        self.used = true;
        Ok(mount)
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if !self.used {
            let _ = rustix::fs::unlinkat(&self.data_dir, &self.name, AtFlags::empty());
        }
    }
}

pub(crate) fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(offset) => Ok(Some(offset)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Adds the non-zero blocks of `data`, merging adjacent ones.
fn split_at_zeroes(start: u64, data: &[u8], extents: &mut Vec<(u64, Vec<u8>)>) {
    let mut offset = start;
    let mut joins = false;
    for block in data.chunks(BLOCK) {
        if block.iter().any(|byte| *byte != 0) {
            match extents.last_mut() {
                Some((_, extent)) if joins => extent.extend_from_slice(block),
                _ => extents.push((offset, block.to_vec())),
            }
            joins = true;
        } else {
            joins = false;
        }
        offset += block.len() as u64;
    }
}

/// CRC-32C as ext4 uses it: seeded with ones, not inverted at the end.
fn crc32c(data: &[u8]) -> u32 {
    data.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1))
        })
    })
}

/// The host's loop devices.
#[derive(Debug)]
pub(crate) struct Loops {
    control: OwnedFd,
    /// Path of the host's /dev.
    dev: PathBuf,
}

impl Loops {
    pub(crate) fn open(dev: &Path) -> io::Result<Self> {
        let control = rustix::fs::open(dev.join("loop-control"), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self {
            control,
            dev: dev.to_owned(),
        })
    }

    /// Attaches a disk. The device is released once the descriptor and all mounts of it are gone. A device that is
    /// opened for reading, or a file that is, makes it read-only.
    fn attach(&self, image: BorrowedFd<'_>, access: OFlags) -> io::Result<(OwnedFd, PathBuf)> {
        let mut last = io::Error::from(io::ErrorKind::ResourceBusy);
        for _ in 0..LOOP_ATTEMPTS {
            let path = self
                .dev
                .join(format!("loop{}", sys::loop_get_free(self.control.as_fd())?));
            let device = rustix::fs::open(&path, access | OFlags::CLOEXEC, Mode::empty())?;
            match sys::loop_configure(device.as_fd(), image) {
                Ok(()) => return Ok((device, path)),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    /// Mounts a disk without attaching it to a mount tree. With `give_back`, freed blocks are returned to the host's
    /// file system; a fully allocated disk keeps its blocks.
    pub(crate) fn mount(&self, image: BorrowedFd<'_>, give_back: bool) -> io::Result<OwnedFd> {
        // Inode tables need no zeroing because the disk reads as zeros, and reading all block bitmaps ahead would cost
        // each sandbox time and memory for blocks it never uses.
        let flags = ["noinit_itable", "no_prefetch_block_bitmaps"];
        let flags = flags.into_iter().chain(give_back.then_some("discard"));
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOATIME;
        self.mount_with(image, OFlags::RDWR, flags, attributes)
    }

    /// Mounts a disk that no sandbox has any more, to read it, without attaching it to a mount tree.
    pub(crate) fn mount_to_read(&self, image: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let attributes = [
            MountAttrFlags::MOUNT_ATTR_RDONLY,
            MountAttrFlags::MOUNT_ATTR_NODEV,
            MountAttrFlags::MOUNT_ATTR_NOSUID,
            MountAttrFlags::MOUNT_ATTR_NOEXEC,
            MountAttrFlags::MOUNT_ATTR_NOATIME,
        ];
        let flags = ["ro", "no_prefetch_block_bitmaps"].into_iter();
        self.mount_with(image, OFlags::RDONLY, flags, attributes.into_iter().collect())
    }

    fn mount_with(
        &self,
        image: BorrowedFd<'_>,
        access: OFlags,
        flags: impl Iterator<Item = &'static str>,
        attributes: MountAttrFlags,
    ) -> io::Result<OwnedFd> {
        let (_device, path) = self.attach(image, access)?;
        let fs = rustix::mount::fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(&fs, "source", path.as_path())?;
        for flag in flags {
            rustix::mount::fsconfig_set_flag(&fs, flag)?;
        }
        rustix::mount::fsconfig_create(&fs)?;
        Ok(rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_ext4() {
        // The check value of CRC-32C is e3069283; ext4 leaves out the final inversion.
        assert_eq!(crc32c(b"123456789"), !0xe306_9283);
    }

    #[test]
    fn images_are_small_and_pass_the_file_system_check() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("disks")).unwrap();
        make_template(dir.path(), 1024).unwrap();
        make_template(dir.path(), 1024).unwrap();
        let held = crate::files::open_dir(dir.path()).unwrap();
        let template = Template::load(held.as_fd(), 1024).unwrap();
        let uuid = |disk: &str| {
            let disk = disk.parse().unwrap();
            template.instantiate(held.as_fd(), &disk, false).unwrap();
            let again = template.instantiate(held.as_fd(), &disk, false).unwrap_err();
            assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
            let path = dir.path().join(path_of(&disk));
            let check = Command::new("/sbin/e2fsck")
                .args(["-f", "-n"])
                .arg(&path)
                .output()
                .unwrap();
            assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
            let mut uuid = [0; 16];
            let file = File::open(&path).unwrap();
            file.read_exact_at(&mut uuid, SUPERBLOCK + UUID as u64).unwrap();
            use std::os::unix::fs::MetadataExt;
            let metadata = file.metadata().unwrap();
            assert_eq!(metadata.len(), 1 << 30);
            assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
            uuid
        };
        assert_ne!(uuid("d0123456789abcdefghij"), uuid("1"));
    }

    #[test]
    fn an_image_that_was_cut_off_is_noticed_and_repaired() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("disks")).unwrap();
        make_template(dir.path(), 64).unwrap();
        let held = crate::files::open_dir(dir.path()).unwrap();
        let template = Template::load(held.as_fd(), 64).unwrap();
        let disk: DiskId = "0".parse().unwrap();
        let image: File = template.instantiate(held.as_fd(), &disk, false).unwrap().into();
        let path = dir.path().join(path_of(&disk));
        assert!(is_clean(&path).unwrap());
        // As the kernel leaves it while it is mounted, with a directory that was not written.
        for change in ["ssv state 0", "clri root/work"] {
            let mut debugfs = Command::new("/sbin/debugfs");
            assert!(
                debugfs
                    .args(["-w", "-R", change])
                    .arg(&path)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        assert!(!is_clean(&path).unwrap());
        let check = |flag: &str| {
            Command::new("/sbin/e2fsck")
                .args(["-f", flag])
                .arg(&path)
                .output()
                .unwrap()
        };
        assert!(!check("-n").status.success());
        repair(&path, &|| false).unwrap();
        assert!(is_clean(&path).unwrap());
        assert!(check("-n").status.success());
        // What is no file system at all is refused.
        image.write_all_at(&vec![0; 64 << 20], 0).unwrap();
        assert!(repair(&path, &|| false).is_err());
    }

    #[test]
    fn a_copy_has_the_same_content_and_the_same_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let source = File::create(&from).unwrap();
        source.set_len(1 << 30).unwrap();
        for at in [0, 5 << 20, (900 << 20) + 17] {
            source.write_all_at(&[7; 12_345], at).unwrap();
        }
        let mut asked = 0;
        copy(&from, &to, &mut || {
            asked += 1;
            io::Result::Ok(())
        })
        .unwrap();
        assert!(asked >= 3);
        let target = File::open(&to).unwrap();
        let mut end = vec![1; 20_000];
        for at in [0, 5 << 20, (900 << 20) + 17] {
            target.read_exact_at(&mut end, at).unwrap();
            assert!(end[..12_345].iter().all(|byte| *byte == 7) && end[12_345..].iter().all(|byte| *byte == 0));
        }
        assert_eq!(target.metadata().unwrap().len(), 1 << 30);
        assert!(held_bytes(&to).unwrap() < 1 << 20);
        // An existing one is never overwritten, and a refusal ends the copy.
        assert!(copy(&from, &to, &mut || io::Result::Ok(())).is_err());
        let refused = copy(&from, &dir.path().join("other"), &mut || {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn a_reserved_image_has_all_of_its_blocks() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("disks")).unwrap();
        make_template(dir.path(), 64).unwrap();
        let held = crate::files::open_dir(dir.path()).unwrap();
        let template = Template::load(held.as_fd(), 64).unwrap();
        let image: File = template
            .instantiate(held.as_fd(), &"0".parse().unwrap(), true)
            .unwrap()
            .into();
        assert!(image.metadata().unwrap().blocks() * 512 >= 64 << 20);
    }
}
