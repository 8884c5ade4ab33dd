-- Checksum of the first text: 1058f5a5ec004e0baa9d5b91d14cdc70a61f71ae54fa44d2c41dac60fc2229c9a7cc67e1aefbdd32c52a7b2593d13968
-- Its statements: 20799f01cb66070c

-- The ledger. Times are microseconds since 1970 by the database's clock. Payloads are encoded by the codec: a version
-- byte, a key id byte, the bytes. The view semel_operations_readable shows both in readable form. Compared text is
-- COLLATE "C": byte order, in which batches also lock their keys.

-- Fences: one counter for the whole database. CACHE 1 (the default) keeps it in order across connections. The maximum
-- leaves the bits above it to the epoch, see postgres/epoch.rs.
CREATE SEQUENCE semel_fence MAXVALUE 8796093022207;

CREATE TABLE semel_operations (
    id            BIGINT PRIMARY KEY,              -- the fence of the first claim
    tenant        TEXT COLLATE "C" NOT NULL,
    service       TEXT COLLATE "C" NOT NULL,
    kind          TEXT COLLATE "C" NOT NULL,
    key           TEXT COLLATE "C" NOT NULL,
    fingerprint   BYTEA NOT NULL,
    payload_order BIGINT,
    payload       BYTEA,
    label1        TEXT COLLATE "C",
    label2        TEXT COLLATE "C",
    label3        TEXT COLLATE "C",
    label4        TEXT COLLATE "C",
    state         TEXT NOT NULL,
    fence         BIGINT NOT NULL,
    failures      BIGINT NOT NULL DEFAULT 0,
    crashes       BIGINT NOT NULL DEFAULT 0,
    parked        BOOLEAN NOT NULL DEFAULT FALSE,
    owner         TEXT NOT NULL,
    created_at    BIGINT NOT NULL,
    claimed_at    BIGINT NOT NULL,
    settled_at    BIGINT,
    not_before    BIGINT,
    expires_at    BIGINT,
    archive_at    BIGINT,
    archived      BOOLEAN NOT NULL DEFAULT FALSE,
    look_at       BIGINT,
    outcome       BYTEA,
    outcome_kept  BOOLEAN,
    error         BYTEA,
    checkpoint    BYTEA,
    CONSTRAINT a_known_state CHECK (state IN ('pending', 'processing', 'completed', 'failed', 'timed_out', 'in_doubt')),
    CONSTRAINT completed_means_an_outcome CHECK ((state = 'completed') = (outcome IS NOT NULL) AND (outcome IS NULL) = (outcome_kept IS NULL)),
    CONSTRAINT settled_states_have_a_time CHECK ((state IN ('completed', 'failed', 'timed_out', 'in_doubt')) = (settled_at IS NOT NULL)),
    CONSTRAINT only_the_settled_expire CHECK (expires_at IS NULL OR (settled_at IS NOT NULL AND state <> 'in_doubt')),
    CONSTRAINT a_key_has_1_to_255_bytes CHECK (octet_length(key) BETWEEN 1 AND 255),
    CONSTRAINT counts_and_fences_only_grow CHECK (failures >= 0 AND crashes >= 0 AND fence >= id)
) WITH (
    -- Free space for the row version that a settle writes. On the same page it needs no new index entries (a HOT
    -- update), because a settle changes no indexed column. Measured with outcomes of 100 bytes: half of the settles
    -- found space at 60, six of seven at 45, all at 35.
    fillfactor = 40
);

-- The tenant comes first in every key: equal keys of two tenants are different operations.
CREATE UNIQUE INDEX semel_operations_key ON semel_operations (tenant, service, kind, key);
-- Listings of one kind, newest first. On one text (tenant and service contain no slash), not on three columns: without
-- statistics the planner rates an index on three columns as good as the one above, and reads a whole scope to find one
-- key.
CREATE INDEX semel_operations_scope ON semel_operations ((tenant || '/' || service || '/' || kind), id);
CREATE INDEX semel_operations_label1 ON semel_operations (tenant, label1, id) WHERE label1 IS NOT NULL;
CREATE INDEX semel_operations_label2 ON semel_operations (tenant, label2, id) WHERE label2 IS NOT NULL;
CREATE INDEX semel_operations_label3 ON semel_operations (tenant, label3, id) WHERE label3 IS NOT NULL;
CREATE INDEX semel_operations_label4 ON semel_operations (tenant, label4, id) WHERE label4 IS NOT NULL;
-- When the sweep next checks the age of an operation. Written at claim, not at settle.
CREATE INDEX semel_operations_look_at ON semel_operations (look_at) WHERE look_at IS NOT NULL;

-- Live leases only: the transaction that removes the row may settle. Renewals write only this table. The sweep finds
-- expired leases by a full scan.
CREATE TABLE semel_leases (
    operation BIGINT PRIMARY KEY,
    fence     BIGINT NOT NULL,
    token     BYTEA NOT NULL,
    deadline  BIGINT NOT NULL,
    run_until BIGINT NOT NULL,
    term      BIGINT NOT NULL,                    -- how long a renewal extends it
    retention BIGINT,
    tombstone BIGINT,
    successor BOOLEAN NOT NULL DEFAULT FALSE,     -- no plain completion: newer data waits, or a service's row follows
    terms     TEXT NOT NULL,                      -- the claim's whole policy
    CONSTRAINT a_lease_ends_within_its_run CHECK (deadline <= run_until)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);

