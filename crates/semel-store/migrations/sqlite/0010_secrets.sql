-- Checksum of the first text: 95ff28102fbaaf1ff9f1154d3d33e2a9fa14796b3028329eabbdefce3d37186d94f98b43865d16b7cce007ff738c217a
-- Its statements: 3980b08195904d30

-- Secrets of this database. The first node that needs one generates it; all nodes use the same.
CREATE TABLE semel_secrets (
    name   TEXT PRIMARY KEY,
    secret BLOB NOT NULL CHECK (length(secret) >= 32)
) STRICT;
