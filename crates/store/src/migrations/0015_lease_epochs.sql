-- Each acquisition of the lease of a node has a number, and a key that has the id of the node and that number. It is NULL after
-- the lease was released. Statements that change rows of a node name the key, so that a server that has lost the lease, and does
-- not know it yet, changes nothing.
ALTER TABLE nodes ADD COLUMN lease_epoch BIGINT NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN lease_key TEXT;
CREATE UNIQUE INDEX nodes_lease_key ON nodes (lease_key);
