-- When the deliverer should look at a notification next, and why one failed or is in doubt. Whether it is delivered is
-- the ledger's word: due_at only keeps many nodes from asking about the same ones, and one node from asking too early.

ALTER TABLE notifications ADD COLUMN due_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE notifications ADD COLUMN error TEXT;

CREATE INDEX notifications_to_deliver ON notifications (notification_type, due_at, id) WHERE status = 'PENDING';
