//! Restores a sandbox from a checkpoint.
//!
//! The launcher prepares what it does for any start, but for the processes (`prepare`). A child, the conductor, puts it into
//! a root for CRIU alone (`checkpoint::jail`), runs CRIU, and does what is to be done between CRIU's steps:
//!
//! ```text
//!   conductor                                   CRIU, in the workload's groups
//!   put everything below one root
//!   start it  ────────────────────────────────▶ create the namespaces
//!   set up lo and eth0           ◀───────────── setup-namespaces
//!   compare the pages with their                restore mounts, files, memory
//!   checksums, in a child (`pages`)
//!   wait for the result,         ◀───────────── post-restore
//!   attach the sysfs of the network
//!   end connections that lead out,
//!   move the agent to its groups,
//!   freeze the workload          ◀───────────── pre-resume
//!                                               let go of the processes
//! ```
//!
//! Connections with an end that is not in the checkpoint are reset: when CRIU lets go of a socket, the kernel asks the other
//! end for a sign of life, and nothing answers but a reset. What is left then waits for an end that will never come, such as
//! a connection that a program has closed for writing, and is ended by socket diagnosis.
//!
//! What is restored was chosen inside, so CRIU may come to wait for something that never happens. Then it is ended as soon as
//! that is certain (`progress`), and at the latest after the time that the slowest host needs. All that it has made is in
//! the groups of the sandbox and in mount namespaces of its own, and goes with them.
//!
//! The workload stays frozen until the agent has its identity and the network its gateway.

use std::convert::Infallible;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use model::resources::Resources;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::net::SocketType;

use super::child::{ChildWait, Unfinished, end_with, has_ended, pair, reported, run_child};
use super::held::Launcher;
use super::ids::{clone_as, map_ids};
use super::pages::PagesCheck;
use super::prepare::{Attached, FileSystems, Wanted};
use super::program;
use super::progress::{LOOK, Progress};
use super::steps::{During, STEP, Stages};
use crate::cgroup::open::{Entry, while_restored};
use crate::checkpoint::criu::{Criu, CriuEvent, CriuRun};
use crate::checkpoint::jail::{self, Jail};
use crate::checkpoint::lost::{self, Lost};
use crate::checkpoint::rpc::{CriuSettings, Task};
use crate::checkpoint::{self, About, dump, facts, ghosts, ids, mounts};
use crate::figures::Figures;
use crate::files::{open_dir, write_at};
use crate::mounts::trees::Trees;
use crate::mounts::{Layout, MOUNTS, Mount, Source, Treatment};
use crate::processors::{self, View};
use crate::rootfs::Rootfs;
use crate::setup::{self, Failure};
use crate::slot::Name;
use crate::sys::{self, Cloned, attr};
use crate::wire::{self, Checkpoint, Reply};
use crate::{base, mounting, netlink, place, sockets};

/// Path of the agents' programs of checkpoints in the launcher.
const PROGRAMS: &str = "/programs";
/// Name of such a program until it is complete.
const UNFINISHED: &str = "new";

/// What a conductor needs.
struct Parts<'a> {
    name: &'a Name,
    base_id: u32,
    checkpoint: &'a Checkpoint,
    about: About,
    interface: &'a str,
    sources: Sources,
    /// Whether CRIU removes names in the file systems.
    removes_names: bool,
    /// The agent's program.
    program: &'a File,
    figures: Option<&'a Figures>,
    processors: &'a View,
    agent: &'a Entry,
    work: &'a Entry,
    host_mounts: BorrowedFd<'a>,
    data_dir: &'a Path,
}

