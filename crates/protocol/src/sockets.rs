//! The tables in which the kernel reports the memory of sockets: `/proc/net/raw`, `netlink`, `tcp`, `udp` and similar, and
//! the numbers of objects that hold memory by existing: netlink sockets and memberships in multicast groups.
//!
//! Host and agent both read them. A table of many sockets is tens of megabytes long, so it is read line by line, and
//! only until the sum exceeds the limit.

use std::io::{self, BufRead, BufReader, Read};

/// Read buffer size, in bytes. The kernel returns one page at a time.
const BUFFER: usize = 4096;
/// Maximum line length, in bytes. The kernel's lines have at most about 200.
const LINE_MAX: u64 = 1024;

/// What a netlink socket takes from the host besides its data, in bytes. Unlike all other sockets that a sandbox can have,
/// it has no slab of its own, and only those are charged.
pub const NETLINK_SOCKET: u64 = 2048;
/// What an IPv4 group with members takes, and each membership in it, in bytes.
const GROUP: u64 = 256;
const MEMBERSHIP: u64 = 64;

/// Netlink sockets of a network namespace, also those that are not bound, from its `/proc/net/protocols`.
#[must_use]
pub fn netlink_sockets(protocols: &str) -> u64 {
    let mut lines = protocols.lines().map(str::split_ascii_whitespace);
    let found = lines.find_map(|mut words| (words.next()? == "NETLINK").then(|| words.nth(1)?.parse().ok())?);
    found.unwrap_or(0)
}

/// Bytes that memberships in multicast groups take, from `/proc/net/igmp`. Stops reading as [`held`] does.
///
/// # Errors
/// When the table cannot be read.
pub fn held_by_groups(table: impl Read, enough: u64) -> io::Result<u64> {
    sum(table, enough, |line| {
        // Lines of interfaces begin with a number; those of groups, with white space before: address, members.
        let members = line
            .strip_prefix('\t')
            .and_then(|line| line.split_ascii_whitespace().nth(1));
        members.map_or(0, |members| {
            GROUP.saturating_add(members.parse::<u64>().unwrap_or(0).saturating_mul(MEMBERSHIP))
        })
    })
}

/// The columns of a table that contain the bytes that a socket holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// The fifth column: bytes being sent and received, in hexadecimal. Used by all tables except netlink.
    Queues,
    /// The fifth and the sixth column, in decimal. Used by the netlink table.
    Buffers,
}

impl Columns {
    /// Bytes held by the socket of a line; zero if the line does not describe a socket.
    fn bytes(self, line: &str) -> u64 {
        let mut words = line.split_ascii_whitespace().skip(4);
        match self {
            Self::Queues => {
                let bytes = |text: &str| u64::from_str_radix(text, 16).unwrap_or(0);
                let queues = words.next().and_then(|queues| queues.split_once(':'));
                queues.map_or(0, |(sending, received)| bytes(sending).saturating_add(bytes(received)))
            }
            Self::Buffers => {
                let buffers = words.take(2).map(|word| word.parse::<u64>().unwrap_or(0));
                buffers.fold(0, u64::saturating_add)
            }
        }
    }
}

/// The sum over a table. Stops reading once it exceeds `enough`, and then returns a number above that.
///
/// # Errors
/// When the table cannot be read.
pub fn held(table: impl Read, columns: Columns, enough: u64) -> io::Result<u64> {
    sum(table, enough, |line| columns.bytes(line))
}

/// The sum of the bytes in each line but the first.
fn sum(table: impl Read, enough: u64, bytes: impl Fn(&str) -> u64) -> io::Result<u64> {
    let mut table = BufReader::with_capacity(BUFFER, table);
    let mut line = Vec::new();
    let mut sum: u64 = 0;
    let mut is_header = true;
    while sum <= enough {
        line.clear();
        if table.by_ref().take(LINE_MAX).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if !is_header {
            sum = sum.saturating_add(bytes(&String::from_utf8_lossy(&line)));
        }
        is_header = false;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
                       253: 00000000:00FD 00000000:0000 07 00000010:0000A000 00:00000000 00000000     0        0 1 2 0 3\n\
                       253: 00000000:00FD 00000000:0000 07 00000000:00000001 00:00000000 00000000     0        0 1 2 0 3\n\
                       nonsense\n";

    fn all(table: &str, columns: Columns) -> u64 {
        held(table.as_bytes(), columns, u64::MAX).unwrap()
    }

    #[test]
    fn tables_are_summed() {
        assert_eq!(all(RAW, Columns::Queues), 0x10 + 0xa000 + 1);
        assert_eq!(all("", Columns::Queues), 0);
        let netlink = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n\
                       0000000000000000 0   1          00000000 4096     32       0     2        0        17\n\
                       0000000000000000 4   0          00000000 8        0        0     2        0        18\n\
                       nonsense\n\
                       0000000000000000 4   0          00000000 x        1";
        assert_eq!(all(netlink, Columns::Buffers), 4096 + 32 + 8 + 1);
    }

    #[test]
    fn objects_are_counted() {
        let protocols = "protocol  size sockets  memory press maxhdr  slab module     cl co\n\
                         TCP       2304      2     148   no     192   yes  kernel      y  y\n\
                         NETLINK   1096   4711      -1   NI       0   no   kernel      n  n\n";
        assert_eq!(netlink_sockets(protocols), 4711);
        assert_eq!(netlink_sockets(""), 0);
        let igmp = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                    1\tlo        :     1      V3\n\
                    \t\t\t\t010000E0     1 0:00000000\t\t0\n\
                    2\teth0      :     2      V3\n\
                    \t\t\t\tFB0000E0    20 0:00000000\t\t0\n";
        let held = held_by_groups(igmp.as_bytes(), u64::MAX).unwrap();
        assert_eq!(held, 2 * GROUP + 21 * MEMBERSHIP);
        assert_eq!(held_by_groups("".as_bytes(), u64::MAX).unwrap(), 0);
    }

    /// An endless table that counts the bytes read.
    struct Endless {
        read: usize,
    }

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let line = b"0: 0:0 0:0 07 00000000:00000400 0\n";
            for byte in buffer.iter_mut() {
                *byte = line[self.read % line.len()];
                self.read += 1;
            }
            Ok(buffer.len())
        }
    }

    #[test]
    fn reading_stops_once_the_sum_exceeds_enough() {
        let mut table = Endless { read: 0 };
        let sum = held(&mut table, Columns::Queues, 1 << 20).unwrap();
        assert_eq!(sum, (1 << 20) + 1024);
        assert!(table.read < 1024 * 34 + 2 * BUFFER, "{}", table.read);
    }

    #[test]
    fn an_endless_line_takes_no_memory() {
        let zeros = io::repeat(b'0').take(10 << 20);
        assert_eq!(held(zeros, Columns::Queues, 0).unwrap(), 0);
    }
}
