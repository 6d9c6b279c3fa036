-- Paused sandboxes of which only the disk is kept: `environment_sealed` is what their processes are given again, sealed by
-- the caller, for every sandbox that was created with an environment. `kept_bytes` is the space that a paused sandbox takes
-- on the disk of its host, and `resume_error` why it could not be resumed the last time; both are only of meaning while it
-- is paused.
ALTER TABLE sandboxes ADD COLUMN environment_sealed TEXT;
ALTER TABLE sandboxes ADD COLUMN kept_bytes BIGINT;
ALTER TABLE sandboxes ADD COLUMN resume_error TEXT;
