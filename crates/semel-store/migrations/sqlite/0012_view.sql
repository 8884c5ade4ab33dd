-- For the view of an operation: people's actions on it,
CREATE INDEX semel_audit_subject ON semel_audit (tenant, subject, id);
-- and its held messages. A message that is published at once has no entry here, so its insert costs nothing more.
CREATE INDEX semel_outbox_operation ON semel_outbox (operation, id) WHERE state IN ('waiting', 'unroutable', 'parked');
