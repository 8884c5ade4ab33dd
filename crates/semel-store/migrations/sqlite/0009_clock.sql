-- Where the host's boot clock stood when the time was this: a clock that was ahead and came back leaves a mark in the
-- future, which goes on by the boot clock and not by the host's. Empty while the host's clock is right.
ALTER TABLE semel_meta ADD COLUMN mark INTEGER;
ALTER TABLE semel_meta ADD COLUMN boot INTEGER;
ALTER TABLE semel_meta ADD COLUMN boot_id TEXT;
