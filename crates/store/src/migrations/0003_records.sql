-- Logs and metrics of sandboxes. They outlive their sandbox, so `sandbox_id` is no foreign key. The team comes first in
-- every key: nothing is ever read but for a team.

-- One row per sandbox that has a log: how much it holds, and from when on it is kept only for a while.
CREATE TABLE sandbox_records (
    team_id TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    log_entries BIGINT NOT NULL,
    log_bytes BIGINT NOT NULL,
    ended_us BIGINT,
    PRIMARY KEY (team_id, sandbox_id)
);
CREATE INDEX sandbox_records_ended ON sandbox_records (ended_us);

-- `seq` tells entries of one moment apart; `bytes` is what an entry counts for.
CREATE TABLE sandbox_logs (
    team_id TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    at_us BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    level BIGINT NOT NULL,
    logger TEXT NOT NULL,
    message TEXT NOT NULL,
    fields_json TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    PRIMARY KEY (team_id, sandbox_id, at_us, seq)
);

-- The samples of some minutes in one row, packed by the caller.
CREATE TABLE sandbox_metrics (
    team_id TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    from_us BIGINT NOT NULL,
    to_us BIGINT NOT NULL,
    samples TEXT NOT NULL,
    PRIMARY KEY (team_id, sandbox_id, from_us)
);
CREATE INDEX sandbox_metrics_to ON sandbox_metrics (to_us);
