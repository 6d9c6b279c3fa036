//! The socket options that programs in a sandbox may set.
//!
//! An allow-list: what ordinary programs set (shells and tools of distributions, browsers, JVMs, Go, Node, Python, web
//! servers, databases, DNS servers, QUIC and gRPC libraries), as long as the memory that the kernel takes for it is either
//! charged or bounded. Many options make the kernel allocate memory that no control group is charged for, of as many
//! sockets as a sandbox can open, and any kernel may have more of them. What is not on the list returns ENOPROTOOPT, as on a
//! kernel without the option, which programs handle. Left out on purpose:
//!
//! - keys (`TCP_MD5SIG`, `TCP_AO_*`): up to `net.core.optmem_max` for each socket, bound or not, and for the first one a
//!   pool of the host's.
//! - memberships in multicast groups, and source filters: the limit of 20 IPv4 memberships is one of each socket, and of
//!   those there can be many. The kernel searches a list of all of a network namespace from its start for each membership
//!   that is added or ends, for IPv4 with the one lock that also creates namespaces: with 100,000 of them, other sandboxes
//!   started in seconds, and killed processes took minutes to exit. Groups reach nothing but the sandbox itself.
//! - `IPV6_FLOWLABEL_MGR`: all sandboxes share 4,096 labels, and one that has taken them leaves one to each socket of the
//!   others.
//! - extension headers and options of IP (`IPV6_HOPOPTS`, `IPV6_RTHDR`, `IPV6_2292PKTOPTIONS`, `IP_OPTIONS`) and headers
//!   that are kept (`TCP_SAVE_SYN`): kept for each socket.
//! - `SO_ZEROCOPY`: notices of what was sent, for each socket, and pages that stay pinned.
//! - `SO_RESERVE_MEM`: reserves a part of `tcp_mem`, which is the host's, without any data.
//! - `TCP_ULP` and `TCP_CONGESTION`: name a module of the kernel. It is loaded only for an administrator of the host, but
//!   protocols like kernel TLS keep state for each connection, and the connections of a sandbox end at the gateway anyway.
//! - `TCP_TX_DELAY` and `UDP_ENCAP`: change the code of the kernel for all sockets of the host.
//! - `TCP_REPAIR*`, `IP_TRANSPARENT`, policies of IPsec, multicast routing, and the tables of packet filters (from 64 on at
//!   the levels of IPv4 and IPv6): for administrators of a network.

use std::collections::BTreeMap;

use libc::c_int;

use super::data;
use super::steps::{Answer, Step, cover, decide};

// Options and levels that the libc crate does not name (include/uapi/linux).
const SO_NO_CHECK: c_int = 11;
const SO_BSDCOMPAT: c_int = 14;
const SO_DETACH_FILTER: c_int = 27;
const SO_MAX_PACING_RATE: c_int = 47;
const SO_CNX_ADVICE: c_int = 53;
const SO_PASSPIDFD: c_int = 76;
const SO_PASSRIGHTS: c_int = 83;
const TCP_INQ: c_int = 36;
const IP_RECVFRAGSIZE: c_int = 25;
const IP_RECVERR_RFC4884: c_int = 26;
const IP_UNICAST_IF: c_int = 50;
const IP_LOCAL_PORT_RANGE: c_int = 51;
const UDP_NO_CHECK6_TX: c_int = 101;
const UDP_NO_CHECK6_RX: c_int = 102;
const IPV6_FLOWINFO: c_int = 11;
const IPV6_RECVERR_RFC4884: c_int = 31;
const IPV6_FLOWINFO_SEND: c_int = 33;
const IPV6_AUTOFLOWLABEL: c_int = 70;
const IPV6_UNICAST_IF: c_int = 76;
const IPV6_RECVFRAGSIZE: c_int = 77;
const IPV6_FREEBIND: c_int = 78;
const SOL_RAW: c_int = 255;
const ICMP_FILTER: c_int = 1;
const ICMPV6_FILTER: c_int = 1;

