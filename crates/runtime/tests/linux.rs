//! The container driver on the real kernel, as root. Not a libtest binary: the driver executes `/proc/self/exe` as its
//! launcher and as the agent, so this program has to be able to play those parts too.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test program of its own"
)]

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::resources::Resources;
use runtime::container::{Container, Settings};
use runtime::driver::{Driver, Sandbox, Started};
use runtime::netns::SocketMaker;
use runtime::slot::Name;
use rustix::event::{PollFd, PollFlags};

const RESOURCES: Resources = Resources {
    cpu_count: 1,
    memory_mb: 64,
    disk_mb: 64,
    pids: 20,
};

/// A name and what it promises.
type Test = (&'static str, fn(&Container));

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("launcher") => return runtime::launcher::main(),
        Some("agent") => return play_agent(),
        Some("spawner") => loop {
            std::thread::park();
        },
        _ => {}
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("these tests make namespaces and mounts: run them as root");
        return ExitCode::FAILURE;
    }
    let tests: [Test; 8] = [
        (
            "a sandbox has namespaces of its own and leaves nothing",
            lives_in_its_own_namespaces,
        ),
        ("its ids are in a range of its own", has_ids_of_its_own),
        ("its workload is limited and its agent is not", is_limited),
        ("what it uses is measured from outside", is_measured),
        ("a sandbox is found by a later driver", is_found_again),
        ("a spawner is replaced inside the workload's group", spawner_is_replaced),
        ("a start that fails leaves nothing running", failed_start_leaves_nothing),
        ("the control socket is the agent's or nobody's", control_is_the_agents),
    ];
    // Beside the others, because it waits for half a minute.
    let stuck = "a launcher that does not answer fails the start and is replaced";
    let stuck = std::thread::spawn(move || run(stuck, launcher_that_stopped_is_replaced));
    let mut outcomes: Vec<bool> = tests.into_iter().map(|(name, test)| run(name, test)).collect();
    outcomes.push(stuck.join().unwrap());
    let passed = outcomes.iter().filter(|passed| **passed).count();
    println!("\n{passed} passed, {} failed", outcomes.len() - passed);
    if passed == outcomes.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs one test with a driver of its own, and whether it passed.
fn run(name: &str, test: fn(&Container)) -> bool {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let container = open(dir.path());
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&container)));
    for found in container.find().unwrap() {
        if let Some(sandbox) = found.alive {
            sandbox.kill();
        }
        clean(&container, &found.name);
    }
    container.sweep(&[]).unwrap();
    container.dismantle();
    println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
    outcome.is_ok()
}

/// An agent that only listens where the host looks for it.
fn play_agent() -> ExitCode {
    let address = SocketAddr::from_abstract_name(protocol::agent::CONTROL_SOCKET).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    loop {
        let _ = listener.accept();
    }
}

fn open(data_dir: &Path) -> Arc<Container> {
    let settings = Settings {
        data_dir: data_dir.to_owned(),
        launchers: 1,
        unlimited: false,
        disks_mb: vec![RESOURCES.disk_mb],
    };
    Container::open(&settings).unwrap()
}

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

fn start(container: &Container, name: &Name) -> Started {
    container.start(name, &RESOURCES).unwrap()
}

/// The kernel empties a cgroup a moment after its last process; this waits for it, but not for ever.
fn clean(container: &Container, name: &Name) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !container.clean(name) {
        assert!(Instant::now() < deadline, "processes are left in {name}");
        std::thread::yield_now();
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

/// Waits for something that happens by itself, but not for ever.
fn until(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "it does not happen");
        std::thread::yield_now();
    }
}

fn is_dead(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z"))
}

fn loops_of(data_dir: &str) -> usize {
    fs::read_dir("/sys/block")
        .unwrap()
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("loop/backing_file")).ok())
        .filter(|file| file.contains(data_dir))
        .count()
}

