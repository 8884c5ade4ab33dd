-- Other data that came under the id of an event: written before the sender is answered, for people to see. The events
-- themselves are operations of the ledger. Times are microseconds since 1970, those of events seconds. Differs from
-- PostgreSQL's in type names and in how ids are made.

CREATE TABLE semel_webhook_conflicts (
    id                 INTEGER PRIMARY KEY,
    tenant             TEXT NOT NULL,
    source             TEXT NOT NULL,
    kind               TEXT NOT NULL,     -- of the operation: the source, and the function where it is part of the scope
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
-- Each other data once, however often it comes.
CREATE UNIQUE INDEX semel_webhook_conflicts_key
    ON semel_webhook_conflicts (tenant, kind, event_id, came_fingerprint);
-- For lists, the latest first.
CREATE INDEX semel_webhook_conflicts_source ON semel_webhook_conflicts (tenant, source, last_at);
