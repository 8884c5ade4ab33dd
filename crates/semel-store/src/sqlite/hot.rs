//! The statements of SQLite.
//!
//! Differs from PostgreSQL because the database is in this process: a round trip costs a thread hop, there is one
//! writer and nothing to lock, and fences and time are a row.

/// New fences and the time: the host's clock, but never before the latest time seen.
pub(crate) const DRAW: &str =
    "UPDATE semel_meta SET fence = fence + $1, clock = max(clock, $2) WHERE only = 1 RETURNING fence, clock";

/// The beginning of a transaction, and its [`DRAW`]: one hop for both.
pub(crate) const BEGIN_AND_DRAW: &str = "BEGIN IMMEDIATE;
     UPDATE semel_meta SET fence = fence + $1, clock = max(clock, $2) WHERE only = 1 RETURNING fence, clock";

/// The latest time seen.
pub(crate) const NOW: &str = "SELECT clock FROM semel_meta WHERE only = 1";

/// The latest time seen, and the boot clock at an earlier mark.
pub(crate) const MARK: &str = "SELECT clock, mark, boot, boot_id FROM semel_meta WHERE only = 1";

/// Stores a mark that is ahead of the host's clock.
pub(crate) const KEEP_MARK: &str =
    "UPDATE semel_meta SET clock = max(clock, $1), mark = $1, boot = $2, boot_id = $3 WHERE only = 1";

/// First claims, and their leases. An existing key is not changed: it gets no lease, and the fence drawn for it stays
/// unused.
pub(crate) const CLAIM: &str = "INSERT INTO semel_operations
        (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
         state, fence, owner, created_at, claimed_at, look_at, pinned, terms)
     SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, unhex(value ->> 5), value ->> 6, unhex(value ->> 7),
            value ->> 8, value ->> 9, value ->> 10, value ->> 11, 'processing', value ->> 0, value ->> 12, $3, $3, value ->> 13, value ->> 14, value ->> 15
     FROM jsonb_each($1)
     WHERE true
     ON CONFLICT (tenant, service, kind, key) DO NOTHING;
     INSERT INTO semel_leases
        (operation, fence, token, deadline, run_until, term, retention, tombstone, terms, successor)
     SELECT value ->> 0, value ->> 0, unhex(value ->> 1), $3 + (value ->> 2), $3 + (value ->> 3), value ->> 2, value ->> 4, value ->> 5,
            value ->> 6, value ->> 7
     FROM jsonb_each($2)
     WHERE value ->> 0 IN (SELECT id FROM semel_operations)";

/// First enqueues, and their rows in the backlog.
pub(crate) const ENQUEUE: &str = "INSERT INTO semel_operations
        (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
         state, fence, owner, created_at, claimed_at, not_before, look_at, priority, terms)
     SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, unhex(value ->> 5), value ->> 6, unhex(value ->> 7),
            value ->> 8, value ->> 9, value ->> 10, value ->> 11, 'pending', value ->> 0, '', $2, 0,
            nullif(value ->> 12, $2), value ->> 13, nullif(value ->> 14, 0), value ->> 15
     FROM jsonb_each($1)
     WHERE true
     ON CONFLICT (tenant, service, kind, key) DO NOTHING;
     INSERT INTO semel_backlog (operation, tenant, service, kind, state, due, priority)
     SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 16, 'pending', value ->> 12, value ->> 14
     FROM jsonb_each($1)
     WHERE value ->> 0 IN (SELECT id FROM semel_operations)";

/// Which of the first claims were made, if not all were: found by their fences.
pub(crate) const MADE: &str = "SELECT id FROM semel_operations WHERE id IN (SELECT value ->> 0 FROM jsonb_each($1))";

/// Plain completions: completes the row if its lease exists, and deletes the lease.
pub(crate) const COMPLETE: &str = "UPDATE semel_operations
     SET state = 'completed', settled_at = $2, expires_at = $2 + l.retention, archive_at = $2 + l.tombstone,
         outcome = unhex(r.value ->> 2), outcome_kept = r.value ->> 3, error = NULL, checkpoint = NULL
     FROM jsonb_each($1) AS r CROSS JOIN semel_leases AS l
     WHERE l.operation = r.value ->> 0 AND l.fence = r.value ->> 1 AND NOT l.successor
       AND semel_operations.id = l.operation AND semel_operations.fence = l.fence
     RETURNING id, fence, tenant, service, kind, coalesce(label1, '') AS label1, coalesce(label2, '') AS label2, claimed_at;
     DELETE FROM semel_leases
     WHERE (operation, fence) IN (SELECT value ->> 0, value ->> 1 FROM jsonb_each($1)) AND NOT successor";

