//! Fills large tables quickly: rows like those of completed operations, created by the database itself.
//!
//! Indexes other than the primary key are dropped first and created at the end, which takes a third of the time. The
//! result is as the migrations made it, and on disk.

use anyhow::Result;
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection, SqliteConnection, sqlite::SqliteConnectOptions,
};
use tokio::task::JoinSet;

use crate::{
    site::{Backend, Site},
    work::{EVENTS, SCOPE},
};

/// Rows per statement: enough to be cheap per row, few enough to show progress.
const CHUNK: i64 = 250_000;

/// A day, the retention, in microseconds.
const DAY: i64 = 86_400_000_000;

/// Fills an empty ledger with `rows` completed operations of the last day, a part of them labelled.
pub(crate) async fn fill(site: &Site, rows: i64) -> Result<()> {
    match site.backend {
        Backend::Sqlite => fill_sqlite(&site.url, rows).await,
        Backend::Postgres => fill_postgres(&site.url, rows).await,
    }
}

/// Updates the planner's statistics.
pub(crate) async fn analyze(site: &Site) -> Result<()> {
    match site.backend {
        Backend::Sqlite => run_sqlite(&mut open_sqlite(&site.url).await?, "ANALYZE").await,
        Backend::Postgres => {
            let mut connection = PgConnection::connect(&site.url).await?;
            run_postgres(&mut connection, "ANALYZE semel_operations, semel_leases, semel_deltas").await
        }
    }
}

/// Lets PostgreSQL write everything back: afterwards the next change of each page costs most, in every measurement.
pub(crate) async fn checkpoint(site: &Site) -> Result<()> {
    match site.backend {
        Backend::Sqlite => Ok(()),
        Backend::Postgres => run_postgres(&mut PgConnection::connect(&site.url).await?, "CHECKPOINT").await,
    }
}

