//! Certificates that are where the image's own tool collects local ones, whether it has done so or not.
//!
//! An image belongs to its users, so what is read is bounded in depth, number and length, and only certificates of it are used.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags};

use super::files;
use super::pem::Bundle;

/// Where tools of distributions look for local certificates when they make a bundle: Debian and Alpine, Fedora, SUSE, Arch.
pub(super) const ANCHORS: [&str; 4] = [
    "usr/local/share/ca-certificates",
    "etc/pki/ca-trust/source/anchors",
    "etc/pki/trust/anchors",
    "etc/ca-certificates/trust-source/anchors",
];
/// How the names of our files there begin.
pub(super) const ANCHOR: &str = "ringfence-ca";
/// Subdirectories of subdirectories that are looked into.
const DEPTH: usize = 3;
/// How many names are looked at, and how many certificates are taken.
const NAMES_MAX: usize = 1024;
const CERTIFICATES_MAX: usize = 256;

/// The certificates, each as PEM text of one form, without repetition.
pub(super) fn find(root: &OwnedFd) -> Vec<String> {
    let mut found = Found::default();
    for (index, directory) in ANCHORS.into_iter().enumerate() {
        // Debian's tool, and Alpine's, take names with this end alone; the others take all.
        let end = if index == 0 { ".crt" } else { "" };
        found.search(root, Path::new(directory), end, DEPTH);
    }
    found.certificates
}

#[derive(Default)]
struct Found {
    certificates: Vec<String>,
    names: usize,
}

impl Found {
    fn search(&mut self, root: &OwnedFd, directory: &Path, end: &str, depth: usize) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let Ok(opened) = rustix::fs::openat2(root, directory, flags, Mode::empty(), resolve) else {
            return;
        };
        let Ok(entries) = Dir::read_from(&opened) else { return };
        let mut names: Vec<_> = entries
            .flatten()
            .take(NAMES_MAX.saturating_sub(self.names))
            .map(|entry| (entry.file_name().to_owned(), entry.file_type()))
            .collect();
        self.names += names.len();
        // In an order that does not depend on the file system, so that the same files make the same bundle.
        names.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, kind) in names {
            let name = name.to_bytes();
            if name == b"." || name == b".." || name.starts_with(ANCHOR.as_bytes()) {
                continue;
            }
            let path = directory.join(std::ffi::OsStr::from_bytes(name));
            match kind {
                FileType::Directory if depth > 0 => self.search(root, &path, end, depth - 1),
                FileType::RegularFile | FileType::Symlink if name.ends_with(end.as_bytes()) => self.read(root, &path),
                _ => {}
            }
        }
    }

    fn read(&mut self, root: &OwnedFd, path: &Path) {
        let Some(path) = path.to_str() else { return };
        // A link may lead to where a program keeps its certificate.
        let Ok(content) = files::read_through(root, path) else {
            return;
        };
        for certificate in Bundle::find(&content).iter().flat_map(Bundle::certificates) {
            let is_new = self.certificates.iter().all(|known| known != certificate);
            if is_new && self.certificates.len() < CERTIFICATES_MAX {
                self.certificates.push(certificate.to_owned());
            }
        }
    }
}
