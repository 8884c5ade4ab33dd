-- Room for the next version on the same page: what comes again is counted once a second.
ALTER TABLE semel_repeats SET (fillfactor = 50);
