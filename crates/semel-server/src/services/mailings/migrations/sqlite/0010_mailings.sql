-- Mailings: an uploaded list of addresses, and one mail per address. Times are microseconds since 1970 by the database's
-- clock. A mailing has a number beside its id: entries name it, and a number is shorter than a UUID.

CREATE TABLE mailings (
    number         INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant         TEXT NOT NULL,
    id             TEXT NOT NULL UNIQUE,
    filename       TEXT NOT NULL,
    content_hash   TEXT NOT NULL,
    content_bytes  INTEGER NOT NULL,
    list_hash      TEXT,                       -- of the set of addresses; known after the import
    storage_url    TEXT,                       -- null once the file is imported
    message        BLOB NOT NULL,             -- JSON: subject, from, text, html
    message_hash   TEXT NOT NULL,
    message_domain TEXT NOT NULL,              -- of Message-IDs; also in the message
    policy         TEXT NOT NULL,
    shape          TEXT NOT NULL,              -- JSON: how the file is read
    address_column INTEGER NOT NULL,           -- its index; also in the shape
    send_at        INTEGER,
    send_at_given  INTEGER,               -- as the upload gave it: a late mailing that is resumed has no send_at
    status         TEXT NOT NULL DEFAULT 'QUEUED',
    phase          TEXT NOT NULL DEFAULT 'importing',
    error          TEXT,
    run            INTEGER NOT NULL DEFAULT 1,  -- the number of the present run
    active         INTEGER NOT NULL DEFAULT TRUE, -- whether that run has not ended
    waiting        INTEGER NOT NULL DEFAULT 0, -- whether that run waits for a time, and does not run
    place          TEXT,                       -- JSON: how far the import is
    last_line      INTEGER NOT NULL DEFAULT 0,  -- the last line that was marked for the first time
    in_flight      TEXT NOT NULL DEFAULT '[]', -- JSON: the lines that are being sent
    in_flight_by   TEXT NOT NULL DEFAULT '',   -- what the transport is recognised by that they were given to
    task           TEXT,                       -- what the next run does first with all entries: reset or cancel
    task_line      INTEGER NOT NULL DEFAULT 0,
    total          INTEGER NOT NULL DEFAULT 0,
    sending        INTEGER NOT NULL DEFAULT 0,
    sent           INTEGER NOT NULL DEFAULT 0,
    failed         INTEGER NOT NULL DEFAULT 0,
    invalid        INTEGER NOT NULL DEFAULT 0,
    suppressed     INTEGER NOT NULL DEFAULT 0,
    cancelled      INTEGER NOT NULL DEFAULT 0,
    in_doubt       INTEGER NOT NULL DEFAULT 0,
    duplicate_rows INTEGER NOT NULL DEFAULT 0,
    rejected_rows  INTEGER NOT NULL DEFAULT 0,
    blank_rows     INTEGER NOT NULL DEFAULT 0,
    plus_tags      INTEGER NOT NULL DEFAULT 0,  -- entries such as ana+news@example.com
    mixed_scripts  INTEGER NOT NULL DEFAULT 0,  -- entries whose address mixes letters of several scripts
    rate_since     INTEGER,                     -- the start of the present run, and what was settled then
    rate_base      INTEGER NOT NULL DEFAULT 0,
    last_attempt   INTEGER,
    retry_at       INTEGER,                     -- when a run that failed is due again; null if it is not
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    deleted_at     INTEGER,
    CONSTRAINT a_known_status CHECK
        (status IN ('PENDING', 'QUEUED', 'PROCESSING', 'PAUSED', 'COMPLETED', 'FAILED', 'CANCELLED')),
    CONSTRAINT a_known_phase CHECK (phase IN ('importing', 'sending')),
    CONSTRAINT a_known_policy CHECK (policy IN ('never-twice', 'never-miss')),
    CONSTRAINT a_known_task CHECK (task IN ('reset', 'cancel')),
    CONSTRAINT counts_add_up CHECK (
        sending >= 0 AND sent >= 0 AND failed >= 0 AND invalid >= 0 AND suppressed >= 0 AND cancelled >= 0
        AND in_doubt >= 0 AND sending + sent + failed + invalid + suppressed + cancelled + in_doubt <= total)
) STRICT;
CREATE UNIQUE INDEX mailings_file ON mailings (tenant, filename, content_hash) WHERE deleted_at IS NULL;
CREATE INDEX mailings_content ON mailings (tenant, content_hash) WHERE deleted_at IS NULL;
CREATE INDEX mailings_list ON mailings (tenant, number);
CREATE INDEX mailings_stored ON mailings (storage_url) WHERE storage_url IS NOT NULL;
CREATE INDEX mailings_unfinished ON mailings (number) WHERE (active OR task IS NOT NULL) AND deleted_at IS NULL;
CREATE INDEX mailings_deleted ON mailings (number) WHERE deleted_at IS NOT NULL;
CREATE INDEX mailings_list_hash ON mailings (tenant, list_hash) WHERE list_hash IS NOT NULL;

