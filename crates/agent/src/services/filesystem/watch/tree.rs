//! The directories of one watch: a single one, or all of a tree that grows, shrinks and is moved about.
//!
//! The kernel watches single directories. A new one is watched first and read then, so that whatever comes into it is
//! seen one way or the other; what is found by reading is announced as created, and the kernel's event for the same
//! creation, if there is one, is dropped. A directory is known by its parent and its own name, so that moving a branch
//! changes one place. Branches that leave the tree are no longer watched.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use protocol::connect::{Code, Error};
use protocol::filesystem::{WatchRequest, event_type};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use super::kernel::{EVENTS, Raw, is_gone, is_network, not_added};
use super::queue::{Outbox, lost};
use crate::services::filesystem::entry;
use crate::services::filesystem::work::Abandoned;
use crate::users::{Names, Users};

/// Directories in all watches together; each costs some hundred bytes here, and a kilobyte in the kernel.
const DIRECTORIES: usize = 131_072;
/// What the kernel calls an event and what clients do, in the order in which clients get those that come together.
const KINDS: [(ReadFlags, i32); 5] = [
    (ReadFlags::CREATE.union(ReadFlags::MOVED_TO), event_type::CREATE),
    (ReadFlags::MOVED_FROM.union(ReadFlags::MOVE_SELF), event_type::RENAME),
    (ReadFlags::ATTRIB, event_type::CHMOD),
    (ReadFlags::MODIFY, event_type::WRITE),
    (
        ReadFlags::DELETE
            .union(ReadFlags::DELETE_SELF)
            .union(ReadFlags::UNMOUNT),
        event_type::REMOVE,
    ),
];

/// One watched directory.
struct Node {
    /// The watch of the parent directory; the root is its own.
    parent: i32,
    name: Arc<OsStr>,
    children: BTreeMap<Arc<OsStr>, i32>,
    /// What was announced because it was found here, and whose creation the kernel may still report.
    announced: HashSet<OsString>,
}

/// The watched directories of one watch.
pub(super) struct Tree {
    root: PathBuf,
    root_watch: i32,
    recursive: bool,
    include_entry: bool,
    inotify: OwnedFd,
    users: Users,
    /// By watch descriptor.
    nodes: HashMap<i32, Node>,
    /// A branch that left its place, and the cookie under which it may arrive at another.
    moving: Option<(u32, i32)>,
    /// Nodes that announced something.
    unsettled: Vec<i32>,
    /// Directories in all watches.
    directories: Arc<AtomicUsize>,
}

/// Whether and how what is found in a new directory is announced.
enum Found<'a> {
    Silently(&'a Abandoned),
    Announce(&'a mut Outbox, &'a Names),
}

