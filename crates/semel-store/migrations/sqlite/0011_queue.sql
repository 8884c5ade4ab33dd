-- Checksum of the first text: 3b2ff94c049481ea8f7a74cc24d92be493967114204c01622f5e4a94c7de6e43d0aaf44dd69ab8f692f925ad79a63bd5
-- Its statements: 18021a4791501eb8

-- Work for later: operations that are stored now and run by a worker.

-- The priority among due operations (NULL is 0), and the policy of the enqueue, which its runs use. Neither is indexed,
-- and neither takes space in rows of operations that were never enqueued.
ALTER TABLE semel_operations ADD COLUMN priority INTEGER CONSTRAINT a_priority_is_small CHECK (priority BETWEEN -2 AND 2);
ALTER TABLE semel_operations ADD COLUMN terms TEXT;
-- Whether the run was asked to stop.
ALTER TABLE semel_leases ADD COLUMN cancelled BOOLEAN NOT NULL DEFAULT FALSE;

-- A worker looks for due operations priority by priority, with one index seek for each.
ALTER TABLE semel_backlog ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
CREATE INDEX semel_backlog_queue ON semel_backlog (service, kind, tenant, priority, due, operation) WHERE due IS NOT NULL;
DROP INDEX semel_backlog_due;

-- Kinds that a person has paused: no node starts their operations until they are resumed.
CREATE TABLE semel_paused (
    service TEXT NOT NULL,
    kind    TEXT NOT NULL,
    at      INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (service, kind)
);

-- Limits of a kind over all nodes. free_at: when the rate allows the next start. The row is locked while operations of
-- the kind are taken, so that the nodes share its limits.
CREATE TABLE semel_limits (
    service TEXT NOT NULL,
    kind    TEXT NOT NULL,
    free_at INTEGER NOT NULL,
    PRIMARY KEY (service, kind)
);
