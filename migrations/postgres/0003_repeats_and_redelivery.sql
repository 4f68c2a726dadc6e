-- A test is one attempt: it climbs no ladder and leaves no dead letter.
ALTER TABLE webhook_deliveries ADD COLUMN is_test BOOLEAN NOT NULL DEFAULT FALSE;

-- Since when the endpoint fails; a success clears it.
ALTER TABLE webhook_endpoints ADD COLUMN failing_since TIMESTAMPTZ;
CREATE INDEX webhook_endpoints_rotating ON webhook_endpoints (previous_secret_until)
    WHERE previous_secret_until IS NOT NULL;

-- A delivery that is redelivered may die again: one open dead letter each, and any number resolved.
ALTER TABLE webhook_dead_letters DROP CONSTRAINT webhook_dead_letters_delivery_id_key;
ALTER TABLE webhook_dead_letters ADD COLUMN event_type TEXT;
UPDATE webhook_dead_letters l SET event_type =
    (SELECT event_type FROM webhook_deliveries d WHERE d.id = l.delivery_id);
ALTER TABLE webhook_dead_letters ALTER COLUMN event_type SET NOT NULL;
ALTER TABLE webhook_dead_letters ADD COLUMN status TEXT NOT NULL DEFAULT 'open';
ALTER TABLE webhook_dead_letters ADD COLUMN resolved_at TIMESTAMPTZ;
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
    id UUID PRIMARY KEY,
    project_id UUID NOT NULL,
    endpoint_id UUID,
    event_type TEXT,
    since TIMESTAMPTZ,
    until TIMESTAMPTZ NOT NULL,
    status TEXT NOT NULL,
    redelivered BIGINT NOT NULL,
    skipped BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    reached_at TIMESTAMPTZ NOT NULL,
    reached_id UUID NOT NULL,
    created_at TIMESTAMPTZ NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL,
    completed_at TIMESTAMPTZ
);
CREATE INDEX webhook_redeliveries_walk ON webhook_redeliveries (project_id, created_at, id);
CREATE UNIQUE INDEX webhook_redeliveries_running ON webhook_redeliveries (project_id)
    WHERE status = 'running';