-- Operations that do not run and have not completed, for workers and people.
CREATE TABLE semel_backlog (
    operation BIGINT PRIMARY KEY,
    tenant    TEXT COLLATE "C" NOT NULL,
    state     TEXT NOT NULL,
    CONSTRAINT nobody_runs_it CHECK (state IN ('pending', 'failed', 'timed_out', 'in_doubt'))
);
CREATE INDEX semel_backlog_state ON semel_backlog (tenant, state, operation);

-- Newer data that waits until the current run settles.
CREATE TABLE semel_successors (
    operation     BIGINT PRIMARY KEY,
    fingerprint   BYTEA NOT NULL,
    payload_order BIGINT NOT NULL,
    payload       BYTEA
);

-- The data of archived operations. Their rows stay in semel_operations as tombstones.
CREATE TABLE semel_archive (
    operation   BIGINT PRIMARY KEY,
    archived_at BIGINT NOT NULL,
    payload     BYTEA,
    outcome     BYTEA NOT NULL,
    outcome_kept BOOLEAN NOT NULL
);

-- Unusual events; the ordinary life is in the operation's row.
CREATE TABLE semel_journal (
    id        BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation BIGINT NOT NULL,
    at        BIGINT NOT NULL,
    event     TEXT NOT NULL,
    fence     BIGINT NOT NULL,
    actor     TEXT NOT NULL,
    detail    BYTEA NOT NULL
);
CREATE INDEX semel_journal_operation ON semel_journal (operation, id);

-- Repeats of a key: an exact count, the first ten and the last ten.
CREATE TABLE semel_repeats (
    operation BIGINT NOT NULL,
    repeat    TEXT NOT NULL CHECK (repeat IN ('duplicate', 'conflict')),
    repeats   TEXT NOT NULL,
    PRIMARY KEY (operation, repeat)
);

-- Counters. A change of states adds rows to semel_deltas in its own transaction, one per batch and group. The sweep
-- folds them into semel_counters. The sum of both tables is always exact.
CREATE TABLE semel_deltas (
    id         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant     TEXT COLLATE "C" NOT NULL,
    service    TEXT COLLATE "C" NOT NULL,
    kind       TEXT COLLATE "C" NOT NULL,
    label1     TEXT COLLATE "C" NOT NULL,
    label2     TEXT COLLATE "C" NOT NULL,
    hour       BIGINT NOT NULL,
    from_state TEXT NOT NULL,                     -- empty if the operation is new, or if the row counts answers
    to_state   TEXT NOT NULL,                     -- empty if the operation was removed, or if the row counts answers
    answer     TEXT NOT NULL,                     -- empty if the row counts changes of state
    bucket     BIGINT NOT NULL,
    n          BIGINT NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

CREATE TABLE semel_counters (
    tenant     TEXT COLLATE "C" NOT NULL,
    hour       BIGINT NOT NULL,
    service    TEXT COLLATE "C" NOT NULL,
    kind       TEXT COLLATE "C" NOT NULL,
    label1     TEXT COLLATE "C" NOT NULL,
    label2     TEXT COLLATE "C" NOT NULL,
    from_state TEXT NOT NULL,
    to_state   TEXT NOT NULL,
    answer     TEXT NOT NULL,
    bucket     BIGINT NOT NULL,
    n          BIGINT NOT NULL,
    PRIMARY KEY (tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket)
);

-- For people: times and payloads in readable form.
CREATE FUNCTION semel_time(micros BIGINT) RETURNS TIMESTAMPTZ LANGUAGE sql IMMUTABLE AS
    $$ SELECT 'epoch'::timestamptz + micros * interval '1 microsecond' $$;
-- Bytes that are not text are escaped: one such row must not break a listing.
CREATE FUNCTION semel_text(bytes BYTEA) RETURNS TEXT LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF get_byte(bytes, 1) <> 0 THEN RETURN '(encrypted)'; END IF;
    RETURN convert_from(substr(bytes, 3), 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
    RETURN encode(substr(bytes, 3), 'escape');
END $$;
CREATE VIEW semel_operations_readable AS
SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.fence, o.failures, o.crashes, o.parked, o.owner,
       encode(o.fingerprint, 'hex') AS fingerprint, o.payload_order, o.label1, o.label2, o.label3, o.label4,
       semel_time(o.created_at) AS created_at, semel_time(o.claimed_at) AS claimed_at, semel_time(o.settled_at) AS settled_at,
       semel_time(o.not_before) AS not_before, semel_time(o.expires_at) AS expires_at, semel_time(l.deadline) AS lease_ends_at,
       o.archived, semel_text(o.payload) AS payload, o.outcome_kept, semel_text(o.outcome) AS outcome,
       semel_text(o.error) AS error, semel_text(o.checkpoint) AS checkpoint
FROM semel_operations o LEFT JOIN semel_leases l ON l.operation = o.id;