impl Tree {
    /// Watches what was asked for. The second result is another descriptor of the same kernel queue, for reading.
    ///
    /// # Errors
    /// `not_found`; `invalid_argument` for what is not a directory and for network file systems; `internal` when the
    /// kernel refuses.
    pub(super) fn open(
        root: PathBuf,
        request: &WatchRequest,
        users: Users,
        directories: Arc<AtomicUsize>,
        abandoned: &Abandoned,
    ) -> Result<(Box<Self>, OwnedFd), Error> {
        let shown = root.display();
        let metadata = fs::metadata(&root).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(Code::NotFound, format!("path {shown} not found: {error}")),
            _ => Error::new(Code::Internal, format!("error getting file info: {shown}: {error}")),
        })?;
        if !metadata.is_dir() {
            let message = format!("path {shown} not a directory");
            return Err(Error::new(Code::InvalidArgument, message));
        }
        if !request.allow_network_mounts && is_network(&root)? {
            let message = format!("cannot watch path on network filesystem: {shown}");
            return Err(Error::new(Code::InvalidArgument, message));
        }
        let failed = |error: io::Error| Error::new(Code::Internal, format!("watcher error: {error}"));
        let inotify =
            inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
        let reading = inotify.try_clone().map_err(failed)?;
        let root_watch = inotify::add_watch(&inotify, &root, EVENTS).map_err(|error| not_added(&root, error))?;
        let mut tree = Box::new(Self {
            root,
            root_watch,
            recursive: request.recursive,
            include_entry: request.include_entry,
            inotify,
            users,
            nodes: HashMap::new(),
            moving: None,
            unsettled: Vec::new(),
            directories,
        });
        tree.insert(root_watch, root_watch, OsStr::new(""))?;
        if tree.recursive {
            let mut pending = Vec::new();
            let mut found = Found::Silently(abandoned);
            let path = tree.root.clone();
            tree.read_directory(root_watch, &path, &mut pending, &mut found)?;
            tree.watch_all(pending, &mut found)?;
        }
        Ok((tree, reading))
    }

    /// Whether these events cannot be handled without asking the file system, or take long.
    pub(super) fn needs_files(&self, batch: &[Raw]) -> bool {
        let branches = ReadFlags::CREATE | ReadFlags::MOVED_TO | ReadFlags::MOVED_FROM;
        let branch = |event: &Raw| event.flags.contains(ReadFlags::ISDIR) && event.flags.intersects(branches);
        self.include_entry || self.moving.is_some() || (self.recursive && batch.iter().any(branch))
    }

    /// Says that the kernel's queue was empty: everything that it knew when the last directory was read has been
    /// reported.
    pub(super) fn settle(&mut self) {
        for watch in self.unsettled.drain(..) {
            if let Some(node) = self.nodes.get_mut(&watch) {
                node.announced = HashSet::new();
            }
        }
    }

    /// Turns the kernel's events into events for clients, and follows the changes of the tree.
    ///
    /// # Errors
    /// Why the watch cannot go on. Events from before are in the outbox nevertheless.
    pub(super) fn apply_all(&mut self, batch: &[Raw], out: &mut Outbox) -> Result<(), Error> {
        let names = if self.include_entry {
            self.users.names()
        } else {
            Names::default()
        };
        batch.iter().try_for_each(|event| self.apply(event, out, &names))
    }

    fn apply(&mut self, event: &Raw, out: &mut Outbox, names: &Names) -> Result<(), Error> {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Err(lost("the kernel's queue was full"));
        }
        let mut arriving = None;
        if let Some((cookie, watch)) = self.moving.take() {
            // The two halves of a move within the tree follow each other.
            let here = event.flags.contains(ReadFlags::MOVED_TO) && self.nodes.contains_key(&event.watch);
            if here && event.cookie == cookie {
                arriving = Some(watch);
            } else {
                self.forget(watch);
            }
        }
        if event.flags.contains(ReadFlags::IGNORED) {
            self.forget(event.watch);
            return Ok(());
        }
        let Some(node) = self.nodes.get_mut(&event.watch) else {
            return Ok(());
        };
        let Some(name) = &event.name else {
            return self.apply_to_root(event, out, names);
        };
        if event.flags.contains(ReadFlags::CREATE) && node.announced.remove(name) {
            return Ok(());
        }
        if event.flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
            node.announced.remove(name);
        }
        self.emit(event.watch, Some(name), event.flags, out, names)?;
        if !self.recursive || !event.flags.contains(ReadFlags::ISDIR) {
            return Ok(());
        }
        if event.flags.contains(ReadFlags::DELETE) {
            if let Some(child) = self.child(event.watch, name) {
                self.forget(child);
            }
        } else if event.flags.contains(ReadFlags::MOVED_FROM) {
            self.moving = self.detach(event.watch, name).map(|child| (event.cookie, child));
        } else if let Some(branch) = arriving {
            self.attach(branch, event.watch, name);
        } else if event.flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            let pending = vec![(event.watch, name.clone())];
            self.watch_all(pending, &mut Found::Announce(out, names))?;
        }
        Ok(())
    }

    /// Handles an event about the root itself. Below the root its parent reports it, too.
    fn apply_to_root(&mut self, event: &Raw, out: &mut Outbox, names: &Names) -> Result<(), Error> {
        if event.watch != self.root_watch {
            return Ok(());
        }
        self.emit(event.watch, None, event.flags, out, names)?;
        if event
            .flags
            .intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT)
        {
            // The name that is being watched is no longer this directory's.
            self.forget(event.watch);
        }
        Ok(())
    }

    fn emit(
        &self,
        watch: i32,
        name: Option<&OsStr>,
        flags: ReadFlags,
        out: &mut Outbox,
        names: &Names,
    ) -> Result<(), Error> {
        let mut relative = self.relative(watch);
        relative.extend(name);
        for (_, kind) in KINDS.iter().filter(|(of_kind, _)| flags.intersects(*of_kind)) {
            self.announce(&relative, *kind, out, names)?;
        }
        Ok(())
    }

    fn announce(&self, relative: &Path, kind: i32, out: &mut Outbox, names: &Names) -> Result<(), Error> {
        let exists = matches!(kind, event_type::CREATE | event_type::WRITE | event_type::CHMOD);
        let entry = if self.include_entry && exists {
            let path = self.join(relative);
            entry::read(&path, &path, names).ok()
        } else {
            None
        };
        let name = if relative.as_os_str().is_empty() {
            ".".to_owned()
        } else {
            entry::text(relative)
        };
        out.push(name, kind, entry)
    }

    /// Watches directories and all directories below them.
    fn watch_all(&mut self, mut pending: Vec<(i32, OsString)>, found: &mut Found<'_>) -> Result<(), Error> {
        while let Some((parent, name)) = pending.pop() {
            let path = self.join(&self.relative(parent).join(&name));
            let flags = EVENTS | WatchFlags::DONT_FOLLOW;
            match inotify::add_watch(&self.inotify, &path, flags | WatchFlags::MASK_CREATE) {
                Ok(watch) => {
                    if let Some(stale) = self.child(parent, &name) {
                        self.forget(stale);
                    }
                    self.insert(watch, parent, &name)?;
                    self.read_directory(watch, &path, &mut pending, found)?;
                }
                // It is watched already: it was moved here, and the events that say so are still to come, or it was
                // found by reading. Without that flag the same call only names the watch.
                Err(Errno::EXIST) => match inotify::add_watch(&self.inotify, &path, flags) {
                    Ok(watch) => self.attach(watch, parent, &name),
                    Err(error) if is_gone(error) => {}
                    Err(error) => return Err(not_added(&path, error)),
                },
                // What is gone by now has its own event for that.
                Err(error) if is_gone(error) => {}
                Err(error) => return Err(not_added(&path, error)),
            }
        }
        Ok(())
    }

    /// Reads a directory whose watch was just added. Directories in it become pending.
    fn read_directory(
        &mut self,
        watch: i32,
        path: &Path,
        pending: &mut Vec<(i32, OsString)>,
        found: &mut Found<'_>,
    ) -> Result<(), Error> {
        let unreadable = |error: io::Error| {
            let message = format!("watcher error: error reading directory {}: {error}", path.display());
            Error::new(Code::Internal, message)
        };
        let entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(()),
            Err(error) => return Err(unreadable(error)),
        };
        let relative = self.relative(watch);
        for entry in entries {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name();
            match found {
                Found::Silently(abandoned) => abandoned.check()?,
                Found::Announce(out, names) => {
                    self.announce(&relative.join(&name), event_type::CREATE, out, names)?;
                    if let Some(node) = self.nodes.get_mut(&watch) {
                        if node.announced.is_empty() {
                            self.unsettled.push(watch);
                        }
                        node.announced.insert(name.clone());
                    }
                }
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if pending.len() >= DIRECTORIES {
                    return Err(too_many());
                }
                pending.push((watch, name));
            }
        }
        Ok(())
    }

    /// Path below the root.
    fn relative(&self, watch: i32) -> PathBuf {
        let mut names = Vec::new();
        let mut at = watch;
        while at != self.root_watch
            && let Some(node) = self.nodes.get(&at)
        {
            names.push(&*node.name);
            at = node.parent;
        }
        names.into_iter().rev().collect()
    }

    fn join(&self, relative: &Path) -> PathBuf {
        // Joining with nothing would add a slash.
        if relative.as_os_str().is_empty() {
            self.root.clone()
        } else {
            self.root.join(relative)
        }
    }

    fn child(&self, parent: i32, name: &OsStr) -> Option<i32> {
        self.nodes.get(&parent)?.children.get(name).copied()
    }

    fn insert(&mut self, watch: i32, parent: i32, name: &OsStr) -> Result<(), Error> {
        let name: Arc<OsStr> = Arc::from(name);
        let node = Node {
            parent,
            name: name.clone(),
            children: BTreeMap::new(),
            announced: HashSet::new(),
        };
        if self.nodes.insert(watch, node).is_none() && self.directories.fetch_add(1, Ordering::Relaxed) >= DIRECTORIES {
            return Err(too_many());
        }
        if parent != watch
            && let Some(above) = self.nodes.get_mut(&parent)
        {
            above.children.insert(name, watch);
        }
        Ok(())
    }

    /// Removes a branch from its place in the tree, and keeps watching it.
    fn detach(&mut self, parent: i32, name: &OsStr) -> Option<i32> {
        self.nodes.get_mut(&parent)?.children.remove(name)
    }

    /// Puts a watched branch in its new place.
    fn attach(&mut self, branch: i32, parent: i32, name: &OsStr) {
        let Some(node) = self.nodes.get(&branch) else { return };
        let (old_parent, old_name) = (node.parent, node.name.clone());
        if old_parent == parent && *old_name == *name && self.child(parent, name) == Some(branch) {
            return;
        }
        // One directory can be at two places by a mount, even below itself.
        let mut above = parent;
        loop {
            if above == branch {
                return;
            }
            match self.nodes.get(&above) {
                Some(node) if node.parent != above => above = node.parent,
                _ => break,
            }
        }
        if self.child(old_parent, &old_name) == Some(branch) {
            self.detach(old_parent, &old_name);
        }
        if let Some(stale) = self.child(parent, name) {
            self.forget(stale);
        }
        let name: Arc<OsStr> = Arc::from(name);
        if let Some(node) = self.nodes.get_mut(&branch) {
            node.parent = parent;
            node.name = name.clone();
        }
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children.insert(name, branch);
        }
    }

    /// Stops watching a branch.
    fn forget(&mut self, branch: i32) {
        if let Some(node) = self.nodes.get(&branch) {
            let (parent, name) = (node.parent, node.name.clone());
            if self.child(parent, &name) == Some(branch) {
                self.detach(parent, &name);
            }
        }
        let mut branches = vec![branch];
        while let Some(watch) = branches.pop() {
            let Some(node) = self.nodes.remove(&watch) else {
                continue;
            };
            branches.extend(node.children.into_values());
            self.directories.fetch_sub(1, Ordering::Relaxed);
            // The kernel itself stops when the directory is gone.
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.directories.fetch_sub(self.nodes.len(), Ordering::Relaxed);
    }
}

fn too_many() -> Error {
    let message = format!("watcher error: more than {DIRECTORIES} directories to watch");
    Error::new(Code::FailedPrecondition, message)
}
