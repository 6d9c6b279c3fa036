-- The node that has made the memory of a snapshot, and the key under which its copy is encrypted in the blob store.
ALTER TABLE builds ADD COLUMN memory_node_id TEXT;
ALTER TABLE builds ADD COLUMN memory_key_sealed TEXT;
