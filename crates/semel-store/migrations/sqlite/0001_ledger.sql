-- Checksum of the first text: 1f1437f4b51b6f9a4ae406cc9aeadfeb7bc476d05a2efc29c184e86bc0231b0fe3c34e4ea281b1821159e54d29be9b41
-- Its statements: 45f09f3cf42164ed

-- The ledger. Times are microseconds since 1970 by the database's clock. Payloads are encoded by the codec: a version
-- byte, a key id byte, the bytes. The view semel_operations_readable shows both in readable form. Differs from
-- PostgreSQL's in type names, in the fence counter (a row, because there are no sequences) and in the view's functions.

-- Fences and time: one counter for the whole file, and the latest time that a process has read, so that a clock that is
-- set back does not revive a lease.
CREATE TABLE semel_meta (
    only  INTEGER PRIMARY KEY CHECK (only = 1),
    fence INTEGER NOT NULL,
    clock INTEGER NOT NULL
);
INSERT INTO semel_meta (only, fence, clock) VALUES (1, 0, 0);

CREATE TABLE semel_operations (
    id            INTEGER PRIMARY KEY,              -- the fence of the first claim
    tenant        TEXT NOT NULL,
    service       TEXT NOT NULL,
    kind          TEXT NOT NULL,
    key           TEXT NOT NULL,
    fingerprint   BLOB NOT NULL,
    payload_order INTEGER,
    payload       BLOB,
    label1        TEXT,
    label2        TEXT,
    label3        TEXT,
    label4        TEXT,
    state         TEXT NOT NULL,
    fence         INTEGER NOT NULL,
    failures      INTEGER NOT NULL DEFAULT 0,
    crashes       INTEGER NOT NULL DEFAULT 0,
    parked        BOOLEAN NOT NULL DEFAULT FALSE,
    owner         TEXT NOT NULL,
    created_at    INTEGER NOT NULL,
    claimed_at    INTEGER NOT NULL,
    settled_at    INTEGER,
    not_before    INTEGER,
    expires_at    INTEGER,
    archive_at    INTEGER,
    archived      BOOLEAN NOT NULL DEFAULT FALSE,
    look_at       INTEGER,
    outcome       BLOB,
    outcome_kept  BOOLEAN,
    error         BLOB,
    checkpoint    BLOB,
    CONSTRAINT a_known_state CHECK (state IN ('pending', 'processing', 'completed', 'failed', 'timed_out', 'in_doubt')),
    CONSTRAINT completed_means_an_outcome CHECK ((state = 'completed') = (outcome IS NOT NULL) AND (outcome IS NULL) = (outcome_kept IS NULL)),
    CONSTRAINT settled_states_have_a_time CHECK ((state IN ('completed', 'failed', 'timed_out', 'in_doubt')) = (settled_at IS NOT NULL)),
    CONSTRAINT only_the_settled_expire CHECK (expires_at IS NULL OR (settled_at IS NOT NULL AND state <> 'in_doubt')),
    CONSTRAINT a_key_has_1_to_255_bytes CHECK (length(CAST(key AS BLOB)) BETWEEN 1 AND 255),
    CONSTRAINT counts_and_fences_only_grow CHECK (failures >= 0 AND crashes >= 0 AND fence >= id)
);

-- The tenant comes first in every key: equal keys of two tenants are different operations.
CREATE UNIQUE INDEX semel_operations_key ON semel_operations (tenant, service, kind, key);
-- Listings of one kind, newest first. On one text, as on PostgreSQL, where the planner needs it.
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
    operation INTEGER PRIMARY KEY,
    fence     INTEGER NOT NULL,
    token     BLOB NOT NULL,
    deadline  INTEGER NOT NULL,
    run_until INTEGER NOT NULL,
    term      INTEGER NOT NULL,                    -- how long a renewal extends it
    retention INTEGER,
    tombstone INTEGER,
    successor BOOLEAN NOT NULL DEFAULT FALSE,     -- no plain completion: newer data waits, or a service's row follows
    terms     TEXT NOT NULL,                      -- the claim's whole policy
    CONSTRAINT a_lease_ends_within_its_run CHECK (deadline <= run_until)
);

-- Operations that do not run and have not completed, for workers and people.
CREATE TABLE semel_backlog (
    operation INTEGER PRIMARY KEY,
    tenant    TEXT NOT NULL,
    state     TEXT NOT NULL,
    CONSTRAINT nobody_runs_it CHECK (state IN ('pending', 'failed', 'timed_out', 'in_doubt'))
);
CREATE INDEX semel_backlog_state ON semel_backlog (tenant, state, operation);

-- Newer data that waits until the current run settles.
CREATE TABLE semel_successors (
    operation     INTEGER PRIMARY KEY,
    fingerprint   BLOB NOT NULL,
    payload_order INTEGER NOT NULL,
    payload       BLOB
);

