//! Tests of the container driver on the real kernel, as root. Not a libtest binary: the driver executes
//! `/proc/self/exe` as its launcher and as the agent, so this program plays those parts too.

#![expect(clippy::unwrap_used, reason = "a test program of its own")]

mod archives;
mod held;
mod kept;
mod layers;
mod limits;
mod loops;
mod mounts;

use std::fs;
use std::io::{self, Read, Write};
use std::net::{self, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::{DiskId, SandboxId};
use model::resources::Resources;
use runtime::container::ContainerDriver;
use runtime::driver::{Driver, Sandbox, StartDisk, StartError, StartRequest, Started};
use runtime::rootfs::{Layer, Overlay, Rootfs};
use runtime::settings::{CriuChoice, DriverSettings};
use rustix::event::{PollFd, PollFlags};
use testkit::privileged::{self, Subcommand};

use self::loops::{loops_of, mounts_of};

/// Pause between two checks of a condition. A loop without one takes processor time from what it waits for.
const PAUSE: Duration = Duration::from_millis(2);

const RESOURCES: Resources = Resources {
    cpu_count: 1,
    memory_mb: 64,
    disk_mb: 64,
    pids: 20,
};

/// The name of a test, which says what is promised, and its function.
type Test = (&'static str, fn(&ContainerDriver));

fn main() -> ExitCode {
    let parts: [Subcommand; 3] = [
        ("launcher", runtime::launcher::main),
        ("agent", play_agent),
        ("spawner", || {
            loop {
                std::thread::park();
            }
        }),
    ];
    privileged::main(&parts, run_all)
}

fn run_all() -> Vec<bool> {
    let tests: [Test; 19] = [
        (
            "a sandbox has namespaces of its own and leaves nothing",
            lives_in_its_own_namespaces,
        ),
        (
            "its file systems outlive it while they are held, and no longer",
            held::outlive_their_sandbox,
        ),
        ("its mounts are those of the list", mounts::are_those_of_the_list),
        ("its ids are in a range of its own", has_ids_of_its_own),
        (
            "its workload is limited, and with its agent a margin above",
            limits::is_limited,
        ),
        ("what it uses is measured from outside", is_measured),
        ("a sandbox is found by a later driver", is_found_again),
        ("a spawner is replaced inside the workload's group", spawner_is_replaced),
        ("a start that fails leaves nothing running", failed_start_leaves_nothing),
        ("a disk is created in advance", has_a_disk_in_advance),
        (
            "its file system has the requested overlays and size",
            has_the_file_system_of_its_request,
        ),
        (
            "what it sends outside is delivered to the gateway, and to nobody without",
            egress_goes_to_the_gateway,
        ),
        (
            "the control socket is accepted only from the agent",
            control_is_the_agents,
        ),
        (
            "a sandbox is started again on its kept disk",
            kept::a_sandbox_is_started_again_on_its_disk,
        ),
        (
            "a kept disk fits another version of base",
            kept::a_kept_disk_fits_another_version_of_base,
        ),
        (
            "a kept disk that was cut off is repaired",
            kept::a_kept_disk_that_was_cut_off_is_repaired,
        ),
        (
            "a disk is checked before it is a layer",
            layers::what_is_on_the_disk_is_checked,
        ),
        (
            "a layer that does not fit is not stored",
            layers::a_layer_that_does_not_fit_is_not_stored,
        ),
        (
            "a commit that is killed leaves nothing",
            layers::a_commit_that_is_killed_leaves_nothing,
        ),
    ];
    // In parallel with the others, because it waits for half a minute.
    let stuck = "a launcher that does not answer fails the start and is replaced";
    let stuck = std::thread::spawn(move || run(stuck, launcher_that_stopped_is_replaced));
    let mut outcomes: Vec<bool> = tests
        .into_iter()
        .chain(archives::TESTS)
        .map(|(name, test)| run(name, test))
        .collect();
    outcomes.push(stuck.join().unwrap());
    outcomes
}

/// Runs one test with its own driver. Returns whether it passed.
fn run(name: &str, test: fn(&ContainerDriver)) -> bool {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let container = open(dir.path());
    privileged::passes(name, || {
        let tested = catch_unwind(AssertUnwindSafe(|| test(&container)));
        for found in container.find().unwrap() {
            if let Some(sandbox) = found.alive {
                end(&sandbox);
            }
            clean(&container, &found.id);
        }
        container.storage().sweep_disks(&[]).unwrap();
        container.dismantle();
        if let Err(failure) = tested {
            resume_unwind(failure);
        }
        assert_eq!(spares(dir.path()), 0, "a disk for the next sandbox is left");
        until(|| loops_of(&format!("{}/", dir.path().display())) == 0);
    })
}

/// A minimal agent that only listens on the control socket and accepts spawners.
fn play_agent() -> ExitCode {
    let kind = rustix::net::SocketType::SEQPACKET;
    let spawners = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
    let address = rustix::net::SocketAddrUnix::new_abstract_name(protocol::agent::SPAWNER_SOCKET.as_bytes()).unwrap();
    rustix::net::bind(&spawners, &address).unwrap();
    rustix::net::listen(&spawners, 16).unwrap();
    let address = SocketAddr::from_abstract_name(protocol::agent::CONTROL_SOCKET).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    loop {
        let _ = listener.accept();
    }
}

fn open(data_dir: &Path) -> Arc<ContainerDriver> {
    let settings = DriverSettings {
        launchers: 1,
        disks_mb: vec![RESOURCES.disk_mb],
        criu: CriuChoice::Off,
        page_out: false,
        ..DriverSettings::new(data_dir.to_owned())
    };
    ContainerDriver::open(&settings).unwrap()
}

fn id(text: &str) -> SandboxId {
    text.parse().unwrap()
}

/// The disk that [`request`] gives to a sandbox.
fn disk_of(id: &SandboxId) -> DiskId {
    let mut random = [0; 20];
    random[..id.as_str().len()].copy_from_slice(id.as_str().as_bytes());
    DiskId::from_random(&random)
}

fn request(id: &SandboxId) -> StartRequest {
    StartRequest {
        id: id.clone(),
        disk: StartDisk::New {
            disk: disk_of(id),
            rootfs: Rootfs::base(),
        },
        resources: RESOURCES,
        restore: false,
    }
}

fn start(container: &ContainerDriver, id: &SandboxId) -> Started {
    container.start(&request(id)).unwrap()
}

/// Kills a sandbox and waits for its end.
fn end(sandbox: &Arc<dyn Sandbox>) {
    sandbox.kill();
    let mut poll = [PollFd::from_borrowed_fd(sandbox.ended(), PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut poll, Some(&limit)).unwrap(), 1, "it ends");
}

/// Gives a sandbox a new spawner, once its agent listens. As a node does, it tries again where that fails: a step of it may take
/// a second, which is short on a busy host.
fn respawn(sandbox: &Arc<dyn Sandbox>) {
    until(|| sandbox.control().is_ok());
    until(|| sandbox.respawn().is_ok());
}

/// The kernel empties a cgroup shortly after its last process ended; this waits for it, with a deadline.
fn clean(container: &ContainerDriver, id: &SandboxId) {
    container.storage().remove_disk(&disk_of(id)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !container.clean(id) {
        assert!(Instant::now() < deadline, "processes are left in {id}");
        std::thread::sleep(PAUSE);
    }
}

/// Pids of the processes of a sandbox, by its pid namespace.
fn processes(of: i32) -> Vec<i32> {
    let namespace = fs::read_link(format!("/proc/{of}/ns/pid")).unwrap();
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| ns == namespace))
        .collect()
}

/// Pid of the agent, from the debug text of the sandbox, which names it.
fn agent_pid(sandbox: &Arc<dyn Sandbox>) -> i32 {
    let text = format!("{sandbox:?}");
    let (_, rest) = text.split_once("pid: ").unwrap();
    rest.split(',').next().unwrap().parse().unwrap()
}

/// Waits for an asynchronous event, with a deadline.
fn until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out");
        std::thread::sleep(PAUSE);
    }
}

