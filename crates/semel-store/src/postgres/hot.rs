//! The two hottest transitions as single statements, and the renewal.
//!
//! Differs from SQLite because a round trip and a commit cost most here: one statement does everything (row, lease,
//! counters). Arrays are cheaper to read than JSON.

use super::epoch::next_fence;

/// The database's clock, unless a test sets the time.
macro_rules! clock {
    ($override:literal) => {
        concat!(
            "clock AS MATERIALIZED (SELECT coalesce(",
            $override,
            ", (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS now)"
        )
    };
}

/// First claims. An existing key is not changed, and not returned; its claim takes the general path, on a fresh
/// snapshot. Rows are inserted in the order of the arrays, which is the order of the keys: two nodes that claim the
/// same keys lock in the same order.
pub(crate) const CLAIM: &str = concat!(
    "WITH ",
    clock!("$22"),
    ", asked AS MATERIALIZED (
    SELECT ",
    next_fence!(),
    " AS fence, a.*
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bigint[], $7::bytea[],
                $8::text[], $9::text[], $10::text[], $11::text[], $12::bytea[], $13::bigint[], $14::bigint[],
                $15::bigint[], $16::bigint[], $17::bigint[], $18::text[], $19::text[], $20::bigint[], $21::boolean[], $23::boolean[], $24::boolean[])
         AS a(tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
              token, term, max_run, retention, tombstone, first_look, terms, owner, n, pinned, followed, by_callers)
), made AS (
    INSERT INTO semel_operations
        (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
         state, fence, owner, created_at, claimed_at, look_at, pinned, terms)
    SELECT fence, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
           'processing', fence, owner, now, now, now + first_look, pinned, CASE WHEN by_callers THEN terms END
    FROM asked, clock
    ON CONFLICT (tenant, service, kind, key) DO NOTHING
    RETURNING id, tenant, service, kind, label1, label2
), leased AS (
    INSERT INTO semel_leases (operation, fence, token, deadline, run_until, term, retention, tombstone, terms, successor)
    SELECT a.fence, a.fence, a.token, now + a.term, now + a.max_run, a.term, a.retention, a.tombstone, a.terms, a.followed
    FROM made JOIN asked AS a ON a.fence = made.id, clock
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000, '', 'processing', '', 0, count(*)
    FROM made, clock GROUP BY tenant, service, kind, label1, label2, now
)
SELECT a.n, a.fence, now FROM made JOIN asked AS a ON a.fence = made.id, clock"
);

/// First enqueues, as [`CLAIM`]: without a lease, pending.
pub(crate) const ENQUEUE: &str = concat!(
    "WITH ",
    clock!("$18"),
    ", asked AS MATERIALIZED (
    SELECT ",
    next_fence!(),
    " AS fence, greatest(now, a.from_time, now + a.delay) AS due, a.*
    FROM clock, unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bigint[], $7::bytea[],
                $8::text[], $9::text[], $10::text[], $11::text[], $12::bigint[], $13::bigint[], $14::bigint[],
                $15::bigint[], $16::text[], $17::bigint[], $19::text[])
         AS a(tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
              first_look, from_time, delay, priority, terms, n, listed)
), made AS (
    INSERT INTO semel_operations
        (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
         state, fence, owner, created_at, claimed_at, not_before, look_at, priority, terms)
    SELECT fence, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
           'pending', fence, '', now, 0, nullif(due, now), now + first_look, nullif(priority, 0), terms
    FROM asked, clock
    ON CONFLICT (tenant, service, kind, key) DO NOTHING
    RETURNING id, tenant, service, kind, label1, label2
), listed AS (
    INSERT INTO semel_backlog (operation, tenant, service, kind, state, due, priority)
    SELECT a.fence, a.tenant, a.service, a.listed, 'pending', a.due, a.priority
    FROM made JOIN asked AS a ON a.fence = made.id
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000, '', 'pending', '', 0, count(*)
    FROM made, clock GROUP BY tenant, service, kind, label1, label2, now
)
SELECT a.n, a.fence, now FROM made JOIN asked AS a ON a.fence = made.id, clock"
);

