-- Checksum of the first text: d551409f670fd3e7dafe40e0af64fbea2296964d69335ad16b40efc84f193e03366803823af2ec945acd4d1cca2dcdd9
-- Its statements: b98cbcc1f96e73bb

-- Messages: the outbox, retries and dead letters, and the queues of the embedded broker. As in the ledger, times are
-- microseconds by the database's clock, and bodies are encoded by the codec. semel_outbox_readable is for people.

-- Messages to be published. A published message is deleted. Ids are in insert order, not in commit order: no reader may
-- use an id as a cursor.
CREATE TABLE semel_outbox (
    id           BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant       TEXT COLLATE "C" NOT NULL,
    message_id   TEXT COLLATE "C" NOT NULL,
    topic        TEXT COLLATE "C" NOT NULL,
    kind         TEXT NOT NULL,
    body         BYTEA NOT NULL,
    headers      TEXT NOT NULL,                    -- a JSON object of strings
    ordering_key TEXT COLLATE "C",
    number       BIGINT,                           -- within its ordering key
    not_before   BIGINT,                           -- as the caller set it
    receipt      BOOLEAN NOT NULL,                 -- whether semel_receipts records its publication
    operation    BIGINT,                           -- the operation in whose transaction it was put,
    fence        BIGINT,                           -- and the fence of that run
    put_at       BIGINT NOT NULL,
    state        TEXT NOT NULL,
    due_at       BIGINT,                           -- when a waiting or unroutable message is tried
    failures     BIGINT NOT NULL DEFAULT 0,
    error        BYTEA,                            -- of the last try, encoded by the codec
    lease_until  BIGINT NOT NULL DEFAULT 0,        -- a relay has leased it until then; 0 if not leased
    token        BIGINT NOT NULL DEFAULT 0,        -- of the lease; 0 if not leased
    CONSTRAINT a_known_state CHECK (state IN ('ready', 'waiting', 'blocked', 'unroutable', 'parked')),
    CONSTRAINT waiting_has_a_time CHECK ((state IN ('waiting', 'unroutable')) = (due_at IS NOT NULL)),
    CONSTRAINT only_the_ready_are_leased CHECK (state = 'ready' OR (lease_until = 0 AND token = 0)),
    CONSTRAINT only_a_key_blocks CHECK (state <> 'blocked' OR ordering_key IS NOT NULL),
    CONSTRAINT a_key_has_numbers CHECK ((ordering_key IS NULL) = (number IS NULL) AND (number IS NULL OR number >= 1)),
    CONSTRAINT a_person_is_told_why CHECK (state NOT IN ('unroutable', 'parked') OR error IS NOT NULL),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL)),
    CONSTRAINT failures_are_counted CHECK (failures >= 0)
) WITH (
    -- Free space for the row version that a relay's lease writes. On the same page it needs no new index entries (a HOT
    -- update), because a lease changes no indexed column.
    fillfactor = 50,
    -- Rows are short-lived: without frequent vacuums every look-up would read over many dead rows.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000
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
    tenant       TEXT COLLATE "C" NOT NULL,
    ordering_key TEXT COLLATE "C" NOT NULL,
    last_number  BIGINT NOT NULL CHECK (last_number >= 1),
    PRIMARY KEY (tenant, ordering_key)
) WITH (fillfactor = 70);

-- Publication times of messages that asked for a receipt. Deleted after a week.
CREATE TABLE semel_receipts (
    tenant     TEXT COLLATE "C" NOT NULL,
    message_id TEXT COLLATE "C" NOT NULL,
    sent_at    BIGINT NOT NULL,
    PRIMARY KEY (tenant, message_id)
);
CREATE INDEX semel_receipts_sent_at ON semel_receipts (sent_at);

-- The queues of the embedded broker. They belong to the system, not to a tenant: each message names its tenant.
CREATE TABLE semel_queues (
    name TEXT COLLATE "C" PRIMARY KEY
);