fn is_dead(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z"))
}

/// Data directory of a driver, which its debug text begins with.
fn data_dir_of(container: &ContainerDriver) -> PathBuf {
    PathBuf::from(format!("{container:?}").split('"').nth(1).unwrap())
}

fn lives_in_its_own_namespaces(container: &ContainerDriver) {
    let id = id("ione");
    let started = start(container, &id);
    let pid = agent_pid(&started.sandbox);
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let ours = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert_ne!(fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap(), ours, "{kind}");
    }
    assert_eq!(processes(pid).len(), 2, "the agent and the spawner");
    // The kernel shows roots of cgroup mounts relative to the reader, which here is on the host.
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let mounts: Vec<&str> = mounts.lines().filter(|line| !line.contains(" - cgroup")).collect();
    let mounts = mounts.join("\n");
    assert!(!mounts.contains("/var/tmp"), "paths of the host are visible:\n{mounts}");
    assert!(!mounts.contains("ione"), "the id is visible:\n{mounts}");
    // Other programs of the host may have overlays.
    let overlays = mounts.lines().filter(|line| line.contains(" - overlay "));
    let devices = overlays.filter_map(|line| line.split(' ').nth(2).map(str::to_owned));
    let devices: Vec<String> = devices.collect();
    assert!(!devices.is_empty(), "{mounts}");
    let host = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(
        mounts_of(&host, &devices),
        [""; 0],
        "mounts of the sandbox are visible on the host"
    );

    end(&started.sandbox);
    assert!(!Path::new(&format!("/proc/{pid}/root/etc")).exists());
    let mut poll = [PollFd::from_borrowed_fd(started.sandbox.ended(), PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(
        rustix::event::poll(&mut poll, Some(&now)).unwrap(),
        1,
        "its end is visible"
    );
    drop(started);
    let image = data_dir_of(container).join(format!("disks/{}.img", disk_of(&id)));
    assert!(image.exists());
    clean(container, &id);
    assert!(container.find().unwrap().is_empty());
    assert!(!image.exists());
    // The kernel unmounts asynchronously.
    let deadline = Instant::now() + Duration::from_secs(60);
    while loops_of(&image.to_string_lossy()) > 0 {
        assert!(Instant::now() < deadline, "a loop device is left");
        std::thread::sleep(PAUSE);
    }
}

/// Disks that belong to no sandbox yet.
fn spares(data_dir: &Path) -> usize {
    let names = fs::read_dir(data_dir.join("disks")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with("spare-"))
        .count()
}

fn has_a_disk_in_advance(container: &ContainerDriver) {
    let data_dir = data_dir_of(container);
    let spare = format!("{}/disks/spare-", data_dir.display());
    for (number, id) in ["ione", "itwo", "ithree", "ifour"].into_iter().enumerate() {
        let started = start(container, &self::id(id));
        let image = data_dir.join(format!("disks/{}.img", disk_of(&self::id(id))));
        assert!(image.exists());
        assert_eq!(loops_of(&image.to_string_lossy()), 1);
        // One launcher has it now. It is created when nothing has to be started for a moment.
        until(|| spares(&data_dir) >= 1);
        if number == 1 {
            // A disk that was removed, here by the sweep of a start, is replaced.
            container
                .storage()
                .sweep_disks(&[disk_of(&self::id("ione")), disk_of(&self::id("itwo"))])
                .unwrap();
            assert_eq!(spares(&data_dir), 0);
        }
        drop(started);
    }
    until(|| loops_of(&spare) >= 1);
}

fn has_ids_of_its_own(container: &ContainerDriver) {
    let map = |id: &SandboxId| {
        let started = start(container, id);
        fs::read_to_string(format!("/proc/{}/uid_map", agent_pid(&started.sandbox))).unwrap()
    };
    let parse = |text: &str| {
        text.split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect::<Vec<u32>>()
    };
    let (one, two) = (parse(&map(&id("ione"))), parse(&map(&id("itwo"))));
    assert_eq!((one[0], one[2]), (0, 65_536));
    assert_eq!(two[1], one[1] + 65_536);
}

fn is_measured(container: &ContainerDriver) {
    let started = start(container, &id("ione"));
    let pid = agent_pid(&started.sandbox);
    let before = started.sandbox.usage().unwrap();
    assert!(before.cpu_time_us > 0, "{before:?}");
    assert_eq!(before.memory_total_bytes, 64 << 20);
    assert!(before.memory_used_bytes > 0, "{before:?}");
    assert!(before.memory_used_bytes < 32 << 20, "{before:?}");
    assert!(before.disk_total_bytes > 32 << 20, "{before:?}");
    assert!(before.disk_total_bytes <= 64 << 20, "{before:?}");
    // An existing file: the host's root is `nobody` inside and could not create one.
    let file = format!("/proc/{pid}/root/etc/passwd");
    fs::write(&file, vec![1; 8 << 20]).unwrap();
    let full = started.sandbox.usage().unwrap();
    let more = full.disk_used_bytes - before.disk_used_bytes;
    assert!(((8 << 20)..(9 << 20)).contains(&more), "{more}");
    // Freed space is available immediately, whatever the disk on the host still holds.
    fs::write(&file, "").unwrap();
    let empty = started.sandbox.usage().unwrap();
    assert!(empty.disk_used_bytes < before.disk_used_bytes + (1 << 20), "{empty:?}");
    assert!(container.capabilities().process_counter);
    assert_eq!(started.sandbox.processes_created().unwrap(), 0);
    assert_eq!(container.processes_created().unwrap(), 0);
    assert_eq!(started.sandbox.processes().unwrap(), 1);
    assert!(started.sandbox.work_time().unwrap() <= Duration::from_micros(empty.cpu_time_us));
    let again = container.find().unwrap().pop().unwrap().alive.unwrap();
    assert!(again.usage().unwrap().cpu_time_us >= before.cpu_time_us);
    end(&started.sandbox);
    assert!(started.sandbox.usage().is_err());
    assert!(container.capacity().unwrap().disk_available_bytes > 0);
}

fn is_found_again(container: &ContainerDriver) {
    let (one, two) = (id("ione"), id("itwo"));
    // As earlier versions named it: a disk that has the number of the slot.
    let mut request_of_earlier = request(&one);
    let disk_of_earlier: DiskId = "0".parse().unwrap();
    request_of_earlier.disk = StartDisk::New {
        disk: disk_of_earlier.clone(),
        rootfs: Rootfs::base(),
    };
    let first = container.start(&request_of_earlier).unwrap();
    let pid = agent_pid(&first.sandbox);
    let second = start(container, &two);
    end(&second.sandbox);
    drop((first, second));
    // A driver waits until the launchers of the previous one have exited.
    container.dismantle();
    let data_dir = format!("{container:?}");
    let later = open(Path::new(data_dir.split('"').nth(1).unwrap()));
    let mut found = later.find().unwrap();
    found.sort_by(|a, b| a.id.cmp(&b.id));
    let told: Vec<_> = found.iter().map(|found| (&found.id, found.disk.clone())).collect();
    assert_eq!(told, [(&one, disk_of_earlier.clone()), (&two, disk_of(&two))]);
    // Their ids are in use, whichever driver started them.
    let exists = later.start(&request(&two)).unwrap_err();
    assert!(matches!(exists, StartError::Exists(_)), "{exists}");
    let alive = found[0].alive.as_ref().unwrap();
    assert_eq!(agent_pid(alive), pid);
    assert!(found[1].alive.is_none());
    // The later driver can do everything that the first one could.
    let running = || {
        processes(pid)
            .into_iter()
            .filter(|pid| !is_dead(*pid))
            .collect::<Vec<_>>()
    };
    let before = running();
    respawn(alive);
    until(|| running().len() == 2);
    assert_ne!(running(), before);
    // A disk in use is kept by its id.
    let disk = alive.disk().unwrap();
    assert!(disk.held_bytes > 0, "{disk:?}");
    later.storage().sweep_disks(&[disk_of_earlier]).unwrap();
    assert_eq!(alive.disk().unwrap().size_bytes, 64 << 20);
    end(alive);
    clean(&later, &one);
    clean(&later, &two);
    assert!(later.find().unwrap().is_empty());
    later.dismantle();
}

fn spawner_is_replaced(container: &ContainerDriver) {
    let started = start(container, &id("ione"));
    let pid = agent_pid(&started.sandbox);
    let spawner = processes(pid).into_iter().find(|other| *other != pid).unwrap();
    let group = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let (before, unconfined) = (group(spawner), fs::read_to_string("/proc/self/status").unwrap());
    // One that was only stopped is killed, too.
    let stop = rustix::process::Signal::STOP;
    rustix::process::kill_process(rustix::process::Pid::from_raw(spawner).unwrap(), stop).unwrap();
    respawn(&started.sandbox);
    // This agent reaps no children, so the old one remains as a zombie.
    until(|| is_dead(spawner));
    let others: Vec<i32> = processes(pid)
        .into_iter()
        .filter(|other| *other != pid && *other != spawner)
        .collect();
    let [new] = others[..] else { panic!("{others:?}") };
    assert_eq!(group(new), before);
    let status = |pid: i32| fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |text: &str, name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let of_new = status(new);
    assert_eq!(field(&of_new, "PPid:"), pid.to_string(), "it is a child of the agent");
    assert_eq!(field(&of_new, "CapBnd:"), "00000000a80425fb");
    assert_eq!(field(&of_new, "Seccomp:"), "2");
    assert_ne!(field(&of_new, "CapBnd:"), field(&unconfined, "CapBnd:"));
    let root = |pid: i32| {
        fs::metadata(format!("/proc/{pid}/root/"))
            .map(|m| std::os::unix::fs::MetadataExt::dev(&m))
            .unwrap()
    };
    assert_eq!(root(new), root(pid));
    let open = fs::read_dir(format!("/proc/{new}/fd")).unwrap().count();
    assert_eq!(
        open, 4,
        "only the standard streams and the way to its agent are open in it"
    );
}

fn failed_start_leaves_nothing(container: &ContainerDriver) {
    let id = id("ione");
    let mut request = request(&id);
    // A directory that `base` does not have.
    push(&mut request, overlay("/nowhere"));
    let error = container.start(&request).unwrap_err();
    assert!(error.to_string().contains("attach an overlay"), "{error}");
    let found = container.find().unwrap();
    assert!(found.iter().all(|found| found.alive.is_none()), "{found:?}");
    clean(container, &id);
    assert!(container.find().unwrap().is_empty());
    // The launcher keeps working.
    start(container, &id);
    // An existing disk is never overwritten.
    let mut request = self::request(&self::id("itwo"));
    request.disk = StartDisk::New {
        disk: disk_of(&id),
        rootfs: Rootfs::base(),
    };
    let error = container.start(&request).unwrap_err();
    assert!(error.to_string().contains("create the disk"), "{error}");
}

fn push(request: &mut StartRequest, overlay: Overlay) {
    match &mut request.disk {
        StartDisk::New { rootfs, .. } => rootfs.overlays.push(overlay),
        StartDisk::Kept(disk) => panic!("{disk}"),
    }
}

fn overlay(target: &str) -> Overlay {
    Overlay {
        target: target.to_owned(),
        layers: vec![Layer::BaseUsr, Layer::HostUsr],
        upper: "more".to_owned(),
    }
}

/// The driver has not seen this number of overlays or this disk size before.
fn has_the_file_system_of_its_request(container: &ContainerDriver) {
    let mut request = request(&id("ione"));
    push(&mut request, overlay("/opt"));
    request.resources.disk_mb = 96;
    let started = container.start(&request).unwrap();
    let pid = agent_pid(&started.sandbox);
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let overlays = mounts.lines().filter(|line| line.contains(" - overlay "));
    let targets: Vec<&str> = overlays.filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(targets, ["/", "/usr", "/opt"]);
    assert!(Path::new(&format!("/proc/{pid}/root/opt/bin/sh")).exists());
    let disk_bytes = started.sandbox.usage().unwrap().disk_total_bytes;
    assert!(((64 << 20)..(96 << 20)).contains(&disk_bytes), "{disk_bytes}");
    // Both uppers accept writes: to existing files, as the host's root is `nobody` inside and could not create one.
    for file in ["etc/passwd", "opt/lib/os-release"] {
        fs::write(format!("/proc/{pid}/root/{file}"), "written").unwrap();
    }
    assert_ne!(fs::read_to_string("/usr/lib/os-release").unwrap(), "written");
}

fn control_is_the_agents(container: &ContainerDriver) {
    let started = start(container, &id("ione"));
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = started.sandbox.control() {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(PAUSE);
    }
    // On the host there is no such socket: the name belongs to the sandbox's network namespace.
    let address = SocketAddr::from_abstract_name(protocol::agent::CONTROL_SOCKET).unwrap();
    assert!(std::os::unix::net::UnixStream::connect_addr(&address).is_err());
    end(&started.sandbox);
    assert!(started.sandbox.control().is_err());
}

fn launcher_that_stopped_is_replaced(container: &ContainerDriver) {
    let data_dir = format!("{container:?}");
    let lock = Path::new(data_dir.split('"').nth(1).unwrap()).join("launchers.lock");
    // The child of this process that has this driver's lock as its standard output; other tests have theirs, and a
    // launcher has children temporarily. The one with its own mounts: the other replaces spawners.
    let mounts = |of: &str| fs::read_link(format!("/proc/{of}/ns/mnt")).ok();
    let is_ours = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        parent == Some(&std::process::id().to_string())
    };
    let launchers: Vec<i32> = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|file| file == lock) && is_ours(*pid))
        .filter(|pid| mounts(&pid.to_string()) != mounts("self"))
        .collect();
    let [launcher] = launchers[..] else {
        panic!("{launchers:?}")
    };
    let process = rustix::process::Pid::from_raw(launcher).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    let id = id("ione");
    let since = Instant::now();
    assert!(container.start(&request(&id)).is_err());
    assert!(since.elapsed() >= Duration::from_secs(30), "{:?}", since.elapsed());
    assert!(!Path::new(&format!("/proc/{launcher}")).exists(), "it is gone");
    clean(container, &id);
    assert!(container.find().unwrap().is_empty());
    start(container, &id);
}

