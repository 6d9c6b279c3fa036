-- Templates that teams build: tags, builds with their logs, cached layers, uploaded files.

-- The namespace of a team's templates. It is set when the team is created, and for older teams after this step.
ALTER TABLE teams ADD COLUMN slug TEXT;
CREATE UNIQUE INDEX teams_slug ON teams (slug);

-- The row of a deleted template stays, so that its id is never given to another.
ALTER TABLE templates ADD COLUMN deleted_us BIGINT;

-- `requested_us` is when the build was started by its client; until then it waits for that, and from then on for its
-- turn on the node. `node_id` is the node that has its layers. `recipe_json` is what the client asked for, without the
-- credentials of a registry, which are in `registry_sealed` until the build ends.
ALTER TABLE builds ADD COLUMN requested_us BIGINT;
ALTER TABLE builds ADD COLUMN started_us BIGINT;
ALTER TABLE builds ADD COLUMN attempts BIGINT NOT NULL DEFAULT 0;
ALTER TABLE builds ADD COLUMN node_id TEXT;
ALTER TABLE builds ADD COLUMN reason TEXT;
ALTER TABLE builds ADD COLUMN reason_step TEXT;
ALTER TABLE builds ADD COLUMN request_json TEXT;
ALTER TABLE builds ADD COLUMN recipe_json TEXT;
ALTER TABLE builds ADD COLUMN registry_sealed TEXT;
CREATE INDEX builds_status ON builds (status, created_us);

-- Assignments of tags. They are never changed: the newest of a tag counts.
CREATE TABLE template_tags (
    template_id TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
    seq BIGINT NOT NULL,
    tag TEXT NOT NULL,
    build_id TEXT NOT NULL REFERENCES builds (id) ON DELETE CASCADE,
    created_us BIGINT NOT NULL,
    PRIMARY KEY (template_id, seq)
);
CREATE INDEX template_tags_build ON template_tags (build_id);
INSERT INTO template_tags (template_id, seq, tag, build_id, created_us)
    SELECT template_id, ROW_NUMBER() OVER (PARTITION BY template_id ORDER BY created_us, id), 'default', id, created_us
    FROM builds;

CREATE TABLE build_logs (
    build_id TEXT NOT NULL REFERENCES builds (id) ON DELETE CASCADE,
    seq BIGINT NOT NULL,
    at_us BIGINT NOT NULL,
    level BIGINT NOT NULL,
    step TEXT,
    message TEXT NOT NULL,
    PRIMARY KEY (build_id, seq)
);

-- What a step of a build left behind, by a key of everything that it depends on.
CREATE TABLE layer_cache (
    node_id TEXT NOT NULL,
    team_id TEXT NOT NULL REFERENCES teams (id),
    key TEXT NOT NULL,
    layer_id TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    state_json TEXT NOT NULL,
    used_us BIGINT NOT NULL,
    PRIMARY KEY (node_id, team_id, key)
);
CREATE INDEX layer_cache_used ON layer_cache (node_id, used_us);

-- Archives that clients uploaded for builds; the content is in the data directory of the node.
CREATE TABLE template_files (
    node_id TEXT NOT NULL,
    team_id TEXT NOT NULL REFERENCES teams (id),
    hash TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    used_us BIGINT NOT NULL,
    PRIMARY KEY (node_id, team_id, hash)
);