impl Launcher {
    pub(super) fn restore(
        &mut self,
        name: &Name,
        base_id: u32,
        rootfs: &Rootfs,
        resources: &Resources,
        checkpoint: &Checkpoint,
        asked_by: BorrowedFd<'_>,
    ) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let mut stages = Stages::new();
        let about = self.about(checkpoint).during("read the checkpoint")?;
        let processors = match crate::mounts::processors(&about.mounts) {
            // What its programs have read once stays true.
            numbers if !numbers.is_empty() => self.views.kept(numbers),
            _ => {
                let cores = self.limited.then_some(resources.cpu_count);
                self.views.of(cores, name.slot)
            }
        };
        let processors = processors.during("select processors")?;
        let user = user_namespace(base_id).during("map ids")?;
        let boot_id = about.boot_id(&name.id).during("create the boot id")?;
        let wanted = Wanted {
            name,
            base_id,
            user: user.as_fd(),
            rootfs,
            new_disk_mb: None,
            processors: &processors,
            boot_id: &boot_id,
        };
        let made = self.file_systems(&wanted, &mut stages)?;
        let lost = lost::lost(self.opened(checkpoint)?.as_fd()).during("look for lost files")?;
        if let Some(why) = make_way(&lost, rootfs, &made.overlays).during("look for lost files")? {
            return Ok((Reply::Refused(why), Vec::new()));
        }
        // Only now, because what is refused leaves no groups.
        let roomy = while_restored(resources);
        let agent_groups = self.agent_groups(name, &roomy)?;
        let work = self.work_groups(name, &roomy)?;
        stages.end("cgroup");
        let FileSystems {
            overlays,
            fixtures,
            figures,
            disk,
        } = made;
        drop(disk);
        let (program, path) = self.program(&about.agent).during("open the agent's program")?;
        let layout = Layout {
            name: &name.to_string(),
            overlays: &rootfs.overlays,
            processors: &processors,
            groups: &self.groups,
            figures: figures.is_some(),
            agent: &path,
        };
        let sources = Sources::of(&layout, overlays, &fixtures).during("create the sources of mounts")?;
        drop(fixtures);
        stages.end("overlay");

        let _readable = Readable::by(base_id, &program).during("open the agent's program")?;
        let (ours, theirs) = pair(SocketType::SEQPACKET)?;
        let parts = Parts {
            name,
            base_id,
            checkpoint,
            about,
            interface: self.interface,
            sources,
            removes_names: lost.iter().any(Lost::is_removed_by_criu),
            program: &program,
            figures: figures.as_ref(),
            processors: &processors,
            agent: &agent_groups,
            work: &work,
            host_mounts: self.host_mounts.as_fd(),
            data_dir: &self.data_path,
        };
        let launcher = rustix::process::getpid();
        let conductor = match sys::clone3(0, None).during("clone")? {
            Cloned::Child => {
                // It sees the end of this process by the end of that socket.
                drop(ours);
                run_child(&theirs, |socket| {
                    end_with(launcher).map_err(|error| setup::failure("follow the launcher", error))?;
                    conduct(socket, &self.tree, &parts)
                })
            }
            Cloned::Parent { pidfd, .. } => Unfinished::new(pidfd),
        };
        drop(theirs);
        drop(parts);
        let wait = ChildWait {
            asked_by,
            // For a run that goes on, but only slowly: one that stands still is ended by its conductor.
            step: STEP * 2 + checkpoint.time_to_read(),
        };
        let told = wait.receive(ours.as_fd()).during("restore")?;
        let text = |told: &Option<(Vec<u8>, Vec<OwnedFd>)>| {
            let (message, _) = told.as_ref()?;
            String::from_utf8(message.clone()).ok()
        };
        let pid = match text(&told).as_deref().map(Outcome::parse) {
            Some(Some(Outcome::Restored(pid))) => pid,
            Some(Some(Outcome::Damaged(why))) => return Ok((Reply::Damaged(why), Vec::new())),
            Some(None) | None => return Err(reported(told)).during("restore the processes"),
        };
        // It exits once it has reported; CRIU has exited before.
        let _ = has_ended(conductor.first(), STEP);
        drop(conductor);
        self.tree.hold(name, resources).during("limit the restored processes")?;
        let agent = dump::pidfd(pid)?;
        let net = rustix::fs::open(
            format!("/proc/{pid}/ns/net"),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        stages.end("restore");
        let mut fds = vec![agent, net];
        fds.extend(figures.map(|figures| figures.kernel));
        Ok((Reply::Started { pid, stages: stages.0 }, fds))
    }