/// Options that are allowed, by their levels.
pub(super) const ALLOWED: [(c_int, &[c_int]); 8] = [
    (
        libc::SOL_SOCKET,
        &[
            libc::SO_DEBUG,
            libc::SO_REUSEADDR,
            libc::SO_DONTROUTE,
            libc::SO_BROADCAST,
            libc::SO_SNDBUF,
            libc::SO_RCVBUF,
            libc::SO_KEEPALIVE,
            libc::SO_OOBINLINE,
            SO_NO_CHECK,
            libc::SO_PRIORITY,
            libc::SO_LINGER,
            SO_BSDCOMPAT,
            libc::SO_REUSEPORT,
            libc::SO_PASSCRED,
            libc::SO_RCVLOWAT,
            libc::SO_SNDLOWAT,
            libc::SO_RCVTIMEO,
            libc::SO_SNDTIMEO,
            libc::SO_BINDTODEVICE,
            SO_DETACH_FILTER,
            libc::SO_TIMESTAMP,
            // The next two answer EPERM to whoever is not an administrator of the host.
            libc::SO_SNDBUFFORCE,
            libc::SO_RCVBUFFORCE,
            libc::SO_PASSSEC,
            libc::SO_TIMESTAMPNS,
            libc::SO_MARK,
            libc::SO_TIMESTAMPING,
            libc::SO_RXQ_OVFL,
            libc::SO_PEEK_OFF,
            libc::SO_SELECT_ERR_QUEUE,
            libc::SO_BUSY_POLL,
            SO_MAX_PACING_RATE,
            libc::SO_INCOMING_CPU,
            SO_CNX_ADVICE,
            libc::SO_BINDTOIFINDEX,
            libc::SO_TIMESTAMP_NEW,
            libc::SO_TIMESTAMPNS_NEW,
            libc::SO_TIMESTAMPING_NEW,
            libc::SO_RCVTIMEO_NEW,
            libc::SO_SNDTIMEO_NEW,
            libc::SO_PREFER_BUSY_POLL,
            libc::SO_BUSY_POLL_BUDGET,
            SO_PASSPIDFD,
            SO_PASSRIGHTS,
        ],
    ),
    (
        libc::IPPROTO_TCP,
        &[
            libc::TCP_NODELAY,
            libc::TCP_MAXSEG,
            libc::TCP_CORK,
            libc::TCP_KEEPIDLE,
            libc::TCP_KEEPINTVL,
            libc::TCP_KEEPCNT,
            libc::TCP_SYNCNT,
            libc::TCP_LINGER2,
            libc::TCP_DEFER_ACCEPT,
            libc::TCP_WINDOW_CLAMP,
            libc::TCP_QUICKACK,
            libc::TCP_THIN_LINEAR_TIMEOUTS,
            libc::TCP_THIN_DUPACK,
            libc::TCP_USER_TIMEOUT,
            libc::TCP_FASTOPEN,
            libc::TCP_NOTSENT_LOWAT,
            libc::TCP_FASTOPEN_CONNECT,
            libc::TCP_FASTOPEN_NO_COOKIE,
            TCP_INQ,
        ],
    ),
    (
        libc::IPPROTO_IP,
        &[
            libc::IP_TOS,
            libc::IP_TTL,
            libc::IP_HDRINCL,
            libc::IP_RECVOPTS,
            libc::IP_RETOPTS,
            libc::IP_PKTINFO,
            libc::IP_MTU_DISCOVER,
            libc::IP_RECVERR,
            libc::IP_RECVTTL,
            libc::IP_RECVTOS,
            libc::IP_FREEBIND,
            libc::IP_PASSSEC,
            libc::IP_RECVORIGDSTADDR,
            libc::IP_MINTTL,
            libc::IP_BIND_ADDRESS_NO_PORT,
            IP_RECVFRAGSIZE,
            IP_RECVERR_RFC4884,
            libc::IP_MULTICAST_IF,
            libc::IP_MULTICAST_TTL,
            libc::IP_MULTICAST_LOOP,
            libc::IP_MULTICAST_ALL,
            IP_UNICAST_IF,
            IP_LOCAL_PORT_RANGE,
        ],
    ),
    (
        libc::IPPROTO_UDP,
        &[
            libc::UDP_CORK,
            UDP_NO_CHECK6_TX,
            UDP_NO_CHECK6_RX,
            libc::UDP_SEGMENT,
            libc::UDP_GRO,
        ],
    ),
    (
        libc::IPPROTO_IPV6,
        &[
            libc::IPV6_2292PKTINFO,
            libc::IPV6_2292HOPOPTS,
            libc::IPV6_2292DSTOPTS,
            libc::IPV6_2292RTHDR,
            libc::IPV6_CHECKSUM,
            libc::IPV6_2292HOPLIMIT,
            IPV6_FLOWINFO,
            libc::IPV6_UNICAST_HOPS,
            libc::IPV6_MULTICAST_IF,
            libc::IPV6_MULTICAST_HOPS,
            libc::IPV6_MULTICAST_LOOP,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_MTU,
            libc::IPV6_RECVERR,
            libc::IPV6_V6ONLY,
            libc::IPV6_MULTICAST_ALL,
            IPV6_RECVERR_RFC4884,
            IPV6_FLOWINFO_SEND,
            libc::IPV6_HDRINCL,
            libc::IPV6_RECVPKTINFO,
            libc::IPV6_PKTINFO,
            libc::IPV6_RECVHOPLIMIT,
            libc::IPV6_RECVHOPOPTS,
            libc::IPV6_RECVRTHDR,
            libc::IPV6_RECVDSTOPTS,
            libc::IPV6_RECVPATHMTU,
            libc::IPV6_DONTFRAG,
            libc::IPV6_RECVTCLASS,
            libc::IPV6_TCLASS,
            IPV6_AUTOFLOWLABEL,
            libc::IPV6_ADDR_PREFERENCES,
            libc::IPV6_MINHOPCOUNT,
            libc::IPV6_RECVORIGDSTADDR,
            IPV6_UNICAST_IF,
            IPV6_RECVFRAGSIZE,
            IPV6_FREEBIND,
        ],
    ),
    (libc::IPPROTO_ICMPV6, &[ICMPV6_FILTER]),
    (SOL_RAW, &[ICMP_FILTER, libc::IPV6_CHECKSUM]),
    (
        libc::SOL_NETLINK,
        &[
            libc::NETLINK_ADD_MEMBERSHIP,
            libc::NETLINK_DROP_MEMBERSHIP,
            libc::NETLINK_PKTINFO,
            libc::NETLINK_BROADCAST_ERROR,
            libc::NETLINK_NO_ENOBUFS,
            libc::NETLINK_CAP_ACK,
            libc::NETLINK_EXT_ACK,
            libc::NETLINK_GET_STRICT_CHK,
        ],
    ),
];

