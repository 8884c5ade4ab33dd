-- Checksum of the first text: 787ec0dd5367658df639d9846494e1da1ac7b6bd8e43b5e88a2a4e25f66bcffa7f2f4062a31344428f47a16b071fe8f3
-- Its statements: 14cd58826fdbdb78

-- Background jobs of older versions; carry_over.rs turns them into operations. A job runs in steps. A step is one
-- transaction that also advances done and cursor, so a job whose node dies continues after its last step. The ledger
-- decides which node runs it. Times are microseconds since 1970.

CREATE TABLE semel_jobs (
    id         TEXT NOT NULL,             -- a UUID of version 7: ids are in order of time
    tenant     TEXT NOT NULL,
    kind       TEXT NOT NULL,
    params     TEXT NOT NULL,             -- JSON: the parameters of this kind of job
    actor      TEXT NOT NULL,
    state      TEXT NOT NULL,
    done       BIGINT NOT NULL DEFAULT 0,
    total      BIGINT,                    -- NULL if unknown
    cursor     TEXT,                      -- where the next step begins, in the kind's own format
    error      TEXT,
    created_at BIGINT NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    updated_at BIGINT NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    ended_at   BIGINT,
    PRIMARY KEY (tenant, id),
    CONSTRAINT a_known_state CHECK (state IN ('running', 'done', 'failed')),
    CONSTRAINT a_job_counts_up CHECK (done >= 0 AND total >= 0),
    CONSTRAINT what_runs_has_not_ended CHECK ((state = 'running') = (ended_at IS NULL)),
    CONSTRAINT what_failed_says_why CHECK ((state = 'failed') = (error IS NOT NULL))
);
-- For the workers: few jobs run at a time, however many have ended.
CREATE INDEX semel_jobs_running ON semel_jobs (id) WHERE state = 'running';
