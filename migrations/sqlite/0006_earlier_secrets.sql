-- Secrets before the previous one, as long as their overlaps last: a JSON list of `sealed` in base64 and `until`.
ALTER TABLE webhook_endpoints ADD COLUMN earlier_secrets TEXT;
CREATE INDEX webhook_endpoints_rotated_again ON webhook_endpoints (id) WHERE earlier_secrets IS NOT NULL;
