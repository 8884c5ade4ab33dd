//! The statements about messages, as in [`crate::sql`]: text that both databases share, except for two that differ.

use crate::{postgres::epoch::next_fence, sql::statements};

/// The columns that a message has in the outbox.
macro_rules! envelope {
    () => {
        "tenant, message_id, topic, kind, body, headers, ordering_key, number, not_before, receipt, operation, fence, put_at"
    };
}

/// The columns of a message in a queue.
macro_rules! delivered {
    () => {
        "id, queue, tenant, message_id, kind, body, headers, number, put_at, operation, fence, deliveries"
    };
}

/// The columns of a message that could not be handled.
macro_rules! letter {
    () => {
        "tenant, consumer, key, fingerprint, message_id, message_tenant, queue, kind, body, headers, number, put_at, operation, fence"
    };
}

/// Stores a message that could not be handled; with the table's own columns and their values.
macro_rules! put_letter {
    ($table:literal, $own:literal, $values:literal) => {
        concat!(
            "INSERT INTO ",
            $table,
            " (",
            letter!(),
            ", failures, reason, ",
            $own,
            ")
         SELECT ",
            letter!(),
            ", failures, reason, ",
            $values,
            "
         FROM {rows $1: tenant text, consumer text, key text, fingerprint bytes, message_id text, message_tenant text,
               queue text, kind text, body bytes, headers text, number int, put_at int, operation int, fence int,
               failures int, reason text, after int} AS r
         CROSS JOIN (SELECT {now $2} AS now) AS clock
         WHERE true
         ON CONFLICT (tenant, consumer, key, fingerprint) DO NOTHING"
        )
    };
}

/// The filter of dead letters. `$3` is a text with its wildcards escaped (case-insensitive, as on SQLite), `$6` a batch
/// of ids.
macro_rules! meant {
    () => {
        "tenant = $1 AND (consumer = $2 OR $2 IS NULL) AND (CAST($3 AS TEXT) IS NULL OR lower(reason) LIKE '%' || lower(CAST($3 AS TEXT)) || '%' ESCAPE '!')
           AND died_at >= $4 AND died_at < $5
           AND (CAST($6 AS TEXT) IS NULL OR id IN (SELECT i.id FROM {rows $6: id int} AS i))
           AND (queue = $7 OR $7 IS NULL)"
    };
}

/// Renews leases, each by row and token. Locked rows are skipped: one row must not delay the renewal of the others.
macro_rules! hold {
    ($table:literal, $column:literal) => {
        concat!(
            "UPDATE ",
            $table,
            " SET ",
            $column,
            " = clock.now + $3
         FROM (SELECT {now $2} AS now) AS clock
         WHERE id {unlocked SELECT h.id FROM ",
            $table,
            " AS h
             WHERE (h.id, h.token) IN (SELECT r.id, r.token FROM {rows $1: id int, token int} AS r)}
         RETURNING id"
        )
    };
}

/// Which of these rows have the token of their lease.
macro_rules! held {
    ($table:literal) => {
        concat!(
            "SELECT h.id FROM ",
            $table,
            " AS h WHERE (h.id, h.token) IN (SELECT r.id, r.token FROM {rows $1: id int, token int} AS r)"
        )
    };
}

/// A row of the outbox in a listing. A page must fit into memory, so long bodies are cut.
macro_rules! outbox_row {
    ($where:literal) => {
        concat!(
            "SELECT id, tenant, message_id, topic, kind, substr(body, 1, 16386) AS body, headers, ordering_key, number,
                    not_before, receipt, operation, fence, put_at, state, due_at, failures, error
             FROM semel_outbox WHERE tenant = $1 AND id > $2 AND (topic = $3 OR $3 IS NULL) AND ",
            $where,
            " ORDER BY id LIMIT $5"
        )
    };
}

