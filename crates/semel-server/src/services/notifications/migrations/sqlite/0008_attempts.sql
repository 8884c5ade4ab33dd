-- Which attempt to deliver a notification was the last one; 0 before the first. With error, it tells how a delivery stands
-- while it is PENDING. Differs from PostgreSQL's in type names.

ALTER TABLE notifications ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
