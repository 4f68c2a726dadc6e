-- False where the answer was too large to be kept: then `body` is empty.
ALTER TABLE idempotency_records ADD COLUMN is_whole BOOLEAN NOT NULL DEFAULT TRUE;
