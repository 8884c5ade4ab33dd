-- What the lists of notifications and events are filtered by. Most notifications are SENT in the end: the index by status
-- has only the others, which are what people look for.

CREATE INDEX notifications_by_status ON notifications (tenant, status, id) WHERE status <> 'SENT';
CREATE INDEX notifications_by_type ON notifications (tenant, notification_type, id);
CREATE INDEX notifications_by_time ON notifications (tenant, created_at, id);
CREATE INDEX notification_events_by_tenant ON notification_events (tenant, id);
CREATE INDEX notification_events_by_aggregate ON notification_events (tenant, aggregate_type, aggregate_id, id);
CREATE INDEX notification_events_by_type ON notification_events (tenant, event_type, id);
CREATE INDEX notification_events_by_time ON notification_events (tenant, created_at, id);
