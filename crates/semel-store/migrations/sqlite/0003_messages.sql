-- Checksum of the first text: 686cbc8a2b6a0a473121cca71ac7d5a096cd32816348509b270f4c034228fd8577795c1ea2f1c0428e3f6453203dbadf
-- Its statements: 0f7ab0f722596d43

-- Messages: the outbox, retries and dead letters, and the queues of the embedded broker. As in the ledger, times are
-- microseconds by the database's clock, and bodies are encoded by the codec. semel_outbox_readable is for people.
-- Differs from PostgreSQL's in type names, in the settings of tables and in the views' functions.

-- Messages to be published. A published message is deleted. Ids are in insert order, not in commit order: no reader may
-- use an id as a cursor.
CREATE TABLE semel_outbox (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant       TEXT NOT NULL,
    message_id   TEXT NOT NULL,
    topic        TEXT NOT NULL,
    kind         TEXT NOT NULL,
    body         BLOB NOT NULL,
    headers      TEXT NOT NULL,                    -- a JSON object of strings
    ordering_key TEXT,
    number       INTEGER,                           -- within its ordering key
    not_before   INTEGER,                           -- as the caller set it
    receipt      BOOLEAN NOT NULL,                 -- whether semel_receipts records its publication
    operation    INTEGER,                           -- the operation in whose transaction it was put,
    fence        INTEGER,                           -- and the fence of that run
    put_at       INTEGER NOT NULL,
    state        TEXT NOT NULL,
    due_at       INTEGER,                           -- when a waiting or unroutable message is tried
    failures     INTEGER NOT NULL DEFAULT 0,
    error        BLOB,                            -- of the last try, encoded by the codec
    lease_until  INTEGER NOT NULL DEFAULT 0,        -- a relay has leased it until then; 0 if not leased
    token        INTEGER NOT NULL DEFAULT 0,        -- of the lease; 0 if not leased
    CONSTRAINT a_known_state CHECK (state IN ('ready', 'waiting', 'blocked', 'unroutable', 'parked')),
    CONSTRAINT waiting_has_a_time CHECK ((state IN ('waiting', 'unroutable')) = (due_at IS NOT NULL)),
    CONSTRAINT only_the_ready_are_leased CHECK (state = 'ready' OR (lease_until = 0 AND token = 0)),
    CONSTRAINT only_a_key_blocks CHECK (state <> 'blocked' OR ordering_key IS NOT NULL),
    CONSTRAINT a_key_has_numbers CHECK ((ordering_key IS NULL) = (number IS NULL) AND (number IS NULL OR number >= 1)),
    CONSTRAINT a_person_is_told_why CHECK (state NOT IN ('unroutable', 'parked') OR error IS NOT NULL),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL)),
    CONSTRAINT failures_are_counted CHECK (failures >= 0)
);
CREATE UNIQUE INDEX semel_outbox_message ON semel_outbox (tenant, message_id);
-- Messages that a relay takes, oldest first.
CREATE INDEX semel_outbox_ready ON semel_outbox (id) WHERE state = 'ready';
-- Messages that become ready when they are due.
CREATE INDEX semel_outbox_due ON semel_outbox (due_at) WHERE due_at IS NOT NULL;
-- All messages of an ordering key, by number,
CREATE UNIQUE INDEX semel_outbox_line ON semel_outbox (tenant, ordering_key, number) WHERE ordering_key IS NOT NULL;
-- and the blocked ones only.
CREATE INDEX semel_outbox_blocked ON semel_outbox (tenant, ordering_key, number) WHERE state = 'blocked';
-- Held messages, for people.
CREATE INDEX semel_outbox_held ON semel_outbox (state, tenant, id) WHERE state IN ('waiting', 'unroutable', 'parked');

-- The last number of each ordering key. The row is locked until the message commits: numbers have no gaps, and no
-- message appears after one with a higher number. Never deleted, or the numbers would start again.
CREATE TABLE semel_outbox_keys (
    tenant       TEXT NOT NULL,
    ordering_key TEXT NOT NULL,
    last_number  INTEGER NOT NULL CHECK (last_number >= 1),
    PRIMARY KEY (tenant, ordering_key)
);

-- Publication times of messages that asked for a receipt. Deleted after a week.
CREATE TABLE semel_receipts (
    tenant     TEXT NOT NULL,
    message_id TEXT NOT NULL,
    sent_at    INTEGER NOT NULL,
    PRIMARY KEY (tenant, message_id)
);
CREATE INDEX semel_receipts_sent_at ON semel_receipts (sent_at);

-- The queues of the embedded broker. They belong to the system, not to a tenant: each message names its tenant.
CREATE TABLE semel_queues (
    name TEXT NOT NULL PRIMARY KEY
);

-- Their messages. An acknowledged message is deleted.
CREATE TABLE semel_queue (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    queue      TEXT NOT NULL,
    tenant     TEXT NOT NULL,
    message_id TEXT NOT NULL,
    kind       TEXT NOT NULL,
    body       BLOB NOT NULL,
    headers    TEXT NOT NULL,
    number     INTEGER,
    put_at     INTEGER NOT NULL,
    operation  INTEGER,
    fence      INTEGER,
    visible_at INTEGER NOT NULL DEFAULT 0,          -- a consumer has leased it until then; 0 if not leased
    token      INTEGER NOT NULL DEFAULT 0,          -- of the lease; 0 if not leased
    deliveries INTEGER NOT NULL DEFAULT 0,          -- deliveries to a consumer that may have begun it
    CONSTRAINT only_what_is_delivered_is_hidden CHECK (token <> 0 OR visible_at = 0),
    CONSTRAINT deliveries_are_counted CHECK (deliveries >= 0),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL))
);
CREATE INDEX semel_queue_line ON semel_queue (queue, id);

