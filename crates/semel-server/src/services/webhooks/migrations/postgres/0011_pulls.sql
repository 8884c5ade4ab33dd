-- When a program last asked for the events of a kind: a rule leaves them to programs. At most a row per kind and tenant.
CREATE TABLE semel_webhook_pulls (
    tenant   TEXT COLLATE "C" NOT NULL,
    kind     TEXT COLLATE "C" NOT NULL,     -- under which the events are due: source:type
    asked_at BIGINT NOT NULL,               -- microseconds since 1970
    PRIMARY KEY (tenant, kind)
);
