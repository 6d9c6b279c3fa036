-- Rows know whose they are: several nodes may share a database, and each server changes the rows of its own node only.

-- A node is a data directory. `lease_owner` is the server that may change its rows, until `lease_until_us` or until it
-- gives the lease back.
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    created_us BIGINT NOT NULL,
    lease_owner TEXT,
    lease_until_us BIGINT NOT NULL
);

-- NULL in rows of a version that did not know nodes: the next node that takes its lease takes them, too. No foreign
-- key: it would make every new sandbox lock and read the row of its node.
ALTER TABLE sandboxes ADD COLUMN node_id TEXT;
ALTER TABLE idempotency_keys ADD COLUMN node_id TEXT;