    /// What a checkpoint was written from.
    fn about(&self, checkpoint: &Checkpoint) -> io::Result<About> {
        let file = rustix::fs::openat(
            self.opened(checkpoint)?,
            checkpoint::ABOUT,
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(serde_json::from_reader(std::fs::File::from(file))?)
    }

    /// The directory of a checkpoint. The host's paths are not reachable here.
    fn opened(&self, checkpoint: &Checkpoint) -> io::Result<OwnedFd> {
        let relative = checkpoint
            .directory
            .strip_prefix(&self.data_path)
            .map_err(io::Error::other)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.data_dir, relative, flags, Mode::empty())?)
    }

    /// The agent's program of a checkpoint, and its path in the launcher.
    fn program(&self, hash: &str) -> io::Result<(File, String)> {
        // A file system of its own, on which it has the same path as the program of this launcher: inside, that is in the
        // mount table.
        let place = Path::new(PROGRAMS).join(hash);
        let path = place.join(program::file_name());
        if !path.exists() {
            if !place.exists() {
                std::fs::DirBuilder::new().recursive(true).create(&place)?;
                mounting::attach(program::memory()?.as_fd(), open_dir(&place)?.as_fd(), "")?;
            }
            let stored = Path::new(checkpoint::agents::DIRECTORY).join(hash);
            let stored = rustix::fs::openat(&self.data_dir, stored, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            program::copy(File::from(stored), open_dir(&place)?.as_fd(), UNFINISHED)?;
            std::fs::rename(place.join(UNFINISHED), &path)?;
        }
        let file = File::open(&path)?;
        let path = path.into_os_string().into_string();
        Ok((file, path.map_err(|_| io::ErrorKind::InvalidData)?))
    }
}

/// What CRIU attaches where the platform provides a mount.
#[derive(Debug)]
struct Sources {
    /// The root of the sandbox.
    root: OwnedFd,
    /// All others by their names, but for the files of `/proc`, whose file system is attached as a whole.
    named: Vec<(String, OwnedFd)>,
}

impl Sources {
    /// The sources for a sandbox with these overlays and fixtures.
    fn of(layout: &Layout<'_>, overlays: Vec<OwnedFd>, fixtures: &OwnedFd) -> io::Result<Self> {
        let sysfs = sysfs_of_nobody_else()?;
        let _fixtures = Attached::at(place::FIXTURES, fixtures.as_fd())?;
        let _sysfs = Attached::at(place::SYSFS, sysfs.as_fd())?;
        let trees = Trees {
            fixtures: fixtures.as_fd(),
            sysfs: sysfs.as_fd(),
            figures: None,
        };
        let mut overlays = overlays.into_iter();
        let root = overlays.next().ok_or(io::ErrorKind::InvalidInput)?;
        let mut named: Vec<(String, OwnedFd)> = Vec::new();
        let external = |mount: &&Mount| mount.source.treatment() == Treatment::External;
        for mount in MOUNTS.iter().filter(external) {
            layout.each(mount, |point, path| -> io::Result<()> {
                let name = mounts::source_name(mount.source, point);
                if named.iter().any(|(known, _)| known == name) {
                    return Ok(());
                }
                let source = match mount.source {
                    Source::Figure(_) => return Ok(()),
                    Source::Overlay => overlays.next().ok_or(io::ErrorKind::InvalidInput)?,
                    _ => trees.part(mount, path)?,
                };
                named.push((name.to_owned(), source));
                Ok(())
            })?;
        }
        Ok(Self { root, named })
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(name, _)| name.as_str())
    }
}

/// Prepares the file systems for files that have lost their names. Returns why such a file cannot be where it was, in which
/// case nothing is changed.
fn make_way(lost: &[Lost], rootfs: &Rootfs, overlays: &[OwnedFd]) -> io::Result<Option<String>> {
    let targets: Vec<&str> = rootfs.overlays.iter().map(|overlay| overlay.target.as_str()).collect();
    for (target, mount) in targets.iter().zip(overlays) {
        if let Some(why) = ghosts::misplaced(lost, mount.as_fd(), target, &targets)? {
            return Ok(Some(why));
        }
    }
    for (target, mount) in targets.iter().zip(overlays) {
        ghosts::remove(lost, mount.as_fd(), target, &targets)?;
    }
    Ok(None)
}

