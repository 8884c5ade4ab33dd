//! The statements that both databases share, as text that one can read and run by hand.
//!
//! A batch comes as one JSON parameter. The only thing that differs is how that becomes rows, so
//! a statement writes `{rows $1: id int, body bytes}` and each database gets its own reading of it:
//! `json_to_recordset` on PostgreSQL, `jsonb_each` on SQLite. Bytes travel as hex. What every replay
//! reads, `{keys}` and `{ids}`, comes to PostgreSQL as arrays, which are cheaper to read. Statements that
//! differ in more than this are in `postgres.rs` and `sqlite.rs`, each with the reason.

/// Which database a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Postgres,
    Sqlite,
}

macro_rules! statements {
    ($(#[doc = $about:literal])+ $struct:ident: $($(#[doc = $doc:literal])+ $name:ident = $text:expr;)+) => {
        $(#[doc = $about])+
        pub(crate) struct $struct { $($(#[doc = $doc])+ pub(crate) $name: &'static str,)+ }

        impl $struct {
            /// The texts for a database. They live as long as the process: sqlx takes only text
            /// that cannot have come from outside, and there are a few dozen of them.
            pub(crate) fn new(dialect: $crate::sql::Dialect) -> Self {
                Self { $($name: Box::leak($crate::sql::render($text, dialect).into_boxed_str()),)+ }
            }

            /// All of them by name, for the test that prepares each on both databases.
            #[cfg(test)]
            pub(crate) fn all(&self) -> Vec<(&'static str, &'static str)> {
                vec![$((stringify!($name), self.$name),)+]
            }
        }
    };
}
pub(crate) use statements;

/// The columns of an operation with its lease and its successor.
macro_rules! operation {
    ($where:literal) => {
        concat!(
            "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.fingerprint, o.payload_order, o.payload,
                    o.label1, o.label2, o.label3, o.label4, o.state, o.fence, o.failures, o.crashes, o.parked, o.pinned, o.owner,
                    coalesce(o.priority, 0) AS priority, o.terms AS own_terms, o.created_at, o.claimed_at, o.settled_at, o.not_before, o.expires_at, o.archive_at, o.archived, o.look_at,
                    o.outcome, o.outcome_kept, o.error, o.checkpoint,
                    l.token, l.deadline, l.run_until, l.terms, l.cancelled,
                    s.fingerprint AS successor_fingerprint, s.payload_order AS successor_order, s.payload AS successor_payload ",
            $where
        )
    };
}

/// As `operation!`, without what may be large: a page of five hundred must fit into memory.
macro_rules! brief {
    ($where:literal) => {
        concat!(
            "SELECT o.id, o.tenant, o.service, o.kind, o.key, o.fingerprint, o.payload_order, CASE WHEN false THEN o.payload END AS payload,
                    o.label1, o.label2, o.label3, o.label4, o.state, o.fence, o.failures, o.crashes, o.parked, o.pinned, o.owner,
                    coalesce(o.priority, 0) AS priority, o.terms AS own_terms, o.created_at, o.claimed_at, o.settled_at, o.not_before, o.expires_at, o.archive_at, o.archived, o.look_at,
                    substr(o.outcome, 1, 2) AS outcome, o.outcome_kept, substr(o.error, 1, 514) AS error,
                    CASE WHEN false THEN o.checkpoint END AS checkpoint,
                    l.token, l.deadline, l.run_until, l.terms, l.cancelled,
                    s.fingerprint AS successor_fingerprint, s.payload_order AS successor_order,
                    CASE WHEN false THEN s.payload END AS successor_payload ",
            $where
        )
    };
}

/// A page: its order, from which id on, how it finds its rows, and what every filter may ask beside that.
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

/// A page of what has a text in one of the four labels.
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

/// Counters of some hours, folded or not, in one snapshot, the largest sums first. What is not asked for one by one is
/// added up: it reads as nothing. `$9` is the word of a `TallyBy`.
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

/// What waits of one kind and tenant, in the order in which it should run: by priority, each by one step of the index, and
/// by how long it is due. At most `$5` of each priority.
macro_rules! by_priority {
    ($columns:literal, $from:literal, $where:literal) => {
        concat!(
            of_priority!($columns, $from, $where, "2"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "1"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "0"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "-1"),
            " UNION ALL ",
            of_priority!($columns, $from, $where, "-2")
        )
    };
}

macro_rules! of_priority {
    ($columns:literal, $from:literal, $where:literal, $priority:literal) => {
        concat!(
            "SELECT * FROM (SELECT ",
            $columns,
            " ",
            $from,
            " WHERE b.service = $1 AND b.kind = $2 AND b.tenant = $3 AND b.priority = ",
            $priority,
            " AND ",
            $where,
            " ORDER BY b.due, b.operation LIMIT $5) AS p"
        )
    };
}

/// When the first of a kind and tenant is due, of one priority.
macro_rules! first_due {
    ($priority:literal) => {
        concat!(
            "SELECT (SELECT b.due FROM semel_backlog AS b
                     WHERE b.service = $1 AND b.kind = kinds.kind AND b.tenant = kinds.tenant AND b.priority = ",
            $priority,
            " AND b.due IS NOT NULL ORDER BY b.due LIMIT 1) AS due"
        )
    };
}

/// Whether an operation may be claimed now, by its own row: what the backlog says may be older than the row, which another
/// node has claimed and settled meanwhile.
macro_rules! runnable {
    () => {
        "o.state IN ('pending', 'failed', 'timed_out') AND NOT o.parked
           AND (o.not_before IS NULL OR o.not_before <= {now $4}) AND (o.expires_at IS NULL OR o.expires_at > {now $4})"
    };
}

statements! {
    /// Every statement of the ledger that both databases share, ready for one of them.
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
    /// As much of an operation as says whether it may be purged: for one that cannot be read.
    load_bare =
        "SELECT o.id, o.fence, o.tenant, o.service, o.kind, o.key, coalesce(o.label1, '') AS label1,
                coalesce(o.label2, '') AS label2, o.state, o.pinned, o.expires_at, l.deadline
         FROM semel_operations AS o LEFT JOIN semel_leases AS l ON l.operation = o.id
         WHERE o.id = $1";
    /// A page of everything, newest first.
    list = page!("o.id", "o.id > $9",
        "FROM semel_operations AS o
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $1 AND o.id < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND (o.state = $6 OR $6 IS NULL)");
    /// A page of one kind. Its lower end is hidden from the planner: next to the upper one, it would take them for the
    /// ends of a short range of ids, and read all of the table by id.
    list_scope = scoped!("(o.id > $9) IS TRUE");
    /// A page of one kind since a time: here the range is what it seems.
    list_scope_since = scoped!("o.id > $9");
    /// A page of what is running: by the leases, which are few.
    list_processing = page!("o.id", "(o.id > $9) IS TRUE",
        "FROM semel_leases AS l
         JOIN semel_operations AS o ON o.id = l.operation
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $1 AND o.id < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND o.state = $6");
    /// A page of what nobody runs and has not completed: by the backlog.
    list_backlog = page!("b.operation", "(o.id > $9) IS TRUE",
        "FROM semel_backlog AS b
         JOIN semel_operations AS o ON o.id = b.operation
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE b.tenant = $1 AND b.operation < $2 AND o.created_at < $3
           AND (o.service = $4 OR $4 IS NULL) AND (o.kind = $5 OR $5 IS NULL) AND b.state = $6");
    /// A page of what has a text in a label.
    list_label1 = labelled!("(o.id > $9) IS TRUE", "label1 = $11");
    /// As `list_label1`.
    list_label2 = labelled!("(o.id > $9) IS TRUE", "label2 = $12");
    /// As `list_label1`.
    list_label3 = labelled!("(o.id > $9) IS TRUE", "label3 = $13");
    /// As `list_label1`.
    list_label4 = labelled!("(o.id > $9) IS TRUE", "label4 = $14");
    /// A page of what has a text in a label, since a time.
    list_label1_since = labelled!("o.id > $9", "label1 = $11");
    /// As `list_label1_since`.
    list_label2_since = labelled!("o.id > $9", "label2 = $12");
    /// As `list_label1_since`.
    list_label3_since = labelled!("o.id > $9", "label3 = $13");
    /// As `list_label1_since`.
    list_label4_since = labelled!("o.id > $9", "label4 = $14");
    /// The last id of which everything up to it was first claimed before a moment. By halves: ids grow with time, so
    /// this reads some sixty rows of any number.
    last_before =
        "WITH RECURSIVE search(id, step) AS (
            SELECT CAST(0 AS BIGINT), CAST(4611686018427387904 AS BIGINT)
            UNION ALL
            SELECT search.id + CASE WHEN (SELECT o.created_at FROM semel_operations AS o WHERE o.id >= search.id + search.step
                                          ORDER BY o.id LIMIT 1) < $1
                               THEN step ELSE 0 END, step / 2
            FROM search WHERE step > 0)
         SELECT id FROM search WHERE step = 0";
    /// The newest operation that is archived.
    last_archived = "SELECT max(operation) FROM semel_archive";
    /// What may be claimed of one kind and tenant, the longest due first, by priority: with the bytes that it has stored,
    /// and the time. What is due later is among them.
    find_waiting = by_priority!("b.operation, b.due,
                CAST(coalesce(length(o.payload), 0) + coalesce(length(o.checkpoint), 0) + coalesce(length(o.error), 0) AS BIGINT)
                AS bytes, {now $4} AS now",
         "FROM semel_backlog AS b JOIN semel_operations AS o ON o.id = b.operation",
         "b.due IS NOT NULL AND (o.expires_at IS NULL OR o.expires_at > {now $4})");
    /// The same of what is due now, for a worker that takes it: locked, without what another transaction holds.
    pick = concat!(
        "SELECT o.id, CAST(coalesce(length(o.payload), 0) + coalesce(length(o.checkpoint), 0) + coalesce(length(o.error), 0)
                AS BIGINT) AS bytes
         FROM (", by_priority!("b.operation", "FROM semel_backlog AS b", "b.due <= {now $4}"), ") AS w
         CROSS JOIN semel_operations AS o
         WHERE o.id = w.operation AND ", runnable!(), " LIMIT $6 {locked o}");
    /// As `pick`, the longest due of all.
    pick_oldest = concat!(
        "SELECT o.id, CAST(coalesce(length(o.payload), 0) + coalesce(length(o.checkpoint), 0) + coalesce(length(o.error), 0)
                AS BIGINT) AS bytes
         FROM (", by_priority!("b.operation, b.due", "FROM semel_backlog AS b", "b.due <= {now $4}"), ") AS w
         CROSS JOIN semel_operations AS o
         WHERE o.id = w.operation AND ", runnable!(), " ORDER BY w.due, w.operation LIMIT $6 {locked o}");
    /// The kinds among these that are paused.
    find_paused =
        "SELECT p.service, p.kind FROM semel_paused AS p
         WHERE (p.service, p.kind) IN (SELECT r.service, r.kind FROM {rows $1: service text, kind text} AS r)";
    /// A kind is paused.
    pause =
        "INSERT INTO semel_paused (service, kind, at, actor, reason) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (service, kind) DO UPDATE SET at = excluded.at, actor = excluded.actor, reason = excluded.reason";
    /// A kind is resumed. When, by whom and why is told by the audit.
    resume_kind =
        "DELETE FROM semel_paused WHERE service = $1 AND kind = $2
           AND CAST($3 AS BIGINT) IS NOT NULL AND CAST($4 AS TEXT) IS NOT NULL AND CAST($5 AS TEXT) IS NOT NULL";
    /// How many of a kind run on all nodes.
    count_running =
        "SELECT count(*) FROM semel_leases AS l CROSS JOIN semel_operations AS o
         WHERE o.id = l.operation AND o.service = $1 AND o.kind = $2 AND l.deadline > {now $3}";
    /// The time.
    now = "SELECT {now $1} AS now";
    /// The limits of a kind, held until the end of the transaction.
    hold_limit =
        "INSERT INTO semel_limits (service, kind, free_at) VALUES ($1, $2, 0)
         ON CONFLICT (service, kind) DO UPDATE SET free_at = semel_limits.free_at
         RETURNING free_at";
    /// From when on the next of a kind may start.
    put_limit = "UPDATE semel_limits SET free_at = $3 WHERE service = $1 AND kind = $2";
    /// The kinds of what nobody runs, of each tenant, from one on, each with when its first is due, and the time. From
    /// one to the next by the index: however many there are of one, seven rows of it are read.
    find_waiting_kinds =
        concat!("WITH RECURSIVE kinds(kind, tenant, n) AS (
            SELECT (SELECT b.kind FROM semel_backlog AS b
                    WHERE b.service = $1 AND b.due IS NOT NULL AND (b.kind, b.tenant) > ($2, $3)
                    ORDER BY b.kind, b.tenant LIMIT 1),
                   (SELECT b.tenant FROM semel_backlog AS b
                    WHERE b.service = $1 AND b.due IS NOT NULL AND (b.kind, b.tenant) > ($2, $3)
                    ORDER BY b.kind, b.tenant LIMIT 1), CAST(1 AS BIGINT)
            UNION ALL
            SELECT (SELECT b.kind FROM semel_backlog AS b
                    WHERE b.service = $1 AND b.due IS NOT NULL AND (b.kind, b.tenant) > (kinds.kind, kinds.tenant)
                    ORDER BY b.kind, b.tenant LIMIT 1),
                   (SELECT b.tenant FROM semel_backlog AS b
                    WHERE b.service = $1 AND b.due IS NOT NULL AND (b.kind, b.tenant) > (kinds.kind, kinds.tenant)
                    ORDER BY b.kind, b.tenant LIMIT 1), n + 1
            FROM kinds WHERE kinds.kind IS NOT NULL AND n < $5)
         SELECT kinds.kind, kinds.tenant, (SELECT min(f.due) FROM (", first_due!("2"), " UNION ALL ", first_due!("1"),
            " UNION ALL ", first_due!("0"), " UNION ALL ", first_due!("-1"), " UNION ALL ", first_due!("-2"), ") AS f) AS due,
                {now $4} AS now
         FROM kinds WHERE kinds.kind IS NOT NULL");
    /// What a worker found exhausted is not due: its rows are locked.
    none_due = "UPDATE semel_backlog SET due = NULL WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// What a claim found exhausted is not due, if it is still as it was then.
    not_due =
        "UPDATE semel_backlog SET due = NULL
         WHERE operation = $1 AND EXISTS (SELECT 1 FROM semel_operations AS o WHERE o.id = $1 AND o.fence = $2)";
    /// Some operations of a tenant, newest first, without what may be large.
    list_by_id = brief!(
        "FROM {rows $1: id int} AS r
         JOIN semel_operations AS o ON o.id = r.id
         LEFT JOIN semel_leases AS l ON l.operation = o.id
         LEFT JOIN semel_successors AS s ON s.operation = o.id
         WHERE o.tenant = $2 ORDER BY o.id DESC");
    /// Operations by their third label, newest first, with what is short of their outcomes, archived or not.
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
    /// What waiters need to know.
    glance =
        "SELECT o.id, o.state, o.fence, l.deadline
         FROM {rows $1: id int} AS r
         JOIN semel_operations AS o ON o.id = r.id
         LEFT JOIN semel_leases AS l ON l.operation = o.id";

    /// New rows, whole. One that exists already is left alone, and not returned.
    insert_operations =
        "INSERT INTO semel_operations
            (id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
             state, fence, failures, crashes, parked, pinned, priority, terms, owner, created_at, claimed_at, settled_at, not_before,
             expires_at, archive_at, archived, look_at, outcome, outcome_kept, error, checkpoint)
         SELECT id, tenant, service, kind, key, fingerprint, payload_order, payload, label1, label2, label3, label4,
             state, fence, failures, crashes, parked, pinned, priority, terms, owner, created_at, claimed_at, settled_at, not_before,
             expires_at, archive_at, archived, look_at, outcome, outcome_kept, error, checkpoint
         FROM {rows $1: id int, tenant text, service text, kind text, key text, fingerprint bytes, payload_order int,
             payload bytes, label1 text, label2 text, label3 text, label4 text, state text, fence int, failures int,
             crashes int, parked bool, pinned bool, priority int, terms text, owner text, created_at int, claimed_at int, settled_at int, not_before int,
             expires_at int, archive_at int, archived bool, look_at int, outcome bytes, outcome_kept bool, error bytes,
             checkpoint bytes} AS r
         WHERE true
         ON CONFLICT (tenant, service, kind, key) DO NOTHING
         RETURNING id";
    /// Changed rows. The fence that was read must still be there.
    update_operations =
        "UPDATE semel_operations AS o
         SET fingerprint = r.fingerprint, payload_order = r.payload_order, payload = r.payload, state = r.state,
             fence = r.fence, failures = r.failures, crashes = r.crashes, parked = r.parked, pinned = r.pinned,
             priority = r.priority, terms = r.terms, owner = r.owner,
             claimed_at = r.claimed_at, settled_at = r.settled_at, not_before = r.not_before, expires_at = r.expires_at,
             archive_at = r.archive_at, archived = r.archived, look_at = r.look_at, outcome = r.outcome,
             outcome_kept = r.outcome_kept, error = r.error, checkpoint = r.checkpoint
         FROM {rows $1: id int, old_fence int, fingerprint bytes, payload_order int, payload bytes, state text, fence int,
             failures int, crashes int, parked bool, pinned bool, priority int, terms text, owner text, claimed_at int, settled_at int, not_before int,
             expires_at int, archive_at int, archived bool, look_at int, outcome bytes, outcome_kept bool, error bytes,
             checkpoint bytes} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";
    /// Changed rows of which what may be large stays as it is: claims of what waited, above all.
    update_briefly =
        "UPDATE semel_operations AS o
         SET state = r.state, fence = r.fence, failures = r.failures, crashes = r.crashes, parked = r.parked,
             pinned = r.pinned, owner = r.owner, claimed_at = r.claimed_at, settled_at = r.settled_at,
             not_before = r.not_before, expires_at = r.expires_at, archive_at = r.archive_at, archived = r.archived,
             look_at = r.look_at
         FROM {rows $1: id int, old_fence int, state text, fence int, failures int, crashes int, parked bool, pinned bool,
             owner text, claimed_at int, settled_at int, not_before int, expires_at int, archive_at int, archived bool,
             look_at int} AS r
         WHERE o.id = r.id AND o.fence = r.old_fence";
    /// Rows that go, by id and fence.
    delete_operations =
        "DELETE FROM semel_operations
         WHERE (id, fence) IN (SELECT r.id, r.old_fence FROM {rows $1: id int, old_fence int} AS r)";
    /// Their archived data goes with them,
    delete_archived = "DELETE FROM semel_archive WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// their story,
    delete_journal = "DELETE FROM semel_journal WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// and their repeats.
    delete_repeats = "DELETE FROM semel_repeats WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";

    /// The leases that claims hold, by their tokens. It reads the live leases, as the sweep does, and is seldom asked:
    /// a token has no index, which every claim would pay for.
    find_tokens =
        "SELECT l.token, l.operation, l.fence FROM semel_leases AS l
         WHERE l.token IN (SELECT r.token FROM {rows $1: token bytes} AS r)";
    /// Leases that end.
    delete_leases = "DELETE FROM semel_leases WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// Leases that begin or change.
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
    /// Operations that leave the backlog.
    delete_backlog = "DELETE FROM semel_backlog WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// Operations that enter the backlog or change in it.
    put_backlog =
        "INSERT INTO semel_backlog (operation, tenant, service, kind, state, due, priority)
         SELECT id, tenant, service, kind, state, due, priority
         FROM {rows $1: id int, tenant text, service text, kind text, state text, due int, priority int} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET service = excluded.service, kind = excluded.kind, state = excluded.state, due = excluded.due,
             priority = excluded.priority";
    /// Newer data that has had its turn.
    delete_successors = "DELETE FROM semel_successors WHERE operation IN (SELECT r.id FROM {rows $1: id int} AS r)";
    /// Newer data that waits.
    put_successors =
        "INSERT INTO semel_successors (operation, fingerprint, payload_order, payload)
         SELECT id, fingerprint, payload_order, payload
         FROM {rows $1: id int, fingerprint bytes, payload_order int, payload bytes} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET fingerprint = excluded.fingerprint, payload_order = excluded.payload_order, payload = excluded.payload";
    /// Data that goes to the archive.
    put_archive =
        "INSERT INTO semel_archive (operation, archived_at, payload, outcome, outcome_kept)
         SELECT id, archived_at, payload, outcome, outcome_kept
         FROM {rows $1: id int, archived_at int, payload bytes, outcome bytes, outcome_kept bool} AS r
         WHERE true
         ON CONFLICT (operation) DO UPDATE
         SET archived_at = excluded.archived_at, payload = excluded.payload, outcome = excluded.outcome,
             outcome_kept = excluded.outcome_kept";
    /// Lines of the story.
    insert_journal =
        "INSERT INTO semel_journal (operation, at, event, fence, actor, detail)
         SELECT id, at, event, fence, actor, detail
         FROM {rows $1: id int, at int, event text, fence int, actor text, detail bytes} AS r";
    /// The end of the story of an operation.
    load_journal =
        "SELECT at, event, fence, actor, detail
         FROM (SELECT id, at, event, fence, actor, detail FROM semel_journal WHERE operation = $1 ORDER BY id DESC LIMIT $2)
              AS newest
         ORDER BY id";
    /// When operations last began anew: with newer data, or by somebody's word.
    begun_anew =
        "SELECT r.id, (SELECT j.at FROM semel_journal AS j
                       WHERE j.operation = r.id AND j.event IN ('superseded', 'resolved') ORDER BY j.id DESC LIMIT 1) AS at
         FROM {rows $1: id int} AS r";
    /// How often operations came again.
    load_repeats =
        "SELECT p.operation, p.repeat, p.repeats
         FROM {rows $1: id int} AS r JOIN semel_repeats AS p ON p.operation = r.id";
    /// How often operations came again; only of operations that still exist.
    put_repeats =
        "INSERT INTO semel_repeats (operation, repeat, repeats)
         SELECT r.id, r.repeat, r.repeats
         FROM {rows $1: id int, repeat text, repeats text} AS r JOIN semel_operations AS o ON o.id = r.id
         WHERE true
         ON CONFLICT (operation, repeat) DO UPDATE SET repeats = excluded.repeats";

    /// Counts of changes and answers.
    insert_deltas =
        "INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
         SELECT tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n
         FROM {rows $1: tenant text, service text, kind text, label1 text, label2 text, hour int, from_state text,
             to_state text, answer text, bucket int, n int} AS r";
    /// Folded counts.
    fold_counters =
        "INSERT INTO semel_counters (tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket, n)
         SELECT tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket, n
         FROM {rows $1: tenant text, service text, kind text, label1 text, label2 text, hour int, from_state text,
             to_state text, answer text, bucket int, n int} AS r
         WHERE true
         ON CONFLICT (tenant, hour, service, kind, label1, label2, from_state, to_state, answer, bucket)
         DO UPDATE SET n = semel_counters.n + excluded.n";
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

    /// Counts added up over hours.
    tally = counters!(
        "kind, label1, label2, from_state, to_state, answer, bucket",
        "kind, label1, label2, from_state, to_state, answer, bucket");
    /// Counts added up over days.
    tally_days = counters!(
        "hour / 24 AS day, from_state, to_state, answer",
        "hour / 24, from_state, to_state, answer");
    /// Kinds of a service that begin with a text, each by one step of the index of keys, however many operations it has.
    find_kinds =
        "WITH RECURSIVE kinds(kind, n) AS (
            SELECT (SELECT o.kind FROM semel_operations AS o WHERE o.tenant = $1 AND o.service = $2 AND o.kind >= $3
                    ORDER BY o.kind LIMIT 1), 1
            UNION ALL
            SELECT (SELECT o.kind FROM semel_operations AS o WHERE o.tenant = $1 AND o.service = $2 AND o.kind > kinds.kind
                    ORDER BY o.kind LIMIT 1), n + 1
            FROM kinds WHERE substr(kinds.kind, 1, length($3)) = $3 AND n < $4)
         SELECT kinds.kind FROM kinds WHERE substr(kinds.kind, 1, length($3)) = $3";

    /// What a person did.
    audit =
        "INSERT INTO semel_audit (tenant, at, actor, action, subject, reason, before, after)
         SELECT $1, {now $8}, $2, $3, $4, $5, $6, $7";
}

/// Turns `{rows $1: id int, body bytes}` into the database's own reading of a JSON array, `{now $2}` into the time (what
/// a test has set, or SQLite's host says, is bound), and `{unlocked SELECT id …}` into "is one of these", without
/// those that somebody else is at.
pub(crate) fn render(text: &str, dialect: Dialect) -> String {
    let (keys, ids) = match dialect {
        Dialect::Postgres => (
            "(SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS k(tenant, service, kind, key))",
            "(SELECT id FROM unnest($1::bigint[]) AS i(id))",
        ),
        Dialect::Sqlite => ("{rows $1: tenant text, service text, kind text, key text}", "{rows $1: id int}"),
    };
    let text = text.replace("{keys}", keys).replace("{ids}", ids);
    let text = each(&text, "{now ", |parameter| match dialect {
        Dialect::Postgres => {
            format!("coalesce({parameter}, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)")
        }
        Dialect::Sqlite => format!("max({parameter}, (SELECT clock FROM semel_meta WHERE only = 1))"),
    });
    let text = each(&text, "{rows ", |inside| {
        let (parameter, columns) = inside.split_once(':').unwrap_or((inside, ""));
        let columns: Vec<(&str, &str)> =
            columns.split(',').filter_map(|column| column.trim().split_once(' ')).collect();
        rows(parameter.trim(), &columns, dialect)
    });
    let text = each(&text, "{locked ", |table| match dialect {
        Dialect::Postgres => format!("FOR UPDATE OF {table} SKIP LOCKED"),
        // Whoever writes is alone.
        Dialect::Sqlite => String::new(),
    });
    // As an array, for a reason that `TAKE_DELTAS` tells.
    each(&text, "{unlocked ", |chosen| match dialect {
        Dialect::Postgres => format!("= ANY (ARRAY({chosen} FOR UPDATE SKIP LOCKED))"),
        Dialect::Sqlite => format!("IN ({chosen})"),
    })
}

/// Replaces what is between an opening and the next closing brace.
fn each(text: &str, opening: &str, replace: impl Fn(&str) -> String) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(opening) {
        let (inside, after) = after.split_once('}').unwrap_or((after, ""));
        out.push_str(before);
        out.push_str(&replace(inside));
        rest = after;
    }
    out.push_str(rest);
    out
}

fn rows(parameter: &str, columns: &[(&str, &str)], dialect: Dialect) -> String {
    let list = |each: &dyn Fn(&(&str, &str)) -> String| columns.iter().map(each).collect::<Vec<_>>().join(", ");
    match dialect {
        Dialect::Postgres => {
            let selected = list(&|(name, kind)| match *kind {
                "bytes" => format!("decode({name}, 'hex') AS {name}"),
                _ => (*name).to_owned(),
            });
            let declared = list(&|(name, kind)| match *kind {
                "int" => format!("{name} bigint"),
                "bool" => format!("{name} boolean"),
                _ => format!("{name} text"),
            });
            format!("(SELECT {selected} FROM json_to_recordset({parameter}::json) AS j({declared}))")
        }
        Dialect::Sqlite => {
            let selected = list(&|(name, kind)| match *kind {
                "bytes" => format!("unhex(value ->> '{name}') AS {name}"),
                _ => format!("value ->> '{name}' AS {name}"),
            });
            format!("(SELECT {selected} FROM jsonb_each({parameter}))")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_becomes_rows_on_both_databases() {
        let text = "DELETE FROM t WHERE id IN (SELECT r.id FROM {rows $1: id int, body bytes} AS r)";
        assert_eq!(
            render(text, Dialect::Postgres),
            "DELETE FROM t WHERE id IN (SELECT r.id FROM (SELECT id, decode(body, 'hex') AS body \
             FROM json_to_recordset($1::json) AS j(id bigint, body text)) AS r)"
        );
        assert_eq!(
            render(text, Dialect::Sqlite),
            "DELETE FROM t WHERE id IN (SELECT r.id FROM (SELECT value ->> 'id' AS id, unhex(value ->> 'body') AS body \
             FROM jsonb_each($1)) AS r)"
        );
    }

    #[test]
    fn no_statement_is_left_half_rendered() {
        for dialect in [Dialect::Postgres, Dialect::Sqlite] {
            for (name, text) in Sql::new(dialect).all() {
                assert!(!text.contains("{rows") && !text.contains('}'), "{name}: {text}");
            }
        }
    }
}
