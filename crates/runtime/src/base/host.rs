//! The copy of the host's `/usr`, for hosts on which its file system cannot be mounted with the ids of a sandbox (see
//! [`crate::mapped`]): the root of a container is an overlay under Docker and podman. Sandboxes see the copy there.
//!
//! It is what the mount of `/usr` has, and nothing that is mounted below: sandboxes do not see that on other hosts either. Modes with
//! set-user-id, owners, times, hard links, and the attributes that layers keep are as in the original. Devices, sockets and
//! pipes are left out, and the contents of the directories that [`super::usr`] hides.
//!
//! The directory above it must be root's alone, because the copy has setuid programs that the host may have replaced since.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

use super::usr::HIDDEN;
use crate::commit::tree::is_kept;
use crate::files::{if_there, open_dir};
use crate::mounting;

/// Name of the copy in the directory of a version.
pub(crate) const HOST: &str = "host";
/// Size of the blocks of files, in bytes.
const BLOCK: u64 = 4096;
/// Maximum size of an extended attribute, and of the names of all of a file, in bytes.
const ATTRIBUTES_MAX: usize = 64 << 10;

/// Sums up what a copy takes, in bytes. Reads no file.
///
/// # Errors
/// When a directory cannot be read.
pub(super) fn size_of(usr: &Path) -> io::Result<u64> {
    let original = Original::open(usr)?;
    original.size_of(Path::new(""), &mut HashSet::new())
}

/// Copies `usr` to `to`, which does not exist, and writes it out. A failure leaves what was copied so far.
///
/// # Errors
/// When a file cannot be read, written, or be given what the original has.
pub(super) fn copy(usr: &Path, to: &Path) -> io::Result<()> {
    let mut copy = Copy {
        original: Original::open(usr)?,
        to: to.to_owned(),
        links: HashMap::new(),
        buffer: vec![0; ATTRIBUTES_MAX],
    };
    let found = fs::metadata(copy.original.at(Path::new("")))?;
    copy.directory(Path::new(""), &found)?;
    // Blocks that the disk did not take become known here, and not as programs of zeros in sandboxes.
    Ok(rustix::fs::syncfs(open_dir(to)?)?)
}

/// A clone of the mount of `/usr`, so that nothing that is mounted below is there.
#[derive(Debug)]
struct Original {
    mount: OwnedFd,
    name: PathBuf,
}

impl Original {
    fn open(usr: &Path) -> io::Result<Self> {
        Ok(Self {
            mount: mounting::clone(open_dir(usr)?.as_fd(), "")?,
            name: usr.to_owned(),
        })
    }

    /// Path by which this process reaches a file of the clone, which is attached nowhere.
    fn at(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.mount.as_raw_fd())).join(path)
    }

    /// The entries of a directory, with what they are. What is removed meanwhile is left out.
    fn entries(&self, path: &Path) -> io::Result<Vec<(PathBuf, Metadata)>> {
        let mut entries = Vec::new();
        if HIDDEN.iter().any(|hidden| path == Path::new(hidden)) {
            return Ok(entries);
        }
        let Some(names) = if_there(fs::read_dir(self.at(path)))? else {
            return Ok(entries);
        };
        for name in names {
            let path = path.join(name?.file_name());
            if let Some(found) = if_there(self.at(&path).symlink_metadata())? {
                entries.push((path, found));
            }
        }
        Ok(entries)
    }

    fn size_of(&self, path: &Path, links: &mut HashSet<(u64, u64)>) -> io::Result<u64> {
        let mut size = BLOCK;
        for (path, found) in self.entries(path).map_err(self.during("read", path))? {
            if found.is_dir() {
                size += self.size_of(&path, links)?;
            } else if found.is_file() && (found.nlink() == 1 || links.insert((found.dev(), found.ino()))) {
                size += found.size().next_multiple_of(BLOCK);
            }
        }
        Ok(size)
    }

    /// Adds to an error what was done with which file of the original.
    fn during<'a>(&'a self, what: &'a str, path: &'a Path) -> impl Fn(io::Error) -> io::Error + use<'a> {
        move |error| {
            io::Error::new(
                error.kind(),
                format!("{what} {}: {error}", self.name.join(path).display()),
            )
        }
    }
}

/// A copy that is being made.
#[derive(Debug)]
struct Copy {
    original: Original,
    to: PathBuf,
    /// The first name of each file with several, by device and inode.
    links: HashMap<(u64, u64), PathBuf>,
    /// For extended attributes.
    buffer: Vec<u8>,
}

impl Copy {
    fn directory(&mut self, path: &Path, found: &Metadata) -> io::Result<()> {
        // Open for nobody else before it is complete, and its time is that of the original after that.
        let made = DirBuilder::new().mode(0o700).create(self.to.join(path));
        made.map_err(self.original.during("copy", path))?;
        let entries = self.original.entries(path);
        for (path, found) in entries.map_err(self.original.during("read", path))? {
            if found.is_dir() {
                self.directory(&path, &found)?;
            } else {
                let copied = self.file(&path, &found);
                copied.map_err(self.original.during("copy", &path))?;
            }
        }
        let complete = self.complete(path, found);
        complete.map_err(self.original.during("copy", path))
    }