/// An agent's program that root of one sandbox can read until this is dropped: as such, CRIU opens it. Otherwise it can only be
/// executed, as in other sandboxes, some of which may run the same file: what can be read can be traced.
struct Readable<'a>(&'a File);

impl<'a> Readable<'a> {
    fn by(base_id: u32, program: &'a File) -> io::Result<Self> {
        let readable = Self(program);
        std::os::unix::fs::fchown(program, None, Some(base_id))?;
        program.set_permissions(Permissions::from_mode(0o751))?;
        Ok(readable)
    }
}

impl Drop for Readable<'_> {
    fn drop(&mut self) {
        let _ = program::make_unreadable(self.0);
    }
}

/// A sysfs that no other process sees: of a network namespace that is gone.
fn sysfs_of_nobody_else() -> io::Result<OwnedFd> {
    let (ours, theirs) = pair(SocketType::SEQPACKET)?;
    match sys::clone3(libc::CLONE_NEWNET, None)? {
        Cloned::Child => run_child(&theirs, |socket| {
            let sysfs = setup::sysfs().map_err(|error| setup::failure("create sysfs", error))?;
            let _ = wire::send(socket, setup::READY, &[sysfs.as_fd()]);
            sys::exit_now(0)
        }),
        Cloned::Parent { .. } => {
            drop(theirs);
            match wire::receive(ours.as_fd())? {
                Some((message, mut mounts)) if message == setup::READY && mounts.len() == 1 => {
                    Ok(mounts.swap_remove(0))
                }
                other => Err(reported(other)),
            }
        }
    }
}

/// A user namespace with the ids of a sandbox, to map the ids of mounts by.
fn user_namespace(base_id: u32) -> io::Result<OwnedFd> {
    let (ours, theirs) = pair(SocketType::STREAM)?;
    let (pid, _pidfd) = match clone_as(base_id, libc::CLONE_NEWUSER, None)? {
        Cloned::Child => {
            drop(ours);
            // Until the parent has what it needs.
            let _ = rustix::io::read(&theirs, &mut [0; 1]);
            sys::exit_now(0)
        }
        Cloned::Parent { pid, pidfd } => (pid, pidfd),
    };
    map_ids(pid, base_id)?;
    let path = format!("/proc/{pid}/ns/user");
    let user = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    drop(ours);
    Ok(user)
}

/// How a restore has ended that was not interrupted, as the conductor tells the launcher.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The pid of the agent.
    Restored(i32),
    /// What of the checkpoint is damaged. Nothing that was restored has run.
    Damaged(String),
}

