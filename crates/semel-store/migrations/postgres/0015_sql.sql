-- Functions for programs without the library: they enqueue an operation, or put a message into the outbox, in the
-- caller's transaction. docs/sql.md describes them. A later migration that changes them raises semel_sql_version().
--
-- They run with the rights of their owner, so that a role that may only execute them needs no rights on tables. Its
-- objects must not be found in their place: search_path has nothing but the system's schema, and every name of ours has
-- its schema. That is why the functions are created from text: {schema} is this schema, {channel} the channel of
-- wakes.rs, {fences} the sequence.
--
-- NOTIFY with equal texts is sent once per transaction. It cannot be part of a two-phase commit, and costs a lock at
-- the commit: `SET semel.notify = off` leaves the work to the nodes' polls.
DO $migration$
DECLARE
    here TEXT := quote_ident(current_schema());
    text TEXT;
BEGIN
    FOREACH text IN ARRAY ARRAY[
$text$
CREATE FUNCTION {schema}.semel_sql_version() RETURNS INTEGER LANGUAGE sql IMMUTABLE AS $body$ SELECT 1 $body$
$text$,
-- What is wrong with a text: NULL if nothing is. The same rules as Key::new and Scope::new.
$text$
CREATE FUNCTION {schema}.semel_wrong_text(value TEXT, most INTEGER, may_be_empty BOOLEAN DEFAULT FALSE)
RETURNS TEXT LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN value IS NULL THEN 'is null'
                WHEN value = '' AND NOT may_be_empty THEN 'is empty'
                WHEN octet_length(value) > most THEN format('is longer than %s bytes', most)
                WHEN value COLLATE "C" ~ '[\u0001-\u001f\u007f-\u009f]' THEN 'has control characters' END
$body$
$text$,
-- Also for the first two parts of a scope: these have no slash.
$text$
CREATE FUNCTION {schema}.semel_wrong_part(value TEXT) RETURNS TEXT LANGUAGE sql IMMUTABLE AS $body$
    SELECT coalesce({schema}.semel_wrong_text(value, 64), CASE WHEN strpos(value, '/') > 0 THEN 'has a slash in it' END)
$body$
$text$,
-- Durations are compared as microseconds in NUMERIC, which also has infinity.
$text$
CREATE FUNCTION {schema}.semel_wrong_span(micros NUMERIC, shortest NUMERIC, why TEXT) RETURNS TEXT LANGUAGE sql IMMUTABLE
AS $body$
    SELECT CASE WHEN micros < shortest THEN why WHEN micros > 31622400000000000 THEN 'is longer than 1000 years' END
$body$
$text$,
$text$
CREATE FUNCTION {schema}.semel_wrong_time(value TIMESTAMPTZ) RETURNS TEXT LANGUAGE sql STABLE AS $body$
    SELECT CASE WHEN NOT isfinite(value) THEN 'is infinite'
                WHEN value > now() + interval '1000 years' THEN 'is more than 1000 years ahead' END
$body$
$text$,
$text$
CREATE FUNCTION {schema}.semel_wrong_headers(headers JSONB) RETURNS TEXT LANGUAGE plpgsql IMMUTABLE AS $body$
BEGIN
    IF jsonb_typeof(headers) <> 'object' THEN
        RETURN 'must be an object of texts';
    END IF;
    RETURN (
        SELECT CASE WHEN bool_or(jsonb_typeof(h.value) <> 'string') THEN 'must be an object of texts'
                    WHEN count(*) > 64 OR sum(octet_length(h.key) + octet_length(h.value #>> '{}')) > 16384
                        THEN 'must be at most 64 of together at most 16 KiB'
                    WHEN bool_or({schema}.semel_wrong_text(h.key, 128) IS NOT NULL)
                        THEN 'a name must be 1 to 128 bytes without control characters'
                    WHEN bool_or(h.key LIKE 'semel-%' OR h.key LIKE 'x-%')
                        THEN 'names that begin with semel- or x- are not free' END
        FROM jsonb_each(headers) AS h);
END
$body$
$text$,
-- Wakes the nodes that wait for news, after the commit.
$text$
CREATE FUNCTION {schema}.semel_wake(news TEXT) RETURNS VOID LANGUAGE sql AS $body$
    SELECT pg_notify({channel}, 'sql ' || news)
    WHERE coalesce(current_setting('semel.notify', TRUE), '') NOT IN ('off', 'false', 'no', '0')
$body$
$text$,

-- The same as Ledger::enqueue_in: the state machine's `enqueue` with on_mismatch = reject, the rows of the statement
-- ENQUEUE, and the rules of Work, Policy and Labels. Differs in one thing: an expired lease is not ended here, its
-- operation is in flight until a worker or the sweep has ended it.
$text$
CREATE FUNCTION {schema}.semel_enqueue_bytes(
    service TEXT, kind TEXT, key TEXT, payload BYTEA,
    not_before TIMESTAMPTZ DEFAULT NULL, priority BIGINT DEFAULT 0,
    label1 TEXT DEFAULT NULL, label2 TEXT DEFAULT NULL, label3 TEXT DEFAULT NULL, label4 TEXT DEFAULT NULL,
    max_attempts BIGINT DEFAULT NULL, on_lost TEXT DEFAULT NULL, lease INTERVAL DEFAULT NULL,
    max_run INTERVAL DEFAULT NULL, retention INTERVAL DEFAULT NULL,
    tenant TEXT DEFAULT 'default',
    OUT answer TEXT, OUT operation BIGINT, OUT created BOOLEAN)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
#variable_conflict use_column
DECLARE
    has_policy   BOOLEAN := coalesce(max_attempts::text, on_lost, lease::text, max_run::text, retention::text) IS NOT NULL;
    lease_for    NUMERIC := coalesce(extract(epoch FROM lease) * 1000000, 30000000);
    run_for      NUMERIC := coalesce(extract(epoch FROM max_run) * 1000000, greatest(lease_for, 900000000));
    kept_for     NUMERIC := coalesce(extract(epoch FROM retention) * 1000000, 86400000000);
    wrong        TEXT;
    terms        TEXT;
    tag          BYTEA := 'semel fingerprint 1: bytes';
    fingerprint  BYTEA;
    epoch        BIGINT;
    at           BIGINT;
    due          BIGINT;
    fence        BIGINT;
    known        RECORD;
BEGIN
    wrong := concat_ws('; ',
        'tenant: ' || {schema}.semel_wrong_part(tenant),
        'service: ' || {schema}.semel_wrong_part(service),
        'kind: ' || {schema}.semel_wrong_text(kind, 200),
        'key: ' || {schema}.semel_wrong_text(key, 255),
        'payload: ' || CASE WHEN payload IS NULL THEN 'is null'
                            WHEN octet_length(payload) > 8388608 THEN 'is larger than 8388608 bytes' END,
        'not_before: ' || {schema}.semel_wrong_time(not_before),
        'priority: ' || CASE WHEN priority IS NULL OR priority NOT BETWEEN -2 AND 2
                             THEN format('is %s, must be -2 to 2', coalesce(priority::text, 'null')) END,
        'label1: ' || CASE WHEN label1 IS NOT NULL THEN {schema}.semel_wrong_text(label1, 255) END,
        'label2: ' || CASE WHEN label2 IS NOT NULL THEN {schema}.semel_wrong_text(label2, 255) END,
        'label3: ' || CASE WHEN label3 IS NOT NULL THEN {schema}.semel_wrong_text(label3, 255) END,
        'label4: ' || CASE WHEN label4 IS NOT NULL THEN {schema}.semel_wrong_text(label4, 255) END,
        'max_attempts: ' || CASE WHEN max_attempts NOT BETWEEN 1 AND 4294967295 THEN 'must be 1 to 4294967295' END,
        'on_lost: ' || CASE WHEN on_lost NOT IN ('rerun', 'hold') THEN 'must be rerun or hold' END,
        'lease: ' || {schema}.semel_wrong_span(lease_for, 100000, 'is shorter than 100ms'),
        'max_run: ' || {schema}.semel_wrong_span(run_for, lease_for, 'is shorter than the lease'),
        'retention: ' || {schema}.semel_wrong_span(kept_for, 1, 'must be longer than 0'));
    IF wrong <> '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'semel_enqueue: ' || wrong;
    END IF;
    IF has_policy THEN
        terms := format('[%s,%s,%s,null,%s,5,1000000,300000000,"reject","%s"]', round(lease_for), round(run_for),
                        round(kept_for), coalesce(max_attempts::text, 'null'), coalesce(on_lost, 'rerun'));
    END IF;
    fingerprint := '\x01'::bytea || sha256(int8send(octet_length(tag)) || tag || int8send(octet_length(payload)) || payload);

    -- A server that no node has seen since a promotion may have a sequence that went back: a node that connects raises
    -- the epoch, and no fence is drawn before.
    SELECT e.epoch << 43 INTO epoch FROM {schema}.semel_epoch AS e, {schema}.semel_cluster() AS c
    WHERE e.one AND ((e.system, e.timeline) <> (c.system, c.timeline)) IS NOT TRUE;
    IF epoch IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'semel_enqueue: no node of Semel has connected to this server since it was promoted, restored or created',
            HINT = 'Try again when a node has connected.';
    END IF;

    FOR n IN 1..10 LOOP
        at := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
        due := greatest(at, (extract(epoch FROM not_before) * 1000000)::bigint);
        fence := epoch + nextval({fences});
        INSERT INTO {schema}.semel_operations
            (id, tenant, service, kind, key, fingerprint, payload, label1, label2, label3, label4, state, fence, owner,
             created_at, claimed_at, not_before, look_at, priority, terms)
        VALUES (fence, tenant, service, kind, key, fingerprint, '\x0100'::bytea || payload, label1, label2, label3, label4,
                'pending', fence, '', at, 0, nullif(due, at), at + round(kept_for)::bigint, nullif(priority, 0), terms)
        ON CONFLICT (tenant, service, kind, key) DO NOTHING;
        IF FOUND THEN
            INSERT INTO {schema}.semel_backlog (operation, tenant, service, kind, state, due, priority)
            VALUES (fence, tenant, service, kind, 'pending', due, priority);
            INSERT INTO {schema}.semel_deltas
                (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
            VALUES (tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), at / 3600000000, '', 'pending', '', 0, 1);
            PERFORM {schema}.semel_wake('due');
            answer := 'enqueued';
            operation := fence;
            created := TRUE;
            RETURN;
        END IF;

        -- Read, not locked: the answer changes nothing.
        SELECT o.id, o.fence, o.fingerprint, o.state, o.expires_at,
               coalesce(o.label1, '') AS label1, coalesce(o.label2, '') AS label2,
               EXISTS (SELECT 1 FROM {schema}.semel_backlog AS b WHERE b.operation = o.id AND b.due IS NULL) AS never_due
        INTO known
        FROM {schema}.semel_operations AS o
        WHERE o.tenant = semel_enqueue_bytes.tenant AND o.service = semel_enqueue_bytes.service
          AND o.kind = semel_enqueue_bytes.kind AND o.key = semel_enqueue_bytes.key;
        CONTINUE WHEN NOT FOUND;
        IF known.expires_at <= at THEN
            -- Past its retention it counts as absent, before the sweep has removed it.
            DELETE FROM {schema}.semel_operations AS o
            WHERE o.id = known.id AND o.fence = known.fence AND o.expires_at <= at;
            IF FOUND THEN
                DELETE FROM {schema}.semel_archive AS a WHERE a.operation = known.id;
                DELETE FROM {schema}.semel_journal AS j WHERE j.operation = known.id;
                DELETE FROM {schema}.semel_repeats AS r WHERE r.operation = known.id;
                DELETE FROM {schema}.semel_backlog AS b WHERE b.operation = known.id;
                INSERT INTO {schema}.semel_deltas
                    (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
                VALUES (tenant, service, kind, known.label1, known.label2, at / 3600000000, known.state, '', '', 0, 1);
            END IF;
            CONTINUE;
        END IF;
        -- A fingerprint of another version cannot be compared: it says nothing about the payload.
        answer := CASE
            WHEN known.fingerprint <> fingerprint AND get_byte(known.fingerprint, 0) = 1 THEN 'mismatch'
            WHEN known.state = 'processing' THEN 'in_flight'
            WHEN known.state = 'completed' THEN 'replay'
            WHEN known.state = 'in_doubt' THEN 'in_doubt'
            WHEN known.never_due THEN 'exhausted'
            WHEN known.state = 'pending' THEN 'waiting'
            ELSE 'not_yet' END;
        operation := known.id;
        created := FALSE;
        RETURN;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE = 'semel_enqueue: the operation is changing; try again';
END
$body$
$text$,
$text$
CREATE FUNCTION {schema}.semel_enqueue(
    service TEXT, kind TEXT, key TEXT, payload TEXT,
    not_before TIMESTAMPTZ DEFAULT NULL, priority BIGINT DEFAULT 0,
    label1 TEXT DEFAULT NULL, label2 TEXT DEFAULT NULL, label3 TEXT DEFAULT NULL, label4 TEXT DEFAULT NULL,
    max_attempts BIGINT DEFAULT NULL, on_lost TEXT DEFAULT NULL, lease INTERVAL DEFAULT NULL,
    max_run INTERVAL DEFAULT NULL, retention INTERVAL DEFAULT NULL,
    tenant TEXT DEFAULT 'default',
    OUT answer TEXT, OUT operation BIGINT, OUT created BOOLEAN)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT e.answer, e.operation, e.created
    FROM {schema}.semel_enqueue_bytes(service, kind, key, convert_to(payload, 'UTF8'), not_before, priority, label1, label2,
         label3, label4, max_attempts, on_lost, lease, max_run, retention, tenant) AS e
$body$
$text$,

-- The same as OutboxStore::put with one message: the rules of Message::check, and the rows of `number_keys` and `put`.
$text$
CREATE FUNCTION {schema}.semel_publish_bytes(
    topic TEXT, body BYTEA, kind TEXT DEFAULT '', ordering_key TEXT DEFAULT NULL, headers JSONB DEFAULT '{}',
    not_before TIMESTAMPTZ DEFAULT NULL, receipt BOOLEAN DEFAULT FALSE, message_id UUID DEFAULT NULL,
    tenant TEXT DEFAULT 'default') RETURNS UUID
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
#variable_conflict use_column
DECLARE
    wrong  TEXT;
    at     BIGINT := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
    due    BIGINT;
    id     UUID := message_id;
    number BIGINT;
    state  TEXT := 'ready';
    made   BYTEA;
BEGIN
    wrong := concat_ws('; ',
        'tenant: ' || {schema}.semel_wrong_text(tenant, 255),
        'topic: ' || CASE WHEN topic IS NULL THEN 'is null' WHEN topic COLLATE "C" !~ '^[A-Za-z0-9.:/_-]{1,200}$'
                          THEN 'must be 1 to 200 letters, digits, ''.'', ''-'', ''_'', '':'' or ''/''' END,
        'body: ' || CASE WHEN body IS NULL THEN 'is null'
                         WHEN octet_length(body) > 1048576 THEN 'is larger than 1048576 bytes' END,
        'kind: ' || {schema}.semel_wrong_text(kind, 255, TRUE),
        'ordering_key: ' || CASE WHEN ordering_key IS NOT NULL THEN {schema}.semel_wrong_text(ordering_key, 255) END,
        'headers: ' || {schema}.semel_wrong_headers(headers),
        'not_before: ' || {schema}.semel_wrong_time(not_before));
    IF wrong <> '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'semel_publish: ' || wrong;
    END IF;
    IF id IS NULL THEN
        -- Version 7: 48 bits of milliseconds, then random bits; the version is the first half of the seventh byte.
        made := overlay(uuid_send(gen_random_uuid()) PLACING substr(int8send(at / 1000), 3) FROM 1 FOR 6);
        id := encode(set_byte(made, 6, (get_byte(made, 6) & 15) | 112), 'hex')::uuid;
    END IF;
    due := (extract(epoch FROM not_before) * 1000000)::bigint;
    IF due > at THEN
        state := 'waiting';
    END IF;
    IF ordering_key IS NOT NULL THEN
        -- Locked until the commit. The next statement must see what the transaction before has committed.
        INSERT INTO {schema}.semel_outbox_keys AS k (tenant, ordering_key, last_number) VALUES (tenant, ordering_key, 1)
        ON CONFLICT (tenant, ordering_key) DO UPDATE SET last_number = k.last_number + 1
        RETURNING k.last_number INTO number;
        PERFORM FROM {schema}.semel_outbox AS o
        WHERE o.tenant = semel_publish_bytes.tenant AND o.ordering_key = semel_publish_bytes.ordering_key
        ORDER BY o.number LIMIT 1;
        IF FOUND THEN
            state := 'blocked';
        END IF;
    END IF;
    INSERT INTO {schema}.semel_outbox
        (tenant, message_id, topic, kind, body, headers, ordering_key, number, not_before, receipt, put_at, state, due_at)
    VALUES (tenant, id::text, topic, kind, '\x0100'::bytea || body, coalesce(headers, '{}')::text, ordering_key, number, due,
            coalesce(receipt, FALSE), at, state, CASE WHEN state = 'waiting' THEN due END)
    ON CONFLICT (tenant, message_id) DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'unique_violation',
            MESSAGE = 'semel_publish: message_id: a message with this id is in the outbox already';
    END IF;
    PERFORM {schema}.semel_wake('outbox');
    RETURN id;
END
$body$
$text$,
$text$
CREATE FUNCTION {schema}.semel_publish(
    topic TEXT, body TEXT, kind TEXT DEFAULT '', ordering_key TEXT DEFAULT NULL, headers JSONB DEFAULT '{}',
    not_before TIMESTAMPTZ DEFAULT NULL, receipt BOOLEAN DEFAULT FALSE, message_id UUID DEFAULT NULL,
    tenant TEXT DEFAULT 'default') RETURNS UUID
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT {schema}.semel_publish_bytes(topic, convert_to(body, 'UTF8'), kind, ordering_key, headers, not_before, receipt,
                                        message_id, tenant)
$body$
$text$
    ] LOOP
        EXECUTE replace(replace(replace(text,
            '{schema}', here),
            '{channel}', quote_literal(left('semel_' || current_schema(), 63))),
            '{fences}', quote_literal(here || '.semel_fence'));
    END LOOP;
END
$migration$;

-- Every role may execute a new function, unless that is revoked.
REVOKE ALL ON FUNCTION semel_enqueue, semel_enqueue_bytes, semel_publish, semel_publish_bytes, semel_wake FROM PUBLIC;
