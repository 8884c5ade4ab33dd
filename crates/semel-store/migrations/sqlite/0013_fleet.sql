-- What the nodes of a database share besides operations: the marks of schedules, and signs of life.

-- Every due time up to the mark is dealt with: its run was enqueued in the transaction that moved the mark, or left out.
CREATE TABLE semel_schedules (
    tenant   TEXT NOT NULL,
    service  TEXT NOT NULL,
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    -- When it is due, as text. Another text counts from when it was stored.
    spec     TEXT NOT NULL,
    since    INTEGER NOT NULL,
    mark     INTEGER NOT NULL,
    last_due INTEGER,
    next_due INTEGER,
    PRIMARY KEY (tenant, service, kind, name),
    CONSTRAINT the_last_run_is_not_after_the_mark CHECK (last_due IS NULL OR last_due <= mark),
    CONSTRAINT the_next_run_is_after_the_mark CHECK (next_due IS NULL OR next_due > mark)
);

-- Nodes, each by its own word; roles and kinds are JSON.
CREATE TABLE semel_nodes (
    owner   TEXT PRIMARY KEY,
    roles   TEXT NOT NULL,
    version TEXT NOT NULL,
    kinds   TEXT NOT NULL,
    since   INTEGER NOT NULL,
    seen    INTEGER NOT NULL
);