    fn file(&mut self, path: &Path, found: &Metadata) -> io::Result<()> {
        let (from, to) = (self.original.at(path), self.to.join(path));
        let inode = (found.dev(), found.ino());
        if let Some(first) = self.links.get(&inode) {
            return fs::hard_link(self.to.join(first), to);
        }
        if found.is_symlink() {
            symlink(fs::read_link(&from)?, &to)?;
        } else if found.is_file() {
            let Some(mut original) = if_there(File::open(&from))? else {
                return Ok(());
            };
            let mut copy = File::options().write(true).create_new(true).mode(0o600).open(&to)?;
            io::copy(&mut original, &mut copy)?;
        } else {
            return Ok(());
        }
        self.complete(path, found)?;
        if found.nlink() > 1 {
            self.links.insert(inode, path.to_owned());
        }
        Ok(())
    }

    /// Gives a file what the original has besides its content. The order matters: a change of the owner takes bits of the mode and
    /// capabilities away.
    fn complete(&mut self, path: &Path, found: &Metadata) -> io::Result<()> {
        let to = self.to.join(path);
        lchown(&to, Some(found.uid()), Some(found.gid()))?;
        if !found.is_symlink() {
            fs::set_permissions(&to, Permissions::from_mode(found.mode() & 0o7777))?;
        }
        self.attributes(path, &to)?;
        let modified = Timespec {
            tv_sec: found.mtime(),
            tv_nsec: found.mtime_nsec(),
        };
        let times = Timestamps {
            last_access: modified,
            last_modification: modified,
        };
        Ok(rustix::fs::utimensat(CWD, &to, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn attributes(&mut self, path: &Path, to: &Path) -> io::Result<()> {
        let from = self.original.at(path);
        let length = match rustix::fs::llistxattr(&from, &mut self.buffer) {
            Err(Errno::OPNOTSUPP) => 0,
            length => length?,
        };
        let names = self.buffer[..length].to_vec();
        for name in names.split_inclusive(|byte| *byte == 0) {
            let Ok(name) = CStr::from_bytes_with_nul(name) else {
                continue;
            };
            if !is_kept(name.to_bytes()) {
                continue;
            }
            let length = rustix::fs::lgetxattr(&from, name, &mut self.buffer)?;
            match rustix::fs::lsetxattr(to, name, &self.buffer[..length], XattrFlags::empty()) {
                // A program works without, as one of a system that was installed there would.
                Ok(()) | Err(Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    use std::os::unix::net::UnixListener;

    use rustix::fs::{FileType, Mode};

    use super::*;

    const PAST: i64 = 1_000_000_000;

    fn set_time(path: &Path) {
        let at = Timespec {
            tv_sec: PAST,
            tv_nsec: 5,
        };
        let times = Timestamps {
            last_access: at,
            last_modification: at,
        };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }

    fn attribute(path: &Path, name: &str) -> Vec<u8> {
        let mut value = vec![0; 64];
        let length = rustix::fs::lgetxattr(path, name, &mut value).unwrap();
        value.truncate(length);
        value
    }

    /// A capability to bind low ports, as the kernel stores it (version 2, effective).
    fn capability() -> Vec<u8> {
        let words: [u32; 5] = [0x0200_0001, 1 << 10, 0, 0, 0];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Checks that a copy has what the original has.
    fn assert_same(usr: &Path, copy: &Path, path: &str) {
        let look = |root: &Path| {
            let found = root.join(path).symlink_metadata().unwrap();
            (
                found.mode(),
                found.uid(),
                found.gid(),
                found.mtime(),
                found.mtime_nsec(),
                found.is_file().then(|| fs::read(root.join(path)).unwrap()),
            )
        };
        assert_eq!(look(usr), look(copy), "{path}");
    }

    /// Checks the copy of a tree with one of each kind.
    fn check(usr: &Path, beside: &Path) {
        let copied = beside.join("copy");
        let size = size_of(usr).unwrap();
        copy(usr, &copied).unwrap();
        let of_copy = |path: &str| copied.join(path).symlink_metadata().unwrap();
        for path in [
            "",
            "bin",
            "bin/su",
            "bin/tool",
            "bin/link",
            "lib/empty",
            "share",
            "lib/large",
        ] {
            assert_same(usr, &copied, path);
        }
        assert_eq!(of_copy("bin/su").mode() & 0o7777, 0o4755);
        assert_eq!((of_copy("share").uid(), of_copy("share").gid()), (7, 8));
        assert_eq!(of_copy("bin").mtime(), PAST);
        assert_eq!(fs::read_link(copied.join("bin/link")).unwrap(), Path::new("../nowhere"));
        assert_eq!((of_copy("bin/link").uid(), of_copy("bin/link").mtime()), (9, PAST));
        let names = ["bin/tool", "bin/tool2", "share/tool3"].map(|path| (of_copy(path).ino(), of_copy(path).nlink()));
        assert_eq!(names, [(names[0].0, 3); 3]);
        assert_eq!(attribute(&copied.join("bin/tool"), "security.capability"), capability());
        assert_eq!(attribute(&copied.join("share"), "user.note"), b"kept");
        for absent in [
            "local/secret",
            "src/secret",
            "share/socket",
            "share/device",
            "share/pipe",
        ] {
            assert!(copied.join(absent).symlink_metadata().is_err(), "{absent}");
        }
        assert!(of_copy("local").is_dir() && of_copy("src").is_dir());
        // Eight directories, a large file and two small ones.
        assert_eq!(size, 8 * BLOCK + (3 << 20) + 2 * BLOCK);
        assert!(
            usr.join("share/socket")
                .symlink_metadata()
                .unwrap()
                .file_type()
                .is_socket()
        );
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let usr = dir.path().join("usr");
        for name in ["bin", "lib/empty", "lib/mounted", "local/bin", "share", "src"] {
            fs::create_dir_all(usr.join(name)).unwrap();
        }
        fs::write(usr.join("bin/su"), "su").unwrap();
        fs::write(usr.join("bin/tool"), "tool").unwrap();
        let large: Vec<u8> = (0..3_u32 << 18).flat_map(u32::to_le_bytes).collect();
        fs::write(usr.join("lib/large"), large).unwrap();
        for name in ["local", "src"] {
            fs::write(usr.join(name).join("secret"), "secret").unwrap();
        }
        lchown(usr.join("share"), Some(7), Some(8)).unwrap();
        lchown(usr.join("bin/tool"), Some(3), Some(4)).unwrap();
        fs::hard_link(usr.join("bin/tool"), usr.join("bin/tool2")).unwrap();
        fs::hard_link(usr.join("bin/tool"), usr.join("share/tool3")).unwrap();
        symlink("../nowhere", usr.join("bin/link")).unwrap();
        lchown(usr.join("bin/link"), Some(9), Some(9)).unwrap();
        drop(UnixListener::bind(usr.join("share/socket")).unwrap());
        let (mode, device) = (Mode::from_raw_mode(0o600), rustix::fs::makedev(1, 3));
        rustix::fs::mknodat(CWD, usr.join("share/device"), FileType::CharacterDevice, mode, device).unwrap();
        rustix::fs::mknodat(CWD, usr.join("share/pipe"), FileType::Fifo, mode, 0).unwrap();
        fs::set_permissions(usr.join("bin/su"), Permissions::from_mode(0o4755)).unwrap();
        fs::set_permissions(usr.join("lib/empty"), Permissions::from_mode(0o1770)).unwrap();
        let set = |path: &str, name: &str, value: &[u8]| {
            rustix::fs::lsetxattr(usr.join(path), name, value, XattrFlags::empty()).unwrap();
        };
        set("bin/tool", "security.capability", &capability());
        set("share", "user.note", b"kept");
        for path in [
            "bin/su",
            "bin/tool",
            "bin/link",
            "bin",
            "lib/empty",
            "share",
            "lib/large",
        ] {
            set_time(&usr.join(path));
        }
        dir
    }

    #[test]
    fn a_copy_has_what_the_original_has() {
        let dir = tree();
        check(&dir.path().join("usr"), dir.path());
    }

    #[test]
    fn a_copy_of_an_overlay_has_what_the_overlay_has() {
        let (dir, beside) = (tree(), tempfile::tempdir().unwrap());
        let usr = dir.path().join("usr");
        crate::mapped::tests::with_overlay(&usr, beside.path(), || check(&usr, dir.path()));
    }

    #[test]
    fn what_is_mounted_below_is_not_copied() {
        let (dir, beside) = (tree(), tempfile::tempdir().unwrap());
        let (usr, mounted) = (dir.path().join("usr"), dir.path().join("usr/lib/mounted"));
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("other"), "").unwrap();
        crate::mapped::tests::with_overlay(other.path(), beside.path(), || {
            mounting::bind(other.path().to_str().unwrap(), mounted.to_str().unwrap()).unwrap();
            assert!(mounted.join("other").exists());
            check(&usr, dir.path());
            assert_eq!(fs::read_dir(dir.path().join("copy/lib/mounted")).unwrap().count(), 0);
        });
    }

    #[test]
    fn an_error_names_the_file() {
        let dir = tree();
        let usr = dir.path().join("usr");
        fs::create_dir_all(dir.path().join("copy")).unwrap();
        let error = copy(&usr, &dir.path().join("copy")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("copy {}", usr.display())), "{error}");
    }
}
