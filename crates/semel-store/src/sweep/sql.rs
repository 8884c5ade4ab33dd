//! The statements of the sweep that both databases share.

use crate::sql::statements;

statements! {
    /// What the sweep asks, ready for one of the databases.
    SweepSql:
    /// Leases that have lapsed, from an operation on, and how much is stored with each.
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
    /// Operations whose time to be looked at has come, from a time on, and how much is stored of each, here and in the
    /// archive.
    find_aged =
        "SELECT o.id, o.look_at AS place,
                CAST(coalesce(length(o.payload), 0) + coalesce(length(o.outcome), 0)
                     + coalesce((SELECT coalesce(length(d.payload), 0) + length(d.outcome) FROM semel_archive AS d
                                 WHERE d.operation = o.id), 0) AS BIGINT) AS bytes
         FROM semel_operations AS o
         WHERE o.look_at <= $1 AND o.look_at >= $2
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = o.id AND a.what = 'age')
         ORDER BY o.look_at LIMIT $3";
    /// Counter rows to be folded, from a number on. The first parameter is for the one above it: these have no time.
    find_deltas =
        "SELECT d.id, d.id AS place, CAST(0 AS BIGINT) AS bytes
         FROM semel_deltas AS d
         WHERE CAST($1 AS BIGINT) IS NOT NULL AND d.id >= $2
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = d.id AND a.what = 'fold')
         ORDER BY d.id LIMIT $3";

    /// The next operations by number, and how much is stored with each. The first parameter is as above.
    find_next =
        "SELECT o.id, o.id AS place, CAST(coalesce(length(o.payload), 0) AS BIGINT) AS bytes
         FROM semel_operations AS o
         WHERE CAST($1 AS BIGINT) IS NOT NULL AND o.id > $2
         ORDER BY o.id LIMIT $3";
    /// The highest number of an operation: where a new process may begin to look.
    last_operation = "SELECT CAST(coalesce(max(o.id), 0) AS BIGINT) FROM semel_operations AS o";
    /// Which of these are being run without a lease. In one snapshot: a lease comes and goes with the state.
    without_lease =
        "SELECT o.id FROM {ids} AS r JOIN semel_operations AS o ON o.id = r.id
         WHERE o.state = 'processing'
           AND NOT EXISTS (SELECT 1 FROM semel_leases AS l WHERE l.operation = o.id)
           AND NOT EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = o.id AND a.what = 'lapse')";

    /// As much of operations as says what their age calls for, and as much as they are counted by.
    load_aged =
        "SELECT o.id, o.fence, o.state, o.expires_at, o.archive_at, o.look_at, o.tenant, o.service, o.kind,
                coalesce(o.label1, '') AS label1, coalesce(o.label2, '') AS label2
         FROM {ids} AS r JOIN semel_operations AS o ON o.id = r.id";
    /// The data of operations goes to the archive: from table to table, since it may be large.
    archive_data =
        "INSERT INTO semel_archive (operation, archived_at, payload, outcome, outcome_kept)
         SELECT o.id, CAST($2 AS BIGINT), o.payload, o.outcome, o.outcome_kept
         FROM {rows $1: id int, old_fence int} AS r JOIN semel_operations AS o ON o.id = r.id AND o.fence = r.old_fence
         WHERE o.outcome IS NOT NULL
         ON CONFLICT (operation) DO UPDATE
         SET archived_at = excluded.archived_at, payload = excluded.payload, outcome = excluded.outcome,
             outcome_kept = excluded.outcome_kept";
    /// What stays of them is the tombstone.
    bury =
        "UPDATE semel_operations AS o
         SET archived = true, archive_at = NULL, payload = NULL, outcome = $2, outcome_kept = false, look_at = o.expires_at
         FROM {rows $1: id int, old_fence int} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";
    /// When the sweep looks at operations again.
    look_again =
        "UPDATE semel_operations AS o SET look_at = r.look_at
         FROM {rows $1: id int, old_fence int, look_at int} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";

    /// What could not be done. One that another node has just set aside stays as it is.
    set_aside =
        "INSERT INTO semel_set_aside (item, what, since, tries, retry_at, reason)
         SELECT r.item, r.what, CAST($2 AS BIGINT), 1, CAST($3 AS BIGINT), r.reason
         FROM {rows $1: item int, what text, reason text} AS r
         WHERE true
         ON CONFLICT (item, what) DO UPDATE
         SET tries = semel_set_aside.tries + 1, retry_at = excluded.retry_at, reason = excluded.reason
         WHERE semel_set_aside.retry_at <= excluded.since
         RETURNING item, what, tries, reason";
    /// What a worker cannot take up is due when it is tried again, so that the next in line is found first.
    put_off =
        "UPDATE semel_backlog SET due = $2
         WHERE operation IN (SELECT r.item FROM {rows $1: item int} AS r) AND due < $2";
    /// What was set aside and can be run after all is due now.
    put_on =
        "UPDATE semel_backlog
         SET due = coalesce((SELECT o.not_before FROM semel_operations AS o
                             WHERE o.id = semel_backlog.operation AND o.not_before > $2), $2)
         WHERE operation IN (SELECT r.item FROM {rows $1: item int} AS r) AND due > $2
           AND EXISTS (SELECT 1 FROM semel_set_aside AS a WHERE a.item = semel_backlog.operation AND a.what = 'run')";
    /// What is to be tried again, and whether its row is still there.
    find_again =
        "SELECT a.item, a.what, CASE WHEN a.what = 'fold' THEN EXISTS (SELECT 1 FROM semel_deltas AS d WHERE d.id = a.item)
                                ELSE EXISTS (SELECT 1 FROM semel_operations AS o WHERE o.id = a.item) END AS is_there
         FROM semel_set_aside AS a WHERE a.retry_at <= $1 ORDER BY a.retry_at LIMIT $2";
    /// What is no longer set aside.
    resume = "DELETE FROM semel_set_aside WHERE (item, what) IN (SELECT r.item, r.what FROM {rows $1: item int, what text} AS r)";
    /// A person wants all of it tried again.
    try_again = "UPDATE semel_set_aside SET retry_at = 0 WHERE retry_at <> 0";
    /// What a person sees of operations.
    set_aside_of =
        "SELECT a.item, a.what, a.since, a.tries, a.retry_at, a.reason
         FROM {rows $1: id int} AS r JOIN semel_set_aside AS a ON a.item = r.id
         WHERE a.what <> 'fold' ORDER BY a.item, a.what";
    /// The operations of a tenant that were set aside, the newest first.
    list_set_aside =
        "SELECT a.item, a.what, a.since, a.tries, a.retry_at, a.reason
         FROM semel_set_aside AS a JOIN semel_operations AS o ON o.id = a.item
         WHERE a.what <> 'fold' AND o.tenant = $1 ORDER BY a.since DESC, a.item DESC, a.what LIMIT $2";
    /// How much is set aside, of each sort.
    count_set_aside =
        "SELECT a.what, count(*) AS n FROM semel_set_aside AS a
         WHERE a.what = 'fold' OR EXISTS (SELECT 1 FROM semel_operations AS o WHERE o.id = a.item)
         GROUP BY a.what ORDER BY a.what";
    /// What can be told of an operation that cannot be read,
    glimpse_id =
        "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.created_at FROM semel_operations AS o
         WHERE o.tenant = $1 AND o.id = $2";
    /// by its number or by its key.
    glimpse_key =
        "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.state, o.created_at FROM semel_operations AS o
         WHERE o.tenant = $1 AND o.service = $2 AND o.kind = $3 AND o.key = $4";
}
