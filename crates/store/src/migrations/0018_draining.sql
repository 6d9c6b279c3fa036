-- Nodes that get no new sandboxes: `draining_us` is since when, and NULL in rows of all others.
ALTER TABLE joined_nodes ADD COLUMN draining_us BIGINT;
