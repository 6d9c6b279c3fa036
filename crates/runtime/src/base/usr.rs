//! The layer between the host's `/usr` and a sandbox's: it hides what is specific to the host and adds what sandboxes
//! need.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, XattrFlags};

use super::copy::{create_dir, put, put_link};
use super::packages;

/// Directories for the host's administrator, hidden in sandboxes.
pub(super) const HIDDEN: [&str; 2] = ["local", "src"];
/// The marker file with which a distribution stops `pip` from changing its Python (PEP 668).
const MARK: &str = "EXTERNALLY-MANAGED";
/// An ordinary user could not write next to the host's programs with `npm install -g`. Hides the host's own settings,
/// which may contain keys.
const NPM: &str = "prefix=/usr/local\n";
/// A file that keeps a directory of packages: `pip` removes one that it has emptied.
pub(super) const PLACEHOLDER: &str = "README.txt";
pub(super) const PLACEHOLDER_TEXT: &str = "Packages that pip installs are put here.\n";
/// Script that Debian runs before it starts the services of a newly installed package: in a sandbox nothing supervises
/// them.
const NO_SERVICES: &str = "#!/bin/sh\nexit 101\n";

/// Why this host's `/usr` cannot be used for `base`; `None` if it can.
pub(crate) fn unsupported_reason(host: &Path) -> Option<String> {
    for name in ["bin", "sbin", "lib"] {
        let target = fs::read_link(host.join(name)).unwrap_or_default();
        if target != Path::new("usr").join(name) && target != Path::new("/usr").join(name) {
            return Some(format!(
                "/{name} is not a link to usr/{name}; the base template needs a merged /usr"
            ));
        }
    }
    (!host.join("usr/bin/bash").exists()).then(|| "/usr/bin/bash is missing".to_owned())
}

/// Creates the layer.
pub(super) fn create(host: &Path, usr: &Path) -> io::Result<()> {
    create_dir(usr, 0o755)?;
    for hidden in HIDDEN {
        let dir = usr.join(hidden);
        create_dir(&dir, 0o755)?;
        rustix::fs::setxattr(&dir, "trusted.overlay.opaque", b"y", XattrFlags::empty())?;
    }
    // Writable for everyone, so that `user` can install programs where every PATH finds them.
    for dir in ["", "bin", "etc", "games", "include", "lib", "sbin", "share", "src"] {
        create_dir(&usr.join("local").join(dir), 0o777)?;
    }
    put_link("share/man", &usr.join("local/man"))?;
    // Not writable for everyone: `pip` of a user would install there, and then could not replace what root has installed
    // beside it. There from the start, because an interpreter looks there only if it exists when it starts.
    for version in pythons(host)? {
        for packages in package_directories(host, &version) {
            let packages = usr.join("local").join(packages);
            for directory in [packages.parent().unwrap_or(&packages), &packages] {
                create_dir(directory, 0o755)?;
            }
            put(&packages.join(PLACEHOLDER), 0o644, PLACEHOLDER_TEXT)?;
        }
    }
    for mark in marks(host) {
        hide(host, usr, &mark)?;
    }
    if host.join("usr/bin/python3").exists() && host.join("usr/bin/python").symlink_metadata().is_err() {
        like_host(host, usr, Path::new("bin"))?;
        put_link("python3", &usr.join("bin/python"))?;
    }
    if ["usr/bin/npm", "usr/etc/npmrc"]
        .iter()
        .any(|file| host.join(file).exists())
    {
        like_host(host, usr, Path::new("etc"))?;
        put(&usr.join("etc/npmrc"), 0o644, NPM)?;
    }
    if packages::is_debian(host) {
        like_host(host, usr, Path::new("sbin"))?;
        put(&usr.join("sbin/policy-rc.d"), 0o755, NO_SERVICES)?;
    }
    Ok(())
}

/// `python3.N` of every interpreter of the host.
pub(super) fn pythons(host: &Path) -> io::Result<Vec<String>> {
    let programs = match fs::read_dir(host.join("usr/bin")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        programs => programs?,
    };
    let names = programs
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let is_version = |name: &String| {
        let minor = name.strip_prefix("python3.").unwrap_or_default();
        !minor.is_empty() && minor.bytes().all(|byte| byte.is_ascii_digit())
    };
    let mut found: Vec<String> = names.filter(is_version).collect();
    found.sort();
    Ok(found)
}

/// Directories of packages that an administrator installs for an interpreter, relative to `/usr/local`.
fn package_directories(host: &Path, version: &str) -> Vec<PathBuf> {
    let (libs, name): (&[&str], _) = if packages::is_debian(host) {
        (&["lib"], "dist-packages")
    } else {
        (&["lib", "lib64"], "site-packages")
    };
    let exists = |lib: &&&str| **lib == "lib" || host.join("usr").join(lib).join(version).is_dir();
    let libs = libs.iter().filter(exists);
    libs.map(|lib| Path::new(lib).join(version).join(name)).collect()
}

/// The marker files of every Python on the host, relative to `/usr`.
pub(super) fn marks(host: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        let Ok(entries) = fs::read_dir(host.join("usr").join(lib)) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let mark = Path::new(lib).join(&name).join(MARK);
            if name.as_encoded_bytes().starts_with(b"python3.") && host.join("usr").join(&mark).is_file() {
                found.push(mark);
            }
        }
    }
    found.sort();
    found
}

/// Hides a file of the host's `/usr`: a device 0:0 is a whiteout for overlayfs.
fn hide(host: &Path, usr: &Path, file: &Path) -> io::Result<()> {
    if let Some(parent) = file.parent() {
        like_host(host, usr, parent)?;
    }
    let nothing = rustix::fs::makedev(0, 0);
    Ok(rustix::fs::mknodat(
        CWD,
        usr.join(file),
        FileType::CharacterDevice,
        Mode::empty(),
        nothing,
    )?)
}

/// Creates a directory of the layer, and its parents, with the modes of the host's: overlayfs shows those of the upper
/// one.
fn like_host(host: &Path, usr: &Path, dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let mut path = PathBuf::new();
    for part in dir.components() {
        path.push(part);
        let mode = fs::metadata(host.join("usr").join(&path)).map_or(0o755, |metadata| metadata.mode() & 0o7777);
        create_dir(&usr.join(&path), mode)?;
    }
    Ok(())
}
