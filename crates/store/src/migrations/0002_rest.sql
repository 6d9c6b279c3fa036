-- What the rest of the REST surface has to remember: more about keys, access tokens, idempotency keys.

-- How many characters follow the prefix of a key, and when it last let somebody in, as far as that was noted.
ALTER TABLE api_keys ADD COLUMN value_length BIGINT NOT NULL DEFAULT 40;
ALTER TABLE api_keys ADD COLUMN last_used_us BIGINT;

-- Like API keys, but of a user. A deleted one is gone: nobody makes the same one twice.
CREATE TABLE access_tokens (
    id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (id),
    name TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    mask TEXT NOT NULL,
    value_length BIGINT NOT NULL,
    created_us BIGINT NOT NULL,
    last_used_us BIGINT
);
CREATE INDEX access_tokens_user ON access_tokens (user_id, created_us);

-- `sandbox_id` names what the request makes, from before it is made. `answer_json` is the caller's own and holds no
-- secret: tokens are derived from the sandbox's id.
CREATE TABLE idempotency_keys (
    team_id TEXT NOT NULL REFERENCES teams (id),
    key TEXT NOT NULL,
    body_hash TEXT NOT NULL,
    state TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    status BIGINT,
    answer_json TEXT,
    created_us BIGINT NOT NULL,
    expires_us BIGINT NOT NULL,
    PRIMARY KEY (team_id, key)
);
CREATE INDEX idempotency_keys_expiry ON idempotency_keys (expires_us);
