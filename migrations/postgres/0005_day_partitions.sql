-- Attempts and events are kept by the day and go as whole days. Their ids are ULIDs, whose first 48 bits
-- are the milliseconds of their time, so a UTC day is a range of ids, and uniqueness, which must
-- contain the key of the partitions, stays as it is. An attempt lies on the day of its delivery.
--
-- Rows that are there stay where they are: their table becomes the partition of all days up to today.
DO $migration$
DECLARE
    today CONSTANT DATE := (now() AT TIME ZONE 'UTC')::DATE;
    parent TEXT;
    key TEXT;
    newest UUID;
    until DATE;
    since DATE;
    old TEXT;
    old_index TEXT;
BEGIN
    CREATE FUNCTION pg_temp.first_id(day DATE) RETURNS UUID LANGUAGE SQL AS
        'SELECT (lpad(to_hex((extract(epoch FROM day) * 1000)::BIGINT), 12, ''0'') || repeat(''0'', 20))::UUID';
    CREATE FUNCTION pg_temp.day_of(id UUID) RETURNS DATE LANGUAGE SQL AS $$
        SELECT (to_timestamp(('x' || substr(replace(id::TEXT, '-', ''), 1, 12))::BIT(48)::BIGINT / 1000.0)
            AT TIME ZONE 'UTC')::DATE $$;

    FOR parent, key IN VALUES ('webhook_attempts', 'delivery_id'), ('events', 'id') LOOP
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', parent);
        EXECUTE format('SELECT %I FROM %I ORDER BY 1 DESC LIMIT 1', key, parent) INTO newest;
        -- Where there are rows, of a clock that was ahead as well, the days begin after the newest.
        until := greatest(today, pg_temp.day_of(newest)) + 1;
        since := CASE WHEN newest IS NULL THEN today ELSE until END;
        old := format('%s_until_%s', parent, to_char(until, 'YYYYMMDD'));
        EXECUTE format('ALTER TABLE %I RENAME TO %I', parent, old);
        FOR old_index IN SELECT indexrelid::regclass::TEXT FROM pg_index WHERE indrelid = old::regclass LOOP
            EXECUTE format('ALTER INDEX %s RENAME TO %I', old_index, 'old_' || old_index);
        END LOOP;
        EXECUTE format('CREATE TABLE %I (LIKE %I) PARTITION BY RANGE (%I)', parent, old, key);

        IF parent = 'events' THEN
            ALTER TABLE events ADD PRIMARY KEY (id);
            CREATE INDEX events_walk ON events (project_id, created_at, id);
            CREATE INDEX events_by_type_walk ON events (project_id, event_type, created_at, id);
        ELSE
            ALTER TABLE webhook_attempts ADD PRIMARY KEY (delivery_id, number);
            CREATE INDEX webhook_attempts_walk ON webhook_attempts (project_id, created_at, id);
            CREATE INDEX webhook_attempts_of_delivery_walk
                ON webhook_attempts (project_id, delivery_id, created_at, id);
            CREATE INDEX webhook_attempts_by_status_walk
                ON webhook_attempts (project_id, status, created_at, id);
            CREATE INDEX webhook_attempts_by_endpoint_walk
                ON webhook_attempts (project_id, endpoint_id, created_at, id);
            CREATE INDEX webhook_attempts_by_type_walk
                ON webhook_attempts (project_id, event_type, created_at, id);
        END IF;

        IF newest IS NULL THEN
            EXECUTE format('DROP TABLE %I', old);
        ELSE
            IF parent = 'webhook_attempts' THEN
                EXECUTE format('ALTER TABLE %I DROP CONSTRAINT old_webhook_attempts_pkey, '
                    'DROP CONSTRAINT old_webhook_attempts_delivery_id_number_key, '
                    'ADD PRIMARY KEY (delivery_id, number), SET (toast_tuple_target = 8160)', old);
            END IF;
            EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (MINVALUE) TO (%L)',
                parent, old, pg_temp.first_id(until));
        END IF;
        FOR day IN 0..(today + 7 - since) LOOP
            EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                format('%s_%s', parent, to_char(since + day, 'YYYYMMDD')), parent,
                pg_temp.first_id(since + day), pg_temp.first_id(since + day + 1));
        END LOOP;
        EXECUTE format('CREATE TABLE %I PARTITION OF %I DEFAULT', parent || '_default', parent);
    END LOOP;

    -- An attempt of some kilobytes stays whole in its page, instead of being compressed out of line.
    FOR old IN SELECT inhrelid::regclass::TEXT FROM pg_inherits WHERE inhparent = 'webhook_attempts'::regclass LOOP
        EXECUTE format('ALTER TABLE %s SET (toast_tuple_target = 8160)', old);
    END LOOP;
    DROP FUNCTION pg_temp.first_id(DATE);
    DROP FUNCTION pg_temp.day_of(UUID);
END
$migration$;
