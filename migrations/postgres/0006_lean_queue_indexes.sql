-- Two indexes of the queue's table cover what another one covers: `id` is its primary key, and `lock_by` has
-- a second index. Each job that is written, taken and removed touched both for nothing. Dropping an index
-- takes as long on a full table as on an empty one.
DROP INDEX IF EXISTS apalis.unique_job_id;
DROP INDEX IF EXISTS apalis.lidx;
