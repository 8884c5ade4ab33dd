-- Checksum of the first text: 4f31271d1d9864217f115cf15e4a87f9fe70b83aba839129e50523327bdff744ef60361db2411246383e165da5d08ae3
-- Its statements: 4677ce5738f613b8

-- due: the time from which a worker may claim the operation; NULL if a person must decide. The attempts of older rows
-- are not known: a worker that finds one exhausted clears its due time.
ALTER TABLE semel_backlog ADD COLUMN service TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE semel_backlog ADD COLUMN kind TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE semel_backlog ADD COLUMN due BIGINT CONSTRAINT a_doubt_is_never_due CHECK (due IS NULL OR state <> 'in_doubt');
UPDATE semel_backlog AS b
SET service = o.service, kind = o.kind,
    due = CASE WHEN b.state <> 'in_doubt' AND NOT o.parked THEN coalesce(o.not_before, 0) END
FROM semel_operations AS o WHERE o.id = b.operation;
-- Kind and tenant first: those without a free worker are skipped with one index seek.
CREATE INDEX semel_backlog_due ON semel_backlog (service, kind, tenant, due, operation) WHERE due IS NOT NULL;
