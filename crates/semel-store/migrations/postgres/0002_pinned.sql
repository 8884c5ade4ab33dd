-- Checksum of the first text: 54c621705e4fba0aa551a3d6b10128e89c7d530804ed29be037de664ce74e7b3f2ecfccf59269871f99b103d0199f438
-- Its statements: 9376b3e1d533ad99

-- Once completed, a pinned operation cannot be changed or purged until its retention ends. Older operations are not
-- pinned.
ALTER TABLE semel_operations ADD COLUMN pinned BOOLEAN NOT NULL DEFAULT FALSE;

-- Replaced, not dropped: other views may depend on it. So a new column must be the last one.
CREATE OR REPLACE VIEW semel_operations_readable AS
SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.fence, o.failures, o.crashes, o.parked, o.owner,
       encode(o.fingerprint, 'hex') AS fingerprint, o.payload_order, o.label1, o.label2, o.label3, o.label4,
       semel_time(o.created_at) AS created_at, semel_time(o.claimed_at) AS claimed_at, semel_time(o.settled_at) AS settled_at,
       semel_time(o.not_before) AS not_before, semel_time(o.expires_at) AS expires_at, semel_time(l.deadline) AS lease_ends_at,
       o.archived, semel_text(o.payload) AS payload, o.outcome_kept, semel_text(o.outcome) AS outcome,
       semel_text(o.error) AS error, semel_text(o.checkpoint) AS checkpoint, o.pinned
FROM semel_operations o LEFT JOIN semel_leases l ON l.operation = o.id;