-- The data of archived operations. Their rows stay in semel_operations as tombstones.
CREATE TABLE semel_archive (
    operation   INTEGER PRIMARY KEY,
    archived_at INTEGER NOT NULL,
    payload     BLOB,
    outcome     BLOB NOT NULL,
    outcome_kept BOOLEAN NOT NULL
);

-- Unusual events; the ordinary life is in the operation's row.
CREATE TABLE semel_journal (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    operation INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    event     TEXT NOT NULL,
    fence     INTEGER NOT NULL,
    actor     TEXT NOT NULL,
    detail    BLOB NOT NULL
);
CREATE INDEX semel_journal_operation ON semel_journal (operation, id);

-- Repeats of a key: an exact count, the first ten and the last ten.
CREATE TABLE semel_repeats (
    operation INTEGER NOT NULL,
    repeat    TEXT NOT NULL CHECK (repeat IN ('duplicate', 'conflict')),
    repeats   TEXT NOT NULL,
    PRIMARY KEY (operation, repeat)
);

-- Counters. A change of states adds rows to semel_deltas in its own transaction, one per batch and group. The sweep
-- folds them into semel_counters. The sum of both tables is always exact.
CREATE TABLE semel_deltas (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant     TEXT NOT NULL,
    service    TEXT NOT NULL,
    kind       TEXT NOT NULL,
    label1     TEXT NOT NULL,
    label2     TEXT NOT NULL,
    hour       INTEGER NOT NULL,
    from_state TEXT NOT NULL,                     -- empty if the operation is new, or if the row counts answers
    to_state   TEXT NOT NULL,                     -- empty if the operation was removed, or if the row counts answers
    answer     TEXT NOT NULL,                     -- empty if the row counts changes of state
    bucket     INTEGER NOT NULL,
    n          INTEGER NOT NULL
);

CREATE TABLE semel_counters (
    tenant     TEXT NOT NULL,
    hour       INTEGER NOT NULL,
    service    TEXT NOT NULL,
    kind       TEXT NOT NULL,
    label1     TEXT NOT NULL,
    label2     TEXT NOT NULL,
    from_state TEXT NOT NULL,
    to_state   TEXT NOT NULL,
    answer     TEXT NOT NULL,
    bucket     INTEGER NOT NULL,
    n          INTEGER NOT NULL,
    PRIMARY KEY (tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket)
);

-- For people: times and payloads in readable form.
CREATE VIEW semel_operations_readable AS
SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.fence, o.failures, o.crashes, o.parked, o.owner,
       hex(o.fingerprint) AS fingerprint, o.payload_order, o.label1, o.label2, o.label3, o.label4,
       strftime('%Y-%m-%dT%H:%M:%S', o.created_at / 1000000, 'unixepoch') || printf('.%06dZ', o.created_at % 1000000) AS created_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.claimed_at / 1000000, 'unixepoch') || printf('.%06dZ', o.claimed_at % 1000000) AS claimed_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.settled_at / 1000000, 'unixepoch') || printf('.%06dZ', o.settled_at % 1000000) AS settled_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.not_before / 1000000, 'unixepoch') || printf('.%06dZ', o.not_before % 1000000) AS not_before,
       strftime('%Y-%m-%dT%H:%M:%S', o.expires_at / 1000000, 'unixepoch') || printf('.%06dZ', o.expires_at % 1000000) AS expires_at,
       strftime('%Y-%m-%dT%H:%M:%S', l.deadline / 1000000, 'unixepoch') || printf('.%06dZ', l.deadline % 1000000) AS lease_ends_at,
       o.archived, CASE WHEN hex(substr(o.payload, 2, 1)) = '00' THEN CAST(substr(o.payload, 3) AS TEXT) WHEN o.payload IS NOT NULL THEN '(encrypted)' END AS payload,
       o.outcome_kept,
       CASE WHEN hex(substr(o.outcome, 2, 1)) = '00' THEN CAST(substr(o.outcome, 3) AS TEXT) WHEN o.outcome IS NOT NULL THEN '(encrypted)' END AS outcome,
       CASE WHEN hex(substr(o.error, 2, 1)) = '00' THEN CAST(substr(o.error, 3) AS TEXT) WHEN o.error IS NOT NULL THEN '(encrypted)' END AS error,
       CASE WHEN hex(substr(o.checkpoint, 2, 1)) = '00' THEN CAST(substr(o.checkpoint, 3) AS TEXT) WHEN o.checkpoint IS NOT NULL THEN '(encrypted)' END AS checkpoint
FROM semel_operations o LEFT JOIN semel_leases l ON l.operation = o.id;
