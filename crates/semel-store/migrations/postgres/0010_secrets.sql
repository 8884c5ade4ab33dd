-- Secrets of this database: made once, by whichever node needs one first, and the same for all of them.
CREATE TABLE semel_secrets (
    name   TEXT COLLATE "C" PRIMARY KEY,
    secret BYTEA NOT NULL CHECK (length(secret) >= 32)
);
