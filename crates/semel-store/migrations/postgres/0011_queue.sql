-- Checksum of the first text: a41d98bc0debac98b901bd775f6a2395ad0c7b3a679e7366edbe52d718bf25a9a41bae66385e3d6fcf3e9b821c62e9d5
-- Its statements: 1c5402c83bb7afed

-- Work for later: operations that are stored now and run by a worker.

-- The priority among due operations (NULL is 0), and the policy of the enqueue, which its runs use. Neither is indexed,
-- and neither takes space in rows of operations that were never enqueued.
ALTER TABLE semel_operations ADD COLUMN priority BIGINT CONSTRAINT a_priority_is_small CHECK (priority BETWEEN -2 AND 2);
ALTER TABLE semel_operations ADD COLUMN terms TEXT;
-- Whether the run was asked to stop.
ALTER TABLE semel_leases ADD COLUMN cancelled BOOLEAN NOT NULL DEFAULT FALSE;

-- A worker looks for due operations priority by priority, with one index seek for each.
ALTER TABLE semel_backlog ADD COLUMN priority BIGINT NOT NULL DEFAULT 0;
CREATE INDEX semel_backlog_queue ON semel_backlog (service, kind, tenant, priority, due, operation) WHERE due IS NOT NULL;
DROP INDEX semel_backlog_due;
-- Rows are short-lived: without frequent vacuums every look-up would read over many dead index entries.
ALTER TABLE semel_backlog SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
                               autovacuum_vacuum_cost_delay = 0);

-- Kinds that a person has paused: no node starts their operations until they are resumed.
CREATE TABLE semel_paused (
    service TEXT COLLATE "C" NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL,
    at      BIGINT NOT NULL,
    actor   TEXT NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (service, kind)
);

-- Limits of a kind over all nodes. free_at: when the rate allows the next start. The row is locked while operations of
-- the kind are taken, so that the nodes share its limits.
CREATE TABLE semel_limits (
    service TEXT COLLATE "C" NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL,
    free_at BIGINT NOT NULL,
    PRIMARY KEY (service, kind)
);