async fn fill_postgres(url: &str, rows: i64) -> Result<()> {
    let mut connection = PgConnection::connect(url).await?;
    let indexes: Vec<(String, String)> = sqlx::query_as(
        "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index
         WHERE indrelid = 'semel_operations'::regclass AND NOT indisprimary",
    )
    .fetch_all(&mut connection)
    .await?;
    for (name, _) in &indexes {
        run_postgres(&mut connection, &format!("DROP INDEX {name}")).await?;
    }
    let fillfactor: Option<String> = sqlx::query_scalar(
        "SELECT option_value FROM pg_class, pg_options_to_table(reloptions)
         WHERE oid = 'semel_operations'::regclass AND option_name = 'fillfactor'",
    )
    .fetch_optional(&mut connection)
    .await?;
    // No row here will be updated, so the free space for a completion is not needed.
    run_postgres(
        &mut connection,
        "ALTER TABLE semel_operations SET (fillfactor = 100, autovacuum_enabled = off);
         SET maintenance_work_mem = '1GB'; SET max_parallel_maintenance_workers = 2",
    )
    .await?;
    for two in starts(rows).chunks(2) {
        let mut running = JoinSet::new();
        for first in two.iter().copied() {
            let (url, last) = (url.to_owned(), rows.min(first + CHUNK - 1));
            running.spawn(async move {
                let mut connection = PgConnection::connect(&url).await?;
                run_postgres(&mut connection, &postgres_rows(first, last)).await
            });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
    }
    let fillfactor = fillfactor.unwrap_or("100".into());
    run_postgres(&mut connection, &format!("ALTER TABLE semel_operations SET (fillfactor = {fillfactor})")).await?;
    run_postgres(&mut connection, "ALTER TABLE semel_operations RESET (autovacuum_enabled)").await?;
    for (_, definition) in indexes {
        run_postgres(&mut connection, &definition).await?;
    }
    run_postgres(&mut connection, &format!("SELECT setval('semel_fence', {rows})")).await?;
    // Otherwise autovacuum would do this during the measurement. It leaves no statistics.
    run_postgres(&mut connection, "VACUUM semel_operations").await
}

fn postgres_rows(first: i64, last: i64) -> String {
    let [tenant, service, kind] = SCOPE;
    format!(
        "INSERT INTO semel_operations
            (id, tenant, service, kind, key, fingerprint, label1, label3, state, fence, owner, created_at, claimed_at,
             settled_at, expires_at, look_at, outcome, outcome_kept)
         SELECT n, '{tenant}', '{service}', '{kind}', gen_random_uuid()::text, '\\x01'::bytea || sha256(int8send(n)),
                CASE WHEN n % 2 = 0 THEN 'order.event-' || n / 2 % {EVENTS} END,
                CASE WHEN n % 3 = 0 THEN 'process-' || gen_random_uuid() END,
                'completed', n, 'bench:1', at, at, at + 2000, at + 2000 + {DAY}, at + {DAY},
                '\\x0100'::bytea || repeat('o', 100)::bytea, TRUE
         FROM (SELECT n, (extract(epoch FROM now()) * 1000000)::bigint - 1000000000 + n AS at
               FROM generate_series({first}, {last}) AS n) AS new"
    )
}

async fn fill_sqlite(url: &str, rows: i64) -> Result<()> {
    let mut connection = open_sqlite(url).await?;
    // No journal and no fsync: a failed fill is thrown away. The ledger opens the file in its own mode again.
    run_sqlite(
        &mut connection,
        "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
         PRAGMA cache_size = -1000000; PRAGMA temp_store = MEMORY; PRAGMA threads = 2",
    )
    .await?;
    let indexes: Vec<(String, String)> = sqlx::query_as(
        "SELECT name, sql FROM sqlite_schema
         WHERE type = 'index' AND tbl_name = 'semel_operations' AND sql IS NOT NULL",
    )
    .fetch_all(&mut connection)
    .await?;
    for (name, _) in &indexes {
        run_sqlite(&mut connection, &format!("DROP INDEX {name}")).await?;
    }
    for first in starts(rows) {
        run_sqlite(&mut connection, &sqlite_rows(first, rows.min(first + CHUNK - 1))).await?;
    }
    for (_, definition) in indexes {
        run_sqlite(&mut connection, &definition).await?;
    }
    run_sqlite(&mut connection, &format!("UPDATE semel_meta SET fence = {rows}")).await?;
    run_sqlite(&mut connection, "PRAGMA synchronous = FULL; PRAGMA journal_mode = WAL").await?;
    connection.close().await?;
    // The ledger's fsyncs should not have to write the rest of this.
    let path = url.strip_prefix("sqlite:").unwrap_or(url).to_owned();
    tokio::task::spawn_blocking(move || std::fs::File::open(path)?.sync_all()).await??;
    Ok(())
}

fn sqlite_rows(first: i64, last: i64) -> String {
    let [tenant, service, kind] = SCOPE;
    format!(
        "WITH RECURSIVE numbers(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM numbers WHERE n < {last}),
              new AS MATERIALIZED (SELECT n, lower(hex(randomblob(16))) AS a, lower(hex(randomblob(16))) AS b,
                             unixepoch() * 1000000 - 1000000000 + n AS at FROM numbers)
         INSERT INTO semel_operations
            (id, tenant, service, kind, key, fingerprint, label1, label3, state, fence, owner, created_at, claimed_at,
             settled_at, expires_at, look_at, outcome, outcome_kept)
         SELECT n, '{tenant}', '{service}', '{kind}',
                substr(a, 1, 8) || '-' || substr(a, 9, 4) || '-' || substr(a, 13, 4) || '-' || substr(a, 17, 4) || '-'
                    || substr(a, 21),
                unhex('01' || b || b),
                CASE WHEN n % 2 = 0 THEN 'order.event-' || n / 2 % {EVENTS} END,
                CASE WHEN n % 3 = 0 THEN 'process-' || b END,
                'completed', n, 'bench:1', at, at, at + 2000, at + 2000 + {DAY}, at + {DAY},
                CAST(x'0100' || printf('%.*c', 100, 'o') AS BLOB), TRUE
         FROM new"
    )
}

fn starts(rows: i64) -> Vec<i64> {
    (1..=rows).step_by(CHUNK as usize).collect()
}

async fn open_sqlite(url: &str) -> Result<SqliteConnection> {
    Ok(url.parse::<SqliteConnectOptions>()?.disable_statement_logging().connect().await?)
}

async fn run_postgres(connection: &mut PgConnection, sql: &str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await?;
    Ok(())
}

async fn run_sqlite(connection: &mut SqliteConnection, sql: &str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await?;
    Ok(())
}
