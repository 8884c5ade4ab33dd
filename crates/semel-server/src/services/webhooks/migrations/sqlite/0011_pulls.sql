-- When a program last asked for the events of a kind: a rule leaves them to programs. At most a row per kind and tenant.
-- Differs from PostgreSQL's in type names.
CREATE TABLE semel_webhook_pulls (
    tenant   TEXT NOT NULL,
    kind     TEXT NOT NULL,     -- under which the events are due: source:type
    asked_at INTEGER NOT NULL,  -- microseconds since 1970
    PRIMARY KEY (tenant, kind)
);