-- Uploads of one tenant decide one after the other whether their file is known: each locks this row.
CREATE TABLE mailing_tenants (
    tenant TEXT PRIMARY KEY
) STRICT;

-- One row per mailing and normalised address. The line of its first appearance in the file names it.
CREATE TABLE mailing_entries (
    mailing      INTEGER NOT NULL,
    line         INTEGER NOT NULL,
    email        TEXT NOT NULL,
    original     TEXT,                         -- as it was written, if that differs
    token        BLOB NOT NULL,
    cells        BLOB NOT NULL,               -- JSON: the values of the row's columns
    status       TEXT NOT NULL DEFAULT 'PENDING',
    attempts     INTEGER NOT NULL DEFAULT 0,
    next_attempt INTEGER,                       -- set if it has to be tried again
    last_attempt INTEGER,
    mail_date    INTEGER,                       -- the Date of the mail, the same on every attempt
    maybe_sent_by TEXT,                        -- what the transport is recognised by that may have sent it before
    external_id  TEXT,
    error        TEXT,
    created_at   INTEGER NOT NULL,
    updated_at   INTEGER NOT NULL,
    PRIMARY KEY (mailing, line),
    CONSTRAINT one_per_address UNIQUE (mailing, email),
    CONSTRAINT a_known_entry_status CHECK
        (status IN ('PENDING', 'SENDING', 'SENT', 'FAILED', 'INVALID', 'SUPPRESSED', 'CANCELLED', 'IN_DOUBT'))
) STRICT;
CREATE INDEX mailing_entries_again ON mailing_entries (mailing, next_attempt, line) WHERE next_attempt IS NOT NULL;

-- The ids that transports gave to mails: each belongs to one entry.
CREATE TABLE mailing_external_ids (
    transport   TEXT NOT NULL,
    external_id TEXT NOT NULL,
    mailing     INTEGER NOT NULL,
    line        INTEGER NOT NULL,
    PRIMARY KEY (transport, external_id)
) STRICT;

-- Rows of a file that became no entry: refused ones, and further rows of a known address.
CREATE TABLE mailing_rejects (
    mailing     INTEGER NOT NULL,
    line        INTEGER NOT NULL,
    column_name TEXT,
    code        TEXT NOT NULL,
    value       BLOB NOT NULL,
    PRIMARY KEY (mailing, line)
) STRICT;
CREATE TABLE mailing_duplicates (
    mailing    INTEGER NOT NULL,
    line       INTEGER NOT NULL,
    first_line INTEGER NOT NULL,
    PRIMARY KEY (mailing, line)
) STRICT;

-- The parts of uploaded files, until they are imported. Only on PostgreSQL: nodes share no disk.
CREATE TABLE mailing_chunks (
    upload     TEXT NOT NULL,
    part       INTEGER NOT NULL,
    data       BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (upload, part)
) STRICT;
CREATE INDEX mailing_chunks_first ON mailing_chunks (upload, created_at) WHERE part = 0;

-- Addresses that get no mail.
CREATE TABLE mail_suppressions (
    tenant     TEXT NOT NULL,
    email      TEXT NOT NULL,
    reason     TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (tenant, email)
) STRICT;

-- The rate of each transport over all nodes: from when on the next mail is free.
CREATE TABLE mail_rates (
    transport  TEXT PRIMARY KEY,
    free_at    INTEGER NOT NULL,
    granted    INTEGER NOT NULL,               -- how many mails the last node that asked may begin
    held_until INTEGER NOT NULL DEFAULT 0,     -- no mail begins before, as the transport has asked
    held_why   TEXT NOT NULL DEFAULT ''
) STRICT;

-- The unsubscribe links in mails of deleted mailings, for a while.
CREATE TABLE mailing_links (
    mailing INTEGER NOT NULL,
    line    INTEGER NOT NULL,
    token   BLOB NOT NULL,
    tenant  TEXT NOT NULL,
    email   TEXT NOT NULL,
    until   INTEGER NOT NULL,
    PRIMARY KEY (mailing, line)
) STRICT;
CREATE INDEX mailing_links_until ON mailing_links (until);
