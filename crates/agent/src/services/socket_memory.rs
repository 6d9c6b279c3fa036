//! Keeps sockets from taking the host's memory while no platform watches.
//!
//! Netlink sockets and replies, memberships in multicast groups, what raw sockets receive, error queues, held-back datagrams and connections that are not accepted
//! are charged to no control group. While a platform runs it watches every sandbox and ends the one that holds too much
//! of that. It notices by reading this agent's events. While it does not, the agent looks at what `/proc/net` reports
//! of its own namespace, and kills the workload. The sandbox stays, with its files.
//!
//! A connection alone proves nothing, for a platform that was stopped keeps its own open. So while there are sockets
//! worth a look the agent sends a heartbeat now and then, and asks the kernel whether it was read. With few sockets
//! that is one wake-up and one small file every [`PROBE`].

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use protocol::agent::AgentEvent;
use protocol::sockets::{Columns, NETLINK_SOCKET, held, held_by_groups, netlink_sockets};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use tokio::time::Instant;

use crate::services::events::EventQueue;
use crate::sys;

/// Time between two looks while no platform reads the events.
const PAUSE: Duration = Duration::from_millis(500);
/// How many times as long as a look took is waited for the next one, so that long tables do not take the processor.
const REST: u32 = 4;
/// Time between two questions whether a platform still reads.
const PROBE: Duration = Duration::from_secs(10);
/// Time that a platform has for reading a heartbeat.
const GRACE: Duration = Duration::from_secs(1);
/// Heartbeats in a row that a platform has to leave unread before it counts as stopped: a busy host may hold one up for a
/// second.
const PROBES: u32 = 2;
/// Number of sockets up to which the tables are not read: the agent's own are about as many.
const FEW: u64 = 8;
/// Most that sockets may hold beyond what they are charged with. Twice what a platform allows, because these figures
/// are rougher than its own.
const BOUND: u64 = 128 << 20;
/// What the tables of sockets that are never charged hold, and how.
const UNCHARGED_TABLES: [(&str, Columns); 3] = [
    ("netlink", Columns::Buffers),
    ("raw", Columns::Queues),
    ("raw6", Columns::Queues),
];
/// Longest table of protocols, in bytes. It has a line of about 130 for each.
const PROTOCOLS_MAX: u64 = 64 << 10;
const CHARGED_TABLES: [&str; 4] = ["tcp", "tcp6", "udp", "udp6"];
/// Where the charge for sockets is, with version 2 of control groups and with version 1.
const CHARGES: [&str; 2] = [
    "/sys/fs/cgroup/memory.stat",
    "/sys/fs/cgroup/memory/memory.kmem.tcp.usage_in_bytes",
];

/// Looks whenever no platform reads the agent's events. Runs for ever.
pub(crate) async fn watch(event_queue: Rc<EventQueue>) {
    let sources = Arc::new(Sources::open());
    let mut stalled = false;
    let mut pause = PAUSE;
    'looks: loop {
        if event_queue.has_reader() && !stalled {
            let changed = tokio::time::timeout(PROBE, event_queue.reader_changed()).await.is_ok();
            if changed || sources.in_use() <= FEW {
                continue;
            }
            for _ in 0..PROBES {
                event_queue.probe();
                // Another reader has not been asked yet.
                let changed = tokio::time::timeout(GRACE, event_queue.reader_changed()).await.is_ok();
                if changed || event_queue.is_followed() {
                    continue 'looks;
                }
            }
        } else {
            tokio::time::sleep(pause).await;
        }
        stalled = event_queue.has_reader() && !event_queue.is_followed();
        if event_queue.has_reader() && !stalled {
            continue;
        }
        let began = Instant::now();
        // Twice, because the figures behind the sum are not read at one moment.
        if look(&sources).await > BOUND {
            let bytes = look(&sources).await;
            if bytes > BOUND {
                event_queue.record(&AgentEvent::SocketMemory { bytes });
                sys::kill_all_others();
            }
        }
        pause = PAUSE.max(began.elapsed() * REST);
    }
}

/// What the sockets hold beyond their charge. Long tables take a while, so not on the one thread.
async fn look(sources: &Arc<Sources>) -> u64 {
    let sources = Arc::clone(sources);
    let work = move || sources.held_uncharged(BOUND);
    tokio::task::spawn_blocking(work).await.unwrap_or(0)
}