fn lives_in_its_own_namespaces(container: &Container) {
    let name = name("ione.0");
    let started = start(container, &name);
    let pid = agent_pid(&started.sandbox);
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let ours = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert_ne!(fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap(), ours, "{kind}");
    }
    assert_eq!(processes(pid).len(), 2, "the agent and the spawner");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    assert!(!mounts.contains("/var/tmp"), "paths of the host are visible:\n{mounts}");
    assert!(!mounts.contains("ione"), "the id is visible:\n{mounts}");
    let host = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(
        !host.contains("overlay"),
        "mounts of the sandbox are visible on the host:\n{host}"
    );

    started.sandbox.kill();
    assert!(!Path::new(&format!("/proc/{pid}/root/etc")).exists());
    let mut poll = [PollFd::from_borrowed_fd(started.sandbox.ended(), PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(
        rustix::event::poll(&mut poll, Some(&now)).unwrap(),
        1,
        "its end is visible"
    );
    drop(started);
    clean(container, &name);
    assert!(container.find().unwrap().is_empty());
    let data_dir = format!("{container:?}");
    let data_dir = data_dir.split('"').nth(1).unwrap();
    assert!(!Path::new(data_dir).join("disks/0.img").exists());
    // The kernel unmounts asynchronously.
    let deadline = Instant::now() + Duration::from_secs(10);
    while loops_of(data_dir) > 0 {
        assert!(Instant::now() < deadline, "a loop device is left");
        std::thread::yield_now();
    }
}

fn has_ids_of_its_own(container: &Container) {
    let map = |name: &Name| {
        let started = start(container, name);
        fs::read_to_string(format!("/proc/{}/uid_map", agent_pid(&started.sandbox))).unwrap()
    };
    let parse = |text: &str| {
        text.split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect::<Vec<u32>>()
    };
    let (one, two) = (parse(&map(&name("ione.0"))), parse(&map(&name("itwo.1"))));
    assert_eq!((one[0], one[2]), (0, 65_536));
    assert_eq!(two[1], one[1] + 65_536);
}

fn is_limited(container: &Container) {
    let started = start(container, &name("ione.0"));
    let pid = agent_pid(&started.sandbox);
    let group = |pid: i32, what: &str| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let line = groups.lines().find(|line| line.split(':').nth(1) == Some(what));
        line.or_else(|| groups.lines().find(|line| line.starts_with("0::")))
            .unwrap()
            .to_owned()
    };
    let spawner = processes(pid).into_iter().find(|other| *other != pid).unwrap();
    for controller in ["memory", "pids", "cpu"] {
        assert!(
            group(spawner, controller).ends_with("/ione.0.work"),
            "{}",
            group(spawner, controller)
        );
        assert!(!group(pid, controller).ends_with(".work"), "{}", group(pid, controller));
    }
    let value = |controller: &str, files: [&str; 2]| {
        let path = group(spawner, controller).splitn(3, ':').nth(2).unwrap().to_owned();
        let roots = [format!("/sys/fs/cgroup/{controller}"), "/sys/fs/cgroup".to_owned()];
        let read = |root: &String, file: &str| fs::read_to_string(format!("{root}{path}/{file}")).ok();
        let text = roots.iter().zip(files).find_map(|(root, file)| read(root, file));
        text.unwrap().trim().to_owned()
    };
    assert_eq!(
        value("memory", ["memory.limit_in_bytes", "memory.max"]),
        (64 << 20).to_string()
    );
    assert_eq!(value("pids", ["pids.max", "pids.max"]), "20");
    let cpu = value("cpu", ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(cpu == "100000" || cpu == "100000 100000", "{cpu}");
}

fn is_measured(container: &Container) {
    let name = name("ione.0");
    let started = start(container, &name);
    let pid = agent_pid(&started.sandbox);
    let before = started.sandbox.usage().unwrap();
    assert!(before.cpu_time_us > 0, "{before:?}");
    assert_eq!(before.memory_total_bytes, 64 << 20);
    assert!(before.memory_used_bytes > 0, "{before:?}");
    assert!(before.memory_used_bytes < 32 << 20, "{before:?}");
    assert!(before.disk_total_bytes > 32 << 20, "{before:?}");
    assert!(before.disk_total_bytes <= 64 << 20, "{before:?}");
    // A file that exists: the host's root is nobody in there and could not make one.
    let file = format!("/proc/{pid}/root/etc/passwd");
    fs::write(&file, vec![1; 8 << 20]).unwrap();
    let full = started.sandbox.usage().unwrap();
    let more = full.disk_used_bytes - before.disk_used_bytes;
    assert!(((8 << 20)..(9 << 20)).contains(&more), "{more}");
    // What was freed is free at once, whatever the image on the host still holds.
    fs::write(&file, "").unwrap();
    let empty = started.sandbox.usage().unwrap();
    assert!(empty.disk_used_bytes < before.disk_used_bytes + (1 << 20), "{empty:?}");
    let again = container.find().unwrap().pop().unwrap().alive.unwrap();
    assert!(again.usage().unwrap().cpu_time_us >= before.cpu_time_us);
    started.sandbox.kill();
    assert!(started.sandbox.usage().is_err());
    assert!(container.room().unwrap().disk_available_bytes > 0);
}

fn is_found_again(container: &Container) {
    let (one, two) = (name("ione.0"), name("itwo.5"));
    let first = start(container, &one);
    let pid = agent_pid(&first.sandbox);
    let second = start(container, &two);
    second.sandbox.kill();
    drop((first, second));
    // A driver waits until the launchers of the one before it are gone.
    container.dismantle();
    let data_dir = format!("{container:?}");
    let later = open(Path::new(data_dir.split('"').nth(1).unwrap()));
    let mut found = later.find().unwrap();
    found.sort_by_key(|found| found.name.slot);
    assert_eq!(found.iter().map(|found| &found.name).collect::<Vec<_>>(), [&one, &two]);
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
    alive.respawn().unwrap();
    until(|| running().len() == 2);
    assert_ne!(running(), before);
    alive.kill();
    clean(&later, &one);
    clean(&later, &two);
    assert!(later.find().unwrap().is_empty());
    later.dismantle();
}

fn spawner_is_replaced(container: &Container) {
    let started = start(container, &name("ione.0"));
    let pid = agent_pid(&started.sandbox);
    let spawner = processes(pid).into_iter().find(|other| *other != pid).unwrap();
    let group = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let (before, unconfined) = (group(spawner), fs::read_to_string("/proc/self/status").unwrap());
    // One that was only stopped does not answer either, and goes all the same.
    let stop = rustix::process::Signal::STOP;
    rustix::process::kill_process(rustix::process::Pid::from_raw(spawner).unwrap(), stop).unwrap();
    started.sandbox.respawn().unwrap();
    // This agent reaps nobody, so the old one stays as a zombie.
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
    assert_eq!(open, 3, "only the standard streams are open in it");
}

fn failed_start_leaves_nothing(container: &Container) {
    let name = name("ione.0");
    let resources = Resources {
        disk_mb: 63,
        ..RESOURCES
    };
    let error = container.start(&name, &resources).unwrap_err();
    assert!(error.to_string().contains("disk template"), "{error}");
    let found = container.find().unwrap();
    assert!(found.iter().all(|found| found.alive.is_none()), "{found:?}");
    clean(container, &name);
    assert!(container.find().unwrap().is_empty());
    // The launcher goes on.
    start(container, &name);
}

fn control_is_the_agents(container: &Container) {
    let started = start(container, &name("ione.0"));
    let maker = SocketMaker::new().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = started.sandbox.control(&maker) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::yield_now();
    }
    // On the host there is no such socket: the name belongs to the sandbox's network namespace.
    let address = SocketAddr::from_abstract_name(protocol::agent::CONTROL_SOCKET).unwrap();
    assert!(std::os::unix::net::UnixStream::connect_addr(&address).is_err());
    started.sandbox.kill();
    assert!(started.sandbox.control(&maker).is_err());
}

fn launcher_that_stopped_is_replaced(container: &Container) {
    let data_dir = format!("{container:?}");
    let lock = Path::new(data_dir.split('"').nth(1).unwrap()).join("launchers.lock");
    // Our child that holds this driver's lock as its standard output; other tests have theirs, and a launcher has
    // children for a moment.
    let is_ours = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        parent == Some(&std::process::id().to_string())
    };
    let launchers: Vec<i32> = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|file| file == lock) && is_ours(*pid))
        .collect();
    let [launcher] = launchers[..] else {
        panic!("{launchers:?}")
    };
    let process = rustix::process::Pid::from_raw(launcher).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    let name = name("ione.0");
    let since = Instant::now();
    assert!(container.start(&name, &RESOURCES).is_err());
    assert!(since.elapsed() >= Duration::from_secs(30), "{:?}", since.elapsed());
    assert!(!Path::new(&format!("/proc/{launcher}")).exists(), "it is gone");
    clean(container, &name);
    assert!(container.find().unwrap().is_empty());
    start(container, &name);
}
