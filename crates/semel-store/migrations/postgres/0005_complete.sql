-- Checksum of the first text: c161dc0e654ce18b1fdcb1fbf8d35a642ae44d90e53c479f51c3a0d79e88203615fef36322ebb234739123cb242660b2
-- Its statements: 308dff442047b36a

-- A plain completion at the end of a caller's transaction, sent in one message with its COMMIT. If the lease is gone or
-- newer data waits, it raises an error, and the COMMIT is not reached. It does the same as the hot statement
-- COMPLETE_ONE.
CREATE FUNCTION semel_complete(asked BIGINT, held BIGINT, body BYTEA, is_kept BOOLEAN, fixed BIGINT) RETURNS BIGINT
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    at_time BIGINT := coalesce(fixed, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
    terms   RECORD;
    done    RECORD;
BEGIN
    DELETE FROM semel_leases AS l WHERE l.operation = asked AND l.fence = held AND NOT l.successor
    RETURNING l.retention, l.tombstone INTO terms;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'not a plain completion' USING ERRCODE = 'SM001';
    END IF;
    UPDATE semel_operations AS o
    SET state = 'completed', settled_at = at_time, expires_at = at_time + terms.retention,
        archive_at = at_time + terms.tombstone, outcome = body, outcome_kept = is_kept, error = NULL, checkpoint = NULL
    WHERE o.id = asked AND o.fence = held
    RETURNING o.tenant, o.service, o.kind, o.label1, o.label2, o.claimed_at INTO done;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'not a plain completion' USING ERRCODE = 'SM001';
    END IF;
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    VALUES (done.tenant, done.service, done.kind, coalesce(done.label1, ''), coalesce(done.label2, ''),
            at_time / 3600000000, 'processing', 'completed', '',
            floor(ln(greatest(least(at_time - done.claimed_at, 4294967295), 1)::float8) / ln(2::float8) * 4)::bigint, 1);
    RETURN at_time;
END $$;