/// First runs of enqueued operations, whose rows are locked: never claimed, failed or lost, and without their own
/// policy. Rows that are not returned take the general path. Rows are found by arrays, not by joins: a join that was
/// planned for a short backlog would scan a long one.
pub(crate) const TAKE: &str = concat!(
    "WITH ",
    clock!("$11"),
    ", taken AS (
    UPDATE semel_operations AS o
    SET state = 'processing', fence = ",
    next_fence!(),
    ", owner = $2, pinned = $3, claimed_at = now, tried_since = nullif(now, o.created_at), not_before = NULL, archive_at = NULL, archived = FALSE,
        look_at = least(o.look_at, now + $4::bigint)
    FROM clock
    WHERE o.id = ANY($1::bigint[]) AND o.state = 'pending' AND o.claimed_at = 0 AND o.failures = 0 AND o.crashes = 0
      AND NOT o.parked AND o.terms IS NULL
      AND (SELECT count(*) FROM semel_successors AS s WHERE s.operation = o.id) = 0
    RETURNING o.id, o.tenant, o.service, o.kind, o.key, o.fingerprint, o.payload_order, o.payload,
        o.label1, o.label2, o.label3, o.label4, o.state, o.fence, o.failures, o.crashes, o.parked, o.pinned, o.owner,
        coalesce(o.priority, 0) AS priority, o.created_at, o.claimed_at, o.tried_since, o.look_at, o.error, o.checkpoint
), gone AS (
    DELETE FROM semel_backlog WHERE operation = ANY (ARRAY(SELECT t.id FROM taken AS t))
), leased AS (
    INSERT INTO semel_leases (operation, fence, token, deadline, run_until, term, retention, tombstone, terms)
    SELECT id, fence, $5, now + $6::bigint, now + $7::bigint, $6, $8, $9, $10 FROM taken, clock
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000, 'pending', 'processing', '', 0,
           count(*)
    FROM taken, clock GROUP BY tenant, service, kind, label1, label2, now
)
SELECT id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4, state, fence,
       failures, crashes, parked, pinned, owner, priority, NULL::text AS own_terms, created_at, claimed_at, tried_since,
       NULL::bigint AS settled_at, NULL::bigint AS not_before, NULL::bigint AS expires_at, NULL::bigint AS archive_at,
       FALSE AS archived, look_at, NULL::bytea AS outcome, NULL::boolean AS outcome_kept, error, checkpoint,
       NULL::bytea AS token, NULL::bigint AS deadline, NULL::bigint AS run_until, NULL::text AS terms,
       NULL::boolean AS cancelled, NULL::bytea AS successor_fingerprint, NULL::bigint AS successor_order,
       NULL::bytea AS successor_payload, NULL::text AS successor_terms, FALSE AS never_due
FROM taken"
);

/// Plain completions: deletes the lease and stores the completion. Rows that are not returned (the fence is old, newer
/// data waits, or a service's row follows) take the general path.
pub(crate) const COMPLETE: &str = concat!(
    "WITH ",
    clock!("$5"),
    ", asked AS (
    SELECT a.id, a.fence, a.outcome, a.kept
    FROM unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::boolean[]) AS a(id, fence, outcome, kept)
), gone AS (
    DELETE FROM semel_leases AS l USING asked AS a
    WHERE l.operation = a.id AND l.fence = a.fence AND NOT l.successor
    RETURNING l.operation, l.fence, l.retention, l.tombstone, a.outcome, a.kept
), done AS (
    UPDATE semel_operations AS o
    SET state = 'completed', settled_at = now, expires_at = now + g.retention, archive_at = now + g.tombstone,
        outcome = g.outcome, outcome_kept = g.kept, error = NULL, checkpoint = NULL
    FROM gone AS g, clock
    WHERE o.id = g.operation AND o.fence = g.fence
    RETURNING o.id, o.fence, o.tenant, o.service, o.kind, o.label1, o.label2, o.claimed_at, now
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000, 'processing', 'completed', '',
           floor(ln(greatest(least(now - claimed_at, 4294967295), 1)::float8) / ln(2::float8) * 4)::bigint AS took, count(*)
    FROM done GROUP BY tenant, service, kind, label1, label2, now, took
)
SELECT id, fence, now FROM done"
);

