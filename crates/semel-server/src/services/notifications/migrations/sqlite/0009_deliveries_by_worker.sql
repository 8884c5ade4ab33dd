-- Deliveries are operations that a worker runs: the ledger knows when each is due, and the status of a notification
-- changes in the commit of its operation. enqueued: whether the notification has its operation. Older notifications,
-- and those of nodes of the previous version, have none: carry_over.rs finds them by the index and enqueues them.

DROP INDEX notifications_to_deliver;
ALTER TABLE notifications DROP COLUMN due_at;
ALTER TABLE notifications ADD COLUMN enqueued BOOLEAN NOT NULL DEFAULT FALSE;

CREATE INDEX notifications_to_enqueue ON notifications (id)
    WHERE status = 'PENDING' AND notification_type <> 'IN_APP' AND NOT enqueued;
