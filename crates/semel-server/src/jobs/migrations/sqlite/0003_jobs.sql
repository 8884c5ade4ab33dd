-- Checksum of the first text: adcee62f0fc6babd80816e2ad4d06ac7dc3f95cb4ee086de80d5eda81f3c3902660e1e1bef68b764bef4f37332a9ee1f
-- Its statements: 97290016e8265c8f

-- Background jobs of older versions; carry_over.rs turns them into operations. A job runs in steps. A step is one
-- transaction that also advances done and cursor, so a job whose node dies continues after its last step. The ledger
-- decides which node runs it. Times are microseconds since 1970. Differs from PostgreSQL's in type names and in the
-- clock (milliseconds).

CREATE TABLE semel_jobs (
    id         TEXT NOT NULL,             -- a UUID of version 7: ids are in order of time
    tenant     TEXT NOT NULL,
    kind       TEXT NOT NULL,
    params     TEXT NOT NULL,             -- JSON: the parameters of this kind of job
    actor      TEXT NOT NULL,
    state      TEXT NOT NULL,
    done       INTEGER NOT NULL DEFAULT 0,
    total      INTEGER,                   -- NULL if unknown
    cursor     TEXT,                      -- where the next step begins, in the kind's own format
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
-- For the workers: few jobs run at a time, however many have ended.
CREATE INDEX semel_jobs_running ON semel_jobs (id) WHERE state = 'running';
