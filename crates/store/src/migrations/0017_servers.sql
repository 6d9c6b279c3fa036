-- The servers that work as one service on this database, each with the id of its data directory, whose lease is in `nodes`: the leases
-- of the nodes that a server serves have the same owner. `address` is where the others reach it. `room_json` is what its nodes have
-- left, for the others to choose among them.
CREATE TABLE servers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    address TEXT,
    room_json TEXT,
    seen_us BIGINT NOT NULL
);
CREATE INDEX nodes_lease_owner ON nodes (lease_owner);
