-- Checksum of the first text: 436f57af11149fc624dfb8c219af4ea4c7c5e979478fc9e92109483bd3bbdf389b2eb585c0ffcf25901225c383036ffc
-- Its statements: 30e1a76408b38412

-- Free space for the next row version on the same page: repeats are counted once a second.
ALTER TABLE semel_repeats SET (fillfactor = 50);
