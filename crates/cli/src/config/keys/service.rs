//! Keys of the service: addresses, certificates, connections, and what it serves beside the API.

use crate::config::key::{Key, Kind, set};
use crate::config::mcp;
use crate::config::values::{
    boolean, count, directory, domain, listen, networks, server_address, server_addresses, some,
};

keys! {
    DATA_DIR = {
        "data_dir", Some("--data-dir"), Text, "/var/lib/ringfence",
        "Data directory: database, keys, sandboxes. Created with mode 0700 if it does not exist.",
        data_dir = directory,
    },
    LISTEN = {
        "listen", Some("--listen"), Text, "127.0.0.1:3000",
        "Address and port of the API and of sandbox traffic. Port 0 selects a free port.",
        listen = listen,
    },
    METRICS_LISTEN = {
        "metrics_listen", Some("--metrics-listen"), Text, "none",
        "Address and port on which metrics for Prometheus are served, without authentication.",
        metrics_listen = some(listen),
    },
    NODES_LISTEN = {
        "nodes.listen", Some("--nodes-listen"), Text, "127.0.0.1:3100",
        "Address and port of `ringfence server` to which its nodes connect, with mutual TLS. Port 0 selects a free port.",
        nodes_listen = listen,
    },
    NODES_ADDRESS = {
        "nodes.address", Some("--nodes-address"), Text, "none",
        "Where other instances of `ringfence server` reach that port of this one, https://<host>:<port>: only for several \
         servers on one database, which must be PostgreSQL.",
        nodes_address = some(server_address),
    },
    NODES_SERVERS = {
        "nodes.servers", None, Text, "those that it has joined",
        "Comma-separated addresses of the servers that `ringfence node` connects to, one at a time, https://<host>:<port>.",
        nodes_servers = server_addresses,
    },
    DOMAIN = {
        "domain", Some("--domain"), Text, "sandbox.localhost:<port of listen>",
        "Domain of sandboxes, whose host names are <port>-<id>.<domain>. Must include the port that clients connect \
         to, unless it is the default port of the scheme.",
        domain = some(domain),
    },
    TLS = {
        "tls", Some("--tls"), Boolean, "false, or true with tls_cert or acme.directory",
        "Whether to serve HTTPS besides HTTP on the same port. Without tls_cert and acme.directory the certificate is \
         issued by a local CA, which clients must trust: <data-dir>/tls/ca.pem.",
    },
    TLS_CERT = {
        "tls_cert", Some("--tls-cert"), Text, "none",
        "Certificate chain file in PEM, server certificate first, valid for <domain> and *.<domain>. Reloaded \
         when it or tls_key changes.",
    },
    TLS_KEY = {
        "tls_key", Some("--tls-key"), Text, "none",
        "Private key file of the server certificate, in PEM.",
    },
    ACME_DIRECTORY = {
        "acme.directory", None, Text, "none",
        "Address of the directory of an ACME server, which then issues the certificate. Requires domain, acme.dns_hook \
         and acme.accept_terms.",
    },
    ACME_ACCEPT_TERMS = {
        "acme.accept_terms", None, Boolean, "false",
        "Whether you accept the terms of service of the authority. Must be true to use ACME.",
    },
    ACME_CONTACT = {
        "acme.contact", None, Text, "none",
        "Comma-separated mail addresses that the authority may write to.",
    },
    ACME_DOMAINS = {
        "acme.domains", None, Text, "<domain>,*.<domain>",
        "Comma-separated names of the certificate, at most 100.",
    },
    ACME_DNS_HOOK = {
        "acme.dns_hook", None, Text, "none",
        "Absolute path of a program that adds and removes TXT records: it is run with the arguments present or \
         cleanup, record name and value.",
    },
    ACME_DNS_HOOK_TIMEOUT_S = {
        "acme.dns_hook_timeout_s", None, Integer, "120",
        "Time limit of one run of the DNS hook, in seconds, 1 to 3600.",
    },
    ACME_DNS_WAIT_S = {
        "acme.dns_wait_s", None, Integer, "30",
        "Time between the DNS hook and the query of the authority, in seconds, 0 to 3600.",
    },
    ACME_CA = {
        "acme.ca", None, Text, "the CA certificates of the host",
        "File in PEM with the CA certificates that the connection to the ACME server must be signed by.",
    },
    SERVER_CONNECTIONS = {
        "server.connections", None, Integer, "8192",
        "Maximum number of client connections, capped at a quarter of the platform's limit on open files. At the \
         limit, the connection that has been idle longest is closed.",
        connections.total = count(16, 1 << 20),
    },
    SERVER_CONNECTIONS_PER_PEER = {
        "server.connections_per_peer", None, Integer, "1024",
        "Maximum number of connections from one IPv4 address or one IPv6 /64. Does not apply to loopback and server.shared_peers.",
        connections.per_peer = count(16, 1 << 20),
    },
    SERVER_CONNECTIONS_PER_SANDBOX = {
        "server.connections_per_sandbox", None, Integer, "2048",
        "Maximum number of concurrent requests and streams to one sandbox. Further ones are answered 429.",
        connections.per_sandbox = count(16, 1 << 20),
    },
    SERVER_SHARED_PEERS = {
        "server.shared_peers", None, Text, "none",
        "Comma-separated addresses and networks shared by many clients, such as reverse proxies and NAT gateways. \
         Limits per peer do not apply to them.",
        connections.shared_peers = networks,
    },
    MCP_PATH = {
        "mcp.path", None, Text, "/mcp",
        "Path of the documentation endpoint for agents (MCP). Must end with /mcp.",
        mcp.path = mcp::path,
    },
    MCP_SUFFIX = {
        "mcp.suffix", None, Text, "svc",
        "Suffix of the names of its tools, such as search_docs_svc: 1 to 32 letters, digits, - and _.",
        mcp.suffix = mcp::suffix,
    },
    DASHBOARD_ENABLED = {
        "dashboard.enabled", None, Boolean, "true",
        "Whether teams can sign in to the dashboard, at /dashboard, with a key.",
        dashboard.is_enabled = boolean,
    },
    DASHBOARD_ALLOW_HTTP = {
        "dashboard.allow_http", None, Boolean, "false",
        "Whether browsers on other machines may use the dashboard over HTTP, which others may read; HTTPS always works.",
        dashboard.allows_http = boolean,
    },
}
