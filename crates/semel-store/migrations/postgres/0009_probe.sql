-- Checksum of the first text: 8ad7c48ab2b52a3912a65ac98e5b0f80197992830f4b5055a2e0b822fe59fc2c8a8e4daa10ea6976507b75b90eb474b6
-- Its statements: 3cbb08a59cc9d0a5

-- Rows that nodes write to test whether the database is writable. Nodes share a few slots, with a row each: tests at
-- the same time rarely wait for each other, and the table stays small.
CREATE TABLE semel_probes (
    slot INTEGER PRIMARY KEY,
    at   BIGINT NOT NULL
);
