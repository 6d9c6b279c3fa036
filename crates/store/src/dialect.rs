//! The differences between SQLite and PostgreSQL, except how connections are opened.

use std::time::Duration;

/// How long PostgreSQL may take to answer a statement. The longest, which remove old records, take a second or two on a busy
/// database; one that waits for a lock may wait for several of these.
const ANSWER: Duration = Duration::from_secs(15);
/// The advisory lock of migrations on PostgreSQL: "ringfenc" as a number, unlikely to be used by another program.
const MIGRATION_LOCK: i64 = i64::from_be_bytes(*b"ringfenc");

/// A database engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Sqlite,
    Postgres,
}

impl Engine {
    /// Begins a transaction that writes. On SQLite it takes the write lock immediately: taking it later, after reads,
    /// is refused when another process has written in between.
    pub(crate) fn begin(self) -> &'static str {
        match self {
            Self::Sqlite => "BEGIN IMMEDIATE",
            Self::Postgres => "BEGIN",
        }
    }

    /// How long a statement may take, if something bounds it.
    pub(crate) fn answer(self) -> Option<Duration> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some(ANSWER),
        }
    }

    /// The statement that lets one transaction after another decide about a team, until it ends, with the id of the team and the
    /// key of a lease. It also keeps others from acquiring that lease until then: whoever does reads the rows that there are, and
    /// must not miss one that is about to be committed. Rows that refer to the team can be inserted meanwhile, and the lease be
    /// renewed. SQLite's write transaction does all that by itself.
    pub(crate) fn team_lock(self) -> &'static str {
        match self {
            Self::Sqlite => "SELECT t.id FROM teams t, nodes n WHERE t.id = $1 AND n.lease_key = $2",
            Self::Postgres => {
                "SELECT t.id FROM teams t, nodes n WHERE t.id = $1 AND n.lease_key = $2 \
                 FOR NO KEY UPDATE OF t FOR KEY SHARE OF n"
            }
        }
    }

    /// The statement that reads the time of the database, in microseconds since the Unix epoch, as column `value`. SQLite runs in
    /// the process of its caller and has no time of its own.
    pub(crate) fn time(self) -> Option<&'static str> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT) AS value"),
        }
    }

    /// The statement that keeps two leases from being acquired until the transaction ends, if a sandbox may be moved from the node of
    /// the one, whose key is `$1`, to that of the other, whose key is `$2`. Both can be renewed meanwhile.
    pub(crate) fn lock_of_move(self) -> &'static str {
        match self {
            Self::Sqlite => "SELECT o.id FROM nodes o, nodes n WHERE o.lease_key = $1 AND n.lease_key = $2",
            Self::Postgres => {
                "SELECT o.id FROM nodes o, nodes n WHERE o.lease_key = $1 AND n.lease_key = $2 FOR KEY SHARE OF o, n"
            }
        }
    }

    /// As [`Self::lock_of_move`], from the node `$1` whose lease nobody but the owner `$5` has at the time `$4`, and was acquired
    /// `$3` times.
    pub(crate) fn lock_of_move_from_free(self) -> &'static str {
        match self {
            Self::Sqlite => {
                "SELECT o.id FROM nodes o, nodes n WHERE o.id = $1 AND n.lease_key = $2 AND o.lease_epoch = $3 \
                 AND (o.lease_owner IS NULL OR o.lease_until_us <= $4 OR o.lease_owner = $5)"
            }
            Self::Postgres => {
                "SELECT o.id FROM nodes o, nodes n WHERE o.id = $1 AND n.lease_key = $2 AND o.lease_epoch = $3 \
                 AND (o.lease_owner IS NULL OR o.lease_until_us <= $4 OR o.lease_owner = $5) FOR KEY SHARE OF o, n"
            }
        }
    }

    /// The statement that keeps the lease of node `$1` from being acquired until the transaction ends, if nobody but the owner `$4` has
    /// it at the time `$3`, and it was acquired `$2` times.
    pub(crate) fn lock_of_free(self) -> &'static str {
        match self {
            Self::Sqlite => {
                "SELECT id FROM nodes WHERE id = $1 AND lease_epoch = $2 \
                 AND (lease_owner IS NULL OR lease_until_us <= $3 OR lease_owner = $4)"
            }
            Self::Postgres => {
                "SELECT id FROM nodes WHERE id = $1 AND lease_epoch = $2 \
                 AND (lease_owner IS NULL OR lease_until_us <= $3 OR lease_owner = $4) FOR KEY SHARE"
            }
        }
    }

    /// The statement that bounds how long each statement waits for locks until the transaction ends, in a migration: what the running
    /// servers ask for meanwhile waits behind it. SQLite's transaction has its only lock from the start.
    pub(crate) fn migration_lock_bound(self) -> Option<&'static str> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some("SET LOCAL lock_timeout = '3s'"),
        }
    }

    /// The statement that keeps other migrations out until the transaction ends, with its argument. SQLite's write
    /// transaction does that by itself.
    pub(crate) fn migration_lock(self) -> Option<(&'static str, i64)> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some(("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)),
        }
    }
}

/// The code of PostgreSQL for a statement that has waited for a lock for as long as it may.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// Whether an error code means that a statement has waited for a lock for as long as it may.
pub(crate) fn is_lock_code(code: &str) -> bool {
    code == LOCK_NOT_AVAILABLE
}

/// Whether an error code means that the disk of the database is full: PostgreSQL's `disk_full`, SQLite's full (13), and
/// its failure to grow its shared index, which has no other cause.
pub(crate) fn is_full_code(code: &str) -> bool {
    const IOERR_SHMSIZE: &str = "4874";
    code == "53100" || code == IOERR_SHMSIZE || (code.len() < 5 && code.parse() == Ok(13_u32))
}

/// Whether an error code is transient. PostgreSQL's have five characters: lost connections (08), rollback by
/// concurrency (40), lack of resources (53), an administrator's intervention (57), the end of a transaction whose next
/// statement did not come (25P03), and a lock that was waited for too long (55P03). SQLite's are shorter numbers whose upper
/// bits are details: busy (5), locked (6), I/O (10).
pub(crate) fn is_transient_code(code: &str) -> bool {
    if code.len() == 5 {
        return code == "25P03"
            || is_lock_code(code)
            || ["08", "40", "53", "57"].iter().any(|class| code.starts_with(class));
    }
    code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 5 | 6 | 10))
}
