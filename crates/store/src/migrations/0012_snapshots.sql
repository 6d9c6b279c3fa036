-- Snapshots of sandboxes: templates whose builds are made of sandboxes. `sandbox_id` is the sandbox, which the build
-- outlives, so it is no foreign key.
ALTER TABLE templates ADD COLUMN is_snapshot BIGINT NOT NULL DEFAULT 0;
ALTER TABLE builds ADD COLUMN sandbox_id TEXT;
