-- Checksum of the first text: 23bb5fcfefbebba5294ebaf548405174393201a8f32857ea011cbb586c3d38e1a6ee50a781e2d393c215ffead3a1acd5
-- Its statements: 80768ce8f59b8a00

-- A host's clock that was ahead and was set back leaves a mark in the future. The time advances from the mark by the
-- boot clock, see sqlite/held.rs. Stored: the mark, the boot clock at the mark, and the id of the boot. NULL while the
-- host's clock is right.
ALTER TABLE semel_meta ADD COLUMN mark INTEGER;
ALTER TABLE semel_meta ADD COLUMN boot INTEGER;
ALTER TABLE semel_meta ADD COLUMN boot_id TEXT;