-- Their messages. An acknowledged message is deleted.
CREATE TABLE semel_queue (
    id         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue      TEXT COLLATE "C" NOT NULL,
    tenant     TEXT COLLATE "C" NOT NULL,
    message_id TEXT COLLATE "C" NOT NULL,
    kind       TEXT NOT NULL,
    body       BYTEA NOT NULL,
    headers    TEXT NOT NULL,
    number     BIGINT,
    put_at     BIGINT NOT NULL,
    operation  BIGINT,
    fence      BIGINT,
    visible_at BIGINT NOT NULL DEFAULT 0,          -- a consumer has leased it until then; 0 if not leased
    token      BIGINT NOT NULL DEFAULT 0,          -- of the lease; 0 if not leased
    deliveries BIGINT NOT NULL DEFAULT 0,          -- deliveries to a consumer that may have begun it
    CONSTRAINT only_what_is_delivered_is_hidden CHECK (token <> 0 OR visible_at = 0),
    CONSTRAINT deliveries_are_counted CHECK (deliveries >= 0),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL))
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000
);
CREATE INDEX semel_queue_line ON semel_queue (queue, id);

-- Messages to be handled again: a handler failed, or the broker has redelivered the message.
CREATE TABLE semel_retries (
    id             BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant         TEXT COLLATE "C" NOT NULL,
    consumer       TEXT COLLATE "C" NOT NULL,
    key            TEXT COLLATE "C" NOT NULL,      -- in the consumer's inbox
    fingerprint    BYTEA NOT NULL,
    message_id     TEXT,                           -- as the message states it, unchecked
    message_tenant TEXT,
    queue          TEXT COLLATE "C" NOT NULL,
    kind           TEXT NOT NULL,
    body           BYTEA NOT NULL,
    headers        TEXT NOT NULL,
    number         BIGINT,
    put_at         BIGINT,
    operation      BIGINT,
    fence          BIGINT,
    failures       BIGINT NOT NULL,
    starts         BIGINT NOT NULL DEFAULT 0,      -- runs that have begun
    reason         TEXT NOT NULL,
    due_at         BIGINT NOT NULL,                -- while leased: when the lease ends
    token          BIGINT NOT NULL DEFAULT 0,      -- of the lease; 0 if not leased
    CONSTRAINT a_key_has_1_to_1024_bytes CHECK (octet_length(key) BETWEEN 1 AND 1024),
    CONSTRAINT runs_are_counted CHECK (failures >= 0 AND starts >= 0 AND (token = 0 OR starts > 0)),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL))
);
CREATE UNIQUE INDEX semel_retries_key ON semel_retries (tenant, consumer, key, fingerprint);
CREATE INDEX semel_retries_due ON semel_retries (consumer, due_at, id);

-- Messages that failed too often or cannot be read. They wait for a person.
CREATE TABLE semel_dead_letters (
    id             BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant         TEXT COLLATE "C" NOT NULL,
    consumer       TEXT COLLATE "C" NOT NULL,
    key            TEXT COLLATE "C" NOT NULL,
    fingerprint    BYTEA NOT NULL,
    message_id     TEXT,
    message_tenant TEXT,
    queue          TEXT COLLATE "C" NOT NULL,
    kind           TEXT NOT NULL,
    body           BYTEA NOT NULL,
    headers        TEXT NOT NULL,
    number         BIGINT,
    put_at         BIGINT,
    operation      BIGINT,
    fence          BIGINT,
    failures       BIGINT NOT NULL,
    reason         TEXT NOT NULL,
    died_at        BIGINT NOT NULL,
    CONSTRAINT a_key_has_1_to_1024_bytes CHECK (octet_length(key) BETWEEN 1 AND 1024),
    CONSTRAINT runs_are_counted CHECK (failures >= 0),
    CONSTRAINT an_origin_is_whole CHECK ((operation IS NULL) = (fence IS NULL))
);
CREATE UNIQUE INDEX semel_dead_letters_key ON semel_dead_letters (tenant, consumer, key, fingerprint);
CREATE INDEX semel_dead_letters_tenant ON semel_dead_letters (tenant, id);

-- People's actions. Never deleted automatically.
CREATE TABLE semel_audit (
    id      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant  TEXT COLLATE "C" NOT NULL,
    at      BIGINT NOT NULL,
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
       semel_text(o.error) AS error, semel_time(o.put_at) AS put_at, semel_time(o.not_before) AS not_before,
       semel_time(o.due_at) AS due_at, semel_time(nullif(o.lease_until, 0)) AS lease_ends_at, o.receipt,
       o.operation, o.fence, o.headers, semel_text(o.body) AS body
FROM semel_outbox o;
CREATE VIEW semel_dead_letters_readable AS
SELECT l.id, l.tenant, l.consumer, l.key, l.queue, l.kind, l.message_id, l.failures, l.reason,
       semel_time(l.died_at) AS died_at, semel_time(l.put_at) AS put_at, l.number, l.headers, semel_text(l.body) AS body
FROM semel_dead_letters l;
