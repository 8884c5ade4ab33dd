-- From when on somebody may claim what nobody runs, for whoever runs such things by themselves; NULL where a person has
-- to decide. Of rows from before this, how many attempts they had is not known: whoever claims one that has none left
-- is told so, and takes it off the list.
ALTER TABLE semel_backlog ADD COLUMN service TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE semel_backlog ADD COLUMN kind TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE semel_backlog ADD COLUMN due BIGINT CONSTRAINT a_doubt_is_never_due CHECK (due IS NULL OR state <> 'in_doubt');
UPDATE semel_backlog AS b
SET service = o.service, kind = o.kind,
    due = CASE WHEN b.state <> 'in_doubt' AND NOT o.parked THEN coalesce(o.not_before, 0) END
FROM semel_operations AS o WHERE o.id = b.operation;
-- By kind and tenant first: whoever has no hands free for one kind, or runs nothing of a tenant, passes over all of it
-- at once.
CREATE INDEX semel_backlog_due ON semel_backlog (service, kind, tenant, due, operation) WHERE due IS NOT NULL;