/// One plain completion, for a caller's transaction: its plan does not depend on the settings of the caller's
/// connection.
pub(crate) const COMPLETE_ONE: &str = concat!(
    "WITH ",
    clock!("$5"),
    ", gone AS (
    DELETE FROM semel_leases AS l WHERE l.operation = $1 AND l.fence = $2 AND NOT l.successor
    RETURNING l.retention, l.tombstone
), done AS (
    UPDATE semel_operations AS o
    SET state = 'completed', settled_at = now, expires_at = now + g.retention, archive_at = now + g.tombstone,
        outcome = $3, outcome_kept = $4, error = NULL, checkpoint = NULL
    FROM gone AS g, clock
    WHERE o.id = $1 AND o.fence = $2
    RETURNING o.tenant, o.service, o.kind, o.label1, o.label2, o.claimed_at, now
), counted AS (
    INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
    SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), now / 3600000000, 'processing', 'completed', '',
           floor(ln(greatest(least(now - claimed_at, 4294967295), 1)::float8) / ln(2::float8) * 4)::bigint, 1
    FROM done
)
SELECT now FROM done"
);

/// The checkpoint of one run, for a caller's transaction; `$5` says whether it is progress. The lease is locked first, as
/// everywhere.
pub(crate) const CHECKPOINT_ONE: &str = concat!(
    "WITH ",
    clock!("$4"),
    ", held AS MATERIALIZED (
    SELECT l.operation FROM semel_leases AS l WHERE l.operation = $1 AND l.fence = $2 FOR UPDATE
)
UPDATE semel_operations AS o SET checkpoint = $3, crashes = CASE WHEN $5 THEN 0 ELSE crashes END
FROM held AS h, clock
WHERE o.id = h.operation AND o.fence = $2
RETURNING now"
);

/// Renewals. Also returns the previous deadline: a gap of more than half a lease gets a note. A locked lease is
/// skipped, and returned without a new deadline, so that it delays no other.
pub(crate) const RENEW: &str = concat!(
    "WITH ",
    clock!("$3"),
    ", asked AS MATERIALIZED (
    SELECT a.id, a.fence FROM unnest($1::bigint[], $2::bigint[]) AS a(id, fence)
), held AS MATERIALIZED (
    SELECT l.operation, l.fence, l.deadline, l.run_until, l.term
    FROM asked AS a
    JOIN semel_leases AS l ON l.operation = a.id AND l.fence = a.fence
    FOR UPDATE OF l SKIP LOCKED
), renewed AS (
    UPDATE semel_leases AS l
    SET deadline = greatest(l.deadline, least(now + l.term, l.run_until))
    FROM held AS h, clock
    WHERE l.operation = h.operation AND l.fence = h.fence AND l.deadline > now AND l.run_until > now
    RETURNING l.operation, l.fence, l.deadline, h.deadline AS before, l.run_until, l.term, now, l.cancelled
)
SELECT operation, fence, deadline, before, run_until, term, now, cancelled FROM renewed
UNION ALL
SELECT l.operation, l.fence, NULL, l.deadline, l.run_until, l.term, now, l.cancelled
FROM asked AS a JOIN semel_leases AS l ON l.operation = a.id AND l.fence = a.fence, clock
WHERE l.deadline > now AND l.run_until > now
  AND (l.operation, l.fence) NOT IN (SELECT h.operation, h.fence FROM held AS h)"
);

/// The live leases of a take that was sent again, by its index: see migration 17.
pub(crate) const TAKEN_UNDER: &str = "SELECT l.operation, l.fence FROM semel_leases AS l
     WHERE l.token = $1 AND l.token >= '\\x80'::bytea AND l.deadline > $2 ORDER BY l.fence";

/// The state of operations, for the notes of their renewals.
pub(crate) const STANDING: &str = "SELECT id, state, fence FROM semel_operations WHERE id = ANY($1)";

