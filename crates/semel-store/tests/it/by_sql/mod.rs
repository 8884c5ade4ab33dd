//! PostgreSQL: operations and messages of programs without the library, by the functions of migration 15.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod enqueue;
mod known;
mod programs;
mod publish;
mod rights;
mod wakes;

use std::time::Duration;

use semel::{Ledger, Scope};
use semel_store::Database;
use semel_testkit::{Kind, Lab};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

/// A database that a node has opened, in real time.
struct Place {
    lab: Lab,
    ledger: Ledger<Database>,
}

impl Place {
    async fn new() -> Self {
        let lab = Lab::in_real_time(Kind::Postgres).await;
        let ledger = lab.ledger().await;
        Self { lab, ledger }
    }

    /// A program's connection.
    async fn program(&self) -> PgConnection {
        PgConnection::connect(&self.lab.url).await.unwrap()
    }

    async fn schema(&self) -> String {
        self.lab.texts("SELECT current_schema()::text").await.remove(0)
    }

    /// Whether the counters agree with the rows.
    async fn counters_are_exact(&self) {
        let wrong = self.lab.texts(
            "WITH counts AS (
                 SELECT tenant, service, kind, label1, label2, from_state, to_state, n FROM semel_deltas
                 UNION ALL SELECT tenant, service, kind, label1, label2, from_state, to_state, n FROM semel_counters
             ), sums AS (
                 SELECT tenant, service, kind, label1, label2, to_state AS state, n FROM counts WHERE to_state <> ''
                 UNION ALL SELECT tenant, service, kind, label1, label2, from_state, -n FROM counts WHERE from_state <> ''
                 UNION ALL SELECT tenant, service, kind, coalesce(label1, ''), coalesce(label2, ''), state, -1
                           FROM semel_operations
             )
             SELECT concat_ws(' ', tenant, service, kind, label1, label2, state, sum(n)) FROM sums
             GROUP BY tenant, service, kind, label1, label2, state HAVING sum(n) <> 0",
        );
        assert_eq!(wrong.await, Vec::<String>::new(), "counters that differ from the rows");
    }
}

/// The scope of these tests.
fn mail() -> Scope {
    Scope::new("default", "shop", "mail").unwrap()
}

/// Runs statements.
async fn run(conn: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await.unwrap();
}

/// The row of an enqueue: the answer, the operation, and whether it was created.
async fn enqueue(conn: &mut PgConnection, arguments: &str) -> (String, i64, bool) {
    let sql = format!("SELECT answer, operation, created FROM semel_enqueue({arguments})");
    sqlx::query_as(AssertSqlSafe(sql)).fetch_one(conn).await.unwrap()
}

/// The answer to an enqueue.
async fn answer(conn: &mut PgConnection, arguments: &str) -> String {
    enqueue(conn, arguments).await.0
}

/// The id of a published message.
async fn publish(conn: &mut PgConnection, arguments: &str) -> String {
    let sql = format!("SELECT semel_publish({arguments})::text");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(conn).await.unwrap()
}

/// The SQLSTATE and the message of a refusal.
async fn refused(conn: &mut PgConnection, sql: &str) -> (String, String) {
    let error = sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await.expect_err(sql);
    let sqlx::Error::Database(error) = error else { panic!("{sql}: {error}") };
    (error.code().unwrap().into_owned(), error.message().to_owned())
}

/// Awaits something that must happen soon. A broken law fails instead of hanging.
async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), what).await.expect("this should have happened long ago")
}
