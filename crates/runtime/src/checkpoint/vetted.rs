//! Whether a program of the host may be run as root: only root can have chosen what runs.
//!
//! CRIU is found on the host and runs with root's rights before it gives them up, so whoever can replace one of its files
//! is root. A file counts as root's if it belongs to root and nobody else may write to it, and if the same holds for every
//! directory on the way to it, also on the way through symbolic links. Of a program, that is asked of itself, of the loader
//! that it names, of the directories in which that looks for libraries by the program's wish, and of each library.
//!
//! Invariant: nothing is executed here but a loader that has been vetted, and only to list what it would load.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use object::elf::{DT_NULL, DT_RPATH, DT_RUNPATH, DT_STRTAB, FileHeader64};
use object::endian::Endianness;
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};

/// Where programs are that CRIU starts.
pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Links that are followed for one path, as by the kernel.
const LINKS_MAX: usize = 40;
/// Largest program that is read. CRIU has 2 MB, the largest of its libraries 3 MB.
const PROGRAM_MAX: u64 = 256 << 20;
/// Write permission of the group and of others. The first also covers entries of an access control list.
const WRITE_BY_OTHERS: u32 = 0o022;
/// Entries of others cannot be replaced in a directory with this bit.
const STICKY: u32 = 0o1000;

/// All files that a run of a program needs, itself included, if it is root's.
///
/// # Errors
/// With a sentence for the operator that names the file which is not root's.
pub(super) fn program(path: &Path) -> Result<BTreeSet<PathBuf>, String> {
    let place = file(path)?;
    let named = |why: String| format!("{}: {why}", path.display());
    let asked = Asked::of(&place).map_err(named)?;
    let mut files = BTreeSet::from([path.to_owned()]);
    let Some(loader) = &asked.loader else {
        return Ok(files);
    };
    file(loader)?;
    asked.places.iter().try_for_each(|place| directory(place))?;
    for library in loaded_by(path).map_err(|error| named(error.to_string()))? {
        let place = file(&library)?;
        let asked = Asked::of(&place).map_err(|why| format!("{}: {why}", library.display()))?;
        asked.places.iter().try_for_each(|place| directory(place))?;
        files.insert(library);
    }
    Ok(files)
}

/// The place of a regular file that is root's, without links.
///
/// # Errors
/// With a sentence for the operator.
pub(super) fn file(path: &Path) -> Result<PathBuf, String> {
    let (place, metadata) = walk(path)?;
    let named = |why: &str| format!("{}: {why}", path.display());
    let metadata = metadata.ok_or_else(|| named("no such file"))?;
    if !metadata.is_file() {
        return Err(named("is no regular file"));
    }
    Ok(place)
}

/// Checks a directory in which a loader looks for libraries. One that does not exist could be made only by root.
fn directory(path: &Path) -> Result<(), String> {
    let (place, metadata) = walk(path)?;
    match metadata {
        // What is not there yet could be put there by anybody.
        Some(metadata) if metadata.mode() & WRITE_BY_OTHERS != 0 => Err(others_write(&place, &metadata)),
        _ => Ok(()),
    }
}

/// Follows a path as the kernel does, and checks each directory, each link and what is at its end. Returns where it leads, and
/// nothing about what does not exist: then the last directory that does is not open to others.
fn walk(path: &Path) -> Result<(PathBuf, Option<Metadata>), String> {
    if !path.is_absolute() {
        return Err(format!("{}: is no absolute path", path.display()));
    }
    let mut todo = parts(path);
    let (mut place, mut links) = (PathBuf::from("/"), 0);
    let mut last = look(&place)?.ok_or_else(|| "/: no such directory".to_owned())?;
    is_roots(&place, &last, None)?;
    while let Some(part) = todo.pop_front() {
        if part == ".." {
            place.pop();
            last = look(&place)?.ok_or_else(|| format!("{}: no such directory", place.display()))?;
            continue;
        }
        let next = place.join(&part);
        let Some(found) = look(&next)? else {
            return match last.mode() & WRITE_BY_OTHERS {
                0 => Ok((next, None)),
                _ => Err(others_write(&place, &last)),
            };
        };
        is_roots(&next, &found, Some(&last))?;
        if found.is_symlink() {
            links += 1;
            if links > LINKS_MAX {
                return Err(format!("{}: too many links", path.display()));
            }
            let target = std::fs::read_link(&next).map_err(|error| format!("{}: {error}", next.display()))?;
            if target.is_absolute() {
                place = PathBuf::from("/");
                last = look(&place)?.ok_or_else(|| "/: no such directory".to_owned())?;
            }
            for part in parts(&target).into_iter().rev() {
                todo.push_front(part);
            }
            continue;
        }
        if !todo.is_empty() && !found.is_dir() {
            return Err(format!("{}: is no directory", next.display()));
        }
        (place, last) = (next, found);
    }
    Ok((place, Some(last)))
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let part = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(part).collect()
}

