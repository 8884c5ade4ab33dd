//! The statements of the sweep that both databases share.

use crate::sql::statements;

statements! {
    /// The statements of the sweep, for one of the databases.
    SweepSql:
    /// Expired leases, after an operation, with the stored bytes of each.
    find_lapsed =
        "SELECT l.operation AS id, l.operation AS place,
                CAST(coalesce(length(o.payload), 0) + coalesce(length(o.checkpoint), 0) + coalesce(length(o.error), 0)
                     + coalesce(length(s.payload), 0) AS BIGINT) AS bytes
         FROM semel_leases AS l
         LEFT JOIN semel_operations AS o ON o.id = l.operation
         LEFT JOIN semel_successors AS s ON s.operation = l.operation
         WHERE l.deadline <= $1 AND l.operation >= $2
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = l.operation AND a.what = 'lapse')
         ORDER BY l.operation LIMIT $3";
    /// Operations whose next look is due, after a time, with the stored bytes of each, here and in the archive.
    find_aged =
        "SELECT o.id, o.look_at AS place,
                CAST(coalesce(length(o.payload), 0) + coalesce(length(o.outcome), 0)
                     + coalesce((SELECT coalesce(length(d.payload), 0) + length(d.outcome) FROM semel_archive AS d
                                 WHERE d.operation = o.id), 0) AS BIGINT) AS bytes
         FROM semel_operations AS o
         WHERE o.look_at <= $1 AND o.look_at >= $2
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = o.id AND a.what = 'age')
         ORDER BY o.look_at LIMIT $3";
    /// Counter rows to fold, after an id. The first parameter is unused: it is the time in the statement above.
    find_deltas =
        "SELECT d.id, d.id AS place, CAST(0 AS BIGINT) AS bytes
         FROM semel_deltas AS d
         WHERE CAST($1 AS BIGINT) IS NOT NULL AND d.id >= $2
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = d.id AND a.what = 'fold')
         ORDER BY d.id LIMIT $3";

    /// The next operations by id, with the stored bytes of each. The first parameter is as above.
    find_next =
        "SELECT o.id, o.id AS place, CAST(coalesce(length(o.payload), 0) AS BIGINT) AS bytes
         FROM semel_operations AS o
         WHERE CAST($1 AS BIGINT) IS NOT NULL AND o.id > $2
         ORDER BY o.id LIMIT $3";
    /// The highest id of an operation: a new process starts below it.
    last_operation = "SELECT CAST(coalesce(max(o.id), 0) AS BIGINT) FROM semel_operations AS o";
    /// Which of these are processing without a lease. In one snapshot: the lease and the state change together.
    without_lease =
        "SELECT o.id FROM {ids} AS r JOIN semel_operations AS o ON o.id = r.id
         WHERE o.state = 'processing'
           AND NOT EXISTS (SELECT 1 FROM semel_leases AS l WHERE l.operation = o.id)
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = o.id AND a.what = 'lapse')";

    /// The columns of operations that their age and the counters need.
    load_aged =
        "SELECT o.id, o.fence, o.state, o.expires_at, o.archive_at, o.look_at, o.tenant, o.service, o.kind,
                coalesce(o.label1, '') AS label1, coalesce(o.label2, '') AS label2
         FROM {ids} AS r JOIN semel_operations AS o ON o.id = r.id";
    /// Copies the data of operations to the archive: from table to table, since it may be large.
    archive_data =
        "INSERT INTO semel_archive (operation, archived_at, payload, outcome, outcome_kept)
         SELECT o.id, CAST($2 AS BIGINT), o.payload, o.outcome, o.outcome_kept
         FROM {rows $1: id int, old_fence int} AS r JOIN semel_operations AS o ON o.id = r.id AND o.fence = r.old_fence
         WHERE o.outcome IS NOT NULL
         ON CONFLICT (operation) DO UPDATE
         SET archived_at = excluded.archived_at, payload = excluded.payload, outcome = excluded.outcome,
             outcome_kept = excluded.outcome_kept";
    /// Turns them into tombstones.
    bury =
        "UPDATE semel_operations AS o
         SET archived = true, archive_at = NULL, payload = NULL, outcome = $2, outcome_kept = false, look_at = o.expires_at
         FROM {rows $1: id int, old_fence int} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";
    /// Sets when the sweep looks at operations again.
    look_again =
        "UPDATE semel_operations AS o SET look_at = r.look_at
         FROM {rows $1: id int, old_fence int, look_at int} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";

    /// Sets rows aside. One that another node has just set aside is not changed.
    set_aside =
        "INSERT INTO semel_set_aside (item, what, since, tries, retry_at, reason)
         SELECT r.item, r.what, CAST($2 AS BIGINT), 1, CAST($3 AS BIGINT), r.reason
         FROM {rows $1: item int, what text, reason text} AS r
         WHERE true
         ON CONFLICT (item, what) DO UPDATE
         SET tries = semel_set_aside.tries + 1, retry_at = excluded.retry_at, reason = excluded.reason
         WHERE semel_set_aside.retry_at <= excluded.since
         RETURNING item, what, tries, reason";
    /// Postpones an operation that a worker cannot read to its next try, so that the next one is found first.
    put_off =
        "UPDATE semel_backlog SET due = $2
         WHERE operation IN (SELECT r.item FROM {rows $1: item int} AS r) AND due < $2";
    /// Makes an operation due now that was set aside and is readable again.
    put_on =
        "UPDATE semel_backlog
         SET due = coalesce((SELECT o.not_before FROM semel_operations AS o
                             WHERE o.id = semel_backlog.operation AND o.not_before > $2), $2)
         WHERE operation IN (SELECT r.item FROM {rows $1: item int} AS r) AND due > $2
           AND EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = semel_backlog.operation AND a.what = 'run')";
    /// The rows to try again, and whether they still exist.
    find_again =
        "SELECT a.item, a.what, CASE WHEN a.what = 'fold' THEN EXISTS (SELECT 1 FROM semel_deltas AS d WHERE d.id = a.item)
                                ELSE EXISTS (SELECT 1 FROM semel_operations AS o WHERE o.id = a.item) END AS is_there
         FROM semel_set_aside AS a WHERE a.retry_at <= $1 ORDER BY a.retry_at LIMIT $2";
    /// Removes rows from those set aside.
    resume = "DELETE FROM semel_set_aside WHERE (item, what) IN (SELECT r.item, r.what FROM {rows $1: item int, what text} AS r)";
    /// Lets all of them be tried again.
    try_again = "UPDATE semel_set_aside SET retry_at = 0 WHERE retry_at <> 0";
    /// The readable columns of operations, for people.
    set_aside_of =
        "SELECT a.item, a.what, a.since, a.tries, a.retry_at, a.reason
         FROM {rows $1: id int} AS r JOIN semel_set_aside AS a ON a.item = r.id
         WHERE a.what <> 'fold' ORDER BY a.item, a.what";
    /// The operations of a tenant that were set aside, the newest first.
    list_set_aside =
        "SELECT a.item, a.what, a.since, a.tries, a.retry_at, a.reason
         FROM semel_set_aside AS a JOIN semel_operations AS o ON o.id = a.item
         WHERE a.what <> 'fold' AND o.tenant = $1 ORDER BY a.since DESC, a.item DESC, a.what LIMIT $2";
    /// How many rows are set aside, by task.
    count_set_aside =
        "SELECT a.what, count(*) AS n FROM semel_set_aside AS a
         WHERE a.what = 'fold' OR EXISTS (SELECT 1 FROM semel_operations AS o WHERE o.id = a.item)
         GROUP BY a.what ORDER BY a.what";
    /// The readable columns of an unreadable operation,
    glimpse_id =
        "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.created_at FROM semel_operations AS o
         WHERE o.tenant = $1 AND o.id = $2";
    /// by its id or by its key.
    glimpse_key =
        "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.created_at FROM semel_operations AS o
         WHERE o.tenant = $1 AND o.service = $2 AND o.kind = $3 AND o.key = $4";
}
