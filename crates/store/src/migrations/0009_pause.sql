-- Paused sandboxes: since when, and what is kept of them. Both are only of meaning in the states pausing, paused and
-- resuming; `kept` is then `memory`, `image` or `filesystem`.
ALTER TABLE sandboxes ADD COLUMN paused_us BIGINT;
ALTER TABLE sandboxes ADD COLUMN kept TEXT;
