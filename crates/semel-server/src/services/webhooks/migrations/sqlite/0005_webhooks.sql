-- Checksum of the first text: 8bcb4f4646ed3523606082ac868239ff2b622853adacc037e7bbecd49029ca13ba4307a1aacf40116e92b0e37c2be20a
-- Its statements: f6a6cd10c34189b7

-- Conflicts: other data received under the id of a known event. The server writes them before it answers the sender,
-- for people. The events themselves are operations of the ledger. Times are microseconds since 1970; creation times of
-- events are seconds. Differs from PostgreSQL's in type names and in the generation of ids.

CREATE TABLE semel_webhook_conflicts (
    id                 INTEGER PRIMARY KEY,
    tenant             TEXT NOT NULL,
    source             TEXT NOT NULL,
    kind               TEXT NOT NULL,     -- of the operation: the source, and the function if it is part of the scope
    event_id           TEXT NOT NULL,
    event_type         TEXT NOT NULL,
    webhook_function   TEXT NOT NULL,
    came_fingerprint   TEXT NOT NULL,
    stored_fingerprint TEXT NOT NULL,
    came_created       INTEGER,
    stored_created     INTEGER,
    deed               TEXT NOT NULL,
    count              INTEGER NOT NULL,
    first_at           INTEGER NOT NULL,
    last_at            INTEGER NOT NULL,
    CONSTRAINT a_known_deed CHECK (deed IN ('taken', 'skipped')),
    CONSTRAINT it_came_at_least_once CHECK (count >= 1),
    CONSTRAINT other_data CHECK (came_fingerprint <> stored_fingerprint)
);
-- One row per fingerprint, however often its data arrives.
CREATE UNIQUE INDEX semel_webhook_conflicts_key
    ON semel_webhook_conflicts (tenant, kind, event_id, came_fingerprint);
-- For lists, latest first.
CREATE INDEX semel_webhook_conflicts_source ON semel_webhook_conflicts (tenant, source, last_at);
