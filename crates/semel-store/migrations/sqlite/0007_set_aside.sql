-- Checksum of the first text: 857b024b0b3d751a269b91796c833bb1dd865ee30cdd43d1cdd5c0134b1be20f056b289726130883ee8932a1f78c3e7f
-- Its statements: 8894006a683d1daf

-- Tasks of the sweep or a worker that failed for one row, because the row cannot be read or the database refuses to
-- change it. The row is skipped until retry_at, so that the others have their turn. A task stays here when its
-- operation is removed; the sweep deletes it at retry_at.
CREATE TABLE semel_set_aside (
    item     INTEGER NOT NULL,                     -- the operation; for 'fold' a row of semel_deltas
    what     TEXT NOT NULL,           -- the task that failed
    since    INTEGER NOT NULL,
    tries    INTEGER NOT NULL,
    retry_at INTEGER NOT NULL,
    reason   TEXT NOT NULL,                       -- of the last try
    PRIMARY KEY (item, what),
    CONSTRAINT a_known_task CHECK (what IN ('lapse', 'age', 'fold', 'run')),
    CONSTRAINT tries_are_counted CHECK (tries >= 1)
);
CREATE INDEX semel_set_aside_retry ON semel_set_aside (retry_at);
