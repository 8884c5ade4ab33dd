-- Work for later: operations that are stored now and run by a worker.

-- The place among what is due (NULL is 0), and the policy of an enqueue: its runs go by that one. Neither is in an index,
-- and neither takes room in the rows of operations that were never enqueued.
ALTER TABLE semel_operations ADD COLUMN priority INTEGER CONSTRAINT a_priority_is_small CHECK (priority BETWEEN -2 AND 2);
ALTER TABLE semel_operations ADD COLUMN terms TEXT;
-- Somebody has asked for the run to stop.
ALTER TABLE semel_leases ADD COLUMN cancelled BOOLEAN NOT NULL DEFAULT FALSE;

-- A worker looks for what is due by priority: one step of the index for each.
ALTER TABLE semel_backlog ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
CREATE INDEX semel_backlog_queue ON semel_backlog (service, kind, tenant, priority, due, operation) WHERE due IS NOT NULL;
DROP INDEX semel_backlog_due;

-- Kinds that a person has paused: no node runs them until they are resumed.
CREATE TABLE semel_paused (
    service TEXT NOT NULL,
    kind    TEXT NOT NULL,
    at      INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (service, kind)
);

-- What the fleet may run of a kind: from when on the next start is free, by the rate. The row is locked while work of
-- such a kind is taken, so that the nodes share its limits.
CREATE TABLE semel_limits (
    service TEXT NOT NULL,
    kind    TEXT NOT NULL,
    free_at INTEGER NOT NULL,
    PRIMARY KEY (service, kind)
);
