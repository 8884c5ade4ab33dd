//! Reading operations: listings, journals and counters.

use super::statements;

/// As `operation!`, without large columns: a page of five hundred must fit into memory.
macro_rules! brief {
    ($where:literal) => {
        concat!(
            "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.fingerprint, o.payload_order, CASE WHEN false THEN o.payload END AS payload,
                    o.label1, o.label2, o.label3, o.label4, o.state, o.fence, o.failures, o.crashes, o.parked, o.pinned, o.owner,
                    coalesce(o.priority, 0) AS priority, o.terms AS own_terms, o.created_at, o.claimed_at, o.tried_since, o.settled_at, o.not_before, o.expires_at, o.archive_at, o.archived, o.look_at,
                    substr(o.outcome, 1, 2) AS outcome, o.outcome_kept, substr(o.error, 1, 514) AS error,
                    CASE WHEN false THEN o.checkpoint END AS checkpoint,
                    l.token, l.deadline, l.run_until, l.terms, l.cancelled,
                    s.fingerprint AS successor_fingerprint, s.payload_order AS successor_order,
                    CASE WHEN false THEN s.payload END AS successor_payload, s.terms AS successor_terms,
                    EXISTS (SELECT 1 FROM semel_backlog AS b WHERE b.operation = o.id AND b.due IS NULL AND b.state <> 'in_doubt') AS never_due ",
            $where
        )
    };
}

/// A page: its order, its first id, how it finds its rows, and the common filters.
macro_rules! page {
    ($order:literal, $above:literal, $where:literal $(, $more:literal)*) => {
        concat!(
            brief!($where),
            $($more,)*
            " AND ", $above, " AND o.created_at >= $8 AND (o.archived = $10 OR $10 IS NULL)
           AND (o.label1 = $11 OR $11 IS NULL) AND (o.label2 = $12 OR $12 IS NULL)
           AND (o.label3 = $13 OR $13 IS NULL) AND (o.label4 = $14 OR $14 IS NULL)
         ORDER BY ", $order, " DESC LIMIT $7"
        )
    };
}

/// A page of one kind: by its own index, so that a rare kind among millions is found at once.
macro_rules! scoped {
    ($above:literal) => {
        page!(
            "o.id",
            $above,
            "FROM semel_operations AS o
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant || '/' || o.service || '/' || o.kind = CAST($1 AS TEXT) || '/' || CAST($4 AS TEXT) || '/' || CAST($5 AS TEXT)
           AND o.id < $2 AND o.created_at < $3 AND (o.state = $6 OR $6 IS NULL)"
        )
    };
}

/// A page by one of the four labels.
macro_rules! labelled {
    ($above:literal, $label:literal) => {
        page!(
            "o.id",
            $above,
            "FROM semel_operations AS o
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $1 AND o.id < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND (o.state = $6 OR $6 IS NULL)
           AND o.",
            $label
        )
    };
}

/// Counters of some hours, folded or not, in one snapshot, the largest sums first. Dimensions that are not kept
/// separate are summed up and empty. `$9` is the word of a `TallyBy`.
macro_rules! counters {
    ($columns:literal, $by:literal) => {
        concat!(
            "SELECT ", $columns, ", CAST(sum(n) AS BIGINT) AS n
         FROM (SELECT CASE WHEN $9 = 'all' THEN kind ELSE '' END AS kind,
                      CASE WHEN $9 IN ('all', 'label1') THEN label1 ELSE '' END AS label1,
                      CASE WHEN $9 IN ('all', 'label2') THEN label2 ELSE '' END AS label2,
                      CASE WHEN $9 IN ('all', 'duration') THEN bucket ELSE 0 END AS bucket,
                      hour, from_state, to_state, answer, n
               FROM (SELECT service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n FROM semel_counters
                     WHERE tenant = $1 AND hour >= $2 AND hour < $3
                     UNION ALL
                     SELECT service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n FROM semel_deltas
                     WHERE tenant = $1 AND hour >= $2 AND hour < $3) AS both_tables
               WHERE service = $4 AND (CAST($5 AS TEXT) IS NULL OR kind IN (SELECT k.kind FROM {rows $5: kind text} AS k))
                 AND (label1 = $6 OR $6 IS NULL) AND (label2 = $7 OR $7 IS NULL)) AS asked
         GROUP BY ", $by, " ORDER BY n DESC, ", $by, " LIMIT $8"
        )
    };
}

