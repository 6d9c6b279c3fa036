-- What teams use together is added up from this index alone: at each create where there are several servers, and now and then for
-- what is on nodes of others. The node is in the middle, so that both find what they ask for without the rows.
CREATE INDEX sandboxes_use ON sandboxes (team_id, node_id, state, kept, cpu_count, memory_mb, kept_bytes);
