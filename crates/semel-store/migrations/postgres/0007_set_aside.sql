-- What the sweep or a worker could not do to a row, because the row cannot be read or the database refuses to change it.
-- Until retry_at the row is left alone, so that the others have their turn. A row stays here when its operation is
-- removed; the sweep deletes it at retry_at.
CREATE TABLE semel_set_aside (
    item     BIGINT NOT NULL,                     -- the operation; for 'fold' a row of semel_deltas
    what     TEXT COLLATE "C" NOT NULL,           -- what could not be done
    since    BIGINT NOT NULL,
    tries    BIGINT NOT NULL,
    retry_at BIGINT NOT NULL,
    reason   TEXT NOT NULL,                       -- of the last try
    PRIMARY KEY (item, what),
    CONSTRAINT a_known_task CHECK (what IN ('lapse', 'age', 'fold', 'run')),
    CONSTRAINT tries_are_counted CHECK (tries >= 1)
);
CREATE INDEX semel_set_aside_retry ON semel_set_aside (retry_at);
