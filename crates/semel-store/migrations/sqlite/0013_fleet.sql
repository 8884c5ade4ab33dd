-- Shared by the nodes of a database, besides operations: the marks of schedules, and signs of life.

-- Every due time up to the mark is handled: its run was enqueued in the transaction that moved the mark, or was
-- skipped.
CREATE TABLE semel_schedules (
    tenant   TEXT NOT NULL,
    service  TEXT NOT NULL,
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    -- When it is due, as text. A changed text applies from since.
    spec     TEXT NOT NULL,
    since    INTEGER NOT NULL,
    mark     INTEGER NOT NULL,
    last_due INTEGER,
    next_due INTEGER,
    PRIMARY KEY (tenant, service, kind, name),
    CONSTRAINT the_last_run_is_not_after_the_mark CHECK (last_due IS NULL OR last_due <= mark),
    CONSTRAINT the_next_run_is_after_the_mark CHECK (next_due IS NULL OR next_due > mark)
);

-- Nodes, as each describes itself; roles and kinds are JSON.
CREATE TABLE semel_nodes (
    owner   TEXT PRIMARY KEY,
    roles   TEXT NOT NULL,
    version TEXT NOT NULL,
    kinds   TEXT NOT NULL,
    since   INTEGER NOT NULL,
    seen    INTEGER NOT NULL
);
