//! Keys of outbound connections.

use crate::config::egress;
use crate::config::key::{Key, Kind, set};
use crate::config::values::{boolean, file, kib, number, some};

keys! {
    EGRESS_ENABLED = {
        "egress.enabled", None, Boolean, "true",
        "Whether sandboxes can connect to anything outside.",
        egress.enabled = boolean,
    },
    EGRESS_DEFAULT = {
        "egress.default", None, Text, "allow",
        "What applies to public addresses that the network settings of a sandbox do not mention: allow or deny.",
        egress.default_allow = egress::is_allow,
    },
    EGRESS_ALLOW_PRIVATE = {
        "egress.allow_private", None, Text, "none",
        "Comma-separated networks that sandboxes may reach although they are not public.",
        egress.allow_private = egress::cidrs,
    },
    EGRESS_DENY = {
        "egress.deny", None, Text, "none",
        "Comma-separated networks that no sandbox may reach, whatever else allows them.",
        egress.deny = egress::cidrs,
    },
    EGRESS_RESOLVERS = {
        "egress.resolvers", None, Text, "those of the host",
        "Comma-separated DNS servers that answer the queries of sandboxes, as address or address:port.",
        egress.resolvers = egress::resolvers,
    },
    EGRESS_HOSTS = {
        "egress.hosts", None, Hosts, "none",
        "Addresses of names inside sandboxes: a table in the file, elsewhere name=address,name=address.",
        egress.hosts = egress::hosts,
    },
    EGRESS_CONNECTIONS = {
        "egress.connections", None, Integer, "1000",
        "Maximum number of open TCP connections from a sandbox, 1 to 1000000.",
        egress.limits.connections = number(1, egress::LIMIT_MAX),
    },
    EGRESS_CONNECTIONS_PER_S = {
        "egress.connections_per_s", None, Integer, "100",
        "Maximum number of new TCP connections from a sandbox per second, 1 to 1000000, and four times as many in one burst.",
        egress.limits.connections_per_s = number(1, egress::LIMIT_MAX),
    },
    EGRESS_DNS_QUERIES_PER_S = {
        "egress.dns_queries_per_s", None, Integer, "100",
        "Maximum number of DNS queries of a sandbox per second that no cache answers, 1 to 1000000, and four times as many \
         in one burst. Further ones wait.",
        egress.limits.dns_queries_per_s = number(1, egress::LIMIT_MAX),
    },
    EGRESS_BANDWIDTH_MBIT = {
        "egress.bandwidth_mbit", None, Integer, "0",
        "Maximum bandwidth of a sandbox's connections, in each direction, in Mbit/s, at most 1000000; 0 is no limit.",
        egress.limits.bandwidth_mbit = number(0, egress::LIMIT_MAX),
    },
    EGRESS_UDP_FLOWS = {
        "egress.udp_flows", None, Integer, "256",
        "Maximum number of concurrent UDP flows from a sandbox, at most 1000000; 0 closes UDP but for the resolver.",
        egress.limits.udp_flows = number(0, egress::LIMIT_MAX),
    },
    EGRESS_INTERCEPTED = {
        "egress.intercepted", None, Integer, "256",
        "Maximum number of open connections from a sandbox that are intercepted for its injection rules, at most 1000000; \
         0 refuses connections to their hosts.",
        egress.limits.intercepted = number(0, egress::LIMIT_MAX),
    },
    EGRESS_REQUESTS_PER_S = {
        "egress.requests_per_s", None, Integer, "1000",
        "Maximum number of requests from a sandbox per second on all intercepted connections, 1 to 1000000, and four times \
         as many in one burst. Further ones are answered with 429.",
        egress.limits.requests_per_s = number(1, egress::LIMIT_MAX),
    },
    EGRESS_MASK_KB = {
        "egress.mask_kb", None, Integer, "4096",
        "How much of a response is searched for injected secrets, to hide them, in KiB; 0 for its headers only.",
        egress.mask_bytes = kib(0, egress::LIMIT_MAX),
    },
    EGRESS_CA_FILE = {
        "egress.ca_file", None, Text, "none",
        "File with certificates of further issuers, in PEM, that servers of intercepted connections may have.",
        egress_ca_file = some(file),
    },
    EGRESS_CA_FILES = {
        "egress.ca_files", None, Text, "none",
        "Comma-separated files with certificates of issuers, in PEM, that every sandbox trusts, with all that runs in it, \
         builds included, and that the gateway trusts for them.",
        egress_ca_files = egress::files,
    },
    UNLIMITED = {
        "unlimited", None, Boolean, "false",
        "Start even if cgroups are not usable. Sandboxes then run without limits on CPU, memory and processes.",
        node.driver.unlimited = boolean,
    },
}
