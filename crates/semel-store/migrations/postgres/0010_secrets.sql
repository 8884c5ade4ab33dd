-- Checksum of the first text: b440764061e2fb0302bbd0c5cd30bece2273bb949a35dc77c0ddfd11711f1e94066275280ad124c7af27050701b9273e
-- Its statements: 919011347b9557ac

-- Secrets of this database. The first node that needs one generates it; all nodes use the same.
CREATE TABLE semel_secrets (
    name   TEXT COLLATE "C" PRIMARY KEY,
    secret BYTEA NOT NULL CHECK (length(secret) >= 32)
);
