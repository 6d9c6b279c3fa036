-- The memory of sandboxes that are being forked to other nodes: the node that has made it, and the key under which its copy is
-- encrypted in the blob store. A row lasts as long as its fork.
CREATE TABLE fork_memories (
    build_id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL,
    memory_node_id TEXT NOT NULL,
    memory_key_sealed TEXT NOT NULL,
    created_us BIGINT NOT NULL
);
