CREATE TABLE projects (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE api_keys (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL REFERENCES projects (id),
    hash BYTEA NOT NULL UNIQUE,
    scopes TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    revoked_at TIMESTAMPTZ
);

CREATE TABLE idempotency_records (
    project_id UUID NOT NULL,
    key TEXT NOT NULL,
    fingerprint BYTEA NOT NULL,
    status BIGINT NOT NULL,
    headers TEXT NOT NULL,
    body BYTEA NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (project_id, key)
);
CREATE INDEX idempotency_records_expiry ON idempotency_records (expires_at);

CREATE TABLE contacts (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    phone TEXT NOT NULL,
    name TEXT,
    email TEXT,
    tags TEXT NOT NULL,
    attributes TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL,
    UNIQUE (project_id, phone)
);
CREATE INDEX contacts_walk ON contacts (project_id, created_at, id);

-- At most 64 rows a project: concurrent writers rarely meet on one, and a count adds few numbers.
CREATE TABLE contact_counts (
    project_id UUID NOT NULL,
    shard BIGINT NOT NULL,
    count BIGINT NOT NULL,
    PRIMARY KEY (project_id, shard)
);

CREATE TABLE events (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    event_type TEXT NOT NULL,
    data TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX events_walk ON events (project_id, created_at, id);
CREATE INDEX events_by_type_walk ON events (project_id, event_type, created_at, id);

CREATE TABLE webhook_endpoints (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    url TEXT NOT NULL,
    description TEXT,
    event_types TEXT NOT NULL,
    enabled BOOLEAN NOT NULL,
    disabled_reason TEXT,
    plugin_id UUID,
    plugin_config TEXT,
    headers BYTEA NOT NULL,
    secret BYTEA NOT NULL,
    previous_secret BYTEA,
    previous_secret_until TIMESTAMPTZ,
    created_at TIMESTAMPTZ NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX webhook_endpoints_walk ON webhook_endpoints (project_id, created_at, id);
CREATE INDEX webhook_endpoints_by_plugin ON webhook_endpoints (plugin_id) WHERE plugin_id IS NOT NULL;

-- `next_number` is the number that the next planned attempt of any trigger gets, `ladder_number` the
-- number of the ladder's own planned attempt, `step` which attempt of the ladder that is, from 1, and
-- `job_copy` which of its jobs counts: with id and number it is the job's unique key.
CREATE TABLE webhook_deliveries (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    event_id UUID NOT NULL,
    event_type TEXT NOT NULL,
    endpoint_id UUID NOT NULL,
    request_id UUID NOT NULL,
    state TEXT NOT NULL,
    attempts BIGINT NOT NULL,
    next_number BIGINT NOT NULL,
    ladder_number BIGINT NOT NULL,
    step BIGINT NOT NULL,
    job_copy BIGINT NOT NULL,
    next_attempt_at TIMESTAMPTZ,
    last_status_code BIGINT,
    created_at TIMESTAMPTZ NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL
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
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    delivery_id UUID NOT NULL,
    endpoint_id UUID NOT NULL,
    event_type TEXT NOT NULL,
    number BIGINT NOT NULL,
    trigger TEXT NOT NULL,
    url TEXT NOT NULL,
    request_id UUID NOT NULL,
    status TEXT NOT NULL,
    status_code BIGINT,
    error TEXT,
    duration_ms BIGINT NOT NULL,
    request_headers TEXT NOT NULL,
    payload TEXT,
    response_headers TEXT NOT NULL,
    response_body BYTEA NOT NULL,
    plugin TEXT,
    created_at TIMESTAMPTZ NOT NULL,
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
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    delivery_id UUID NOT NULL UNIQUE,
    event_id UUID NOT NULL,
    endpoint_id UUID NOT NULL,
    reason TEXT NOT NULL,
    attempts BIGINT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX webhook_dead_letters_walk ON webhook_dead_letters (project_id, created_at, id);
CREATE INDEX webhook_dead_letters_by_endpoint_walk
    ON webhook_dead_letters (project_id, endpoint_id, created_at, id);

CREATE TABLE plugins (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    name TEXT NOT NULL,
    active_version BIGINT,
    created_at TIMESTAMPTZ NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX plugins_walk ON plugins (project_id, created_at, id);

CREATE TABLE plugin_versions (
    id UUID PRIMARY KEY,
    plugin_id UUID NOT NULL REFERENCES plugins (id) ON DELETE CASCADE,
    version BIGINT NOT NULL,
    status TEXT NOT NULL,
    reason TEXT,
    sha256 BYTEA NOT NULL,
    size BIGINT NOT NULL,
    exports TEXT NOT NULL,
    component BYTEA NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    UNIQUE (plugin_id, version)
);
CREATE INDEX plugin_versions_by_content ON plugin_versions (sha256);
CREATE INDEX plugin_versions_walk ON plugin_versions (plugin_id, created_at, id);

-- Compiled components, authenticated under the master key; `engine` names the compiler and settings.
CREATE TABLE plugin_artifacts (
    sha256 BYTEA NOT NULL,
    engine TEXT NOT NULL,
    artifact BYTEA NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (sha256, engine)
);

-- The queue's own table: finished jobs are removed by their age.
CREATE INDEX jobs_finished ON apalis.jobs (done_at) WHERE status IN ('Done', 'Killed');

CREATE TABLE inspector_bins (
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX inspector_bins_walk ON inspector_bins (project_id, created_at, id);

CREATE TABLE inspector_requests (
    id UUID PRIMARY KEY,
    bin_id UUID NOT NULL REFERENCES inspector_bins (id) ON DELETE CASCADE,
    method TEXT NOT NULL,
    path TEXT NOT NULL,
    query TEXT,
    headers TEXT NOT NULL,
    body BYTEA NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX inspector_requests_walk ON inspector_requests (bin_id, created_at, id);
