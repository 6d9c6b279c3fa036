-- Forks: `authority_of` is the sandbox whose certificate authority programs of this one trust, because they were running in
-- it, or in a fork of it, when it was forked. That sandbox may be gone, so it is no foreign key.
ALTER TABLE sandboxes ADD COLUMN authority_of TEXT;
