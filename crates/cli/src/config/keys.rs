//! The table of configuration keys: names, types, defaults, meanings, and the field that each key sets.
//!
//! Help texts, the reference, environment variables, the check of the configuration file and the configuration itself are
//! all derived from this table, so a key cannot be undocumented or spelt differently in two places. Defaults are those of
//! the settings of the crate that uses a value; a test compares them with the table.

use model::resources::OPEN_FILES_MAX;
use server::settings::RepositorySettings;

use super::key::set;
pub(crate) use super::key::{Key, Kind, Set};
use super::values::{
    OPEN_FILES_MIN, WEBHOOKS_MAX, WEBHOOKS_RETRY_MAX_S, boolean, count, criu, directory, disk_reserve, domain, file,
    host_names, kib, limit, listen, log_format, log_level, mib, networks, number, pause_answer, schemes, seconds,
    server_address, server_addresses, some,
};
use super::{builds, egress, mcp};

/// The upper limit of a number that has none of its own.
pub(super) const MAX: u32 = u32::MAX;

macro_rules! keys {
    ($($constant:ident = {
        $name:literal, $flag:expr, $kind:ident, $default:literal,
        $meaning:literal $(, $($field:ident).+ = $read:expr)? $(,)?
    }),+ $(,)?) => {
        $(pub(crate) const $constant: &Key = &Key {
            name: $name,
            flag: $flag,
            kind: Kind::$kind,
            default: $default,
            meaning: $meaning,
            set: set!($($($field).+ = $read)?),
        };)+

        /// Every key, in the order in which the reference shows them.
        pub(crate) const ALL: &[&Key] = &[$($constant),+];
    };
}

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
    REPOSITORIES_CLONE_TIMEOUT_S = {
        "repositories.clone_timeout_s", None, Integer, "45",
        "Maximum time that a create request waits for its repositories, in seconds, from 1 to 50.",
        repositories.clone_timeout_s = number(1, RepositorySettings::CLONE_TIMEOUT_MAX_S),
    },
    REPOSITORIES_SOFT_AGE_S = {
        "repositories.soft_age_s", None, Integer, "300",
        "Age from which the copy of a repository that lacks something is replaced, in seconds.",
        repositories.soft_age_s = number(0, MAX),
    },
    REPOSITORIES_HARD_AGE_S = {
        "repositories.hard_age_s", None, Integer, "86400",
        "Age from which the copy of a repository is not used any more, in seconds.",
        repositories.hard_age_s = number(0, MAX),
    },
    REPOSITORIES_COPY_MB = {
        "repositories.copy_mb", None, Integer, "512",
        "Maximum size of the copy of one repository, in MiB.",
        repositories.bundle_bytes = mib(0),
    },
    REPOSITORIES_TEAM_MB = {
        "repositories.team_mb", None, Integer, "2048",
        "Maximum size of the copies of the repositories of one team, in MiB.",
        repositories.team_bytes = mib(0),
    },
    REPOSITORIES_TOTAL_MB = {
        "repositories.total_mb", None, Integer, "8192",
        "Maximum size of the copies of all repositories, in MiB; 0 keeps none.",
        repositories.total_bytes = mib(0),
    },
    BUILDS_CONCURRENT = {
        "builds.concurrent", None, Integer, "2",
        "How many builds of templates run at the same time, at least 1. Others wait for their turn.",
        builds.concurrent = number(1, MAX),
    },
    BUILDS_FILE_MB = {
        "builds.file_mb", None, Integer, "2048",
        "Maximum size of the files that one step of a build copies, as they are uploaded, in MiB.",
        builds.file_bytes = mib(0),
    },
    BUILDS_TEAM_FILES_MB = {
        "builds.team_files_mb", None, Integer, "20480",
        "Maximum size of all uploaded files of a team, in MiB.",
        builds.team_files_bytes = mib(0),
    },
    BUILDS_FILE_AGE_S = {
        "builds.file_age_s", None, Integer, "604800",
        "How long uploaded files are kept after their last use, in seconds, at least 60.",
        builds.file_age_s = number(60, MAX),
    },
    BUILDS_CACHE_AGE_S = {
        "builds.cache_age_s", None, Integer, "604800",
        "How long the result of a step is kept for later builds after its last use, in seconds, at least 60.",
        builds.cache_age_s = number(60, MAX),
    },
    BUILDS_CACHE_MB = {
        "builds.cache_mb", None, Integer, "20480",
        "Approximate maximum size of all results of steps that are kept for later builds, in MiB. What templates \
         consist of is not limited by this.",
        builds.cache_bytes = mib(0),
    },
    BUILDS_REGISTRY_MIRRORS = {
        "builds.registry_mirrors", None, Text, "none",
        "Comma-separated registries from which images are fetched instead of others, such as `docker.io=mirror.example:5000`.",
        builds.registry_mirrors = builds::mirrors,
    },
    BUILDS_INSECURE_REGISTRIES = {
        "builds.insecure_registries", None, Text, "none",
        "Comma-separated registries, host or host:port, that are reached without TLS.",
        builds.insecure_registries = builds::hosts,
    },
    BUILDS_REGISTRY_CA_FILES = {
        "builds.registry_ca_files", None, Text, "none",
        "Comma-separated files with certificates of issuers, in PEM, that a registry may have besides those of the \
         system, such as `registry.example:5000=/etc/ssl/registry.pem`.",
        registry_ca_files = builds::ca_files,
    },
    BLOBS_STORE = {
        "blobs.store", None, Text, "local",
        "Where layers of templates and uploaded files are kept: local for the data directory only, or s3 for a bucket besides it.",
    },
    BLOBS_BUCKET = {
        "blobs.bucket", None, Text, "none",
        "Name of the bucket, which must exist. Required with s3.",
    },
    BLOBS_ENDPOINT = {
        "blobs.endpoint", None, Text, "that of Amazon S3 in blobs.region",
        "Address of the S3 server, such as https://s3.example:9000.",
    },
    BLOBS_REGION = {
        "blobs.region", None, Text, "us-east-1",
        "Region of the bucket.",
    },
    BLOBS_PREFIX = {
        "blobs.prefix", None, Text, "ringfence",
        "What the names of all objects begin with. Belongs to one database: another one is refused.",
    },
    BLOBS_ACCESS_KEY_ID = {
        "blobs.access_key_id", None, Text, "none",
        "Name of the access key. Required with s3.",
    },
    BLOBS_SECRET_ACCESS_KEY_FILE = {
        "blobs.secret_access_key_file", None, Text, "none",
        "File with the secret access key. The key can also be in the variable RINGFENCE_BLOBS_SECRET_ACCESS_KEY.",
    },
    BLOBS_ALLOW_HTTP = {
        "blobs.allow_http", None, Boolean, "false",
        "Whether blobs.endpoint may be an address without TLS.",
    },
    BLOBS_PATH_STYLE = {
        "blobs.path_style", None, Boolean, "true with blobs.endpoint, else false",
        "Whether the bucket is in the path of requests, and not in the name of the host.",
    },
    BLOBS_CA_FILE = {
        "blobs.ca_file", None, Text, "none",
        "File in PEM with CA certificates that the S3 server may be signed by, besides those of the host.",
    },
    BLOBS_GRACE_S = {
        "blobs.grace_s", None, Integer, "86400",
        "How long an object that nothing refers to is kept, in seconds. Must be longer than a build takes if several \
         nodes share the database.",
    },
    BLOBS_CACHE_MB = {
        "blobs.cache_mb", None, Integer, "no limit",
        "Maximum size of the layers in the data directory, in MiB. Those that were not used for long are removed from it \
         if they are in the bucket, and come back when they are needed.",
    },
    SIGNING_SCHEMES = {
        "signing.schemes", None, Text, "Ringfence,Qiniu,Sufy",
        "Comma-separated words of the header Authorization that announce a signed request, such as Qiniu in \
         `Authorization: Qiniu <access key>:<signature>`.",
        signing.schemes = schemes,
    },
    SIGNING_REQUIRE_DATE = {
        "signing.require_date", None, Boolean, "false",
        "Whether a signature must cover a date. Without one, whoever sees a signed request can send it again.",
        signing.require_date = boolean,
    },
    SIGNING_REQUIRED_FOR_RULES = {
        "signing.required_for_rules", None, Boolean, "false",
        "Whether operations on injection rules must be signed with an access key; an API key is not enough then.",
        signing.required_for_rules = boolean,
    },
    LOG_FORMAT = {
        "log_format", Some("--log-format"), Text, "text",
        "Log format on stderr: text, or json with one object per line.",
        log_format = log_format,
    },
    LOG_LEVEL = {
        "log_level", Some("--log-level"), Text, "info for up, server and node; warn for up on a terminal and for the other commands",
        "Log level: error, warn, info, debug or trace, or directives such as info,node=debug.",
        log_level = some(log_level),
    },
    DATABASE_URL = {
        "database_url", None, Text, "sqlite:<data-dir>/ringfence.db",
        "Database: sqlite:<path> or postgres://user:password@host/name. Has no flag, because it may contain a password.",
    },
    MASTER_KEY_FILE = {
        "master_key_file", None, Text, "<data-dir>/secret.key, created by the first start",
        "File with the key under which secrets in the database are encrypted, 64 hexadecimal characters. The key can \
         also be the value of RINGFENCE_MASTER_KEY.",
    },
    LAUNCHERS = {
        "launchers", None, Integer, "one per core, at least 2",
        "Number of helper processes that start sandboxes in parallel, 1 to 64. Up to twice as many others restore those that \
         go on with their processes, where there is CRIU (`pause.criu`); one team has half of these at a time.",
        node.driver.launchers = count(1, 64),
    },
    BASE_TEMPLATE = {
        "base_template", None, Boolean, "true",
        "Whether to offer the built-in template `base`. Its sandboxes can read the host's /usr.",
        node.driver.base = boolean,
    },
    SANDBOX_ISOLATION = {
        "sandbox.isolation", None, Text, "container",
        "How sandboxes are isolated from each other and from the host: container is the only way so far.",
        node.isolation = str::parse,
    },
    SANDBOX_CPU_COUNT = {
        "sandbox.cpu_count", None, Integer, "2",
        "CPU cores of a sandbox of `base`, 1 to 1024.",
        resources.cpu_count = number(1, 1024),
    },
    SANDBOX_MEMORY_MB = {
        "sandbox.memory_mb", None, Integer, "1024",
        "Memory limit of a sandbox of `base`, in MiB, at least 64.",
        resources.memory_mb = number(64, MAX),
    },
    SANDBOX_DISK_MB = {
        "sandbox.disk_mb", None, Integer, "10240",
        "Disk size of a sandbox of `base`, in MiB, at least 64.",
        resources.disk_mb = number(64, MAX),
    },
    SANDBOX_DISK_RESERVE = {
        "sandbox.disk_reserve", None, Text, "none",
        "How much disk space is reserved when a sandbox starts: none (blocks are allocated when they are written) or \
         full (the whole disk is allocated).",
        node.driver.reserve_disks = disk_reserve,
    },
    SANDBOX_PIDS = {
        "sandbox.pids", None, Integer, "512",
        "Maximum number of processes and threads of a sandbox, at least 32.",
        resources.pids = number(32, MAX),
    },
    SANDBOX_OPEN_FILES = {
        "sandbox.open_files", None, Integer, "1024",
        "How many files a process of a sandbox may have open unless it asks for more, 64 to 524288. Each may ask for 524288.",
        node.driver.open_files = number(OPEN_FILES_MIN, OPEN_FILES_MAX),
    },
    SANDBOX_PROCESSES_PER_SECOND = {
        "sandbox.processes_per_second", None, Integer, "2000",
        "How many processes and threads a sandbox may create per second in the long run, before its processor time is \
         limited for some time; 0 limits none. All sandboxes together may create as many for every core.",
        node.process_rate = limit(1_000_000),
    },
    PAUSE_RETENTION_S = {
        "pause.retention_s", None, Integer, "0",
        "How long a sandbox may be paused, in seconds; then it is ended, with all that is kept of it. 0 is no limit.",
        pause.retention_s = limit(MAX),
    },
    PAUSE_CRIU = {
        "pause.criu", None, Text, "auto",
        "CRIU, 4.2 or later, which writes the processes of paused sandboxes to disk, copies those of sandboxes that are \
         forked, and keeps those of snapshots: auto (the one that is installed, if there is one), off, or its path. Without it they \
         stay in memory, and forks are refused.",
        node.driver.criu = criu,
    },
    PAUSE_ANSWER = {
        "pause.answer", None, Text, "durable",
        "When a pause is answered that writes processes to disk: durable (when what is kept survives a power cut) or frozen \
         (when the processes are stopped; they are written afterwards).",
        pause.answer = pause_answer,
    },
    PAUSE_PAGE_OUT = {
        "pause.page_out", None, Boolean, "true",
        "Whether the memory of sandboxes that are paused in memory is moved to the swap of the host, if it has some.",
        node.driver.page_out = boolean,
    },
    PAUSE_AT_SHUTDOWN = {
        "pause.at_shutdown", None, Boolean, "false",
        "Whether sandboxes are kept on disk when the platform is stopped: running ones are paused, with their processes \
         where there is CRIU (`pause.criu`), and otherwise with their files alone; so are those that are paused in memory. Otherwise \
         all stay as they are until the host stops.",
        pause.at_shutdown = boolean,
    },
    POOL_BASE = {
        "pool.base", None, Integer, "4, or 0 on a host with less than 3 GiB of memory",
        "How many sandboxes of `base` are started in advance and kept ready.",
        pool.base = number(0, MAX),
    },
    POOL_PER_TEMPLATE = {
        "pool.per_template", None, Integer, "1",
        "How many sandboxes of each template with a start command are at least started in advance and kept ready, as long \
         as the template was used in the last 10 minutes. More are kept, up to 8, where several were asked for in the time \
         that one takes to become ready; 0 keeps none.",
        pool.per_template = number(0, MAX),
    },
    POOL_TOTAL = {
        "pool.total", None, Integer, "16",
        "Maximum number of sandboxes that are kept ready; 0 switches the pool off.",
        pool.total = number(0, MAX),
    },
    POOL_MEMORY_MB = {
        "pool.memory_mb", None, Integer, "2048",
        "Maximum memory that all sandboxes that are kept ready take together, in MiB.",
        pool.memory_mb = number(0, MAX),
    },
    SANDBOX_MAX_LIFETIME_S = {
        "sandbox.max_lifetime_s", None, Integer, "86400",
        "Maximum lifetime of a sandbox from its start, in seconds; caps the timeout that clients request.",
    },
    SANDBOX_ALWAYS_SECURE = {
        "sandbox.always_secure", None, Boolean, "false",
        "Whether every agent requires its access token. By default, sandboxes created on the older create path without \
         `secure` accept requests without credentials, as that path specifies.",
        always_secure = boolean,
    },
    LIMITS_SANDBOXES = {
        "limits.sandboxes", None, Integer, "0",
        "Maximum number of sandboxes of a team; 0 is no limit.",
    },
    LIMITS_CPU_COUNT = {
        "limits.cpu_count", None, Integer, "0",
        "Maximum number of CPU cores of all sandboxes of a team together; 0 is no limit.",
    },
    LIMITS_MEMORY_MB = {
        "limits.memory_mb", None, Integer, "0",
        "Maximum sum of the memory limits of all sandboxes of a team, in MiB; 0 is no limit.",
    },
    LIMITS_CREATES_PER_MINUTE = {
        "limits.creates_per_minute", None, Integer, "0",
        "Maximum number of create requests of a team per minute, also in one burst; 0 is no limit.",
    },
    LIMITS_PAUSED_SANDBOXES = {
        "limits.paused_sandboxes", None, Integer, "100",
        "Maximum number of paused sandboxes of a team; 0 means that none can be paused.",
    },
    LIMITS_PAUSED_DISK_MB = {
        "limits.paused_disk_mb", None, Integer, "0",
        "Space that the disks of all paused sandboxes of a team take at most, in MiB: none is paused at or beyond it; 0 is no limit.",
    },
    LIMITS_BUILDS = {
        "limits.builds", None, Integer, "20",
        "Maximum number of builds of templates of a team that have not ended.",
    },
    LIMITS_TEMPLATE_CPU_COUNT = {
        "limits.template_cpu_count", None, Integer, "8",
        "Maximum number of CPU cores of the sandboxes of a template that a team builds.",
    },
    LIMITS_TEMPLATE_MEMORY_MB = {
        "limits.template_memory_mb", None, Integer, "8192",
        "Maximum memory of the sandboxes of a template that a team builds, in MiB.",
    },
    LIMITS_TEMPLATE_DISK_MB = {
        "limits.template_disk_mb", None, Integer, "0",
        "Space that the templates and snapshots of a team take at most, in MiB: none is made at or beyond it; 0 is no limit.",
    },
    LIMITS_REQUESTS_PER_SECOND = {
        "limits.requests_per_second", None, Integer, "0",
        "Maximum number of API requests of a team per second, also in one burst; 0 is no limit.",
    },
    CAPACITY_MEMORY_FLOOR_MB = {
        "capacity.memory_floor_mb", None, Integer, "256",
        "Memory reserved for this host, in MiB: create requests that leave less are refused. 0 disables the check.",
        capacity.memory_floor_mb = number(0, MAX),
    },
    CAPACITY_DISK_FLOOR_MB = {
        "capacity.disk_floor_mb", None, Integer, "1024",
        "Disk space reserved on the file system of the data directory, in MiB: create requests that leave less are \
         refused, and running sandboxes may not write new data. For running sandboxes at least 64 applies.",
        capacity.disk_floor_mb = number(0, MAX),
    },
    CAPACITY_MAX_SANDBOXES = {
        "capacity.max_sandboxes", None, Integer, "0",
        "Maximum number of sandboxes of all teams; 0 is no maximum.",
        capacity.max_sandboxes = limit(MAX),
    },
    LOGS_RETENTION_S = {
        "logs.retention_s", None, Integer, "604800",
        "Retention of the log of a sandbox after its end, in seconds.",
        records.log_retention_s = number(0, MAX),
    },
    LOGS_MAX_ENTRIES = {
        "logs.max_entries", None, Integer, "10000",
        "Maximum number of entries in the log of a sandbox, at least 1. The oldest are deleted first.",
        records.log_entries = number(1, MAX),
    },
    LOGS_MAX_KB = {
        "logs.max_kb", None, Integer, "4096",
        "Maximum size of the log of a sandbox, in KiB, at least 16. The oldest entries are deleted first.",
        records.log_bytes = kib(16, MAX),
    },
    LOGS_MAX_TOTAL_MB = {
        "logs.max_total_mb", None, Integer, "1024",
        "Maximum size of all sandbox logs together, in MiB, at least 1. The logs of the sandboxes that ended first are \
         deleted first, then the oldest entries of the largest log.",
        records.log_total_bytes = mib(1),
    },
    METRICS_MAX_TOTAL_MB = {
        "metrics.max_total_mb", None, Integer, "1024",
        "Maximum size of all metrics samples together, in MiB, at least 1. The oldest are deleted first.",
        records.metric_total_bytes = mib(1),
    },
    METRICS_RETENTION_S = {
        "metrics.retention_s", None, Integer, "86400",
        "Retention of metrics samples, in seconds. 1,000 sandboxes write 140 to 425 MB a day.",
        records.metric_retention_s = number(0, MAX),
    },
    EVENTS_RETENTION_S = {
        "events.retention_s", None, Integer, "604800",
        "Retention of lifecycle events, of the attempts to send them, and of the metrics of teams, in seconds.",
        records.event_retention_s = number(0, MAX),
    },
    EVENTS_MAX_TOTAL_MB = {
        "events.max_total_mb", None, Integer, "512",
        "Maximum size of all lifecycle events together, in MiB, at least 1; a team has a quarter at most. The oldest of the \
         team with the most are deleted first.",
        records.event_total_bytes = mib(1),
    },
    WEBHOOKS_MAX_PER_TEAM = {
        "webhooks.max_per_team", None, Integer, "10",
        "Maximum number of webhooks of a team; 0 switches webhooks off.",
        webhooks.per_team = number(0, WEBHOOKS_MAX),
    },
    WEBHOOKS_ALLOW_PRIVATE = {
        "webhooks.allow_private", None, Text, "none",
        "Comma-separated networks in which receivers of events may be although they are not public.",
        webhooks.allow_private = egress::cidrs,
    },
    WEBHOOKS_ALLOW_HOSTS = {
        "webhooks.allow_hosts", None, Text, "none",
        "Comma-separated host names of receivers that may have any address.",
        webhooks.allow_hosts = host_names,
    },
    WEBHOOKS_DENY = {
        "webhooks.deny", None, Text, "none",
        "Comma-separated networks in which no receiver of events may be. Takes precedence over webhooks.allow_private.",
        webhooks.deny = egress::cidrs,
    },
    WEBHOOKS_ALLOW_HTTP = {
        "webhooks.allow_http", None, Boolean, "false",
        "Whether URLs of webhooks may begin with http://: events are sent in clear then.",
        webhooks.allow_http = boolean,
    },
    WEBHOOKS_CA_FILE = {
        "webhooks.ca_file", None, Text, "none",
        "File with certificates of further issuers, in PEM, that receivers of events may have.",
        webhooks_ca_file = some(file),
    },
    WEBHOOKS_RETRY_S = {
        "webhooks.retry_s", None, Integer, "10",
        "Pause before the second attempt to send an event, in seconds, 1 to 600; each of the four following ones is three \
         times as long.",
        webhooks.retry = seconds(1, WEBHOOKS_RETRY_MAX_S),
    },
    TELEMETRY_OTLP_ENDPOINT = {
        "telemetry.otlp_endpoint", None, Text, "none",
        "Address of a receiver of OpenTelemetry, such as http://127.0.0.1:4318, to which traces of API requests and metrics \
         are sent by OTLP over HTTP. Without it nothing is.",
    },
    TELEMETRY_OTLP_HEADERS_FILE = {
        "telemetry.otlp_headers_file", None, Text, "none",
        "File with headers for the receiver, such as its credential, one `Name: value` per line. Requires https:// unless the \
         receiver is on this host.",
    },
    TELEMETRY_CA_FILE = {
        "telemetry.ca_file", None, Text, "none",
        "File with certificates of further issuers, in PEM, that the receiver may have.",
    },
    TELEMETRY_SAMPLING_RATIO = {
        "telemetry.sampling_ratio", None, Number, "1",
        "Part of the traces that is recorded, from 0 to 1. Clients that send traceparent decide about theirs.",
    },
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

/// The table that contains one table per provider of injections.
pub(crate) const PROVIDER: &str = "provider";

/// The table that contains one table per team.
pub(crate) const TEAM: &str = "team";
