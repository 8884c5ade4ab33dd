-- Secrets of this database: made once, by whichever node needs one first, and the same for all of them.
CREATE TABLE semel_secrets (
    name   TEXT PRIMARY KEY,
    secret BLOB NOT NULL CHECK (length(secret) >= 32)
) STRICT;
