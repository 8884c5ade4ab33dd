-- Checksum of the first text: 3e924cd69204840acdfb29017eef96ce57aab49f8450c3490184ee06872c5080b7ff9123e6285dbd66981970c81d74ce
-- Its statements: cc40c25f33d3eef8

-- due: the time from which a worker may claim the operation; NULL if a person must decide. The attempts of older rows
-- are not known: a worker that finds one exhausted clears its due time.
ALTER TABLE semel_backlog ADD COLUMN service TEXT NOT NULL DEFAULT '';
ALTER TABLE semel_backlog ADD COLUMN kind TEXT NOT NULL DEFAULT '';
ALTER TABLE semel_backlog ADD COLUMN due INTEGER CONSTRAINT a_doubt_is_never_due CHECK (due IS NULL OR state <> 'in_doubt');
UPDATE semel_backlog
SET service = o.service, kind = o.kind,
    due = CASE WHEN semel_backlog.state <> 'in_doubt' AND NOT o.parked THEN coalesce(o.not_before, 0) END
FROM semel_operations AS o WHERE o.id = semel_backlog.operation;
-- Kind and tenant first: those without a free worker are skipped with one index seek.
CREATE INDEX semel_backlog_due ON semel_backlog (service, kind, tenant, due, operation) WHERE due IS NOT NULL;
