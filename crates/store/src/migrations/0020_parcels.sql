-- Copies of paused sandboxes in the blob store. `parcel_key_sealed` is the key under which they are encrypted, `parcel_id` names the
-- last one that is complete, and `parcel_run` is the execution whose pause it is of: it counts while that is the current one.
ALTER TABLE sandboxes ADD COLUMN parcel_key_sealed TEXT;
ALTER TABLE sandboxes ADD COLUMN parcel_id TEXT;
ALTER TABLE sandboxes ADD COLUMN parcel_run TEXT;