/// Journal notes that are written after their change. The operation may be purged or expire meanwhile: its row is
/// locked while they are written, so that none is orphaned. A locked one is skipped and retried.
pub(crate) const NOTE: &str = "WITH there AS MATERIALIZED (
    SELECT r.id, r.at, r.event, r.fence, CASE WHEN r.fence = o.fence THEN o.owner ELSE '' END AS actor, r.detail
    FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bytea[]) AS r(id, at, event, fence, detail)
    JOIN semel_operations AS o ON o.id = r.id
    FOR KEY SHARE OF o SKIP LOCKED
)
INSERT INTO semel_journal (operation, at, event, fence, actor, detail)
SELECT id, at, event, fence, actor, detail FROM there
RETURNING operation, fence";

/// Keeps operations from being deleted until the commit, skipping locked ones. Completions and renewals continue
/// meanwhile.
pub(crate) const HOLD: &str = "SELECT id FROM semel_operations WHERE id = ANY($1) FOR KEY SHARE SKIP LOCKED";

/// Which operations exist.
pub(crate) const THERE: &str = "SELECT id FROM semel_operations WHERE id = ANY($1)";

/// The time, and new fences for the general path.
pub(crate) const DRAW: &str =
    concat!("WITH ", clock!("$2"), " SELECT now, ", next_fence!(), " AS fence FROM clock, generate_series(1, $1)");

/// The time alone.
pub(crate) const NOW: &str = concat!("WITH ", clock!("$1"), " SELECT now FROM clock");

/// Locks for the general path, in the order of a completion: the lease, then the operation. This one waits;
pub(crate) const LOCK_LEASES: &str =
    "SELECT operation FROM semel_leases WHERE operation = ANY($1) ORDER BY operation FOR UPDATE";
/// as above;
pub(crate) const LOCK_OPERATIONS: &str = "SELECT id FROM semel_operations WHERE id = ANY($1) ORDER BY id FOR UPDATE";
/// takeovers and the sweep do not wait: a transaction that has the row locked is changing it now.
pub(crate) const TRY_LOCK_OPERATIONS: &str =
    "SELECT id FROM semel_operations WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED";
/// As above, without the leases that could not be locked.
pub(crate) const TRY_LOCK_LEASES: &str =
    "SELECT operation FROM semel_leases WHERE operation = ANY($1) ORDER BY operation FOR UPDATE SKIP LOCKED";

/// Counter rows to fold, each taken by one node. They are selected first, as an array: for a table that was empty when
/// it was last analysed, the planner would join with the selection, and repeat it for every row.
pub(crate) const TAKE_DELTAS: &str = "DELETE FROM semel_deltas WHERE id = ANY (ARRAY
        (SELECT id FROM semel_deltas WHERE id = ANY ($1) ORDER BY id FOR UPDATE SKIP LOCKED))
     RETURNING tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n";

/// All of them by name, for the test that prepares each.
#[cfg(test)]
pub(crate) const ALL: &[(&str, &str)] = &[
    ("CLAIM", CLAIM),
    ("ENQUEUE", ENQUEUE),
    ("TAKE", TAKE),
    ("COMPLETE", COMPLETE),
    ("COMPLETE_ONE", COMPLETE_ONE),
    ("CHECKPOINT_ONE", CHECKPOINT_ONE),
    ("RENEW", RENEW),
    ("TAKEN_UNDER", TAKEN_UNDER),
    ("STANDING", STANDING),
    ("NOTE", NOTE),
    ("HOLD", HOLD),
    ("THERE", THERE),
    ("DRAW", DRAW),
    ("NOW", NOW),
    ("LOCK_LEASES", LOCK_LEASES),
    ("LOCK_OPERATIONS", LOCK_OPERATIONS),
    ("TRY_LOCK_OPERATIONS", TRY_LOCK_OPERATIONS),
    ("TRY_LOCK_LEASES", TRY_LOCK_LEASES),
    ("TAKE_DELTAS", TAKE_DELTAS),
];
