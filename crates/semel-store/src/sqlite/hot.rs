//! What SQLite does in its own words.
//!
//! Differs from PostgreSQL because the database is in this process: a round trip costs a thread
//! hop, there is one writer and nothing to lock, and fences and time are a row.

/// New fences and the time: the host's clock, held from going back by what anybody has seen.
pub(crate) const DRAW: &str =
    "UPDATE semel_meta SET fence = fence + $1, clock = max(clock, $2) WHERE only = 1 RETURNING fence, clock";

/// The time, as seen so far.
pub(crate) const NOW: &str = "SELECT clock FROM semel_meta WHERE only = 1";

/// First claims. A key that exists already is left alone, and not counted.
pub(crate) const CLAIM: &str = "INSERT INTO semel_operations
        (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
         state, fence, owner, created_at, claimed_at, look_at)
     SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, unhex(value ->> 5), value ->> 6, unhex(value ->> 7),
            value ->> 8, value ->> 9, value ->> 10, value ->> 11, 'processing', value ->> 0, value ->> 12, $2, $2, value ->> 13
     FROM jsonb_each($1)
     WHERE true
     ON CONFLICT (tenant, service, kind, key) DO NOTHING";

/// Which of the first claims were made, where not all were: a fence is nobody else's id.
pub(crate) const MADE: &str = "SELECT id FROM semel_operations WHERE id IN (SELECT value ->> 0 FROM jsonb_each($1))";

/// The leases of first claims.
pub(crate) const LEASE: &str = "INSERT INTO semel_leases
        (operation, fence, token, deadline, run_until, term, retention, tombstone, terms)
     SELECT value ->> 0, value ->> 0, unhex(value ->> 1), $2 + (value ->> 2), $2 + (value ->> 3), value ->> 2, value ->> 4, value ->> 5,
            value ->> 6
     FROM jsonb_each($1)";

/// Plain completions, first half: the lease goes, and with it the right to say so.
pub(crate) const END_LEASES: &str = "DELETE FROM semel_leases
     WHERE (operation, fence) IN (SELECT value ->> 0, value ->> 1 FROM jsonb_each($1)) AND NOT successor
     RETURNING operation, fence, retention, tombstone";

/// Plain completions, second half: the row says so.
pub(crate) const COMPLETE: &str = "UPDATE semel_operations
     SET state = 'completed', settled_at = $2, expires_at = $2 + (r.value ->> 2), archive_at = $2 + (r.value ->> 3),
         outcome = unhex(r.value ->> 4), outcome_kept = r.value ->> 5, error = NULL, checkpoint = NULL
     FROM jsonb_each($1) AS r
     WHERE semel_operations.id = r.value ->> 0 AND semel_operations.fence = r.value ->> 1
     RETURNING id, tenant, service, kind, coalesce(label1, '') AS label1, coalesce(label2, '') AS label2, claimed_at";

/// Renewals, first half: the leases as they are.
pub(crate) const HELD: &str = "SELECT operation, fence, deadline, run_until, term FROM semel_leases
     WHERE (operation, fence) IN (SELECT value ->> 0, value ->> 1 FROM jsonb_each($1)) AND deadline > $2 AND run_until > $2";

/// Renewals, second half.
pub(crate) const RENEW: &str = "UPDATE semel_leases SET deadline = r.value ->> 2
     FROM jsonb_each($1) AS r
     WHERE semel_leases.operation = r.value ->> 0 AND semel_leases.fence = r.value ->> 1";

/// Counter rows to be folded.
pub(crate) const TAKE_DELTAS: &str =
    "DELETE FROM semel_deltas WHERE id IN (SELECT id FROM semel_deltas ORDER BY id LIMIT $1)
     RETURNING tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n";

/// All of them by name, for the test that prepares each.
#[cfg(test)]
pub(crate) const ALL: &[(&str, &str)] = &[
    ("DRAW", DRAW),
    ("NOW", NOW),
    ("CLAIM", CLAIM),
    ("MADE", MADE),
    ("LEASE", LEASE),
    ("END_LEASES", END_LEASES),
    ("COMPLETE", COMPLETE),
    ("HELD", HELD),
    ("RENEW", RENEW),
    ("TAKE_DELTAS", TAKE_DELTAS),
];
