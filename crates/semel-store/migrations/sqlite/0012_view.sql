-- What is shown with an operation: what people did about it,
CREATE INDEX semel_audit_subject ON semel_audit (tenant, subject, id);
-- and its messages that are held. A message that goes out at once has no entry here, so that putting it costs nothing more.
CREATE INDEX semel_outbox_operation ON semel_outbox (operation, id) WHERE state IN ('waiting', 'unroutable', 'parked');
