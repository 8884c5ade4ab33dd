-- Checksum of the first text: 36b1c144343fcabe8249e255e8756d2cdbf71af658020483905ecbb95f86dd14ce657d601d3789d7ce59e63e5a3653e3
-- Its statements: 8d56e5bcb3758558

-- When the deliverer next checks a notification, and why it failed or is in doubt. The ledger decides whether it is
-- delivered; due_at only spares nodes needless look-ups.

ALTER TABLE notifications ADD COLUMN due_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE notifications ADD COLUMN error TEXT;

CREATE INDEX notifications_to_deliver ON notifications (notification_type, due_at, id) WHERE status = 'PENDING';