impl Outcome {
    fn text(&self) -> String {
        match self {
            Self::Restored(pid) => format!("restored {pid}"),
            Self::Damaged(why) => format!("damaged {why}"),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text.split_once(' ')? {
            ("restored", pid) => pid.parse().ok().map(Self::Restored),
            ("damaged", why) => Some(Self::Damaged(why.to_owned())),
            _ => None,
        }
    }
}

/// Runs in the conductor.
fn conduct(
    socket: BorrowedFd<'_>,
    tree: &crate::cgroup::open::OpenTree,
    parts: &Parts<'_>,
) -> Result<Infallible, Failure> {
    let outcome = run(socket, tree, parts).map_err(|error| setup::failure("", error))?;
    let told = wire::send(socket, outcome.text().as_bytes(), &[]);
    told.map_err(|error| setup::failure("report", error))?;
    sys::exit_now(0)
}

fn run(socket: BorrowedFd<'_>, tree: &crate::cgroup::open::OpenTree, parts: &Parts<'_>) -> io::Result<Outcome> {
    checkpoint::sys::notice_children();
    enter_jail(parts).during("mount the sandbox's file systems")?;
    let pages = parts
        .checkpoint
        .pages_remain
        .then(|| PagesCheck::begin(Path::new(jail::CHECKPOINT)));
    let mut pages = pages.transpose().during("compare the pages")?;
    let mut damage = None;
    let source = |point: &str| mounts::source_at(point, parts.sources.names(), parts.figures.is_some());
    let mut settings = CriuSettings::new();
    settings.set("root", jail::ROOT)?;
    // The agent's program can be read meanwhile.
    settings.add("skip-file-rwx-check");
    mounts::settings_of_restore(&parts.about.mounts, source, &mut settings)?;
    let prepare = || {
        parts.work.join()?;
        // CRIU does not restore that, and what it restores inherits its own.
        processors::pin_to(parts.processors.numbers.iter().map(|number| *number as usize));
        // What is restored sees the group that it is in as the root.
        sys::unshare(libc::CLONE_NEWCGROUP | libc::CLONE_NEWUTS)?;
        Ok(rustix::system::sethostname(base::HOST_NAME.as_bytes())?)
    };
    let run = CriuRun {
        program: &parts.checkpoint.program.path,
        task: Task::Restore {
            removes_names: parts.removes_names,
        },
        settings: &settings,
        base: parts.base_id,
        birth: parts.work.birth.as_ref().map(AsFd::as_fd),
        asks_filters: true,
    };
    let mut criu = Criu::start(&run, prepare)?;
    let (mut agent, mut is_restored) = (0, false);
    let mut progress = Progress::of(criu.pid());
    loop {
        let Some(event) = dump::next(&mut criu, socket, parts.figures, LOOK)? else {
            if progress.is_stuck() {
                let why = "CRIU waits for something in the sandbox that does not come";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            continue;
        };
        match event {
            CriuEvent::Step { action, init } => {
                if init > 0 {
                    agent = init;
                }
                match action.as_str() {
                    "setup-namespaces" => {
                        ids::check(init, parts.base_id)?;
                        let interface = parts.interface;
                        in_child(|| set_up_network(init, interface)).during("network")?;
                    }
                    "post-restore" => {
                        // All memory is there, and CRIU ends the processes if it may not go on. It would not do that later.
                        damage = damage_of(&mut pages)?;
                        if damage.is_some() {
                            criu.refuse()?;
                            progress.again();
                            continue;
                        }
                        in_child(|| attach_sysfs(init)).during("attach /sys/.../net")?;
                    }
                    "pre-resume" => {
                        // Before anything in it runs.
                        program::make_unreadable(parts.program)?;
                        is_restored = agent > 0;
                        in_child(|| end_connections(agent)).during("end connections")?;
                        for pid in [agent, criu.pid()] {
                            parts.agent.take(pid).during("move the agent to its group")?;
                        }
                        tree.freeze_work(parts.name).during("freeze the workload")?;
                    }
                    _ => {}
                }
                criu.go()?;
                progress.again();
            }
            CriuEvent::Ended(0) if is_restored => return Ok(Outcome::Restored(agent)),
            CriuEvent::Ended(status) => {
                // It may have failed for that reason.
                if let Some(why) = damage.or(damage_of(&mut pages)?) {
                    return Ok(Outcome::Damaged(why));
                }
                let why = criu.why();
                return Err(io::Error::other(if why.is_empty() {
                    format!("CRIU exited with status {status}")
                } else {
                    why
                }));
            }
        }
    }
}

/// What of the pages is damaged, once they are compared, if anything is; none if they were compared before.
fn damage_of(pages: &mut Option<PagesCheck>) -> io::Result<Option<String>> {
    pages.take().map_or(Ok(None), |check| check.damage())
}

/// Makes a root with what CRIU needs, and enters it.
fn enter_jail(parts: &Parts<'_>) -> io::Result<()> {
    // CRIU is there, and the checkpoint.
    sys::setns(parts.host_mounts, libc::CLONE_NEWNS)?;
    let jail = Jail::new(&parts.checkpoint.program.files, parts.base_id)?;
    facts::give(&parts.data_dir.join(facts::FILE), &jail)?;
    jail.attach(parts.sources.root.as_fd(), jail::ROOT)?;
    for (name, mount) in &parts.sources.named {
        jail.attach(mount.as_fd(), &mounts::source_path(name))?;
    }
    if let Some(figures) = parts.figures {
        jail.attach_directory(figures.mount.as_fd(), jail::FIGURES)?;
    }
    let checkpoint = &parts.checkpoint.directory;
    // Its parent belongs to root alone, so this opens it to nobody else. CRIU lists it without the privilege to.
    std::fs::set_permissions(checkpoint, std::fs::Permissions::from_mode(0o755))?;
    let harmless = attr::RDONLY | attr::NOSUID | attr::NODEV | attr::NOEXEC;
    jail.show(checkpoint, jail::CHECKPOINT, harmless)?;
    // The slot is seldom the one that it was written in. The checkpoint itself stays as it is.
    let written = ids::file(checkpoint)?;
    jail.write(IDS, &ids::mapped(&std::fs::read(&written)?, parts.base_id)?)?;
    let name = written.file_name().unwrap_or_default().to_string_lossy();
    jail.cover(&format!("{}/{name}", jail::CHECKPOINT), IDS)?;
    jail.enter()
}

/// Where the map of ids of the sandbox's slot is, in the root for CRIU.
const IDS: &str = "/ringfence/ids";

/// Runs `work` in a child, so that this process stays in its namespaces. The child ends with this process.
fn in_child(work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let (ours, theirs) = pair(SocketType::SEQPACKET)?;
    let parent = rustix::process::getpid();
    match sys::clone3(0, None)? {
        Cloned::Child => run_child(&theirs, |socket| {
            let done = end_with(parent).and_then(|()| work());
            done.map_err(|error| setup::failure("", error))?;
            let _ = wire::send(socket, setup::READY, &[]);
            sys::exit_now(0)
        }),
        Cloned::Parent { pidfd, .. } => {
            drop(theirs);
            let told = wire::receive(ours.as_fd())?;
            let _ = rustix::process::waitid(
                rustix::process::WaitId::PidFd(pidfd.as_fd()),
                rustix::process::WaitIdOptions::EXITED,
            );
            match told {
                Some((message, _)) if message == setup::READY => Ok(()),
                other => Err(reported(other)),
            }
        }
    }
}

fn namespace(init: i32, kind: &str) -> io::Result<OwnedFd> {
    let path = format!("/proc/{init}/ns/{kind}");
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

fn set_up_network(init: i32, interface: &str) -> io::Result<()> {
    sys::setns(namespace(init, "net")?.as_fd(), libc::CLONE_NEWNET)?;
    netlink::configure(interface)?;
    netlink::answer_for_all(true)?;
    setup::limit_network()
}

fn end_connections(init: i32) -> io::Result<()> {
    sys::setns(namespace(init, "net")?.as_fd(), libc::CLONE_NEWNET)?;
    netlink::answer_for_all(false)?;
    sockets::end_halves()
}

fn attach_sysfs(init: i32) -> io::Result<()> {
    let mounts = namespace(init, "mnt")?;
    sys::setns(namespace(init, "net")?.as_fd(), libc::CLONE_NEWNET)?;
    // Mounts of this child's own, which end with it.
    sys::unshare(libc::CLONE_NEWNS)?;
    let parts = setup::sysfs_of_network()?;
    sys::setns(mounts.as_fd(), libc::CLONE_NEWNS)?;
    for (point, mount) in parts {
        mounting::attach(mount.as_fd(), CWD, point)?;
    }
    Ok(())
}

impl Entry {
    /// Moves a process, with all of its threads.
    fn take(&self, pid: i32) -> io::Result<()> {
        if let Some(birth) = &self.birth {
            write_at(birth.as_fd(), "cgroup.procs", &pid.to_string())?;
        }
        for tasks in self.v1() {
            for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                let task = task?.file_name();
                rustix::io::write(tasks, task.as_encoded_bytes())?;
            }
        }
        Ok(())
    }
}