/// One plain completion in a caller's transaction: the time, the row, the lease; and the columns to count.
macro_rules! complete_one {
    ($known:literal) => {
        concat!(
            "UPDATE semel_meta SET clock = max(clock, $5) WHERE only = 1;
     UPDATE semel_operations
     SET state = 'completed', settled_at = m.clock, expires_at = m.clock + l.retention, archive_at = m.clock + l.tombstone,
         outcome = $3, outcome_kept = $4, error = NULL, checkpoint = NULL
     FROM semel_meta AS m CROSS JOIN semel_leases AS l
     WHERE m.only = 1 AND l.operation = $1 AND l.fence = $2 AND NOT l.successor
       AND semel_operations.id = $1 AND semel_operations.fence = $2
     RETURNING ",
            $known,
            ";
     DELETE FROM semel_leases WHERE operation = $1 AND fence = $2 AND NOT successor"
        )
    };
}

/// One plain completion in a caller's transaction: one hop for all of it.
pub(crate) const COMPLETE_ONE: &str = complete_one!(
    "tenant, service, kind, coalesce(label1, '') AS label1, coalesce(label2, '') AS label2, claimed_at, settled_at"
);

/// One plain completion at the end of a caller's transaction, with its count and the commit: one hop for all of it. If
/// the lease is gone, or newer data waits, the count has no tenant: its insert fails, and the commit is not reached.
pub(crate) const COMPLETE_AND_COMMIT: &str = concat!(
    complete_one!("settled_at"),
    ";
     INSERT INTO semel_deltas
        (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
     VALUES ((SELECT tenant FROM semel_operations WHERE id = $1 AND fence = $2 AND state = 'completed'),
             $6, $7, $8, $9, (SELECT clock / 3600000000 FROM semel_meta WHERE only = 1), 'processing', 'completed', '', $10, 1);
     COMMIT"
);

/// The counts of a transaction, as [`Sql::insert_deltas`](crate::sql::Sql), and its end.
pub(crate) const COUNT_AND_COMMIT: &str = "INSERT INTO semel_deltas
        (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
     SELECT value ->> 'tenant', value ->> 'service', value ->> 'kind', value ->> 'label1', value ->> 'label2', value ->> 'hour',
            value ->> 'from_state', value ->> 'to_state', value ->> 'answer', value ->> 'bucket', value ->> 'n'
     FROM jsonb_each($1);
     COMMIT";

/// Renewals, first half: reads the leases.
pub(crate) const HELD: &str = "SELECT operation, fence, deadline, run_until, term, cancelled FROM semel_leases
     WHERE (operation, fence) IN (SELECT value ->> 0, value ->> 1 FROM jsonb_each($1)) AND deadline > $2 AND run_until > $2";

/// Renewals, second half: writes them.
pub(crate) const RENEW: &str = "UPDATE semel_leases SET deadline = r.value ->> 2
     FROM jsonb_each($1) AS r
     WHERE semel_leases.operation = r.value ->> 0 AND semel_leases.fence = r.value ->> 1";

/// The live leases of a take that was sent again, by its index: see migration 17.
pub(crate) const TAKEN_UNDER: &str = "SELECT l.operation, l.fence FROM semel_leases AS l
     WHERE l.token = $1 AND l.token >= x'80' AND l.deadline > $2 ORDER BY l.fence";

/// The state of operations, for the notes of their renewals. Their stored data is not read: it may be large, or
/// unreadable, which must not affect the other leases.
pub(crate) const STANDING: &str =
    "SELECT id, state, fence, owner FROM semel_operations WHERE id IN (SELECT value FROM json_each($1))";

/// Counter rows to fold.
pub(crate) const TAKE_DELTAS: &str = "DELETE FROM semel_deltas WHERE id IN (SELECT value FROM json_each($1))
     RETURNING tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n";

/// All of them by name, for the test that prepares each.
#[cfg(test)]
pub(crate) const ALL: &[(&str, &str)] = &[
    ("DRAW", DRAW),
    ("BEGIN_AND_DRAW", BEGIN_AND_DRAW),
    ("NOW", NOW),
    ("MARK", MARK),
    ("KEEP_MARK", KEEP_MARK),
    ("CLAIM", CLAIM),
    ("ENQUEUE", ENQUEUE),
    ("MADE", MADE),
    ("COMPLETE", COMPLETE),
    ("COMPLETE_ONE", COMPLETE_ONE),
    ("COMPLETE_AND_COMMIT", COMPLETE_AND_COMMIT),
    ("COUNT_AND_COMMIT", COUNT_AND_COMMIT),
    ("HELD", HELD),
    ("RENEW", RENEW),
    ("TAKEN_UNDER", TAKEN_UNDER),
    ("STANDING", STANDING),
    ("TAKE_DELTAS", TAKE_DELTAS),
];
