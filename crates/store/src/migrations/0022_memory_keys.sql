-- The key under which the copy of the memory of a snapshot is encrypted in the blob store.
ALTER TABLE builds ADD COLUMN memory_key_sealed TEXT;
