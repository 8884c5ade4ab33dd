//! The statements about schedules, nodes and kinds, which both databases share.

use crate::sql::statements;

/// The first kind after another, by one step of the backlog's index.
macro_rules! next_kind {
    ($column:literal, $after:literal) => {
        concat!(
            "(SELECT ",
            $column,
            " FROM semel_backlog AS b WHERE b.due IS NOT NULL AND (b.service, b.kind) > (",
            $after,
            ") ORDER BY b.service, b.kind LIMIT 1)"
        )
    };
}

statements! {
    /// The statements of the fleet, for one of the databases.
    FleetSql:
    /// The marks of some schedules, and the time: a row for each, with or without a mark.
    marks =
        "SELECT r.tenant, r.service, r.kind, r.name, s.spec, s.since, s.mark, s.last_due, s.next_due,
                EXISTS (SELECT 1 FROM semel_paused AS p WHERE p.service = r.service AND p.kind = r.kind) AS paused,
                {now $2} AS now
         FROM {rows $1: tenant text, service text, kind text, name text} AS r
         LEFT JOIN semel_schedules AS s
           ON s.tenant = r.tenant AND s.service = r.service AND s.kind = r.kind AND s.name = r.name";
    /// All marks.
    all_marks =
        "SELECT s.tenant, s.service, s.kind, s.name, s.spec, s.since, s.mark, s.last_due, s.next_due,
                EXISTS (SELECT 1 FROM semel_paused AS p WHERE p.service = s.service AND p.kind = s.kind) AS paused,
                {now $1} AS now
         FROM semel_schedules AS s ORDER BY s.tenant, s.service, s.kind, s.name LIMIT $2";
    /// The first mark of a schedule.
    put_mark =
        "INSERT INTO semel_schedules (tenant, service, kind, name, spec, since, mark, last_due, next_due)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
         ON CONFLICT (tenant, service, kind, name) DO NOTHING";
    /// Moves a mark, if it is still the one that was read and no other transaction has locked it.
    move_mark =
        "UPDATE semel_schedules SET spec = $5, since = $6, mark = $7, last_due = $8, next_due = $9
         WHERE tenant = $1 AND service = $2 AND kind = $3 AND mark <= $7
           AND name {unlocked SELECT s.name FROM semel_schedules AS s
               WHERE s.tenant = $1 AND s.service = $2 AND s.kind = $3 AND s.name = $4 AND s.spec = $10 AND s.mark = $11}";

    /// Stores the sign of life of a node.
    leave_sign =
        "INSERT INTO semel_nodes (owner, roles, version, kinds, since, seen)
         VALUES ($1, $2, $3, $4, coalesce($5, {now $6}), {now $6})
         ON CONFLICT (owner) DO UPDATE SET roles = excluded.roles, version = excluded.version, kinds = excluded.kinds,
                                           since = excluded.since, seen = excluded.seen
         RETURNING since";
    /// Removes the sign of life of a node.
    remove_sign = "DELETE FROM semel_nodes WHERE owner = $1 AND since = $2";
    /// The nodes, latest sign first.
    nodes =
        "SELECT n.owner, n.roles, n.version, n.kinds, n.since, n.seen, {now $1} AS now
         FROM semel_nodes AS n ORDER BY n.seen DESC, n.owner LIMIT $2";
    /// Whether a node has not been seen since a time.
    any_gone = "SELECT n.owner FROM semel_nodes AS n WHERE n.seen < $1 LIMIT 1";
    /// Removes nodes that have not been seen since a time.
    forget_gone = "DELETE FROM semel_nodes WHERE seen < $1";

    /// The kinds of the backlog, from one to the next by the index, and how many of the first few of each are due.
    waiting =
        concat!("WITH RECURSIVE kinds(service, kind, n) AS (
            SELECT ", next_kind!("b.service", "'', ''"), ", ", next_kind!("b.kind", "'', ''"), ", CAST(1 AS BIGINT)
            UNION ALL
            SELECT ", next_kind!("b.service", "kinds.service, kinds.kind"), ", ",
                next_kind!("b.kind", "kinds.service, kinds.kind"), ", n + 1
            FROM kinds WHERE kinds.service IS NOT NULL AND n < $2)
         SELECT kinds.service, kinds.kind,
                (SELECT count(*) FROM (SELECT b.due FROM semel_backlog AS b
                    WHERE b.service = kinds.service AND b.kind = kinds.kind AND b.due IS NOT NULL LIMIT $3) AS w) AS waiting,
                (SELECT count(*) FROM (SELECT b.due FROM semel_backlog AS b
                    WHERE b.service = kinds.service AND b.kind = kinds.kind AND b.due IS NOT NULL LIMIT $3) AS w
                 WHERE w.due <= {now $1}) AS due
         FROM kinds WHERE kinds.service IS NOT NULL");
    /// How many of each kind run, among the first few leases.
    running =
        "SELECT o.service, o.kind, count(*) AS n
         FROM (SELECT l.operation FROM semel_leases AS l ORDER BY l.operation LIMIT $1) AS l
         CROSS JOIN semel_operations AS o
         WHERE o.id = l.operation GROUP BY o.service, o.kind";
    /// The pause of a kind.
    pause_of = "SELECT p.at, p.actor, p.reason FROM semel_paused AS p WHERE p.service = $1 AND p.kind = $2";
    /// The paused kinds of a service.
    paused_of = "SELECT p.kind FROM semel_paused AS p WHERE p.service = $1";
    /// The paused kinds.
    paused = "SELECT p.service, p.kind, p.at, p.actor, p.reason FROM semel_paused AS p LIMIT $1";
}
