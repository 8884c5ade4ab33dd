-- Checksum of the first text: beebed66b9d31bf7f1abf26c29aa8b258eb5e89f64d642ff06466f5a52a4ab8aaf344d88de3ca7d26bed6cdd41c5463f
-- Its statements: 11caba2c67a264a1

-- When the deliverer next checks a notification, and why it failed or is in doubt. The ledger decides whether it is
-- delivered; due_at only spares nodes needless look-ups. Differs from PostgreSQL's in type names.

ALTER TABLE notifications ADD COLUMN due_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE notifications ADD COLUMN error TEXT;

CREATE INDEX notifications_to_deliver ON notifications (notification_type, due_at, id) WHERE status = 'PENDING';
