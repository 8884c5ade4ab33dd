-- Checksum of the first text: 107368c7961f364bc603a1a9c6a07f39656cec3d99369045ac4fd8d958c9451d7c721e1eea6a49488b9ce11aa60d9650
-- Its statements: e16d812302b2ceb4

-- Indexes for the filters of the lists of notifications and events. Most notifications end as SENT: the index by status
-- has only the others, which people look for.

CREATE INDEX notifications_by_status ON notifications (tenant, status, id) WHERE status <> 'SENT';
CREATE INDEX notifications_by_type ON notifications (tenant, notification_type, id);
CREATE INDEX notifications_by_time ON notifications (tenant, created_at, id);
CREATE INDEX notification_events_by_tenant ON notification_events (tenant, id);
CREATE INDEX notification_events_by_aggregate ON notification_events (tenant, aggregate_type, aggregate_id, id);
CREATE INDEX notification_events_by_type ON notification_events (tenant, event_type, id);
CREATE INDEX notification_events_by_time ON notification_events (tenant, created_at, id);
