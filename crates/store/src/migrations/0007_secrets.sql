-- Secrets of teams, which header rules of sandboxes refer to by name. The caller seals the value and this table never
-- sees it. A new version replaces the value before: nothing reads an older one.
CREATE TABLE secrets (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL REFERENCES teams (id),
    name TEXT NOT NULL,
    version BIGINT NOT NULL,
    value_sealed TEXT NOT NULL,
    metadata_json TEXT NOT NULL,
    created_us BIGINT NOT NULL,
    updated_us BIGINT NOT NULL,
    UNIQUE (team_id, name)
);
CREATE INDEX secrets_list ON secrets (team_id, created_us, id);
