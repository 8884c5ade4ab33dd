-- Checksum of the first text: 68c3db79dfcdb79a8077bdc12711a9f63c620a8e6cda89daa71180915393199e3cc879fdbde4fc68b977fa8054a40ec7
-- Its statements: 810cbc997c716f32

-- Tasks of the sweep or a worker that failed for one row, because the row cannot be read or the database refuses to
-- change it. The row is skipped until retry_at, so that the others have their turn. A task stays here when its
-- operation is removed; the sweep deletes it at retry_at.
CREATE TABLE semel_set_aside (
    item     BIGINT NOT NULL,                     -- the operation; for 'fold' a row of semel_deltas
    what     TEXT COLLATE "C" NOT NULL,           -- the task that failed
    since    BIGINT NOT NULL,
    tries    BIGINT NOT NULL,
    retry_at BIGINT NOT NULL,
    reason   TEXT NOT NULL,                       -- of the last try
    PRIMARY KEY (item, what),
    CONSTRAINT a_known_task CHECK (what IN ('lapse', 'age', 'fold', 'run')),
    CONSTRAINT tries_are_counted CHECK (tries >= 1)
);
CREATE INDEX semel_set_aside_retry ON semel_set_aside (retry_at);
