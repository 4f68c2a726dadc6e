-- A test is one attempt: it climbs no ladder and leaves no dead letter.
ALTER TABLE webhook_deliveries ADD COLUMN is_test INTEGER NOT NULL DEFAULT 0;

-- Since when the endpoint fails; a success clears it.
ALTER TABLE webhook_endpoints ADD COLUMN failing_since INTEGER;
CREATE INDEX webhook_endpoints_rotating ON webhook_endpoints (previous_secret_until)
    WHERE previous_secret_until IS NOT NULL;

-- A delivery that is redelivered may die again: one open dead letter each, and any number resolved.
-- SQLite drops a constraint only with its table.
CREATE TABLE webhook_dead_letters_new (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    delivery_id BLOB NOT NULL,
    event_id BLOB NOT NULL,
    event_type TEXT NOT NULL,
    endpoint_id BLOB NOT NULL,
    reason TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'open',
    resolved_at INTEGER,
    created_at INTEGER NOT NULL
);
INSERT INTO webhook_dead_letters_new
    (id, project_id, delivery_id, event_id, event_type, endpoint_id, reason, attempts, created_at)
    SELECT l.id, l.project_id, l.delivery_id, l.event_id, d.event_type, l.endpoint_id, l.reason,
        l.attempts, l.created_at
    FROM webhook_dead_letters l JOIN webhook_deliveries d ON d.id = l.delivery_id;
DROP TABLE webhook_dead_letters;
ALTER TABLE webhook_dead_letters_new RENAME TO webhook_dead_letters;
CREATE INDEX webhook_dead_letters_walk ON webhook_dead_letters (project_id, created_at, id);
CREATE INDEX webhook_dead_letters_by_endpoint_walk
    ON webhook_dead_letters (project_id, endpoint_id, created_at, id);
CREATE UNIQUE INDEX webhook_dead_letters_open ON webhook_dead_letters (delivery_id)
    WHERE status = 'open';
CREATE INDEX webhook_dead_letters_by_status_walk
    ON webhook_dead_letters (project_id, status, created_at, id);
CREATE INDEX webhook_dead_letters_by_type_walk
    ON webhook_dead_letters (project_id, event_type, created_at, id);
CREATE INDEX webhook_dead_letters_by_age ON webhook_dead_letters (created_at);
CREATE INDEX webhook_dead_letters_resolved ON webhook_dead_letters (resolved_at)
    WHERE resolved_at IS NOT NULL;

-- A redelivery in bulk: its filter, how far it has come (the last letter it looked at), and which of
-- its jobs counts.
CREATE TABLE webhook_redeliveries (
    id BLOB PRIMARY KEY,
    project_id BLOB NOT NULL,
    endpoint_id BLOB,
    event_type TEXT,
    since INTEGER,
    until INTEGER NOT NULL,
    status TEXT NOT NULL,
    redelivered INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    batch INTEGER NOT NULL,
    reached_at INTEGER NOT NULL,
    reached_id BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    completed_at INTEGER
);
CREATE INDEX webhook_redeliveries_walk ON webhook_redeliveries (project_id, created_at, id);
CREATE UNIQUE INDEX webhook_redeliveries_running ON webhook_redeliveries (project_id)
    WHERE status = 'running';
