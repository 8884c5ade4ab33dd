-- Checksum of the first text: 2824f558395adcc4f6a50c1fd5edd118d4b1943ef156492a5181c6dd7a42030a9798fc5da1941f8885ea2101fa480c28
-- Its statements: 5ccc9313a1750c88

-- Events, their recipients, and one notification per recipient and channel. Times are microseconds since 1970 by the
-- database's clock. The tenant is in every key: tenants share no row. Differs from PostgreSQL's in type names, in the
-- clock (milliseconds) and in collations (text is compared byte by byte anyway).

-- Accepted events. The ledger accepts each event once; the same commit puts the message of each kind into the outbox.
CREATE TABLE notification_events (
    id             INTEGER PRIMARY KEY,
    tenant         TEXT NOT NULL,
    event_id       TEXT NOT NULL,
    aggregate_type TEXT NOT NULL,
    aggregate_id   TEXT,                       -- JSON: 5 and "5" differ
    event_type     TEXT NOT NULL,
    payload        BLOB NOT NULL,
    messages       TEXT NOT NULL,              -- JSON: the kinds, each with the id of its message
    created_at     INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    CONSTRAINT notification_events_event_id UNIQUE (tenant, event_id)
);

-- The revision of each tenant's directory. A change takes the next number and locks the row until it commits, so the
-- directory of a revision is the same whenever it is read.
CREATE TABLE notification_directories (
    tenant   TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL
);

-- The directory: the group, channels and addresses of each recipient. A change ends one row and begins another.
CREATE TABLE notification_recipients (
    id         INTEGER PRIMARY KEY,
    tenant     TEXT NOT NULL,
    kind       TEXT NOT NULL,
    user_id    TEXT NOT NULL,
    group_id   TEXT NOT NULL,
    channels   TEXT NOT NULL,                  -- words separated by one space
    addresses  BLOB NOT NULL,                 -- JSON: an address for each channel that has one
    since      INTEGER NOT NULL,                -- the first revision of the directory with this row
    until      INTEGER,                         -- the first one without it
    created_at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    ended_at   INTEGER,
    CONSTRAINT a_known_kind CHECK (kind IN ('restaurant', 'customer', 'agency', 'admin')),
    CONSTRAINT somebody_is_reached CHECK (channels <> ''),
    CONSTRAINT it_ends_after_it_begins CHECK (until > since),
    CONSTRAINT an_end_has_a_time CHECK ((until IS NULL) = (ended_at IS NULL))
);
CREATE UNIQUE INDEX notification_recipients_now ON notification_recipients (tenant, kind, user_id) WHERE until IS NULL;
CREATE INDEX notification_recipients_by_group ON notification_recipients (tenant, kind, group_id, user_id);
CREATE INDEX notification_recipients_by_user ON notification_recipients (tenant, kind, user_id, since);
CREATE INDEX notification_recipients_list ON notification_recipients (tenant, kind, id) WHERE until IS NULL;

-- The progress of an event's fan-out to one kind, with the event's data for deliveries.
CREATE TABLE notification_fanouts (
    tenant         TEXT NOT NULL,
    event_id       TEXT NOT NULL,
    kind           TEXT NOT NULL,
    aggregate_type TEXT NOT NULL,
    event_type     TEXT NOT NULL,
    payload        BLOB NOT NULL,
    revision       INTEGER NOT NULL,            -- of the directory, at the start
    recipients     INTEGER NOT NULL DEFAULT 0,
    notifications  INTEGER NOT NULL DEFAULT 0,
    begun_at       INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    done_at        INTEGER,
    PRIMARY KEY (tenant, event_id, kind),
    CONSTRAINT a_known_kind CHECK (kind IN ('restaurant', 'customer', 'agency', 'admin'))
);
CREATE INDEX notification_fanouts_open ON notification_fanouts (tenant, revision) WHERE done_at IS NULL;

-- One row per event, kind, recipient and channel, however often a message is delivered.
CREATE TABLE notifications (
    id                INTEGER PRIMARY KEY,
    tenant            TEXT NOT NULL,
    event_id          TEXT NOT NULL,
    kind              TEXT NOT NULL,
    user_id           TEXT NOT NULL,
    notification_type TEXT NOT NULL,
    status            TEXT NOT NULL DEFAULT 'PENDING',
    stream_seq        INTEGER,                  -- the position in the stream, if it is IN_APP and SENT
    created_at        INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    sent_at           INTEGER,
    read_at           INTEGER,
    CONSTRAINT one_per_event_recipient_and_channel UNIQUE (tenant, event_id, kind, user_id, notification_type),
    CONSTRAINT a_known_kind CHECK (kind IN ('restaurant', 'customer', 'agency', 'admin')),
    CONSTRAINT a_known_type CHECK (notification_type IN ('PUSH', 'EMAIL', 'SMS', 'IN_APP')),
    CONSTRAINT a_known_status CHECK (status IN ('PENDING', 'SENT', 'FAILED', 'IN_DOUBT')),
    CONSTRAINT only_what_is_sent_in_the_app_is_in_the_stream
        CHECK ((stream_seq IS NOT NULL) = (notification_type = 'IN_APP' AND status = 'SENT'))
);
CREATE INDEX notifications_by_user ON notifications (tenant, kind, user_id, id);
CREATE INDEX notifications_by_tenant ON notifications (tenant, id);
CREATE INDEX notifications_by_event ON notifications (tenant, event_id, id);
CREATE INDEX notifications_for_the_stream ON notifications (id) WHERE notification_type = 'IN_APP' AND status = 'PENDING';
CREATE UNIQUE INDEX notifications_stream ON notifications (stream_seq) WHERE stream_seq IS NOT NULL;
CREATE INDEX notifications_stream_of_a_user ON notifications (tenant, kind, user_id, stream_seq) WHERE stream_seq IS NOT NULL;

-- The last position in the stream. The transaction that assigns positions locks the row until it commits, so no
-- position appears after a higher one.
CREATE TABLE notification_stream (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    last_seq INTEGER NOT NULL
);
INSERT INTO notification_stream (one, last_seq) VALUES (1, 0);
