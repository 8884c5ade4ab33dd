-- Checksum of the first text: 1e271409e0f25d48f94dceaadfc45ca0a306584c5f5388344695d4c906bf53d8ce0e241fe373aa4f606795136fd77b0d
-- Its statements: b2ca70f7149c17a8

-- Once completed, a pinned operation cannot be changed or purged until its retention ends. Older operations are not
-- pinned.
ALTER TABLE semel_operations ADD COLUMN pinned BOOLEAN NOT NULL DEFAULT FALSE;

DROP VIEW semel_operations_readable;
CREATE VIEW semel_operations_readable AS
SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.fence, o.failures, o.crashes, o.parked, o.owner,
       hex(o.fingerprint) AS fingerprint, o.payload_order, o.label1, o.label2, o.label3, o.label4,
       strftime('%Y-%m-%dT%H:%M:%S', o.created_at / 1000000, 'unixepoch') || printf('.%06dZ', o.created_at % 1000000) AS created_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.claimed_at / 1000000, 'unixepoch') || printf('.%06dZ', o.claimed_at % 1000000) AS claimed_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.settled_at / 1000000, 'unixepoch') || printf('.%06dZ', o.settled_at % 1000000) AS settled_at,
       strftime('%Y-%m-%dT%H:%M:%S', o.not_before / 1000000, 'unixepoch') || printf('.%06dZ', o.not_before % 1000000) AS not_before,
       strftime('%Y-%m-%dT%H:%M:%S', o.expires_at / 1000000, 'unixepoch') || printf('.%06dZ', o.expires_at % 1000000) AS expires_at,
       strftime('%Y-%m-%dT%H:%M:%S', l.deadline / 1000000, 'unixepoch') || printf('.%06dZ', l.deadline % 1000000) AS lease_ends_at,
       o.archived, CASE WHEN hex(substr(o.payload, 2, 1)) = '00' THEN CAST(substr(o.payload, 3) AS TEXT) WHEN o.payload IS NOT NULL THEN '(encrypted)' END AS payload,
       o.outcome_kept,
       CASE WHEN hex(substr(o.outcome, 2, 1)) = '00' THEN CAST(substr(o.outcome, 3) AS TEXT) WHEN o.outcome IS NOT NULL THEN '(encrypted)' END AS outcome,
       CASE WHEN hex(substr(o.error, 2, 1)) = '00' THEN CAST(substr(o.error, 3) AS TEXT) WHEN o.error IS NOT NULL THEN '(encrypted)' END AS error,
       CASE WHEN hex(substr(o.checkpoint, 2, 1)) = '00' THEN CAST(substr(o.checkpoint, 3) AS TEXT) WHEN o.checkpoint IS NOT NULL THEN '(encrypted)' END AS checkpoint,
       o.pinned
FROM semel_operations o LEFT JOIN semel_leases l ON l.operation = o.id;
