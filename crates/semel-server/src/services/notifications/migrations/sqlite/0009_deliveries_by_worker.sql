-- Deliveries are operations that a worker runs: when one is due is in the ledger, and the status of a notification follows
-- in the commit of its operation. enqueued says that a notification has its operation. A node of the version before makes
-- notifications without one; those are found by the index and carried over, as are all from before.

DROP INDEX notifications_to_deliver;
ALTER TABLE notifications DROP COLUMN due_at;
ALTER TABLE notifications ADD COLUMN enqueued BOOLEAN NOT NULL DEFAULT FALSE;

CREATE INDEX notifications_to_enqueue ON notifications (id)
    WHERE status = 'PENDING' AND notification_type <> 'IN_APP' AND NOT enqueued;
