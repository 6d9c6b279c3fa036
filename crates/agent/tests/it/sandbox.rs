//! One agent in its namespaces, ended when dropped.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::client::Client;
use crate::sys;

/// An agent. Its file system is this machine's, except `/proc`, `/run`, `/etc/passwd` and `/etc/group`; what it writes
/// to `/etc` and `/usr` is its own.
pub(crate) struct Sandbox {
    pub(crate) agent: i32,
    network: File,
    pub(crate) directory: TempDir,
    boot: Option<UnixStream>,
}

impl Sandbox {
    /// A running agent, or none without root.
    pub(crate) fn start() -> Option<Self> {
        if !sys::is_root() {
            assert!(
                std::env::vars().all(|(key, _)| key != "AGENT_TESTS_MUST_RUN"),
                "needs root"
            );
            eprintln!("SKIPPED: needs root to make namespaces");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        // The users of the sandbox pass through it.
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let home = directory.path().join("home/user");
        fs::create_dir_all(&home).unwrap();
        fs::create_dir_all(directory.path().join("root")).unwrap();
        std::os::unix::fs::chown(&home, Some(1000), Some(1000)).unwrap();
        let shown = directory.path().display();
        let passwd = directory.path().join("passwd");
        fs::write(
            &passwd,
            format!("root:x:0:0::{shown}/root:/bin/sh\nuser:x:1000:1000::{shown}/home/user:/bin/sh\nlost:x:1001:1001::/nowhere:\n"),
        )
        .unwrap();
        let group = directory.path().join("group");
        fs::write(&group, "root:x:0:\nuser:x:1000:\nextra:x:2000:user\n").unwrap();

        let (boot, boot_of_agent) = UnixStream::pair().unwrap();
        let flags = SocketFlags::CLOEXEC;
        let (to_spawner, spawner) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let agent = sys::start(&sys::Plan {
            program: &sys::c_path(Path::new(env!("CARGO_BIN_EXE_ringfence-agent"))),
            passwd: &sys::c_path(&passwd),
            group: &sys::c_path(&group),
            boot: &OwnedFd::from(boot_of_agent),
            to_spawner: &to_spawner,
            spawner: &spawner,
        })
        .unwrap();
        let network = File::open(format!("/proc/{agent}/ns/net")).unwrap();
        Some(Self {
            agent,
            network,
            directory,
            boot: Some(boot),
        })
    }

    /// A file in the sandbox's own directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The connection that the agent inherited; once.
    pub(crate) async fn boot(&mut self) -> Client {
        let boot = self.boot.take().unwrap();
        boot.set_nonblocking(true).unwrap();
        Client::new(tokio::net::UnixStream::from_std(boot).unwrap()).await
    }

    /// A started agent that took an `/init`, which is also when it listens.
    pub(crate) async fn ready(init: &str) -> Option<Self> {
        let mut sandbox = Self::start()?;
        let mut boot = sandbox.boot().await;
        assert_eq!(boot.post("/init", init).await.status, 204);
        Some(sandbox)
    }

    /// Runs a function in the sandbox's network.
    pub(crate) fn in_network<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let network = self.network.try_clone().unwrap();
        let inside = move || {
            sys::enter_network(network.as_fd()).unwrap();
            work()
        };
        std::thread::spawn(inside).join().unwrap()
    }

    /// A client over TCP.
    pub(crate) async fn client(&self) -> Client {
        let stream = self.in_network(|| std::net::TcpStream::connect(("127.0.0.1", protocol::agent::PORT)).unwrap());
        stream.set_nonblocking(true).unwrap();
        Client::new(TcpStream::from_std(stream).unwrap()).await
    }

    /// A socket that listens on a free port of the sandbox's loopback.
    pub(crate) fn listener(&self) -> tokio::net::TcpListener {
        let listener = self.in_network(|| std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap());
        listener.set_nonblocking(true).unwrap();
        tokio::net::TcpListener::from_std(listener).unwrap()
    }

    /// A connection to the control socket.
    pub(crate) fn host_stream(&self) -> tokio::net::UnixStream {
        use std::os::linux::net::SocketAddrExt;
        let stream = self.in_network(|| {
            let address = std::os::unix::net::SocketAddr::from_abstract_name(protocol::agent::CONTROL_SOCKET).unwrap();
            UnixStream::connect_addr(&address).unwrap()
        });
        stream.set_nonblocking(true).unwrap();
        tokio::net::UnixStream::from_std(stream).unwrap()
    }

    /// The host on the control socket.
    pub(crate) async fn host(&self) -> Client {
        Client::new(self.host_stream()).await
    }

    /// Pids, as seen from here, of the agent's children whose command line has this word.
    pub(crate) fn children(&self, word: &str) -> Vec<i32> {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.agent)).unwrap();
        let pids = children.split_whitespace().map(|pid| pid.parse().unwrap());
        pids.filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0)
                .any(|argument| argument == word.as_bytes())
        })
        .collect()
    }

    /// Kilobytes of a field of `/proc/PID/status` of the agent, such as `RssAnon`.
    pub(crate) fn memory(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.agent)).unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        sys::end(self.agent);
    }
}
