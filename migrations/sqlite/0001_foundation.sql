CREATE TABLE projects (
    id BLOB PRIMARY KEY,
    name TEXT NOT NULL,
    created_at INTEGER NOT NULL
);

CREATE TABLE api_keys (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL REFERENCES projects (id),
    hash BLOB NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
);

CREATE TABLE idempotency_records (
    project_id BLOB NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    status INTEGER NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (project_id, key)
);
CREATE INDEX idempotency_records_expiry ON idempotency_records (expires_at);

CREATE TABLE contacts (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    phone TEXT NOT NULL,
    name TEXT,
    email TEXT,
    tags TEXT NOT NULL,
    attributes TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    UNIQUE (project_id, phone)
);
CREATE INDEX contacts_walk ON contacts (project_id, created_at, id);

-- At most 64 rows a project: concurrent writers rarely meet on one, and a count adds few numbers.
CREATE TABLE contact_counts (
    project_id BLOB NOT NULL,
    shard INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (project_id, shard)
);

CREATE TABLE events (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    event_type TEXT NOT NULL,
    data TEXT NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX events_walk ON events (project_id, created_at, id);
CREATE INDEX events_by_type_walk ON events (project_id, event_type, created_at, id);

CREATE TABLE webhook_endpoints (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    url TEXT NOT NULL,
    description TEXT,
    event_types TEXT NOT NULL,
    enabled INTEGER NOT NULL,
    disabled_reason TEXT,
    plugin_id BLOB,
    plugin_config TEXT,
    headers BLOB NOT NULL,
    secret BLOB NOT NULL,
    previous_secret BLOB,
    previous_secret_until INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);
CREATE INDEX webhook_endpoints_walk ON webhook_endpoints (project_id, created_at, id);
CREATE INDEX webhook_endpoints_by_plugin ON webhook_endpoints (plugin_id) WHERE plugin_id IS NOT NULL;

-- `next_number` is the number that the next planned attempt of any trigger gets, `ladder_number` the
-- number of the ladder's own planned attempt, `step` which attempt of the ladder that is, from 1, and
-- `job_copy` which of its jobs counts: with id and number it is the job's unique key.
CREATE TABLE webhook_deliveries (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    event_id BLOB NOT NULL,
    event_type TEXT NOT NULL,
    endpoint_id BLOB NOT NULL,
    request_id BLOB NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    next_number INTEGER NOT NULL,
    ladder_number INTEGER NOT NULL,
    step INTEGER NOT NULL,
    job_copy INTEGER NOT NULL,
    next_attempt_at INTEGER,
    last_status_code INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);
CREATE INDEX webhook_deliveries_walk ON webhook_deliveries (project_id, created_at, id);
CREATE INDEX webhook_deliveries_by_state_walk
    ON webhook_deliveries (project_id, state, created_at, id);
CREATE INDEX webhook_deliveries_by_endpoint_walk
    ON webhook_deliveries (project_id, endpoint_id, created_at, id);
CREATE INDEX webhook_deliveries_by_type_walk
    ON webhook_deliveries (project_id, event_type, created_at, id);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (next_attempt_at)
    WHERE state IN ('pending', 'retrying');
CREATE INDEX webhook_deliveries_open ON webhook_deliveries (endpoint_id, state)
    WHERE state IN ('pending', 'retrying', 'paused');

CREATE TABLE webhook_attempts (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    delivery_id BLOB NOT NULL,
    endpoint_id BLOB NOT NULL,
    event_type TEXT NOT NULL,
    number INTEGER NOT NULL,
    trigger TEXT NOT NULL,
    url TEXT NOT NULL,
    request_id BLOB NOT NULL,
    status TEXT NOT NULL,
    status_code INTEGER,
    error TEXT,
    duration_ms INTEGER NOT NULL,
    request_headers TEXT NOT NULL,
    payload TEXT,
    response_headers TEXT NOT NULL,
    response_body BLOB NOT NULL,
    plugin TEXT,
    created_at INTEGER NOT NULL,
    UNIQUE (delivery_id, number)
);
CREATE INDEX webhook_attempts_walk ON webhook_attempts (project_id, created_at, id);
CREATE INDEX webhook_attempts_of_delivery_walk
    ON webhook_attempts (project_id, delivery_id, created_at, id);
CREATE INDEX webhook_attempts_by_status_walk
    ON webhook_attempts (project_id, status, created_at, id);
CREATE INDEX webhook_attempts_by_endpoint_walk
    ON webhook_attempts (project_id, endpoint_id, created_at, id);
CREATE INDEX webhook_attempts_by_type_walk
    ON webhook_attempts (project_id, event_type, created_at, id);

CREATE TABLE webhook_dead_letters (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    delivery_id BLOB NOT NULL UNIQUE,
    event_id BLOB NOT NULL,
    endpoint_id BLOB NOT NULL,
    reason TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX webhook_dead_letters_walk ON webhook_dead_letters (project_id, created_at, id);
CREATE INDEX webhook_dead_letters_by_endpoint_walk
    ON webhook_dead_letters (project_id, endpoint_id, created_at, id);

CREATE TABLE plugins (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    name TEXT NOT NULL,
    active_version INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);
CREATE INDEX plugins_walk ON plugins (project_id, created_at, id);

CREATE TABLE plugin_versions (
    id BLOB PRIMARY KEY,
    plugin_id BLOB NOT NULL REFERENCES plugins (id) ON DELETE CASCADE,
    version INTEGER NOT NULL,
    status TEXT NOT NULL,
    reason TEXT,
    sha256 BLOB NOT NULL,
    size INTEGER NOT NULL,
    exports TEXT NOT NULL,
    component BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (plugin_id, version)
);
CREATE INDEX plugin_versions_by_content ON plugin_versions (sha256);
CREATE INDEX plugin_versions_walk ON plugin_versions (plugin_id, created_at, id);

-- Compiled components, authenticated under the master key; `engine` names the compiler and settings.
CREATE TABLE plugin_artifacts (
    sha256 BLOB NOT NULL,
    engine TEXT NOT NULL,
    artifact BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (sha256, engine)
);

CREATE TABLE inspector_bins (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX inspector_bins_walk ON inspector_bins (project_id, created_at, id);

CREATE TABLE inspector_requests (
    id BLOB PRIMARY KEY,
    bin_id BLOB NOT NULL REFERENCES inspector_bins (id) ON DELETE CASCADE,
    method TEXT NOT NULL,
    path TEXT NOT NULL,
    query TEXT,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX inspector_requests_walk ON inspector_requests (bin_id, created_at, id);
