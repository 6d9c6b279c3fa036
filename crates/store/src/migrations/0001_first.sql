-- Portable: TEXT and BIGINT only. Times are microseconds since the Unix epoch, flags are 0 and 1, JSON is opaque TEXT.

CREATE TABLE teams (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    created_us BIGINT NOT NULL
);

CREATE TABLE users (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL REFERENCES teams (id),
    name TEXT NOT NULL,
    created_us BIGINT NOT NULL,
    UNIQUE (team_id, name)
);

-- The key itself is never stored: `hash` is what is looked up, `mask` is what people recognise it by.
CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL REFERENCES teams (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    mask TEXT NOT NULL,
    created_us BIGINT NOT NULL,
    revoked_us BIGINT
);
CREATE INDEX api_keys_team ON api_keys (team_id, created_us);

-- Requests are signed with the secret, so it must be recoverable; the caller seals it and this table never sees it.
CREATE TABLE access_keys (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL REFERENCES teams (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    secret_sealed TEXT NOT NULL,
    created_us BIGINT NOT NULL,
    revoked_us BIGINT
);
CREATE INDEX access_keys_team ON access_keys (team_id, created_us);

-- A template without a team is global: every team may use it.
CREATE TABLE templates (
    id TEXT PRIMARY KEY,
    team_id TEXT REFERENCES teams (id),
    is_public BIGINT NOT NULL,
    spawn_count BIGINT NOT NULL,
    last_spawned_us BIGINT,
    created_us BIGINT NOT NULL
);
CREATE INDEX templates_team ON templates (team_id, created_us);

-- `scope` is the owning team's id, or the empty string for global templates: NULL would not be unique.
CREATE TABLE template_aliases (
    scope TEXT NOT NULL,
    alias TEXT NOT NULL,
    template_id TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    PRIMARY KEY (scope, alias)
);
CREATE INDEX template_aliases_template ON template_aliases (template_id);

CREATE TABLE builds (
    id TEXT PRIMARY KEY,
    template_id TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    status TEXT NOT NULL,
    cpu_count BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL,
    agent_version TEXT,
    spec_json TEXT,
    created_us BIGINT NOT NULL,
    finished_us BIGINT
);
CREATE INDEX builds_template ON builds (template_id, created_us);

-- A sandbox outlives its template and its build, so those two are not foreign keys.
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL REFERENCES teams (id),
    user_id TEXT NOT NULL REFERENCES users (id),
    template_id TEXT NOT NULL,
    build_id TEXT NOT NULL,
    alias TEXT,
    state TEXT NOT NULL,
    version BIGINT NOT NULL,
    execution_id TEXT NOT NULL,
    started_us BIGINT NOT NULL,
    end_us BIGINT NOT NULL,
    max_end_us BIGINT NOT NULL,
    cpu_count BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL,
    agent_version TEXT NOT NULL,
    metadata_json TEXT NOT NULL,
    secure BIGINT NOT NULL,
    allow_public_traffic BIGINT NOT NULL,
    allow_internet_access BIGINT,
    network_json TEXT,
    lifecycle_json TEXT,
    created_us BIGINT NOT NULL
);
-- Lists are pages of one team in this order, forwards or backwards.
CREATE INDEX sandboxes_team_started ON sandboxes (team_id, started_us DESC, id);
