-- Jobs that wait for room: `lane` says where, and `priority` is below zero while they are parked.
ALTER TABLE Jobs ADD COLUMN lane TEXT;

CREATE INDEX jobs_parked ON Jobs (job_type, lane, priority DESC, run_at)
    WHERE status = 'Pending' AND priority < 0;

-- The mark of a job that was begun: seconds. Before, nobody marked: what was taken may have been begun.
ALTER TABLE Jobs ADD COLUMN begun_at INTEGER;

UPDATE Jobs SET begun_at = unixepoch() WHERE status IN ('Queued', 'Running');

-- Before, what failed waited under a status of its own.
UPDATE Jobs SET status = 'Pending' WHERE status = 'Failed' AND attempts < max_attempts;
