-- Lifecycle events of sandboxes. They outlive their sandbox, so `sandbox_id` is no foreign key. `type_bit` is one bit, so
-- that several types are asked for with a mask; `body_json` is the event as clients get it; `bytes` is what it counts for.
CREATE TABLE lifecycle_events (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    at_us BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    type_bit BIGINT NOT NULL,
    body_json TEXT NOT NULL,
    bytes BIGINT NOT NULL
);
CREATE INDEX lifecycle_events_team ON lifecycle_events (team_id, at_us, seq);
CREATE INDEX lifecycle_events_sandbox ON lifecycle_events (team_id, sandbox_id, at_us, seq);
CREATE INDEX lifecycle_events_at ON lifecycle_events (at_us);
CREATE INDEX lifecycle_events_bytes ON lifecycle_events (team_id, bytes);

-- Addresses to which the events of a team are sent. The caller seals the secret that signs them.
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    team_id TEXT NOT NULL REFERENCES teams (id),
    name TEXT NOT NULL,
    url TEXT NOT NULL,
    enabled BIGINT NOT NULL,
    type_mask BIGINT NOT NULL,
    secret_sealed TEXT NOT NULL,
    dropped BIGINT NOT NULL DEFAULT 0,
    created_us BIGINT NOT NULL
);
CREATE INDEX webhooks_list ON webhooks (team_id, created_us, id);

-- Events that are to be sent. A server that is about to send one moves `due_us` beyond the time that it may take, and
-- names its attempt in `claim` and its node, so that no other server sends the event meanwhile, and the next process of the
-- node of a killed one finds it.
CREATE TABLE webhook_deliveries (
    webhook_id TEXT NOT NULL,
    event_id TEXT NOT NULL,
    team_id TEXT NOT NULL,
    due_us BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    claim TEXT,
    node_id TEXT,
    PRIMARY KEY (webhook_id, event_id)
);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook_id, team_id, due_us);
CREATE INDEX webhook_deliveries_team ON webhook_deliveries (team_id);

-- What became of the attempts: `status` is that of the response, `error` one word where there was none.
CREATE TABLE webhook_attempts (
    id TEXT PRIMARY KEY,
    webhook_id TEXT NOT NULL,
    event_id TEXT NOT NULL,
    type_bit BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    at_us BIGINT NOT NULL,
    duration_us BIGINT NOT NULL,
    status BIGINT,
    error TEXT,
    next_us BIGINT
);
CREATE INDEX webhook_attempts_list ON webhook_attempts (webhook_id, at_us, id);
CREATE INDEX webhook_attempts_at ON webhook_attempts (at_us);

-- What a team used in a minute: the most sandboxes at a time and the number of starts, as one server process saw it.
CREATE TABLE team_usage (
    team_id TEXT NOT NULL,
    at_us BIGINT NOT NULL,
    node_id TEXT NOT NULL,
    process TEXT NOT NULL,
    sandboxes BIGINT NOT NULL,
    starts BIGINT NOT NULL,
    PRIMARY KEY (team_id, at_us, node_id, process)
);
CREATE INDEX team_usage_at ON team_usage (at_us);
