//! Work for later: due operations, their order, and the limits of the fleet.

use super::statements;

/// Due operations of one kind and tenant, in the order in which they should run: by priority, each by one index step,
/// then by due time. At most `$5` of each priority, from its place on: `$7` and `$8` are the due time and the operation
/// where the highest priority begins, and so on.
macro_rules! by_priority {
    ($columns:literal, $from:literal, $where:literal) => {
        concat!(
            of_priority!($columns, $from, $where, "2", "($7, $8)"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "1", "($9, $10)"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "0", "($11, $12)"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "-1", "($13, $14)"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "-2", "($15, $16)")
        )
    };
}

macro_rules! of_priority {
    ($columns:literal, $from:literal, $where:literal, $priority:literal, $place:literal) => {
        concat!(
            "SELECT * FROM (SELECT ",
            $columns,
            " ",
            $from,
            " WHERE b.service = $1 AND b.kind = $2 AND b.tenant = $3 AND b.priority = ",
            $priority,
            " AND ",
            $where,
            " AND (b.due, b.operation) >= ",
            $place,
            " ORDER BY b.due, b.operation LIMIT $5) AS p"
        )
    };
}

/// The kind or the tenant of the first row after a kind and tenant: the next tenant of the kind, or else the next kind.
/// In two steps, because SQLite compares pairs row by row and would read all rows of the first pair. The priority in
/// the order leaves PostgreSQL one index to choose.
macro_rules! next_kind {
    ($column:literal, $kind:literal, $tenant:literal) => {
        concat!(
            "coalesce((SELECT ",
            $column,
            " FROM semel_backlog AS b
                    WHERE b.service = $1 AND b.kind = ",
            $kind,
            " AND b.tenant > ",
            $tenant,
            " AND b.due IS NOT NULL ORDER BY b.tenant, b.priority LIMIT 1),
                   (SELECT ",
            $column,
            " FROM semel_backlog AS b
                    WHERE b.service = $1 AND b.kind > ",
            $kind,
            " AND b.due IS NOT NULL ORDER BY b.kind, b.tenant LIMIT 1))"
        )
    };
}

/// The first row of a kind and tenant for one priority, as its due time and its operation with a space between them: so
/// one index step finds both.
macro_rules! first_of {
    ($of:literal, $priority:literal, $from:literal) => {
        concat!(
            "(SELECT CAST(b.due AS TEXT) || ' ' || CAST(b.operation AS TEXT) FROM semel_backlog AS b
              WHERE b.service = $1 AND b.kind = ",
            $of,
            ".kind AND b.tenant = ",
            $of,
            ".tenant AND b.priority = ",
            $priority,
            " AND b.due IS NOT NULL",
            $from,
            " ORDER BY b.due, b.operation LIMIT 1)"
        )
    };
}

/// The operation of a row of the backlog, if its kind is not paused and its own row allows a claim now: the row of the
/// backlog may be outdated, because another node has claimed and settled the operation meanwhile.
macro_rules! picked {
    () => {
        "o.id, o.payload, o.checkpoint, o.error FROM semel_operations AS o
         WHERE o.id = w.operation AND NOT EXISTS (SELECT 1 FROM semel_paused AS p WHERE p.service = $1 AND p.kind = $2)
           AND o.state IN ('pending', 'failed', 'timed_out') AND NOT o.parked
           AND (o.not_before IS NULL OR o.not_before <= {now $4}) AND (o.expires_at IS NULL OR o.expires_at > {now $4})"
    };
}

statements! {
    /// Every statement about work for later, for one of the databases.
    WorkSql:
    /// Due operations of one kind and tenant for a worker, by priority, then the longest due first, with their stored
    /// bytes. Locks them, and skips rows that another transaction has locked.
    pick = concat!(
        "SELECT o.id, CAST(coalesce(length(o.payload), 0) + coalesce(length(o.checkpoint), 0) + coalesce(length(o.error), 0)
                AS BIGINT) AS bytes
         FROM (", by_priority!("b.operation", "FROM semel_backlog AS b", "b.due <= {now $4}"), ") AS w
         CROSS JOIN {locked ", picked!(), "} LIMIT $6");
    /// As `pick`, but the longest due first, with any priority.
    pick_oldest = concat!(
        "SELECT o.id, CAST(coalesce(length(o.payload), 0) + coalesce(length(o.checkpoint), 0) + coalesce(length(o.error), 0)
                AS BIGINT) AS bytes
         FROM (SELECT f.operation FROM (", by_priority!("b.operation, b.due", "FROM semel_backlog AS b", "b.due <= {now $4}"),
        ") AS f ORDER BY f.due, f.operation LIMIT 5 * $5) AS w
         CROSS JOIN {locked ", picked!(), "} LIMIT $6");
    /// Pauses a kind. An earlier pause stays.
    pause =
        "INSERT INTO semel_paused (service, kind, at, actor, reason) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (service, kind) DO NOTHING";
    /// Resumes a kind. The audit has the time, the person and the reason.
    resume_kind =
        "DELETE FROM semel_paused WHERE service = $1 AND kind = $2
           AND CAST($3 AS BIGINT) IS NOT NULL AND CAST($4 AS TEXT) IS NOT NULL AND CAST($5 AS TEXT) IS NOT NULL";
    /// How many of a kind run on all nodes.
    count_running =
        "SELECT count(*) FROM semel_leases AS l CROSS JOIN semel_operations AS o
         WHERE o.id = l.operation AND o.service = $1 AND o.kind = $2 AND l.deadline > {now $3}";
    /// The time.
    now = "SELECT {now $1} AS now";
    /// The limits of a kind, locked until the end of the transaction.
    lock_limit =
        "SELECT o.free_at FROM (SELECT 1 AS one) AS w
         CROSS JOIN {locked o.free_at FROM semel_limits AS o WHERE o.service = $1 AND o.kind = $2}";
    /// The first limits of a kind; nothing if another node has locked those that are there.
    make_limit =
        "INSERT INTO semel_limits (service, kind, free_at) VALUES ($1, $2, 0)
         ON CONFLICT (service, kind) DO NOTHING RETURNING free_at";
    /// Sets when the next of a kind may start.
    put_limit = "UPDATE semel_limits SET free_at = $3 WHERE service = $1 AND kind = $2";
    /// Moves the next start of a kind back, because some starts were not used; unless another node has locked it.
    give_back =
        "UPDATE semel_limits SET free_at = free_at - $3
         WHERE service = $1
           AND kind {unlocked SELECT l.kind FROM semel_limits AS l WHERE l.service = $1 AND l.kind = $2}";
    /// The kinds and tenants of the backlog, from one on, each with its first row of each priority, and the time. From one
    /// to the next by the index: nine rows of each are read, however many it has.
    find_waiting_kinds =
        concat!("WITH RECURSIVE kinds(kind, tenant, n) AS (
            SELECT ", next_kind!("b.kind", "$2", "$3"), ", ", next_kind!("b.tenant", "$2", "$3"), ", CAST(1 AS BIGINT)
            UNION ALL
            SELECT ", next_kind!("b.kind", "kinds.kind", "kinds.tenant"), ",
                   ", next_kind!("b.tenant", "kinds.kind", "kinds.tenant"), ", n + 1
            FROM kinds WHERE kinds.kind IS NOT NULL AND n < $5)
         SELECT kinds.kind, kinds.tenant,
                ", first_of!("kinds", "2", ""), ", ", first_of!("kinds", "1", ""), ", ", first_of!("kinds", "0", ""), ",
                ", first_of!("kinds", "-1", ""), ", ", first_of!("kinds", "-2", ""), ",
                {now $4} AS now
         FROM kinds WHERE kinds.kind IS NOT NULL");
    /// The same of known kinds and tenants, each from its places on, by its number; and whether there are others between
    /// it and the next: by the next pair of the index, because a comparison of pairs in both directions reads all rows of
    /// the first one.
    find_known_kinds =
        concat!("SELECT r.n,
                ", first_of!("r", "2", " AND (b.due, b.operation) >= (r.due1, r.id1)"), ",
                ", first_of!("r", "1", " AND (b.due, b.operation) >= (r.due2, r.id2)"), ",
                ", first_of!("r", "0", " AND (b.due, b.operation) >= (r.due3, r.id3)"), ",
                ", first_of!("r", "-1", " AND (b.due, b.operation) >= (r.due4, r.id4)"), ",
                ", first_of!("r", "-2", " AND (b.due, b.operation) >= (r.due5, r.id5)"), ",
                (SELECT x.kind IS NOT NULL AND (x.kind, x.tenant) < (r.next_kind, r.next_tenant)
                 FROM (SELECT ", next_kind!("b.kind", "r.kind", "r.tenant"), " AS kind,
                              ", next_kind!("b.tenant", "r.kind", "r.tenant"), " AS tenant) AS x) AS others,
                {now $3} AS now
         FROM {rows $2: n int, kind text, tenant text, next_kind text, next_tenant text, due1 int, id1 int, due2 int,
               id2 int, due3 int, id3 int, due4 int, id4 int, due5 int, id5 int} AS r");
    /// An operation that a worker found exhausted is not due any more: its row is locked.
    none_due = "UPDATE semel_backlog SET due = NULL WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// The same for one of them, if it has not changed since.
    not_due =
        "UPDATE semel_backlog SET due = NULL
         WHERE operation = $1 AND EXISTS (SELECT 1 FROM semel_operations AS o WHERE o.id = $1 AND o.fence = $2)";
    /// When operations are due, those that are.
    due_of =
        "SELECT b.operation, b.due FROM {rows $1: id int} AS r
         JOIN semel_backlog AS b ON b.operation = r.id
         WHERE b.due IS NOT NULL";
    /// Of these operations, those that neither run nor will be run by a worker.
    ended =
        "SELECT r.n, o.id FROM {rows $1: n int, tenant text, service text, kind text, key text} AS r
         JOIN semel_operations AS o ON o.tenant = r.tenant AND o.service = r.service AND o.kind = r.kind AND o.key = r.key
         LEFT JOIN semel_backlog AS b ON b.operation = o.id
         WHERE o.state <> 'processing' AND b.due IS NULL";
}
