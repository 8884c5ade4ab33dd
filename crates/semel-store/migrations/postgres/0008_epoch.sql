-- Checksum of the first text: 0b661c0aba24e8b0592dcc50514b18eeb2a2bd2201226f9bd7d50722d423137681ef1d8b04e8d74d1b4e635b4d20cc24
-- Its statements: e0ac71b052b9bcc5

-- The epoch: the bits above the sequence in every fence, id and token. A sequence goes back when a lagging standby is
-- promoted, when a dump is restored and when rows are replicated logically. On every new connection a node compares the
-- server with the one stored here, and raises the epoch if they differ; it never lowers the epoch. See
-- postgres/epoch.rs. The first node that finds no row writes it.
CREATE TABLE semel_epoch (
    one      BOOLEAN PRIMARY KEY DEFAULT TRUE CONSTRAINT there_is_one_epoch CHECK (one),
    epoch    BIGINT NOT NULL CONSTRAINT an_epoch_has_20_bits CHECK (epoch BETWEEN 0 AND 1048575),
    system   BIGINT,                              -- the cluster's identifier; NULL if it could not be read
    timeline BIGINT                               -- the cluster's timeline; NULL if it could not be read
);

-- The identity of this server. NULL if it cannot be read: no permission, or no such function. The timeline is that of
-- the log that is being written: pg_control_checkpoint() shows the old one until the first checkpoint after a
-- promotion.
CREATE FUNCTION semel_cluster(OUT system BIGINT, OUT timeline BIGINT) LANGUAGE plpgsql AS $$
BEGIN
    SELECT c.system_identifier, ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
    INTO system, timeline FROM pg_control_system() AS c;
EXCEPTION WHEN OTHERS THEN
    -- OTHERS includes neither a cancelled query nor a lost connection.
    system := NULL;
    timeline := NULL;
END $$;
