-- The queue would announce every job by NOTIFY, which nobody listens to here. Transactions that notify
-- commit one after the other, whole flush and all: it was the ceiling of everything that enqueues.
DROP TRIGGER IF EXISTS notify_workers ON apalis.jobs;
