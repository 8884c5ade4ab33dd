-- The epoch: the bits above the sequence in every fence, id and token. A sequence goes back when a standby that lagged is
-- promoted, when a dump is restored and when rows are replicated logically. Nodes compare the server with what is stored
-- here on every new connection, and raise the epoch when it is another one; they never lower it. See postgres/epoch.rs.
-- The first node that finds no row writes it.
CREATE TABLE semel_epoch (
    one      BOOLEAN PRIMARY KEY DEFAULT TRUE CONSTRAINT there_is_one_epoch CHECK (one),
    epoch    BIGINT NOT NULL CONSTRAINT an_epoch_has_20_bits CHECK (epoch BETWEEN 0 AND 1048575),
    system   BIGINT,                              -- the cluster's identifier; NULL where it could not be read
    timeline BIGINT                               -- the cluster's timeline; NULL where it could not be read
);

-- Which server this is. NULL where the server does not tell: no permission, or no such function. The timeline is that of
-- the log that is being written: pg_control_checkpoint() shows the old one until the first checkpoint after a promotion.
CREATE FUNCTION semel_cluster(OUT system BIGINT, OUT timeline BIGINT) LANGUAGE plpgsql AS $$
BEGIN
    SELECT c.system_identifier, ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
    INTO system, timeline FROM pg_control_system() AS c;
EXCEPTION WHEN OTHERS THEN
    -- A cancelled query and a lost connection are not among these.
    system := NULL;
    timeline := NULL;
END $$;