/// Runs `work` on a thread in the network of a sandbox.
fn inside_network<T: Send>(sandbox: &Arc<dyn Sandbox>, work: impl FnOnce() -> T + Send) -> T {
    let namespace = fs::File::open(format!("/proc/{}/ns/net", agent_pid(sandbox))).unwrap();
    let enter = move || {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

fn egress_goes_to_the_gateway(container: &ContainerDriver) {
    let id = id("igress");
    let started = start(container, &id);
    let sandbox = &started.sandbox;
    let outside = [
        "93.184.216.34:443",
        "[2606:4700::1111]:80",
        "10.0.0.1:99",
        "169.254.169.254:80",
    ];
    let reaches_nobody = || {
        let error = TcpStream::connect(outside[0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    };
    inside_network(sandbox, reaches_nobody);

    let gateway = sandbox.egress().unwrap();
    let listener = gateway.tcp().unwrap();
    listener.set_nonblocking(false).unwrap();
    inside_network(sandbox, || {
        for address in outside {
            let mut client = TcpStream::connect(address).unwrap();
            let (mut accepted, peer) = listener.accept().unwrap();
            let destination: net::SocketAddr = address.parse().unwrap();
            let local = accepted.local_addr().unwrap();
            assert_eq!(
                (local.ip().to_canonical(), local.port()),
                (destination.ip(), destination.port())
            );
            let own = client.local_addr().unwrap();
            assert_eq!((peer.ip().to_canonical(), peer.port()), (own.ip(), own.port()));
            accepted.write_all(b"x").unwrap();
            client.read_exact(&mut [0]).unwrap();
        }
        // The sandbox's own addresses stay its own, and a program that listens everywhere does not get the rest.
        let server = TcpListener::bind("[::]:8080").unwrap();
        for own in [
            "127.0.0.1:8080",
            "[::1]:8080",
            "10.0.0.2:8080",
            "[fd00::2]:8080",
            "127.9.9.9:8080",
        ] {
            TcpStream::connect(own).unwrap();
            server.accept().unwrap();
        }
        let _client = TcpStream::connect("93.184.216.34:8080").unwrap();
        listener.accept().unwrap();
        assert!(
            TcpListener::bind("93.184.216.34:80").is_err(),
            "an address that is not its own"
        );

        let mut buffer = [0; 100];
        for (own, address) in [("0.0.0.0:0", "1.1.1.1:123"), ("[::]:0", "[2001:4860::8]:443")] {
            let client = UdpSocket::bind(own).unwrap();
            client.connect(address).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            client.send(b"question").unwrap();
            let (length, source, destination) = gateway.receive(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"question");
            assert_eq!(
                (source, destination),
                (client.local_addr().unwrap(), address.parse().unwrap())
            );
            gateway.send(destination, source, b"answer").unwrap();
            let length = client.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"answer");
            gateway
                .send(destination, source, &vec![1; runtime::egress::DATAGRAM_MAX - 20])
                .unwrap();
            client.recv(&mut buffer).unwrap();
            gateway.refuse(source, destination).unwrap();
            let error = client.recv(&mut buffer).unwrap_err();
            assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "refused: {error}");
        }
    });
    assert_eq!(
        gateway.receive(&mut [0; 9]).unwrap_err().kind(),
        io::ErrorKind::WouldBlock
    );

    drop((listener, gateway));
    inside_network(sandbox, reaches_nobody);
    // A later platform opens it again.
    drop(sandbox.egress().unwrap());
    end(sandbox);
}
