-- Assignments of one tag, newest first: they are counted and pruned with every assignment.
CREATE INDEX template_tags_tag ON template_tags (template_id, tag, created_us, seq);

-- Removals of objects from the blob store that nodes have announced. A row stays for a while after its end, so that a
-- node that stored the object meanwhile finds out.
CREATE TABLE blob_removals (
    name TEXT PRIMARY KEY,
    id BIGINT NOT NULL,
    begun_us BIGINT NOT NULL,
    ended_us BIGINT
);
