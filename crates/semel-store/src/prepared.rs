//! Every statement is text that both databases understand: each is prepared on the real thing.

use semel_testkit::{Kind, Lab};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Either, Executor as _, PgConnection, SqlSafeStr as _,
    Statement as _, sqlite::SqliteConnectOptions,
};

use crate::{
    look,
    messaging::{self, MessageSql},
    postgres,
    sql::{Dialect, Sql},
    sqlite,
    sweep::sql::SweepSql,
};

/// Statements by name, with how many parameters each has.
type Counted = Vec<(&'static str, usize)>;

async fn on_postgres(statements: &[(&'static str, &'static str)]) -> Counted {
    let lab = Lab::new(Kind::Postgres).await;
    drop(lab.open().await);
    let mut conn = PgConnection::connect(&lab.url).await.unwrap();
    let (mut counted, mut refused) = (Vec::new(), Vec::new());
    for (name, text) in statements {
        match conn.prepare(AssertSqlSafe(*text).into_sql_str()).await {
            Ok(prepared) => {
                let Some(Either::Left(parameters)) = prepared.parameters() else { panic!("{name}") };
                counted.push((*name, parameters.len()));
            }
            Err(error) => refused.push(format!("{name}: {error}\n{text}")),
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    counted
}

async fn on_sqlite(statements: &[(&'static str, &'static str)]) -> Counted {
    let lab = Lab::new(Kind::Sqlite).await;
    drop(lab.open().await);
    let path = lab.url.strip_prefix("sqlite:").unwrap();
    let mut conn = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
    let (mut counted, mut refused) = (Vec::new(), Vec::new());
    for (name, text) in statements {
        match conn.prepare(AssertSqlSafe(*text).into_sql_str()).await {
            Ok(prepared) => {
                let Some(Either::Right(parameters)) = prepared.parameters() else { panic!("{name}") };
                counted.push((*name, parameters));
            }
            Err(error) => refused.push(format!("{name}: {error}\n{text}")),
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    counted
}

/// A parameter that is left unbound is silently NULL on SQLite, so both readings of a shared
/// statement must have the same number of them.
#[tokio::test]
async fn every_shared_statement_prepares_on_both_databases() {
    let mut postgres = on_postgres(&Sql::new(Dialect::Postgres).all()).await;
    let mut sqlite = on_sqlite(&Sql::new(Dialect::Sqlite).all()).await;
    assert!(postgres.len() > 30);
    // The one exception: keys come to PostgreSQL as four arrays.
    assert_eq!((postgres.remove(0), sqlite.remove(0)), (("load_by_key", 4), ("load_by_key", 1)));
    assert_eq!(postgres, sqlite);
    let sqlite = on_sqlite(&SweepSql::new(Dialect::Sqlite).all()).await;
    assert!(sqlite.len() > 15);
    assert_eq!(on_postgres(&SweepSql::new(Dialect::Postgres).all()).await, sqlite);
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

/// How a batch finds its rows must not depend on luck: each statement that names keys or ids uses
/// an index, also on a table that was never analysed.
#[tokio::test]
async fn no_shared_statement_reads_the_whole_of_a_growing_table_on_sqlite() {
    let lab = Lab::new(Kind::Sqlite).await;
    drop(lab.open().await);
    let statements = Sql::new(Dialect::Sqlite).all().into_iter().chain(MessageSql::new(Dialect::Sqlite).all());
    let statements = statements.chain(SweepSql::new(Dialect::Sqlite).all());
    for (name, text) in statements.chain(messaging::HOT_SQLITE.iter().copied()) {
        // Folding and counting read their own small tables, and the sweep the leases, whole.
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

/// Rows enough for a plan to go wrong: a thousand live leases among twenty thousand operations, and what belongs to some
/// of them.
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

/// The same of messages: most are ready, one in ten waits, and one in ten stands in a line.
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

/// How a batch finds its rows must not depend on luck on PostgreSQL either: with the settings of its connections each
/// statement of the lanes, and of relays and consumers, uses an index, on tables that were never analysed and are empty,
/// and on full ones.
#[tokio::test]
async fn no_statement_of_a_lane_reads_the_whole_of_a_growing_table_on_postgres() {
    // Folding and counting read their own small tables; the sweep, and who has lost answers, the live leases.
    const WHOLE: [&str; 6] = ["load_counts", "tally", "tally_days", "find_lapsed", "find_tokens", "TAKE_DELTAS"];
    // These read no table.
    const NONE: [&str; 2] = ["CHANNEL", "NOTIFY"];
    let (shared, messages) = (Sql::new(Dialect::Postgres).all(), MessageSql::new(Dialect::Postgres).all());
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
                // In a caller's transaction, whatever its settings.
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

/// A relay and a consumer read what they take in the order of its index, and no further than they need: everything else
/// may wait in the same table by the million.
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

/// What is due is read in the order of its index and no further than asked for, and its kinds by one step of the index
/// each, also where the table was empty when it was last analysed, or never was: whoever runs such things asks every
/// second.
#[tokio::test]
async fn what_is_due_is_found_in_the_order_of_its_index() {
    const FILL: &str = "INSERT INTO semel_backlog (operation, tenant, state, service, kind, due)
         SELECT i, 't' || (i % 2), 'failed', 'bank', 'k' || (i % 3), i FROM generate_series(1, 20000) AS i";
    let sql = Sql::new(Dialect::Postgres);
    let waiting = format!("PREPARE waiting AS {}", sql.find_waiting);
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
        for text in [known, FILL, &mode, look::IN_ORDER, &waiting, &kinds] {
            sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut conn).await.unwrap();
        }
        for (execute, looks, by) in [
            ("waiting('bank', 'k1', 't1', NULL, 65)", 5, &["(kind = ", "(tenant = ", "(priority = "][..]),
            (
                "kinds('bank', '', '', NULL, 9)",
                9,
                &["(ROW(kind, tenant) > ROW(kinds_1.kind, kinds_1.tenant))", "(tenant = kinds.tenant)"],
            ),
        ] {
            // Carried out too: else a part of the second one is not told.
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
    let sql = Sql::new(Dialect::Sqlite);
    for (text, by) in [
        (sql.find_waiting, &["(service=? AND kind=? AND tenant=? AND priority=? AND due>?)"][..]),
        (
            sql.find_waiting_kinds,
            &["(service=? AND (kind,tenant)>(?,?))", "(service=? AND kind=? AND tenant=? AND priority=? AND due>?)"],
        ),
    ] {
        let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"));
        let plan: Vec<(i64, i64, i64, String)> = sqlx::query_as(explain).fetch_all(&mut conn).await.unwrap();
        let plan = plan.into_iter().map(|(.., step)| step).collect::<Vec<_>>().join("\n");
        assert!(by.iter().all(|by| plan.contains(&format!("INDEX semel_backlog_queue {by}"))), "{plan}");
        assert!(!plan.contains("TEMP B-TREE"), "{plan}");
    }
}

/// A phase of the sweep reads its rows in the order of their index, from where it left off, and no further than asked
/// for: a million rows may be due, and PostgreSQL may know nothing of the table yet.
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