statements! {
    /// Every statement that reads operations, for one of the databases.
    LookSql:
    /// A page of all operations, newest first.
    list = page!("o.id", "o.id > $9",
        "FROM semel_operations AS o
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $1 AND o.id < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND (o.state = $6 OR $6 IS NULL)");
    /// A page of one kind. Its lower end is hidden from the planner: together with the upper one, the planner would
    /// assume a short range of ids and scan the table by id.
    list_scope = scoped!("(o.id > $9) IS TRUE");
    /// A page of one kind since a time: here the range is short.
    list_scope_since = scoped!("o.id > $9");
    /// A page of running operations: by the leases, which are few.
    list_processing = page!("o.id", "(o.id > $9) IS TRUE",
        "FROM semel_leases AS l
         JOIN semel_operations AS o ON o.id = l.operation
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $1 AND o.id < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND o.state = $6");
    /// A page of operations that do not run and have not completed: by the backlog.
    list_backlog = page!("b.operation", "(o.id > $9) IS TRUE",
        "FROM semel_backlog AS b
         JOIN semel_operations AS o ON o.id = b.operation
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE b.tenant = $1 AND b.operation < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND b.state = $6");
    /// A page by a label.
    list_label1 = labelled!("(o.id > $9) IS TRUE", "label1 = $11");
    /// As `list_label1`.
    list_label2 = labelled!("(o.id > $9) IS TRUE", "label2 = $12");
    /// As `list_label1`.
    list_label3 = labelled!("(o.id > $9) IS TRUE", "label3 = $13");
    /// As `list_label1`.
    list_label4 = labelled!("(o.id > $9) IS TRUE", "label4 = $14");
    /// A page by a label, since a time.
    list_label1_since = labelled!("o.id > $9", "label1 = $11");
    /// As `list_label1_since`.
    list_label2_since = labelled!("o.id > $9", "label2 = $12");
    /// As `list_label1_since`.
    list_label3_since = labelled!("o.id > $9", "label3 = $13");
    /// As `list_label1_since`.
    list_label4_since = labelled!("o.id > $9", "label4 = $14");
    /// The last id up to which every operation was first claimed before a moment. By bisection: ids grow with time, so
    /// this reads some sixty rows.
    last_before =
        "WITH RECURSIVE search(id, step) AS (
            SELECT CAST(0 AS BIGINT), CAST(4611686018427387904 AS BIGINT)
            UNION ALL
            SELECT search.id + CASE WHEN (SELECT o.created_at FROM semel_operations AS o WHERE o.id >= search.id + search.step
                                          ORDER BY o.id LIMIT 1) < $1
                               THEN step ELSE 0 END, step / 2
            FROM search WHERE step > 0)
         SELECT id FROM search WHERE step = 0";
    /// The newest archived operation.
    last_archived = "SELECT max(operation) FROM semel_archive";
    /// Some operations of a tenant, newest first, without large columns.
    list_by_id = brief!(
        "FROM {rows $1: id int} AS r
         JOIN semel_operations AS o ON o.id = r.id
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $2 ORDER BY o.id DESC");
    /// Operations by their third label, newest first, with short outcomes, archived or not.
    pass_by_label =
        "SELECT p.id, p.fence, p.service, p.kind, p.label1, p.label2, p.created_at, p.archived,
                CASE WHEN length(coalesce(a.outcome, p.outcome)) <= $5 THEN coalesce(a.outcome, p.outcome) END AS outcome,
                coalesce(a.outcome_kept, p.outcome_kept) AS outcome_kept
         FROM (SELECT id, fence, service, kind, label1, label2, created_at, outcome, outcome_kept, archived
               FROM semel_operations WHERE tenant = $1 AND label3 = $2 AND id < $3 ORDER BY id DESC LIMIT $4) AS p
         LEFT JOIN semel_archive AS a ON p.archived AND a.operation = p.id
         ORDER BY p.id DESC";
    /// The archived data of an operation.
    load_archived = "SELECT payload, outcome, outcome_kept FROM semel_archive WHERE operation = $1";
    /// The columns that waiters need.
    glance =
        "SELECT o.id, o.state, o.fence, l.deadline
         FROM {rows $1: id int} AS r
         JOIN semel_operations AS o ON o.id = r.id
         LEFT JOIN semel_leases AS l ON l.operation = o.id";
    /// The newest journal notes of an operation.
    load_journal =
        "SELECT at, event, fence, actor, detail
         FROM (SELECT id, at, event, fence, actor, detail FROM semel_journal WHERE operation = $1 ORDER BY id DESC LIMIT $2)
              AS newest
         ORDER BY id";
    /// The latest actions of people on one object.
    audited =
        "SELECT at, actor, action, reason, before, after FROM semel_audit
         WHERE tenant = $1 AND subject = $2 AND substr(action, 1, length($3)) = $3 ORDER BY id DESC LIMIT $4";
    /// When operations last restarted: with newer data, or by a decision.
    begun_anew =
        "SELECT r.id, (SELECT j.at FROM semel_journal AS j
                       WHERE j.operation = r.id AND j.event IN ('superseded', 'resolved') ORDER BY j.id DESC LIMIT 1) AS at
         FROM {rows $1: id int} AS r";
    /// Operations that wait and that no worker runs: parked, or out of attempts.
    never_due =
        "SELECT b.operation FROM {rows $1: id int} AS r JOIN semel_backlog AS b ON b.operation = r.id
         WHERE b.due IS NULL AND b.state <> 'in_doubt'";
    /// All counts of a tenant, folded or not, in one snapshot.
    load_counts =
        "SELECT tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, CAST(sum(n) AS BIGINT) AS n
         FROM (SELECT tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n FROM semel_counters
               WHERE tenant = $1 AND hour >= $2
               UNION ALL
               SELECT tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n FROM semel_deltas
               WHERE tenant = $1 AND hour >= $2) AS both_tables
         GROUP BY tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket
         ORDER BY hour, service, kind, label1, label2, answer, from_state, to_state, bucket";
    /// Counts summed over hours.
    tally = counters!(
        "kind, label1, label2, from_state, to_state, answer, bucket",
        "kind, label1, label2, from_state, to_state, answer, bucket");
    /// Counts summed over days.
    tally_days = counters!(
        "hour / 24 AS day, from_state, to_state, answer",
        "hour / 24, from_state, to_state, answer");
    /// Kinds of a service with a prefix, each by one step of the key index, however many operations it has.
    find_kinds =
        "WITH RECURSIVE kinds(kind, n) AS (
            SELECT (SELECT o.kind FROM semel_operations AS o WHERE o.tenant = $1 AND o.service = $2 AND o.kind >= $3
                    ORDER BY o.kind LIMIT 1), 1
            UNION ALL
            SELECT (SELECT o.kind FROM semel_operations AS o WHERE o.tenant = $1 AND o.service = $2 AND o.kind > kinds.kind
                    ORDER BY o.kind LIMIT 1), n + 1
            FROM kinds WHERE substr(kinds.kind, 1, length($3)) = $3 AND n < $4)
         SELECT kinds.kind FROM kinds WHERE substr(kinds.kind, 1, length($3)) = $3";
}
