-- What is left on a draining node is to be paused: `pause_asked_us` is since when an operator asks for that, `pause_begun_us` since when the
-- server that has the node does it, and the others are how many it has kept, and how many not, once it is done.
ALTER TABLE joined_nodes ADD COLUMN pause_asked_us BIGINT;
ALTER TABLE joined_nodes ADD COLUMN pause_begun_us BIGINT;
ALTER TABLE joined_nodes ADD COLUMN pause_kept BIGINT;
ALTER TABLE joined_nodes ADD COLUMN pause_failed BIGINT;