/// Where the kernel reports on this sandbox's sockets, opened before the workload runs.
#[derive(Debug, Default)]
struct Sources {
    /// `/proc/self/net`.
    tables: Option<OwnedFd>,
    /// What the sandbox's sockets are charged with.
    charge: Option<File>,
}

impl Sources {
    fn open() -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self {
            tables: rustix::fs::openat(CWD, "/proc/self/net", flags, Mode::empty()).ok(),
            charge: CHARGES.iter().find_map(|path| File::open(path).ok()),
        }
    }

    /// Opens a table, but nothing that was mounted over it.
    fn table(&self, name: &str) -> io::Result<File> {
        let directory = self.tables.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve)?.into())
    }

    /// Sockets of all kinds; as many as there can be where that is not known.
    fn in_use(&self) -> u64 {
        let mut text = [0; 512];
        let read = self.table("sockstat").and_then(|mut table| table.read(&mut text));
        read.ok()
            .and_then(|length| in_use(&String::from_utf8_lossy(&text[..length])))
            .unwrap_or(u64::MAX)
    }

    /// Bytes that the sockets hold beyond their charge, or any number above `enough` once there is more than that.
    fn held_uncharged(&self, enough: u64) -> u64 {
        if self.in_use() <= FEW {
            return 0;
        }
        let add = |sum: u64, name: &str, columns, enough: u64| {
            let table = self.table(name);
            let held = table.and_then(|table| held(table, columns, enough.saturating_sub(sum)));
            sum.saturating_add(held.unwrap_or(0))
        };
        let objects = self.objects(enough);
        let never_charged = UNCHARGED_TABLES
            .iter()
            .fold(objects, |sum, (name, columns)| add(sum, name, *columns, enough));
        // Where the charge is not known, all of what may be charged counts as charged.
        let Some(charged) = self.charged().filter(|_| never_charged <= enough) else {
            return never_charged;
        };
        let enough = charged.saturating_add(enough - never_charged);
        let chargeable = CHARGED_TABLES
            .iter()
            .fold(0, |sum, name| add(sum, name, Columns::Queues, enough));
        never_charged + chargeable.saturating_sub(charged)
    }

    /// What netlink sockets and memberships hold by existing.
    fn objects(&self, enough: u64) -> u64 {
        let mut protocols = String::new();
        let table = self.table("protocols");
        let read = table.and_then(|table| table.take(PROTOCOLS_MAX).read_to_string(&mut protocols));
        let sockets = read.map_or(0, |_| netlink_sockets(&protocols));
        let groups = self.table("igmp").and_then(|table| held_by_groups(table, enough));
        sockets
            .saturating_mul(NETLINK_SOCKET)
            .saturating_add(groups.unwrap_or(0))
    }

    fn charged(&self) -> Option<u64> {
        let mut text = [0; 8192];
        let length = self.charge.as_ref()?.read_at(&mut text, 0).ok()?;
        charged(&String::from_utf8_lossy(&text[..length]))
    }
}

/// The number of version 1, or the line `sock` of version 2.
fn charged(text: &str) -> Option<u64> {
    let number = text.trim().parse().ok();
    number.or_else(|| text.lines().find_map(|line| line.strip_prefix("sock ")?.parse().ok()))
}

/// Sockets of all kinds, from `/proc/net/sockstat`.
fn in_use(text: &str) -> Option<u64> {
    let number = |line: &str| line.strip_prefix("sockets: used ")?.parse().ok();
    text.lines().find_map(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_and_their_charge_are_read() {
        assert_eq!(in_use("sockets: used 70\nTCP: inuse 5 orphan 1\n"), Some(70));
        assert_eq!(in_use(""), None);
        assert_eq!(charged("4096\n"), Some(4096));
        assert_eq!(charged("anon 1\nfile 2\nsock 8192\nshmem 3\n"), Some(8192));
        assert_eq!(charged("anon 1\n"), None);
    }

    #[test]
    fn this_machine_can_be_read() {
        let sources = Sources::open();
        assert!(sources.in_use() < u64::MAX);
        for (name, _) in UNCHARGED_TABLES {
            assert!(sources.table(name).is_ok() || name == "raw6", "{name}");
        }
        // What cannot be read is worth a look, which then finds nothing.
        let none = Sources::default();
        assert_eq!((none.in_use(), none.held_uncharged(BOUND)), (u64::MAX, 0));
    }
}
