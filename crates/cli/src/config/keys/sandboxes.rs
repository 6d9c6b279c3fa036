//! Keys of the log, the database, sandboxes, their pauses and pool, and the limits of teams and of the host.

use model::resources::OPEN_FILES_MAX;

use crate::config::key::{Key, Kind, set};
use crate::config::values::{
    MAX, OPEN_FILES_MIN, boolean, count, criu, disk_reserve, limit, log_format, log_level, number, pause_answer, some,
};

keys! {
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
    PAUSE_COPIES = {
        "pause.copies", None, Boolean, "true",
        "Whether a server with nodes that have joined copies what is paused on disk, and the memory of snapshots, to the blob store, \
         encrypted, if it has one (`blobs.store`): other nodes go on with what is paused where the node that has it is away, drains, is \
         full or was forgotten, start sandboxes from the snapshots, and run forks. `ringfence up` makes no copies.",
        pause.copies = boolean,
    },
    PAUSE_COPY_MIB_PER_S = {
        "pause.copy_mib_per_s", None, Integer, "0",
        "How much the copy of one paused sandbox sends to the blob store per second at most, in MiB; 0 is no limit. Two are copied at a \
         time.",
        pause.copy_mib_per_s = limit(MAX),
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
        "Space that the templates and snapshots of a team take at most, in MiB: none can be requested at or beyond it; 0 is no limit.",
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
}
