-- Background jobs. A job goes in steps; each is one transaction that also moves done and cursor on, so that a job whose
-- node dies goes on where it was. Who runs it is the ledger's business. Times are microseconds since 1970. Differs from
-- PostgreSQL's in type names and in the clock (which here has milliseconds).

CREATE TABLE semel_jobs (
    id         TEXT NOT NULL,             -- a UUID of version 7, so that the order of ids is that of time
    tenant     TEXT NOT NULL,
    kind       TEXT NOT NULL,
    params     TEXT NOT NULL,             -- JSON: what the kind of job needs to know
    actor      TEXT NOT NULL,
    state      TEXT NOT NULL,
    done       INTEGER NOT NULL DEFAULT 0,
    total      INTEGER,                   -- NULL while, or because, nobody knows
    cursor     TEXT,                      -- where the next step begins; only the kind of job understands it
    error      TEXT,
    created_at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    updated_at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    ended_at   INTEGER,
    PRIMARY KEY (tenant, id),
    CONSTRAINT a_known_state CHECK (state IN ('running', 'done', 'failed')),
    CONSTRAINT a_job_counts_up CHECK (done >= 0 AND total >= 0),
    CONSTRAINT what_runs_has_not_ended CHECK ((state = 'running') = (ended_at IS NULL)),
    CONSTRAINT what_failed_says_why CHECK ((state = 'failed') = (error IS NOT NULL))
);
-- For the workers: there are few of these, however many there have been.
CREATE INDEX semel_jobs_running ON semel_jobs (id) WHERE state = 'running';
