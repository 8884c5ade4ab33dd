-- The time, the priority and the policy of newer data that waits for the older to settle, with the order of the data that
-- they belong to. NULL if an earlier version stored the data: those of the older data apply.
ALTER TABLE semel_successors ADD COLUMN terms TEXT;
