-- Jobs that wait for room: `lane` says where, and `priority` is below zero while they are parked.
ALTER TABLE apalis.jobs ADD COLUMN lane TEXT COLLATE "C";

CREATE INDEX jobs_parked ON apalis.jobs (job_type, lane, priority DESC, run_at)
    WHERE status = 'Pending' AND priority < 0;

-- The mark of a job that was begun. Not a status: every index knows the status, and no index this.
ALTER TABLE apalis.jobs ADD COLUMN begun_at TIMESTAMPTZ;

UPDATE apalis.jobs SET begun_at = now() WHERE status = 'Running';

-- Before, what failed waited under a status of its own.
UPDATE apalis.jobs SET status = 'Pending' WHERE status = 'Failed' AND attempts < max_attempts;
