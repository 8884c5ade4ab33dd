-- Which attempt to deliver a notification was the last one; 0 before the first. With error, it tells how a delivery stands
-- while it is PENDING.

ALTER TABLE notifications ADD COLUMN attempt BIGINT NOT NULL DEFAULT 0;
