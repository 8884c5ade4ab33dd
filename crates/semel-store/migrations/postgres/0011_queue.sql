-- Work for later: operations that are stored now and run by a worker.

-- The place among what is due (NULL is 0), and the policy of an enqueue: its runs go by that one. Neither is in an index,
-- and neither takes room in the rows of operations that were never enqueued.
ALTER TABLE semel_operations ADD COLUMN priority BIGINT CONSTRAINT a_priority_is_small CHECK (priority BETWEEN -2 AND 2);
ALTER TABLE semel_operations ADD COLUMN terms TEXT;
-- Somebody has asked for the run to stop.
ALTER TABLE semel_leases ADD COLUMN cancelled BOOLEAN NOT NULL DEFAULT FALSE;

-- A worker looks for what is due by priority: one step of the index for each.
ALTER TABLE semel_backlog ADD COLUMN priority BIGINT NOT NULL DEFAULT 0;
CREATE INDEX semel_backlog_queue ON semel_backlog (service, kind, tenant, priority, due, operation) WHERE due IS NOT NULL;
DROP INDEX semel_backlog_due;
-- Rows come and go: without this, entries of the index that are dead would be read over again by every look.
ALTER TABLE semel_backlog SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
                               autovacuum_vacuum_cost_delay = 0);

-- Kinds that a person has paused: no node runs them until they are resumed.
CREATE TABLE semel_paused (
    service TEXT COLLATE "C" NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL,
    at      BIGINT NOT NULL,
    actor   TEXT NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (service, kind)
);

-- What the fleet may run of a kind: from when on the next start is free, by the rate. The row is locked while work of
-- such a kind is taken, so that the nodes share its limits.
CREATE TABLE semel_limits (
    service TEXT COLLATE "C" NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL,
    free_at BIGINT NOT NULL,
    PRIMARY KEY (service, kind)
);