statements! {
    /// Every statement about messages that both databases share, for one of them.
    MessageSql:

    /// The next numbers of ordering keys, in the order of the batch; locks the keys.
    number_keys =
        "INSERT INTO semel_outbox_keys (tenant, ordering_key, last_number)
         SELECT tenant, ordering_key, n FROM {rows $1: tenant text, ordering_key text, n int} AS r
         WHERE true
         ON CONFLICT (tenant, ordering_key) DO UPDATE SET last_number = semel_outbox_keys.last_number + excluded.last_number
         RETURNING tenant, ordering_key, last_number";
    /// Inserts messages. One with an ordering key is blocked by every earlier one that still exists: in its own batch,
    /// and in the table. Not in one statement with the numbers: it must see the commits of the transactions that the
    /// first statement has waited for.
    put =
        "INSERT INTO semel_outbox (tenant, message_id, topic, kind, body, headers, ordering_key, number, not_before, receipt,
            operation, fence, put_at, state, due_at)
         SELECT tenant, message_id, topic, kind, body, headers, ordering_key, number, not_before, receipt,
            operation, fence, now, state, CASE WHEN state = 'waiting' THEN not_before END
         FROM (SELECT r.place, r.tenant, r.message_id, r.topic, r.kind, r.body, r.headers, r.ordering_key, r.number,
                      r.not_before, r.receipt, r.operation, r.fence, clock.now,
                      CASE WHEN r.behind THEN 'blocked'
                           WHEN r.ordering_key IS NOT NULL
                            AND (SELECT o.number FROM semel_outbox AS o
                                 WHERE o.tenant = r.tenant AND o.ordering_key = r.ordering_key
                                 ORDER BY o.number LIMIT 1) IS NOT NULL THEN 'blocked'
                           WHEN r.not_before > clock.now THEN 'waiting'
                           ELSE 'ready' END AS state
               FROM {rows $1: place int, tenant text, message_id text, topic text, kind text, body bytes, headers text,
                     ordering_key text, number int, not_before int, receipt bool, operation int, fence int,
                     behind bool} AS r
               CROSS JOIN (SELECT {now $2} AS now) AS clock) AS m
         ORDER BY place";
    /// Stores the marks of rows that were not published.
    mark =
        "UPDATE semel_outbox AS o
         SET state = r.state, due_at = clock.now + r.after, failures = o.failures + r.failed,
             error = coalesce(r.error, o.error), lease_until = 0, token = 0
         FROM {rows $1: id int, token int, state text, after int, failed int, error bytes} AS r
         CROSS JOIN (SELECT {now $2} AS now) AS clock
         WHERE o.id = r.id AND o.token = r.token";
    /// Makes due rows ready.
    ready_due =
        "UPDATE semel_outbox SET state = 'ready', due_at = NULL
         WHERE id {unlocked SELECT id FROM semel_outbox WHERE due_at <= (SELECT {now $1}) ORDER BY due_at LIMIT $2}";
    /// When the next one is due.
    next_due = "SELECT due_at FROM semel_outbox WHERE due_at IS NOT NULL ORDER BY due_at LIMIT 1";
    /// The first blocked row of each of the next ordering keys, and whether it is no longer blocked. From key to key by
    /// index: a key may have many rows.
    find_stuck =
        "WITH RECURSIVE line (id, tenant, ordering_key, number, n) AS (
            SELECT o.id, o.tenant, o.ordering_key, o.number, 1
            FROM semel_outbox AS o
            WHERE o.id = (SELECT b.id FROM semel_outbox AS b
                          WHERE b.state = 'blocked' AND (b.tenant, b.ordering_key) > ($1, $2)
                          ORDER BY b.tenant, b.ordering_key, b.number LIMIT 1)
            UNION ALL
            SELECT o.id, o.tenant, o.ordering_key, o.number, l.n + 1
            FROM line AS l
            JOIN semel_outbox AS o
              ON o.id = (SELECT b.id FROM semel_outbox AS b
                         WHERE b.state = 'blocked' AND (b.tenant, b.ordering_key) > (l.tenant, l.ordering_key)
                         ORDER BY b.tenant, b.ordering_key, b.number LIMIT 1)
            WHERE l.n < $3)
         SELECT l.id, l.tenant, l.ordering_key,
                (SELECT e.id FROM semel_outbox AS e
                 WHERE e.tenant = l.tenant AND e.ordering_key = l.ordering_key AND e.number < l.number
                 ORDER BY e.number LIMIT 1) IS NULL AS stuck
         FROM line AS l ORDER BY l.n";
    /// Makes rows ready that are no longer blocked. They stay so: later rows have higher numbers.
    free_stuck =
        "UPDATE semel_outbox AS o
         SET state = CASE WHEN o.not_before > clock.now THEN 'waiting' ELSE 'ready' END,
             due_at = CASE WHEN o.not_before > clock.now THEN o.not_before END
         FROM (SELECT {now $2} AS now) AS clock
         WHERE o.id {unlocked SELECT id FROM semel_outbox WHERE state = 'blocked'
             AND id IN (SELECT i.id FROM {rows $1: id int} AS i)}
         RETURNING state";

    /// When a message was published.
    receipt = "SELECT sent_at FROM semel_receipts WHERE tenant = $1 AND message_id = $2";
    /// Deletes receipts from before a time.
    purge_receipts =
        "DELETE FROM semel_receipts WHERE (tenant, message_id) IN
            (SELECT tenant, message_id FROM semel_receipts WHERE sent_at < $1 ORDER BY sent_at LIMIT $2)";
    /// Whether there are any.
    any_receipts = "SELECT sent_at FROM semel_receipts WHERE sent_at < $1 ORDER BY sent_at LIMIT 1";
    /// A page of the outbox,
    list = outbox_row!("(state = $4 OR $4 IS NULL)");
    /// and of those in some state: by its own index, so that a few among millions are found at once.
    list_held = outbox_row!("state IN ('waiting', 'unroutable', 'parked') AND state = $4");
    /// Unroutable and parked messages of a service's operations with a third label. Each state by its own index scan:
    /// together they would have to be sorted first.
    stuck_of_service =
        "SELECT m.topic, m.state, count(*) AS n
         FROM (SELECT topic, state, operation FROM
                   (SELECT topic, state, operation FROM semel_outbox
                    WHERE state IN ('waiting', 'unroutable', 'parked') AND state = 'unroutable' AND tenant = $1
                    ORDER BY id LIMIT 500) AS u
               UNION ALL
               SELECT topic, state, operation FROM
                   (SELECT topic, state, operation FROM semel_outbox
                    WHERE state IN ('waiting', 'unroutable', 'parked') AND state = 'parked' AND tenant = $1
                    ORDER BY id LIMIT 500) AS p) AS m
         JOIN semel_operations AS o ON o.id = m.operation AND o.tenant = $1 AND o.service = $2 AND o.label3 = $3
         GROUP BY m.topic, m.state ORDER BY m.topic, m.state LIMIT 100";
    /// Messages of an operation that were not published at once.
    held_of_operation =
        "SELECT message_id, topic, state, error, put_at FROM semel_outbox
         WHERE state IN ('waiting', 'unroutable', 'parked') AND tenant = $1 AND operation = $2 ORDER BY id LIMIT $3";
    /// A row before a person's action; the statement of the action checks whether it has changed.
    load_held =
        "SELECT id, state, topic, ordering_key, number, failures, operation, fence FROM semel_outbox
         WHERE tenant = $1 AND message_id = $2";
    /// Makes a row ready, for a person.
    redrive =
        "UPDATE semel_outbox SET state = 'ready', due_at = NULL
         WHERE id = $1 AND state IN ('waiting', 'unroutable', 'parked')";
    /// Deletes a row, for a person.
    skip = "DELETE FROM semel_outbox WHERE id = $1 AND state IN ('unroutable', 'parked')";
    /// Makes the next row of its ordering key ready.
    free_next =
        "UPDATE semel_outbox AS o
         SET state = CASE WHEN o.not_before > clock.now THEN 'waiting' ELSE 'ready' END,
             due_at = CASE WHEN o.not_before > clock.now THEN o.not_before END
         FROM (SELECT {now $4} AS now) AS clock
         WHERE o.state = 'blocked'
           AND o.id = (SELECT n.id FROM semel_outbox AS n
                       WHERE n.tenant = $1 AND n.ordering_key = $2 AND n.number > $3 ORDER BY n.number LIMIT 1)";
    /// How many rows are in each state, up to a limit, and since when the oldest is ready.
    backlog =
        "SELECT (SELECT count(*) FROM (SELECT id FROM semel_outbox WHERE state = 'ready' ORDER BY id LIMIT $1) AS s) AS ready,
                (SELECT count(*) FROM (SELECT id FROM semel_outbox
                    WHERE state IN ('waiting', 'unroutable', 'parked') AND state = 'waiting' LIMIT $1) AS s) AS waiting,
                (SELECT count(*) FROM (SELECT id FROM semel_outbox
                    WHERE state = 'blocked' ORDER BY tenant, ordering_key, number LIMIT $1) AS s) AS blocked,
                (SELECT count(*) FROM (SELECT id FROM semel_outbox
                    WHERE state IN ('waiting', 'unroutable', 'parked') AND state = 'unroutable' LIMIT $1) AS s) AS unroutable,
                (SELECT count(*) FROM (SELECT id FROM semel_outbox
                    WHERE state IN ('waiting', 'unroutable', 'parked') AND state = 'parked' LIMIT $1) AS s) AS parked,
                (SELECT put_at FROM semel_outbox WHERE state = 'ready' ORDER BY id LIMIT 1) AS oldest";

    /// Inserts a retry. An existing one is not changed. Failed runs elsewhere count as started as well: starts without
    /// a failure are crashes.
    put_retry = put_letter!("semel_retries", "starts, due_at", "r.failures, clock.now + r.after");
    /// Inserts a dead letter. An existing one is not changed.
    put_dead = put_letter!("semel_dead_letters", "died_at", "clock.now + r.after");
    /// Takes due retries of a consumer, oldest first, and counts their starts.
    take_retries = concat!(
        "UPDATE semel_retries SET due_at = $3 + $4, token = $5, starts = starts + 1
         WHERE id {unlocked SELECT id FROM semel_retries WHERE consumer = $1 AND due_at <= $3 ORDER BY due_at, id LIMIT $2}
         RETURNING id, ", letter!(), ", failures, starts, token");
    /// Deletes a retry whose effect is being committed.
    retry_done = "DELETE FROM semel_retries WHERE id = $1 AND token = $2";
    /// Releases a retry that was taken and not begun: its start is not counted.
    retry_not_begun =
        "UPDATE semel_retries
         SET due_at = clock.now, token = 0, starts = starts - 1
         FROM (SELECT {now $3} AS now) AS clock
         WHERE id = $1 AND token = $2";
    /// Postpones unreadable retries that were taken: their start is not counted.
    retries_unread =
        "UPDATE semel_retries SET due_at = $2, token = 0, starts = starts - 1
         WHERE token = $3 AND id IN (SELECT i.id FROM {rows $1: id int} AS i)";
    /// Stores the failure of a retry.
    retry_later =
        "UPDATE semel_retries
         SET due_at = clock.now + $3, token = 0, failures = failures + 1, reason = $4
         FROM (SELECT {now $5} AS now) AS clock
         WHERE id = $1 AND token = $2";
    /// Turns a retry that failed too often into a dead letter. An existing letter of the same message is updated, which
    /// locks it: otherwise a person could re-drive it onto the retry that is about to be deleted, and both would be
    /// gone.
    retry_dead = concat!(
        "INSERT INTO semel_dead_letters (", letter!(), ", failures, reason, died_at)
         SELECT ", letter!(), ", failures + 1, $3, clock.now
         FROM semel_retries CROSS JOIN (SELECT {now $4} AS now) AS clock
         WHERE id = $1 AND token = $2
         ON CONFLICT (tenant, consumer, key, fingerprint)
         DO UPDATE SET failures = excluded.failures, reason = excluded.reason, died_at = excluded.died_at");
    /// When the next retry of a consumer is due.
    next_retry = "SELECT due_at FROM semel_retries WHERE consumer = $1 ORDER BY due_at LIMIT 1";

    /// A page of dead letters, newest first, with long bodies cut.
    letters = concat!(
        "SELECT id, tenant, consumer, key, message_id, message_tenant, queue, kind, substr(body, 1, 16386) AS body, headers,
                number, put_at, operation, fence, failures, reason, died_at
         FROM semel_dead_letters
         WHERE ", meant!(), " AND id < $8 ORDER BY id DESC LIMIT $9");
    /// One dead letter.
    letter =
        "SELECT id, tenant, consumer, key, message_id, message_tenant, queue, kind, body, headers, number, put_at, operation,
                fence, failures, reason, died_at
         FROM semel_dead_letters WHERE tenant = $1 AND id = $2";
    /// How many match, up to a limit.
    count_letters = concat!(
        "SELECT count(*) FROM (SELECT 1 FROM semel_dead_letters WHERE ", meant!(), " LIMIT $8) AS s");
    /// Which match, oldest first.
    find_letters = concat!(
        "SELECT id FROM semel_dead_letters
         WHERE id {unlocked SELECT id FROM semel_dead_letters WHERE ", meant!(), " AND id > $8 ORDER BY id LIMIT $9}
         ORDER BY id");
    /// Turns them into retries that are due now, with all counts at zero.
    redrive_letters = concat!(
        "INSERT INTO semel_retries (", letter!(), ", failures, starts, reason, due_at)
         SELECT ", letter!(), ", 0, 0, reason, clock.now
         FROM semel_dead_letters CROSS JOIN (SELECT {now $2} AS now) AS clock
         WHERE id IN (SELECT i.id FROM {rows $1: id int} AS i)
         ORDER BY id
         ON CONFLICT (tenant, consumer, key, fingerprint) DO NOTHING");
    /// Deletes them as dead letters.
    delete_letters = "DELETE FROM semel_dead_letters WHERE id IN (SELECT i.id FROM {rows $1: id int} AS i)";
    /// Deletes one, for a person.
    discard_letter =
        "DELETE FROM semel_dead_letters WHERE tenant = $1 AND id = $2
         RETURNING consumer, key, queue, failures, reason";
    /// Declares queues.
    declare =
        "INSERT INTO semel_queues (name) SELECT name FROM {rows $1: name text} AS r
         WHERE true
         ON CONFLICT (name) DO NOTHING";
    /// Which queues exist.
    find_queues = "SELECT q.name FROM {rows $1: name text} AS r JOIN semel_queues AS q ON q.name = r.name";
    /// Inserts published messages.
    publish =
        "INSERT INTO semel_queue (queue, tenant, message_id, kind, body, headers, number, put_at, operation, fence)
         SELECT queue, tenant, message_id, kind, body, headers, number, put_at, operation, fence
         FROM {rows $1: place int, queue text, tenant text, message_id text, kind text, body bytes, headers text, number int,
               put_at int, operation int, fence int} AS r
         ORDER BY place";
    /// Deletes acknowledged messages.
    acknowledge =
        "DELETE FROM semel_queue
         WHERE (id, token) IN (SELECT r.id, r.token FROM {rows $1: id int, token int} AS r)
         RETURNING id";
    /// Turns unreadable messages of a queue into dead letters, as stored; returns the keys of the new letters.
    bury_unread = concat!(
        "INSERT INTO semel_dead_letters (", letter!(), ", failures, reason, died_at)
         SELECT q.tenant, r.consumer, r.key, r.fingerprint, q.message_id, q.tenant, q.queue, q.kind, q.body, q.headers,
                q.number, q.put_at, q.operation, q.fence, 0, r.reason, clock.now
         FROM {rows $1: id int, token int, consumer text, key text, fingerprint bytes, reason text} AS r
         JOIN semel_queue AS q ON q.id = r.id AND q.token = r.token
         CROSS JOIN (SELECT {now $2} AS now) AS clock
         WHERE true
         ORDER BY q.id
         ON CONFLICT (tenant, consumer, key, fingerprint) DO NOTHING
         RETURNING key");
    /// Postpones messages of a queue that this version cannot read: their delivery is not counted.
    put_off =
        "UPDATE semel_queue SET visible_at = clock.now + $3, deliveries = deliveries - 1
         FROM (SELECT {now $2} AS now) AS clock
         WHERE (id, token) IN (SELECT r.id, r.token FROM {rows $1: id int, token int} AS r)
         RETURNING id";
    /// Returns messages to their queue.
    requeue =
        "UPDATE semel_queue AS q SET visible_at = 0, token = 0, deliveries = q.deliveries - r.unbegun
         FROM {rows $1: message int, held int, unbegun int} AS r
         WHERE q.id = r.message AND q.token = r.held
         RETURNING id, queue";

    /// Renews the leases of a relay's rows,
    hold_outbox = hold!("semel_outbox", "lease_until");
    /// and returns which it still holds.
    held_outbox = held!("semel_outbox");
    /// Renews the leases of an embedded queue's deliveries,
    hold_queue = hold!("semel_queue", "visible_at");
    /// and returns which are still held.
    held_queue = held!("semel_queue");
}

/// Takes rows for a relay, on PostgreSQL: lease, time and token in one statement, which is its own commit. Limited by
/// bytes: the length of a body is known without reading it.
pub(super) const TAKE_POSTGRES: &str = concat!(
    "WITH lease AS MATERIALIZED (
        SELECT coalesce($3, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
               ",
    next_fence!(),
    " AS token)
     UPDATE semel_outbox SET lease_until = lease.now + $2, token = lease.token
     FROM lease
     WHERE id = ANY (ARRAY(SELECT s.id FROM (
                               SELECT f.id, sum(f.bytes) OVER (ORDER BY f.id) - f.bytes AS before FROM (
                                   SELECT r.id, octet_length(r.body) AS bytes FROM semel_outbox AS r
                                   WHERE r.state = 'ready' AND r.lease_until <= (SELECT now FROM lease)
                                   ORDER BY r.id LIMIT $1 FOR UPDATE SKIP LOCKED) AS f) AS s
                           WHERE s.before < $4))
     RETURNING id, failures, ",
    envelope!(),
    ", semel_outbox.token"
);

/// Differs because SQLite's time and token were drawn when the transaction began.
pub(super) const TAKE_SQLITE: &str = concat!(
    "UPDATE semel_outbox SET lease_until = $3 + $2, token = $4
     WHERE id IN (SELECT s.id FROM (
                      SELECT f.id, sum(f.bytes) OVER (ORDER BY f.id) - f.bytes AS before FROM (
                          SELECT id, length(body) AS bytes FROM semel_outbox
                          WHERE state = 'ready' AND lease_until <= $3 ORDER BY id LIMIT $1) AS f) AS s
                  WHERE s.before < $5)
     RETURNING id, failures, ",
    envelope!(),
    ", token"
);

/// Takes free messages of a queue, oldest first, on PostgreSQL. The range of one queue keeps the plan on the index by
/// queue: for `queue = $1` the primary key gives the same order, and a take from a quiet queue would read over all
/// messages of the others.
pub(super) const DELIVER_POSTGRES: &str = concat!(
    "WITH lease AS MATERIALIZED (
        SELECT coalesce($4, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now,
               ",
    next_fence!(),
    " AS token)
     UPDATE semel_queue SET visible_at = lease.now + $3, token = lease.token, deliveries = deliveries + 1
     FROM lease
     WHERE id = ANY (ARRAY(SELECT r.id FROM semel_queue AS r
                           WHERE r.queue BETWEEN $1 AND $1 AND r.visible_at <= (SELECT now FROM lease)
                           ORDER BY r.queue, r.id LIMIT $2 FOR UPDATE SKIP LOCKED))
     RETURNING ",
    delivered!(),
    ", semel_queue.token"
);

/// Differs because SQLite's time and token were drawn when the transaction began.
pub(super) const DELIVER_SQLITE: &str = concat!(
    "UPDATE semel_queue SET visible_at = $4 + $3, token = $5, deliveries = deliveries + 1
     WHERE id IN (SELECT id FROM semel_queue WHERE queue = $1 AND visible_at <= $4 ORDER BY id LIMIT $2)
     RETURNING ",
    delivered!(),
    ", token"
);

/// Published rows on PostgreSQL: deletes them, stores their receipts, and makes the rows behind them ready; in one
/// statement, because this and the take are the cost of a message. The rows behind are selected first, as an array, and
/// their state is compared in a way that no index matches: a planner without statistics of blocked rows would start
/// with all of them, and search each behind every published row.
pub(super) const SENT_POSTGRES: &str = "WITH clock AS MATERIALIZED (
        SELECT coalesce($3, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now
     ), gone AS (
        DELETE FROM semel_outbox AS o USING unnest($1::bigint[], $2::bigint[]) AS a(id, token)
        WHERE o.id = a.id AND o.token = a.token
        RETURNING o.tenant, o.message_id, o.ordering_key, o.number, o.receipt
     ), noted AS (
        INSERT INTO semel_receipts (tenant, message_id, sent_at)
        SELECT tenant, message_id, now FROM gone, clock WHERE receipt
        ON CONFLICT (tenant, message_id) DO UPDATE SET sent_at = excluded.sent_at
     ), freed AS (
        UPDATE semel_outbox AS o
        SET state = CASE WHEN o.not_before > clock.now THEN 'waiting' ELSE 'ready' END,
            due_at = CASE WHEN o.not_before > clock.now THEN o.not_before END
        FROM clock
        WHERE o.id = ANY (ARRAY(
                SELECT (SELECT n.id FROM semel_outbox AS n
                        WHERE n.tenant = g.tenant AND n.ordering_key = g.ordering_key AND n.number > g.number
                        ORDER BY n.number LIMIT 1)
                FROM gone AS g WHERE g.ordering_key IS NOT NULL))
          AND o.state || '' = 'blocked'
        RETURNING o.state
     )
     SELECT state FROM freed";

/// Differs because SQLite has no statement that does several things: three in one hop, in the order in which each finds
/// its rows.
pub(super) const SENT_SQLITE: &str = "UPDATE semel_outbox
     SET state = CASE WHEN not_before > $2 THEN 'waiting' ELSE 'ready' END,
         due_at = CASE WHEN not_before > $2 THEN not_before END
     WHERE state = 'blocked'
       AND id IN (SELECT (SELECT n.id FROM semel_outbox AS n
                          WHERE n.tenant = o.tenant AND n.ordering_key = o.ordering_key AND n.number > o.number
                          ORDER BY n.number LIMIT 1)
                  FROM jsonb_each($1) AS r CROSS JOIN semel_outbox AS o
                  WHERE o.id = r.value ->> 0 AND o.token = r.value ->> 1 AND o.ordering_key IS NOT NULL)
     RETURNING state;
     INSERT INTO semel_receipts (tenant, message_id, sent_at)
     SELECT o.tenant, o.message_id, $2
     FROM jsonb_each($1) AS r CROSS JOIN semel_outbox AS o
     WHERE o.id = r.value ->> 0 AND o.token = r.value ->> 1 AND o.receipt
     ON CONFLICT (tenant, message_id) DO UPDATE SET sent_at = excluded.sent_at;
     DELETE FROM semel_outbox WHERE (id, token) IN (SELECT value ->> 0, value ->> 1 FROM jsonb_each($1))";

/// The statements that differ, for the test that prepares each.
#[cfg(test)]
pub(crate) const HOT_POSTGRES: &[(&str, &str)] = &[
    ("TAKE", TAKE_POSTGRES),
    ("SENT", SENT_POSTGRES),
    ("DELIVER", DELIVER_POSTGRES),
    ("CHANNEL", crate::wakes::CHANNEL),
    ("NOTIFY", crate::wakes::NOTIFY),
];
/// As above.
#[cfg(test)]
pub(crate) const HOT_SQLITE: &[(&str, &str)] =
    &[("TAKE", TAKE_SQLITE), ("SENT", SENT_SQLITE), ("DELIVER", DELIVER_SQLITE)];
