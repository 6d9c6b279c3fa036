-- Injection rules, and the secrets of the platform itself. Columns that end in `sealed` are encrypted by the caller.

-- A rule belongs to a user, who is of one team.
CREATE TABLE injection_rules (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    injection_sealed TEXT NOT NULL,
    created_us BIGINT NOT NULL,
    updated_us BIGINT NOT NULL,
    UNIQUE (user_id, name)
);

-- What must outlive the key under which everything is sealed, such as the seed of the tokens of sandboxes.
CREATE TABLE platform_secrets (
    name TEXT PRIMARY KEY,
    value_sealed TEXT NOT NULL
);

-- The injections of a sandbox: references to rules, and those with secrets of their own.
ALTER TABLE sandboxes ADD COLUMN injections_sealed TEXT;
