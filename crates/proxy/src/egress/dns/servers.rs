//! The DNS servers of the host, and whether the host has IPv6.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The port of DNS servers.
pub(super) const PORT: u16 = 53;

/// Servers that are asked, as many as libc asks. Each costs the timeout of a query.
pub(super) const MAX_SERVERS: usize = 3;

/// How often the file of the host and its routes are checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The file has a few lines; what is longer is not one.
const MAX_FILE: u64 = 64 << 10;

/// A public address: that of one of the root name servers. Nothing is sent there.
const PUBLIC_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0x500, 0x2f, 0, 0, 0, 0, 0xf);

/// The servers in the text of a resolv.conf, at most as many as are asked. Lines that are not understood are skipped, for
/// example addresses with the name of an interface.
pub(super) fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let keyword = words.next()?;
        let address: IpAddr = words.next()?.parse().ok()?;
        (keyword == "nameserver").then(|| SocketAddr::new(address, PORT))
    };
    text.lines().filter_map(server).take(MAX_SERVERS).collect()
}

/// The servers in a file, which is read again when it has changed.
pub(super) struct HostServers {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    checked: Option<Instant>,
    version: Option<Version>,
    servers: Arc<[SocketAddr]>,
}

/// Device, file, size and time of the last change: differs if the contents do.
type Version = (u64, u64, u64, i64, i64);

impl HostServers {
    pub(super) fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            state: Mutex::default(),
        }
    }

    /// The current servers; none if the file is missing.
    pub(super) fn current(&self) -> Arc<[SocketAddr]> {
        let mut state = self.state.lock();
        let now = Instant::now();
        if state.checked.is_none_or(|checked| now - checked >= CHECK_INTERVAL) {
            let is_first = state.checked.replace(now).is_none();
            let metadata = std::fs::metadata(&self.path).ok();
            let version = metadata.map(|file| (file.dev(), file.ino(), file.size(), file.ctime(), file.ctime_nsec()));
            if is_first || version != state.version {
                let mut text = Vec::new();
                let read = File::open(&self.path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut text));
                if let Err(error) = read {
                    tracing::warn!(path = %self.path.display(), %error, "cannot read the DNS servers of the host");
                    text.clear();
                }
                state.version = version;
                state.servers = parse_resolv_conf(&String::from_utf8_lossy(&text)).into();
            }
        }
        state.servers.clone()
    }
}

/// Whether the host has a route to public IPv6 addresses.
#[derive(Default)]
pub(super) struct Ipv6Route {
    state: Mutex<Option<(Instant, bool)>>,
}

impl Ipv6Route {
    /// Whether the host has a route for IPv6, as of the last seconds.
    pub(super) fn has_ipv6(&self) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        match *state {
            Some((until, has_ipv6)) if now < until => has_ipv6,
            _ => {
                let has_ipv6 = has_ipv6();
                *state = Some((now + CHECK_INTERVAL, has_ipv6));
                has_ipv6
            }
        }
    }

    #[cfg(test)]
    pub(super) fn fixed(has_ipv6: bool) -> Self {
        let until = Instant::now() + Duration::from_secs(1 << 30);
        Self {
            state: Mutex::new(Some((until, has_ipv6))),
        }
    }
}

/// Connecting a UDP socket looks a route up and sends nothing.
fn has_ipv6() -> bool {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
    socket.is_ok_and(|socket| socket.connect((PUBLIC_IPV6, PORT)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_not_understood_are_skipped() {
        let text = "# nameserver 192.0.2.9\n; nameserver 192.0.2.9\nsearch example.com\noptions edns0\n\
            nameserver\nnameserver x\nnameserver fe80::1%eth0\n nameserver  127.0.0.53 # local\nnameserver\t2001:db8::1\n\
            nameserver192.0.2.9\nnameservers 192.0.2.9\nnameserver 192.0.2.1:53\nnameserver 192.0.2.1\r\n\
            nameserver 192.0.2.2";
        let servers: Vec<SocketAddr> = ["127.0.0.53:53", "[2001:db8::1]:53", "192.0.2.1:53"]
            .map(|text| text.parse().unwrap())
            .into();
        assert_eq!(parse_resolv_conf(text), servers);
        assert_eq!(parse_resolv_conf(""), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_changes_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let servers = HostServers::new(&path);
        let addresses = || {
            servers
                .current()
                .iter()
                .map(|server| server.ip().to_string())
                .collect::<Vec<_>>()
        };
        let none: [&str; 0] = [];
        assert_eq!(addresses(), none);
        std::fs::write(&path, "nameserver 192.0.2.1").unwrap();
        assert_eq!(addresses(), none);
        tokio::time::advance(CHECK_INTERVAL).await;
        assert_eq!(addresses(), ["192.0.2.1"]);
        let new = folder.path().join("new");
        std::fs::write(&new, "nameserver 192.0.2.2").unwrap();
        std::fs::rename(&new, &path).unwrap();
        tokio::time::advance(CHECK_INTERVAL).await;
        assert_eq!(addresses(), ["192.0.2.2"]);
        std::fs::remove_file(&path).unwrap();
        tokio::time::advance(CHECK_INTERVAL).await;
        assert_eq!(addresses(), none);
    }

    #[tokio::test]
    async fn ipv6_is_known() {
        assert_eq!(Ipv6Route::default().has_ipv6(), has_ipv6());
        assert!(Ipv6Route::fixed(true).has_ipv6());
    }
}