-- Messages to be handled again: a handler failed, or the broker has redelivered the message.
CREATE TABLE semel_retries (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant         TEXT NOT NULL,
    consumer       TEXT NOT NULL,
    key            TEXT NOT NULL,      -- in the consumer's inbox
    fingerprint    BLOB NOT NULL,
    message_id     TEXT,                           -- as the message states it, unchecked
    message_tenant TEXT,
    queue          TEXT NOT NULL,
    kind           TEXT NOT NULL,
    body           BLOB NOT NULL,
    headers        TEXT NOT NULL,
    number         INTEGER,
    put_at         INTEGER,
    operation      INTEGER,
    fence          INTEGER,
    failures       INTEGER NOT NULL,
    starts         INTEGER NOT NULL DEFAULT 0,      -- runs that have begun
    reason         TEXT NOT NULL,
    due_at         INTEGER NOT NULL,                -- while leased: when the lease ends
    token          INTEGER NOT NULL DEFAULT 0,      -- of the lease; 0 if not leased
    CONSTRAINT a_key_has_1_to_1024_bytes CHECK (length(CAST(key AS BLOB)) BETWEEN 1 AND 1024),
    CONSTRAINT runs_are_counted CHECK (failures >= 0 AND starts >= 0 AND (token = 0 OR starts > 0)),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL))
);
CREATE UNIQUE INDEX semel_retries_key ON semel_retries (tenant, consumer, key, fingerprint);
CREATE INDEX semel_retries_due ON semel_retries (consumer, due_at, id);

-- Messages that failed too often or cannot be read. They wait for a person.
CREATE TABLE semel_dead_letters (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant         TEXT NOT NULL,
    consumer       TEXT NOT NULL,
    key            TEXT NOT NULL,
    fingerprint    BLOB NOT NULL,
    message_id     TEXT,
    message_tenant TEXT,
    queue          TEXT NOT NULL,
    kind           TEXT NOT NULL,
    body           BLOB NOT NULL,
    headers        TEXT NOT NULL,
    number         INTEGER,
    put_at         INTEGER,
    operation      INTEGER,
    fence          INTEGER,
    failures       INTEGER NOT NULL,
    reason         TEXT NOT NULL,
    died_at        INTEGER NOT NULL,
    CONSTRAINT a_key_has_1_to_1024_bytes CHECK (length(CAST(key AS BLOB)) BETWEEN 1 AND 1024),
    CONSTRAINT runs_are_counted CHECK (failures >= 0),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL))
);
CREATE UNIQUE INDEX semel_dead_letters_key ON semel_dead_letters (tenant, consumer, key, fingerprint);
CREATE INDEX semel_dead_letters_tenant ON semel_dead_letters (tenant, id);

-- People's actions. Never deleted automatically.
CREATE TABLE semel_audit (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant  TEXT NOT NULL,
    at      INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason  TEXT NOT NULL,
    before  TEXT,                                  -- JSON
    after   TEXT                                   -- JSON
);
CREATE INDEX semel_audit_tenant ON semel_audit (tenant, id);

-- For people: times and bodies in readable form.
CREATE VIEW semel_outbox_readable AS
SELECT o.id, o.tenant, o.message_id, o.topic, o.kind, o.state, o.ordering_key, o.number, o.failures,
       CASE WHEN hex(substr(o.error, 2, 1)) = '00' THEN CAST(substr(o.error, 3) AS TEXT) WHEN o.error IS NOT NULL THEN '(encrypted)' END AS error,
       strftime('%Y-%m-%dT%H:%M:%S', o.put_at / 1000000, 'unixepoch') || printf('.%06dZ', o.put_at % 1000000) AS put_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.not_before / 1000000, 'unixepoch') || printf('.%06dZ', o.not_before % 1000000) AS not_before,
       strftime('%Y-%m-%dT%H:%M:%S', o.due_at / 1000000, 'unixepoch') || printf('.%06dZ', o.due_at % 1000000) AS due_at,
       strftime('%Y-%m-%dT%H:%M:%S', nullif(o.lease_until, 0) / 1000000, 'unixepoch') || printf('.%06dZ', nullif(o.lease_until, 0) % 1000000) AS lease_ends_at,
       o.receipt, o.operation, o.fence, o.headers,
       CASE WHEN hex(substr(o.body, 2, 1)) = '00' THEN CAST(substr(o.body, 3) AS TEXT) WHEN o.body IS NOT NULL THEN '(encrypted)' END AS body
FROM semel_outbox o;
CREATE VIEW semel_dead_letters_readable AS
SELECT l.id, l.tenant, l.consumer, l.key, l.queue, l.kind, l.message_id, l.failures, l.reason,
       strftime('%Y-%m-%dT%H:%M:%S', l.died_at / 1000000, 'unixepoch') || printf('.%06dZ', l.died_at % 1000000) AS died_at,
       strftime('%Y-%m-%dT%H:%M:%S', l.put_at / 1000000, 'unixepoch') || printf('.%06dZ', l.put_at % 1000000) AS put_at,
       l.number, l.headers,
       CASE WHEN hex(substr(l.body, 2, 1)) = '00' THEN CAST(substr(l.body, 3) AS TEXT) WHEN l.body IS NOT NULL THEN '(encrypted)' END AS body
FROM semel_dead_letters l;
