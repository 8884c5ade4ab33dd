//! Operations, with their leases, backlog, successors, journals and counters.

use super::statements;

/// The columns of an operation with its lease and its successor.
macro_rules! operation {
    ($where:literal) => {
        concat!(
            "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.fingerprint, o.payload_order, o.payload,
                    o.label1, o.label2, o.label3, o.label4, o.state, o.fence, o.failures, o.crashes, o.parked, o.pinned, o.owner,
                    coalesce(o.priority, 0) AS priority, o.terms AS own_terms, o.created_at, o.claimed_at, o.tried_since, o.settled_at, o.not_before, o.expires_at, o.archive_at, o.archived, o.look_at,
                    o.outcome, o.outcome_kept, o.error, o.checkpoint,
                    l.token, l.deadline, l.run_until, l.terms, l.cancelled,
                    s.fingerprint AS successor_fingerprint, s.payload_order AS successor_order, s.payload AS successor_payload,
                    s.terms AS successor_terms,
                    EXISTS (SELECT 1 FROM semel_backlog AS b WHERE b.operation = o.id AND b.due IS NULL AND b.state <> 'in_doubt') AS never_due ",
            $where
        )
    };
}

statements! {
    /// Every statement that changes operations, for one of the databases.
    Sql:
    /// Operations by key.
    load_by_key = operation!(
        "FROM {keys} AS r
         JOIN semel_operations AS o ON o.tenant = r.tenant AND o.service = r.service AND o.kind = r.kind AND o.key = r.key
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id");
    /// Operations by id.
    load_by_id = operation!(
        "FROM {ids} AS r
         JOIN semel_operations AS o ON o.id = r.id
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id");
    /// The columns that decide whether an operation may be purged: for an unreadable one.
    load_bare =
        "SELECT o.id, o.fence, o.tenant, o.service, o.kind, o.key, coalesce(o.label1, '') AS label1,
                coalesce(o.label2, '') AS label2, o.state, o.pinned, o.expires_at, l.deadline
         FROM semel_operations AS o LEFT JOIN semel_leases AS l ON l.operation = o.id
         WHERE o.id = $1";
    /// Inserts complete rows. An existing one is not changed, and not returned.
    insert_operations =
        "INSERT INTO semel_operations
            (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
             state, fence, failures, crashes, parked, pinned, priority, terms, owner, created_at, claimed_at, tried_since, settled_at, not_before,
             expires_at, archive_at, archived, look_at, outcome, outcome_kept, error, checkpoint)
         SELECT id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
             state, fence, failures, crashes, parked, pinned, priority, terms, owner, created_at, claimed_at, tried_since, settled_at, not_before,
             expires_at, archive_at, archived, look_at, outcome, outcome_kept, error, checkpoint
         FROM {rows $1: id int, tenant text, service text, kind text, key text, fingerprint bytes, payload_order int,
             payload bytes, label1 text, label2 text, label3 text, label4 text, state text, fence int, failures int,
             crashes int, parked bool, pinned bool, priority int, terms text, owner text, created_at int, claimed_at int, tried_since int, settled_at int, not_before int,
             expires_at int, archive_at int, archived bool, look_at int, outcome bytes, outcome_kept bool, error bytes,
             checkpoint bytes} AS r
         WHERE true
         ON CONFLICT (tenant, service, kind, key) DO NOTHING
         RETURNING id";
    /// Updates rows. The fence must be the one that was read.
    update_operations =
        "UPDATE semel_operations AS o
         SET fingerprint = r.fingerprint, payload_order = r.payload_order, payload = r.payload, state = r.state,
             fence = r.fence, failures = r.failures, crashes = r.crashes, parked = r.parked, pinned = r.pinned,
             priority = r.priority, terms = r.terms, owner = r.owner,
             claimed_at = r.claimed_at, tried_since = r.tried_since, settled_at = r.settled_at, not_before = r.not_before, expires_at = r.expires_at,
             archive_at = r.archive_at, archived = r.archived, look_at = r.look_at, outcome = r.outcome,
             outcome_kept = r.outcome_kept, error = r.error, checkpoint = r.checkpoint
         FROM {rows $1: id int, old_fence int, fingerprint bytes, payload_order int, payload bytes, state text, fence int,
             failures int, crashes int, parked bool, pinned bool, priority int, terms text, owner text, claimed_at int, tried_since int, settled_at int, not_before int,
             expires_at int, archive_at int, archived bool, look_at int, outcome bytes, outcome_kept bool, error bytes,
             checkpoint bytes} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";
    /// Updates rows without their large columns: mostly claims of pending operations.
    update_briefly =
        "UPDATE semel_operations AS o
         SET state = r.state, fence = r.fence, failures = r.failures, crashes = r.crashes, parked = r.parked,
             pinned = r.pinned, owner = r.owner, claimed_at = r.claimed_at, tried_since = r.tried_since, settled_at = r.settled_at,
             not_before = r.not_before, expires_at = r.expires_at, archive_at = r.archive_at, archived = r.archived,
             look_at = r.look_at
         FROM {rows $1: id int, old_fence int, state text, fence int, failures int, crashes int, parked bool, pinned bool,
             owner text, claimed_at int, tried_since int, settled_at int, not_before int, expires_at int, archive_at int, archived bool,
             look_at int} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";
    /// Deletes rows, by id and fence.
    delete_operations =
        "DELETE FROM semel_operations
         WHERE (id, fence) IN (SELECT r.id, r.old_fence FROM {rows $1: id int, old_fence int} AS r)";
    /// Deletes their archived data,
    delete_archived = "DELETE FROM semel_archive WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// their journals,
    delete_journal = "DELETE FROM semel_journal WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// and their repeats.
    delete_repeats = "DELETE FROM semel_repeats WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// The leases of claims, by their tokens. It scans the live leases, as the sweep does, and is rarely used: an index
    /// on tokens would cost every claim.
    find_tokens =
        "SELECT l.token, l.operation, l.fence FROM semel_leases AS l
         WHERE l.token IN (SELECT r.token FROM {rows $1: token bytes} AS r)";
    /// Deletes leases.
    delete_leases = "DELETE FROM semel_leases WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// Inserts or updates leases.
    put_leases =
        "INSERT INTO semel_leases (operation, fence, token, deadline, run_until, term, retention, tombstone, successor, terms,
             cancelled)
         SELECT id, fence, token, deadline, run_until, term, retention, tombstone, successor, terms, cancelled
         FROM {rows $1: id int, fence int, token bytes, deadline int, run_until int, term int, retention int, tombstone int,
             successor bool, terms text, cancelled bool} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET fence = excluded.fence, token = excluded.token, deadline = excluded.deadline, run_until = excluded.run_until,
             term = excluded.term, retention = excluded.retention, tombstone = excluded.tombstone,
             successor = excluded.successor, terms = excluded.terms, cancelled = excluded.cancelled";
    /// Deletes rows of the backlog.
    delete_backlog = "DELETE FROM semel_backlog WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// Inserts or updates rows of the backlog.
    put_backlog =
        "INSERT INTO semel_backlog (operation, tenant, service, kind, state, due, priority)
         SELECT id, tenant, service, kind, state, due, priority
         FROM {rows $1: id int, tenant text, service text, kind text, state text, due int, priority int} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET service = excluded.service, kind = excluded.kind, state = excluded.state, due = excluded.due,
             priority = excluded.priority";
    /// Deletes successors.
    delete_successors = "DELETE FROM semel_successors WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// Inserts successors.
    put_successors =
        "INSERT INTO semel_successors (operation, fingerprint, payload_order, payload, terms)
         SELECT id, fingerprint, payload_order, payload, terms
         FROM {rows $1: id int, fingerprint bytes, payload_order int, payload bytes, terms text} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET fingerprint = excluded.fingerprint, payload_order = excluded.payload_order, payload = excluded.payload,
             terms = excluded.terms";
    /// Inserts archived data.
    put_archive =
        "INSERT INTO semel_archive (operation, archived_at, payload, outcome, outcome_kept)
         SELECT id, archived_at, payload, outcome, outcome_kept
         FROM {rows $1: id int, archived_at int, payload bytes, outcome bytes, outcome_kept bool} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET archived_at = excluded.archived_at, payload = excluded.payload, outcome = excluded.outcome,
             outcome_kept = excluded.outcome_kept";
    /// Inserts journal notes.
    insert_journal =
        "INSERT INTO semel_journal (operation, at, event, fence, actor, detail)
         SELECT id, at, event, fence, actor, detail
         FROM {rows $1: id int, at int, event text, fence int, actor text, detail bytes} AS r";
    /// The stored repeats of operations.
    load_repeats =
        "SELECT p.operation, p.repeat, p.repeats
         FROM {rows $1: id int} AS r JOIN semel_repeats AS p ON p.operation = r.id";
    /// Stores repeats, only of operations that still exist.
    put_repeats =
        "INSERT INTO semel_repeats (operation, repeat, repeats)
         SELECT r.id, r.repeat, r.repeats
         FROM {rows $1: id int, repeat text, repeats text} AS r JOIN semel_operations AS o ON o.id = r.id
         WHERE true
         ON CONFLICT (operation, repeat) DO UPDATE SET repeats = excluded.repeats";
    /// Inserts counts of changes and answers.
    insert_deltas =
        "INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
         SELECT tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n
         FROM {rows $1: tenant text, service text, kind text, label1 text, label2 text, hour int, from_state text,
             to_state text, answer text, bucket int, n int} AS r";
    /// Adds folded counts.
    fold_counters =
        "INSERT INTO semel_counters (tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket, n)
         SELECT tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket, n
         FROM {rows $1: tenant text, service text, kind text, label1 text, label2 text, hour int, from_state text,
             to_state text, answer text, bucket int, n int} AS r
         WHERE true
         ON CONFLICT (tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket)
         DO UPDATE SET n = semel_counters.n + excluded.n";
    /// Inserts an action of a person.
    audit =
        "INSERT INTO semel_audit (tenant, at, actor, action, subject, reason, before, after)
         SELECT $1, {now $8}, $2, $3, $4, $5, $6, $7";
}
