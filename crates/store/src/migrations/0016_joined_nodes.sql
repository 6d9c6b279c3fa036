-- Nodes that are processes of their own and have joined a server. A certificate outlives its row's deletion, so a node that was
-- forgotten keeps its row, with `forgotten_us`. `place` is what a node takes of the platform: there is one, 0, and NULL in rows
-- of forgotten nodes, so that the database refuses a second node.
CREATE TABLE joined_nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    place BIGINT UNIQUE,
    joined_us BIGINT NOT NULL,
    seen_us BIGINT,
    forgotten_us BIGINT
);

-- Tokens to join, by their hash. `node_id` is the node that a token has made: it is used up.
CREATE TABLE node_tokens (
    hash TEXT PRIMARY KEY,
    created_us BIGINT NOT NULL,
    expires_us BIGINT NOT NULL,
    node_id TEXT
);
CREATE INDEX node_tokens_expiry ON node_tokens (expires_us);
