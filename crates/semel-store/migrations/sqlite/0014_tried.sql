-- Since when the present data of an operation is tried: its first claim, or a person's decision to run it again. NULL if
-- it was claimed when it was created, or never. The waits of an operation that is tried in vain grow with this time, not
-- with its age: it may have been enqueued for another day.
ALTER TABLE semel_operations ADD COLUMN tried_since INTEGER;
