//! Prepares every statement on both databases.

use semel_testkit::{Kind, Lab, statements::prepare};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Either, Executor as _, PgConnection, SqlSafeStr as _,
    Statement as _, sqlite::SqliteConnectOptions,
};

use crate::{
    fleet::sql::FleetSql,
    look,
    messaging::{self, MessageSql},
    postgres,
    sql::{Dialect, LookSql, Sql, WorkSql},
    sqlite,
    sweep::sql::SweepSql,
};

/// Statements by name, with the number of parameters.
type Counted = Vec<(&'static str, usize)>;

async fn on_postgres(statements: &[(&'static str, &'static str)]) -> Counted {
    prepare_on(Kind::Postgres, statements).await
}

async fn on_sqlite(statements: &[(&'static str, &'static str)]) -> Counted {
    prepare_on(Kind::Sqlite, statements).await
}

async fn prepare_on(kind: Kind, statements: &[(&'static str, &'static str)]) -> Counted {
    let lab = Lab::new(kind).await;
    drop(lab.open().await);
    prepare(&lab, statements).await
}

/// The statements of the ledger that both databases share.
fn of_the_ledger(dialect: Dialect) -> Vec<(&'static str, &'static str)> {
    [Sql::new(dialect).all(), WorkSql::new(dialect).all(), LookSql::new(dialect).all()].concat()
}

/// An unbound parameter is silently NULL on SQLite, so both forms of a shared statement must have the same number of
/// parameters.
#[tokio::test]
async fn every_shared_statement_prepares_on_both_databases() {
    let mut postgres = on_postgres(&of_the_ledger(Dialect::Postgres)).await;
    let mut sqlite = on_sqlite(&of_the_ledger(Dialect::Sqlite)).await;
    assert!(postgres.len() > 50);
    // The one exception: PostgreSQL gets keys as four arrays.
    assert_eq!((postgres.remove(0), sqlite.remove(0)), (("load_by_key", 4), ("load_by_key", 1)));
    assert_eq!(postgres, sqlite);
    let sqlite = on_sqlite(&SweepSql::new(Dialect::Sqlite).all()).await;
    assert!(sqlite.len() > 15);
    assert_eq!(on_postgres(&SweepSql::new(Dialect::Postgres).all()).await, sqlite);
    let sqlite = on_sqlite(&FleetSql::new(Dialect::Sqlite).all()).await;
    assert!(sqlite.len() > 10);
    assert_eq!(on_postgres(&FleetSql::new(Dialect::Postgres).all()).await, sqlite);
    let sqlite = on_sqlite(&MessageSql::new(Dialect::Sqlite).all()).await;
    assert!(sqlite.len() > 30);
    assert_eq!(on_postgres(&MessageSql::new(Dialect::Postgres).all()).await, sqlite);
}

#[tokio::test]
async fn every_hot_statement_prepares_on_its_database() {
    on_postgres(postgres::HOT).await;
    on_sqlite(sqlite::HOT).await;
    on_postgres(messaging::HOT_POSTGRES).await;
    on_sqlite(messaging::HOT_SQLITE).await;
}

/// Each statement that names keys or ids must use an index, also on a table that was never analysed.
#[tokio::test]
async fn no_shared_statement_reads_the_whole_of_a_growing_table_on_sqlite() {
    let lab = Lab::new(Kind::Sqlite).await;
    drop(lab.open().await);
    let statements = of_the_ledger(Dialect::Sqlite).into_iter().chain(MessageSql::new(Dialect::Sqlite).all());
    let statements = statements.chain(SweepSql::new(Dialect::Sqlite).all());
    let statements = statements.chain(FleetSql::new(Dialect::Sqlite).all());
    for (name, text) in statements.chain(messaging::HOT_SQLITE.iter().copied()) {
        // Exceptions: folding and counting read their own small tables completely, and the sweep reads all leases.
        if ["load_counts", "tally", "tally_days", "find_lapsed"].contains(&name) {
            continue;
        }
        let path = lab.url.strip_prefix("sqlite:").unwrap();
        let mut conn = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
        let plan: Vec<(i64, i64, i64, String)> =
            sqlx::query_as(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"))).fetch_all(&mut conn).await.unwrap();
        for (_, _, _, step) in plan {
            let whole = [
                "SCAN o",
                "SCAN b",
                "SCAN semel_backlog",
                "SCAN semel_operations",
                "SCAN semel_journal",
                "SCAN semel_repeats",
                "SCAN semel_archive",
                "SCAN semel_outbox",
                "SCAN semel_outbox_keys",
                "SCAN semel_receipts",
                "SCAN q",
                "SCAN semel_queue",
                "SCAN semel_retries",
                "SCAN semel_dead_letters",
                "SCAN semel_audit",
            ];
            assert!(!whole.iter().any(|scan| step == *scan), "{name}: {step}");
        }
    }
}

/// Enough rows for a plan to go wrong: a thousand live leases among twenty thousand operations, and related rows of
/// some of them.
const FILL: &str = "
    INSERT INTO semel_operations (id, tenant, service, kind, key, fingerprint, state, fence, owner, created_at, claimed_at,
                                  settled_at, outcome, outcome_kept)
    SELECT i, 'acme', 'bank', 'transfer', 'k' || i, '\\x00', CASE WHEN i > 19000 THEN 'processing' ELSE 'completed' END, i, 'o',
           i, i, CASE WHEN i > 19000 THEN NULL ELSE i END, CASE WHEN i > 19000 THEN NULL ELSE '\\x00'::bytea END,
           CASE WHEN i > 19000 THEN NULL ELSE true END
    FROM generate_series(1, 20000) AS i;
    INSERT INTO semel_leases (operation, fence, token, deadline, run_until, term, terms)
    SELECT i, i, '\\x00', i, i, 1, '{}' FROM generate_series(19001, 20000) AS i;
    INSERT INTO semel_journal (operation, at, event, fence, actor, detail)
    SELECT i, i, 'released', i, '', '\\x0100'::bytea FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_backlog (operation, tenant, state, service, kind, due)
    SELECT i, 'acme', 'failed', 'bank', 'transfer', i FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_successors (operation, fingerprint, payload_order)
    SELECT i, '\\x00', i FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_archive (operation, archived_at, outcome, outcome_kept)
    SELECT i, i, '\\x00', true FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_repeats (operation, repeat, repeats) SELECT i, 'duplicate', '{}' FROM generate_series(1, 5000) AS i;
    ANALYZE semel_operations, semel_leases, semel_journal, semel_backlog, semel_successors, semel_archive, semel_repeats";

/// The same for messages: most are ready, one in ten waits, and one in ten has an ordering key.
const FILL_MESSAGES: &str = "
    INSERT INTO semel_outbox (tenant, message_id, topic, kind, body, headers, ordering_key, number, receipt, put_at, state,
                              due_at)
    SELECT 'acme', i, 'news', 'k', '\\x00', '{}', CASE WHEN i % 10 = 1 THEN 'line ' || i % 100 END,
           CASE WHEN i % 10 = 1 THEN i END, i % 2 = 0, i,
           CASE i % 10 WHEN 0 THEN 'waiting' WHEN 1 THEN 'blocked' ELSE 'ready' END, CASE WHEN i % 10 = 0 THEN i END
    FROM generate_series(1, 20000) AS i;
    INSERT INTO semel_outbox_keys (tenant, ordering_key, last_number)
    SELECT 'acme', 'line ' || i, i FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_receipts (tenant, message_id, sent_at) SELECT 'acme', i, i FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_queues (name) SELECT 'queue ' || i FROM generate_series(1, 20) AS i;
    INSERT INTO semel_queue (queue, tenant, message_id, kind, body, headers, put_at)
    SELECT 'queue ' || i % 20, 'acme', i, 'k', '\\x00', '{}', i FROM generate_series(1, 20000) AS i;
    INSERT INTO semel_retries (tenant, consumer, key, fingerprint, queue, kind, body, headers, failures, reason, due_at)
    SELECT 'acme', 'books', 'k' || i, '\\x00', 'queue 1', 'k', '\\x00', '{}', 1, 'no', i FROM generate_series(1, 5000) AS i;
    INSERT INTO semel_dead_letters (tenant, consumer, key, fingerprint, queue, kind, body, headers, failures, reason,
                                    died_at)
    SELECT 'acme', 'books', 'k' || i, '\\x00', 'queue 1', 'k', '\\x00', '{}', 1, 'no', i FROM generate_series(1, 5000) AS i;
    ANALYZE semel_outbox, semel_outbox_keys, semel_receipts, semel_queues, semel_queue, semel_retries, semel_dead_letters";

/// The same on PostgreSQL: with the settings of its connections each statement of the lanes, relays and consumers uses
/// an index, on empty tables that were never analysed, and on full ones.
#[tokio::test]
async fn no_statement_of_a_lane_reads_the_whole_of_a_growing_table_on_postgres() {
    // Exceptions: folding and counting read their own small tables; the sweep and the look-up of lost answers read the
    // live leases.
    const WHOLE: [&str; 6] = ["load_counts", "tally", "tally_days", "find_lapsed", "find_tokens", "TAKE_DELTAS"];
    // These read no table.
    const NONE: [&str; 2] = ["CHANNEL", "NOTIFY"];
    let (shared, messages) = (of_the_ledger(Dialect::Postgres), MessageSql::new(Dialect::Postgres).all());
    let all = shared.iter().chain(postgres::HOT).chain(&messages).chain(messaging::HOT_POSTGRES);
    let on_lane = all.filter(|(name, _)| !WHOLE.contains(name) && !NONE.contains(name));
    let lab = Lab::new(Kind::Postgres).await;
    drop(lab.open().await);
    let mut wrong = Vec::new();
    for fill in [&[][..], &[FILL, FILL_MESSAGES]] {
        let mut conn = PgConnection::connect(&lab.url).await.unwrap();
        for rows in fill {
            sqlx::raw_sql(*rows).execute(&mut conn).await.unwrap();
        }
        for (name, text) in on_lane.clone() {
            let settings = match *name {
                "CLAIM" => postgres::CLAIMS,
                // In a caller's transaction, with any settings.
                "COMPLETE_ONE" | "number_keys" | "put" => "RESET ALL; SET plan_cache_mode = force_generic_plan",
                _ => postgres::LANE,
            };
            let plan = plan_of(&mut conn, settings, text).await;
            let whole = plan.lines().filter(|line| line.contains("Seq Scan on semel_")).map(str::trim);
            wrong.extend(whole.map(|line| format!("{name} (filled: {}): {line}", !fill.is_empty())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A relay and a consumer read the rows they take in index order, no further than needed: the same table may hold
/// millions of other rows.
#[tokio::test]
async fn messages_are_taken_in_the_order_of_their_index() {
    let sql = MessageSql::new(Dialect::Postgres);
    let hot = |name: &str| messaging::HOT_POSTGRES.iter().find(|(found, _)| *found == name).unwrap().1;
    let takes = [
        ("TAKE", hot("TAKE"), "semel_outbox_ready"),
        ("DELIVER", hot("DELIVER"), "semel_queue_line"),
        ("take_retries", sql.take_retries, "semel_retries_due"),
        ("ready_due", sql.ready_due, "semel_outbox_due"),
    ];
    for fill in ["SELECT 1", FILL_MESSAGES] {
        let lab = Lab::new(Kind::Postgres).await;
        drop(lab.open().await);
        let mut conn = PgConnection::connect(&lab.url).await.unwrap();
        sqlx::raw_sql(fill).execute(&mut conn).await.unwrap();
        for (name, text, index) in takes {
            let plan = plan_of(&mut conn, postgres::LANE, text).await;
            assert!(plan.contains(&format!("using {index}")), "{name}: {plan}");
        }
    }
}

/// The plan of a statement for parameters that are not known yet.
async fn plan_of(conn: &mut PgConnection, settings: &'static str, text: &'static str) -> String {
    sqlx::raw_sql("RESET ALL; SELECT set_config('semel.epoch', '0', false)").execute(&mut *conn).await.unwrap();
    sqlx::raw_sql(settings).execute(&mut *conn).await.unwrap();
    let prepared = (&mut *conn).prepare(AssertSqlSafe(text).into_sql_str()).await.unwrap();
    let Some(Either::Left(parameters)) = prepared.parameters() else { panic!("{text}") };
    let nulls = vec!["NULL"; parameters.len()].join(", ");
    let arguments = if nulls.is_empty() { String::new() } else { format!("({nulls})") };
    sqlx::raw_sql(AssertSqlSafe(format!("PREPARE it AS {text}"))).execute(&mut *conn).await.unwrap();
    let explain = AssertSqlSafe(format!("EXPLAIN (COSTS OFF) EXECUTE it{arguments}"));
    let plan: Vec<(String,)> = sqlx::query_as(explain).fetch_all(&mut *conn).await.unwrap();
    sqlx::raw_sql("DEALLOCATE it").execute(&mut *conn).await.unwrap();
    plan.into_iter().map(|(line,)| line).collect::<Vec<_>>().join("\n")
}

/// Due operations are read in index order, no further than requested, and their kinds by one index step each, also if
/// the table was empty when it was last analysed, or never was: workers run these statements every second.
#[tokio::test]
async fn due_operations_are_read_in_index_order() {
    const FILL: &str = "INSERT INTO semel_backlog (operation, tenant, state, service, kind, due)
         SELECT i, 't' || (i % 2), 'failed', 'bank', 'k' || (i % 3), i FROM generate_series(1, 20000) AS i";
    let sql = WorkSql::new(Dialect::Postgres);
    let pick = format!("PREPARE pick AS {}", sql.pick);
    let kinds = format!("PREPARE kinds AS {}", sql.find_waiting_kinds);
    for (known, mode) in [
        ("SELECT 1", "force_custom_plan"),
        ("SELECT 1", "force_generic_plan"),
        ("ANALYZE semel_backlog", "force_custom_plan"),
        ("ANALYZE semel_backlog", "force_generic_plan"),
    ] {
        let lab = Lab::new(Kind::Postgres).await;
        drop(lab.open().await);
        let mut conn = PgConnection::connect(&lab.url).await.unwrap();
        let mode = format!("SET plan_cache_mode = {mode}");
        for text in [known, FILL, &mode, look::IN_ORDER, &pick, &kinds] {
            sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut conn).await.unwrap();
        }
        for (execute, looks, by) in [
            (
                "pick('bank', 'k1', 't1', NULL, 65, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)",
                5,
                &["(kind = ", "(tenant = ", "(priority = "][..],
            ),
            (
                "kinds('bank', '', '', NULL, 9)",
                13,
                &["(tenant > kinds_1.tenant)", "(kind > kinds_1.kind)", "(tenant = kinds.tenant)"],
            ),
        ] {
            // Executed too: otherwise EXPLAIN omits a part of the second one.
            let explain = AssertSqlSafe(format!("EXPLAIN (ANALYZE, COSTS OFF) EXECUTE {execute}"));
            let plan: Vec<(String,)> = sqlx::query_as(explain).fetch_all(&mut conn).await.unwrap();
            let plan = plan.into_iter().map(|(line,)| line).collect::<Vec<_>>().join("\n");
            assert_eq!(plan.matches("using semel_backlog_queue").count(), looks, "{plan}");
            assert!(by.iter().all(|by| plan.contains(by)), "{plan}");
            for whole in ["Sort", "Bitmap", "Seq Scan"] {
                assert!(!plan.contains(whole), "{plan}");
            }
        }
    }

    let lab = Lab::new(Kind::Sqlite).await;
    drop(lab.open().await);
    let path = lab.url.strip_prefix("sqlite:").unwrap();
    let mut conn = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
    let sql = WorkSql::new(Dialect::Sqlite);
    for (text, by) in [
        (sql.pick, &["(service=? AND kind=? AND tenant=? AND priority=? AND due>? AND due<?)"][..]),
        (
            sql.find_waiting_kinds,
            &[
                "(service=? AND kind=? AND tenant>?)",
                "(service=? AND kind>?)",
                "(service=? AND kind=? AND tenant=? AND priority=? AND due>?)",
            ],
        ),
    ] {
        let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"));
        let plan: Vec<(i64, i64, i64, String)> = sqlx::query_as(explain).fetch_all(&mut conn).await.unwrap();
        let plan = plan.into_iter().map(|(.., step)| step).collect::<Vec<_>>().join("\n");
        assert!(by.iter().all(|by| plan.contains(&format!("INDEX semel_backlog_queue {by}"))), "{plan}");
        assert!(!plan.contains("TEMP B-TREE"), "{plan}");
    }
}

/// A worker finds each operation that it takes by its id, also with a plan from when the tables were empty: a plan is
/// cached until the next vacuum or analyse, and a queue fills faster.
#[tokio::test]
async fn work_is_taken_by_id_also_where_the_plan_is_older_than_the_queue() {
    let (sql, lab) = (WorkSql::new(Dialect::Postgres), Lab::new(Kind::Postgres).await);
    drop(lab.open().await);
    let mut conn = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("VACUUM ANALYZE semel_operations, semel_backlog, semel_successors").execute(&mut conn).await.unwrap();
    let (_, take) = postgres::HOT.iter().find(|(name, _)| *name == "TAKE").unwrap();
    for text in [sql.pick, sql.pick_oldest, take] {
        let plan = plan_of(&mut conn, postgres::LANE, text).await;
        let lines: Vec<_> = plan.lines().collect();
        let scans = lines.windows(2).filter(|pair| pair[0].contains("Scan using semel_"));
        let whole: Vec<_> = scans.filter(|pair| !pair[1].contains("Index Cond")).map(|pair| pair[0]).collect();
        assert!(whole.is_empty() && !plan.contains("Seq Scan on semel_"), "{whole:?}: {plan}");
    }
}

/// A phase of the sweep reads its rows in index order, from where it left off, no further than requested: a million
/// rows may be due, and PostgreSQL may have no statistics yet.
#[tokio::test]
async fn the_sweep_finds_its_rows_in_the_order_of_their_index() {
    const FILL: &str = "INSERT INTO semel_operations
            (id, tenant, service, kind, key, fingerprint, state, fence, owner, created_at, claimed_at, look_at)
         SELECT i, 't', 's', 'k', 'k' || i, '', 'processing', i, '', i, i, i FROM generate_series(1, 5000) AS i;
         INSERT INTO semel_leases (operation, fence, token, deadline, run_until, term, terms)
         SELECT i, i, '', i, i, 1, '' FROM generate_series(1, 5000) AS i;
         INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
         SELECT 't', 's', 'k', '', '', 1, '', '', '', 0, 1 FROM generate_series(1, 5000) AS i";
    let sql = SweepSql::new(Dialect::Postgres);
    let phases = [
        ("lapsed", sql.find_lapsed, "semel_leases_pkey"),
        ("aged", sql.find_aged, "semel_operations_look_at"),
        ("deltas", sql.find_deltas, "semel_deltas_pkey"),
    ];
    for known in ["SELECT 1", "ANALYZE"] {
        let lab = Lab::new(Kind::Postgres).await;
        drop(lab.open().await);
        let mut conn = PgConnection::connect(&lab.url).await.unwrap();
        for text in [known, FILL, "SET plan_cache_mode = force_generic_plan", look::IN_ORDER] {
            sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut conn).await.unwrap();
        }
        for (name, text, index) in phases {
            let prepare = format!("PREPARE {name} (bigint, bigint, bigint) AS {text}");
            sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut conn).await.unwrap();
            let explain = AssertSqlSafe(format!("EXPLAIN (ANALYZE, COSTS OFF) EXECUTE {name}(4000, 100, 10)"));
            let plan: Vec<(String,)> = sqlx::query_as(explain).fetch_all(&mut conn).await.unwrap();
            let plan = plan.into_iter().map(|(line,)| line).collect::<Vec<_>>().join("\n");
            let scan =
                plan.lines().find(|line| line.contains(&format!("using {index}"))).unwrap_or_else(|| panic!("{plan}"));
            assert!(scan.contains("rows=10 ") || scan.contains("rows=11 "), "no further than asked for: {plan}");
            for whole in ["Sort", "Bitmap", "Seq Scan"] {
                assert!(!plan.contains(whole), "{plan}");
            }
        }
    }
}