fn look(path: &Path) -> Result<Option<Metadata>, String> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// Whether an entry of a directory is root's. Below a directory with the sticky bit, others can make entries, and cannot replace
/// directories of root; a file there may be a second name that another user gave to a file of root, so it does not count.
fn is_roots(path: &Path, metadata: &Metadata, above: Option<&Metadata>) -> Result<(), String> {
    if metadata.uid() != 0 {
        return Err(format!(
            "{} belongs to user {}, who could replace what runs as root: root must own it",
            path.display(),
            metadata.uid()
        ));
    }
    if above.is_some_and(|above| above.mode() & WRITE_BY_OTHERS != 0) && !metadata.is_dir() {
        return Err(format!(
            "{} is in a directory to which others than root may write: move it",
            path.display()
        ));
    }
    // The mode of a link means nothing.
    let is_open = metadata.mode() & WRITE_BY_OTHERS != 0 && !metadata.is_symlink();
    if is_open && !(metadata.is_dir() && metadata.mode() & STICKY != 0) {
        return Err(others_write(path, metadata));
    }
    Ok(())
}

fn others_write(path: &Path, metadata: &Metadata) -> String {
    format!(
        "{} has mode {:04o}, so others than root could replace what runs as root: chmod go-w it",
        path.display(),
        metadata.mode() & 0o7777
    )
}

/// What a program or library wants of a loader.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    /// The loader that it names; none for one that is linked statically, and for libraries.
    loader: Option<PathBuf>,
    /// Directories in which libraries are to be looked up.
    places: Vec<PathBuf>,
}

impl Asked {
    fn of(path: &Path) -> Result<Self, String> {
        let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
        if metadata.len() > PROGRAM_MAX {
            return Err(format!("is larger than {} MiB", PROGRAM_MAX >> 20));
        }
        let data = std::fs::read(path).map_err(|error| error.to_string())?;
        if data.starts_with(b"#!") {
            // Which programs it starts is not known, and none of them would be in the root that CRIU runs in.
            return Err("is a script: name the program itself".to_owned());
        }
        let origin = path.parent().unwrap_or(Path::new("/"));
        Self::parse(&data, origin).map_err(|error| format!("is no 64-bit program of Linux: {error}"))
    }

    fn parse(data: &[u8], origin: &Path) -> Result<Self, object::read::Error> {
        let header = FileHeader64::<Endianness>::parse(data)?;
        let endian = header.endian()?;
        let segments = header.program_headers(endian, data)?;
        let (mut loader, mut entries) = (None, &[][..]);
        for segment in segments {
            if let Some(path) = segment.interpreter(endian, data)? {
                loader = Some(PathBuf::from(OsStr::from_bytes(path)));
            }
            entries = segment.dynamic(endian, data)?.unwrap_or(entries);
        }
        let entries = entries.iter().map(|entry| (entry.d_tag(endian), entry.d_val(endian)));
        let entries: Vec<_> = entries.take_while(|(tag, _)| *tag != DT_NULL).collect();
        let names = entries
            .iter()
            .find(|(tag, _)| *tag == DT_STRTAB)
            .map(|(_, address)| *address);
        let text = |offset: u64| {
            let address = names?.checked_add(offset)?;
            // Of the string table on, whose size is that of its segment at most.
            segments.iter().find_map(|segment| {
                let (begin, size) = (segment.p_vaddr(endian), segment.p_filesz(endian));
                let within = address.checked_sub(begin).filter(|within| *within < size)?;
                let bytes = segment.data(endian, data).ok()?.get(usize::try_from(within).ok()?..)?;
                bytes.split(|byte| *byte == 0).next()
            })
        };
        let mut places = Vec::new();
        for (_, offset) in entries.iter().filter(|(tag, _)| [DT_RPATH, DT_RUNPATH].contains(tag)) {
            let list = String::from_utf8_lossy(text(*offset).unwrap_or_default()).into_owned();
            let origin = origin.to_string_lossy();
            let list = list.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
            // An empty one is the current directory, which is no absolute path, as others that are relative.
            places.extend(list.split(':').map(PathBuf::from));
        }
        Ok(Self { loader, places })
    }
}

/// What a program loads before it starts, and what loads it. Empty for one that is linked statically.
///
/// The loader of the C library prints that in the place of running the program, where it finds this variable. Only for a
/// program and a loader that are root's.
fn loaded_by(program: &Path) -> io::Result<Vec<PathBuf>> {
    // With another loader it would run, so it gets an argument with which it ends at once.
    let text = output(program, &["--version"], &[("LD_TRACE_LOADED_OBJECTS", "1")])?;
    Ok(text.lines().filter_map(loaded).collect())
}

/// The file in a line such as `libc.so.6 => /lib/libc.so.6 (0x7f...)` or `/lib64/ld-linux-x86-64.so.2 (0x7f...)`.
fn loaded(line: &str) -> Option<PathBuf> {
    let (file, _) = line.trim().rsplit_once(" (0x")?;
    let file = file.split_once(" => ").map_or(file, |(_, file)| file);
    file.starts_with('/').then(|| PathBuf::from(file))
}

/// What a program that is root's prints.
pub(super) fn output(program: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> io::Result<String> {
    #[expect(clippy::disallowed_methods, reason = "programs of the host, without a sandbox")]
    let output = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .envs(environment.iter().copied())
        .current_dir("/")
        .stdin(Stdio::null())
        .output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests;