/// Programs for the kernel's packet filter, which return EPERM: their machine code counts against a limit of the host.
pub(super) const FILTERS: [c_int; 4] = [
    libc::SO_ATTACH_FILTER,
    libc::SO_ATTACH_BPF,
    libc::SO_ATTACH_REUSEPORT_CBPF,
    libc::SO_ATTACH_REUSEPORT_EBPF,
];

/// `TCP_ZEROCOPY_RECEIVE`: maps pages of a socket into a process, where they no longer count as data of the socket.
pub(super) const TCP_ZEROCOPY_RECEIVE: c_int = 35;

/// What follows for a call of `setsockopt`: searches for its level, then for its option.
pub(super) fn setting() -> Vec<Step> {
    let absent = [Step::Return(Answer::Errno(libc::ENOPROTOOPT))];
    let levels = ALLOWED.iter().map(|(level, options)| {
        let answers = options.iter().map(|option| (*option, Answer::Allow));
        let filters = FILTERS.iter().filter(|_| *level == libc::SOL_SOCKET);
        let filters = filters.map(|option| (*option, Answer::Errno(libc::EPERM)));
        let answers: BTreeMap<u32, Vec<Step>> = answers
            .chain(filters)
            .map(|(option, answer)| (option.cast_unsigned(), vec![Step::Return(answer)]))
            .collect();
        let mut steps = vec![Step::Load(data::argument(2))];
        steps.extend(decide(&cover(answers, &absent)));
        (level.cast_unsigned(), steps)
    });
    let mut steps = vec![
        // A negative length.
        Step::Load(data::argument(4)),
        Step::IfAtLeastElseSkip(1 << 31, 1),
        Step::Return(Answer::Errno(libc::EINVAL)),
        Step::Load(data::argument(1)),
    ];
    steps.extend(decide(&cover(levels.collect(), &absent)));
    steps
}

/// What follows for a call of `getsockopt`. No other option that can be read takes memory: those of packet filters answer
/// EPERM to whoever does not administrate the network.
pub(super) fn reading() -> [Step; 6] {
    [
        Step::Load(data::argument(1)),
        Step::IfEqualElseSkip(libc::IPPROTO_TCP.cast_unsigned(), 3),
        Step::Load(data::argument(2)),
        Step::IfEqualElseSkip(TCP_ZEROCOPY_RECEIVE.cast_unsigned(), 1),
        Step::Return(Answer::Errno(libc::ENOPROTOOPT)),
        Step::Return(Answer::Allow),
    ]
}
