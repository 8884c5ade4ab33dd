-- What a node writes to find out whether it can write. A row per slot: nodes that ask at the same time do not wait for
-- one another, and there are never more rows than slots.
CREATE TABLE semel_probes (
    slot INTEGER PRIMARY KEY,
    at   BIGINT NOT NULL
);
