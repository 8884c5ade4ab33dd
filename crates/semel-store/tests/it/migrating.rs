//! PostgreSQL: a migration that has to wait for a lock delays no other statement for long.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use semel_store::{Database, Settings, migrator};
use semel_testkit::{Kind, Lab};
use sqlx::{Connection as _, PgConnection};
use tokio::time::timeout;

const MADE: (&str, &str) = ("0001_made", "CREATE TABLE made (n INT); INSERT INTO made VALUES (1)");
const WIDER: (&str, &str) = ("0002_wider", "ALTER TABLE made ADD COLUMN more INT");

async fn migrate(db: &Database, files: &[(&'static str, &'static str)]) -> semel::Result<()> {
    db.migrate("made_migrations", migrator(files), migrator(files)).await
}

/// A long-running reader of a table: a dump, a report.
async fn long_reader(lab: &Lab) -> PgConnection {
    let mut reader = PgConnection::connect(&lab.url).await.unwrap();
    let read = "SET application_name = 'pg_dump'; BEGIN; SELECT n FROM made";
    sqlx::raw_sql(read).execute(&mut reader).await.unwrap();
    reader
}

/// Until a migration waits for the reader.
async fn until_it_waits(lab: &Lab) {
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'made'::regclass";
    while lab.number(waiting).await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_behind_a_long_reader_lets_others_pass_and_is_made_once() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let (one, other) = (lab.open().await, lab.open().await);
    migrate(&one, &[MADE]).await.unwrap();
    let mut reader = long_reader(&lab).await;
    let migrating = [one, other].map(|db| tokio::spawn(async move { migrate(&db, &[MADE, WIDER]).await }));
    let watched = async {
        for _ in 0..2 {
            until_it_waits(&lab).await;
            assert_eq!(lab.number("SELECT count(*) FROM made").await, 1, "others pass");
        }
    };
    timeout(Duration::from_secs(60), watched).await.expect("other statements wait as long as the reader runs");
    assert!(migrating.iter().all(|one| !one.is_finished()), "the reader is still reading");
    sqlx::raw_sql("COMMIT").execute(&mut reader).await.unwrap();
    for one in migrating {
        one.await.unwrap().unwrap();
    }
    assert_eq!(lab.number("SELECT count(more) FROM made").await, 0);
    assert_eq!(lab.number("SELECT count(*) FROM made_migrations").await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_gives_up_names_the_lock_holder() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let settings = Settings { migration_patience: Duration::from_millis(1), ..lab.settings() };
    let db = Database::open(&lab.url, settings).await.unwrap();
    migrate(&db, &[MADE]).await.unwrap();
    let _reader = long_reader(&lab).await;
    let (error, text) = loop {
        let error = migrate(&db, &[MADE, WIDER]).await.unwrap_err();
        let text = error.to_string();
        // Those of other tests, in the same database.
        if !text.contains("another node is migrating") {
            break (error, text);
        }
    };
    assert!(error.is_transient(), "{text}");
    assert!(text.contains("migration 2 waits for pg_dump (pid "), "{text}");
    assert_eq!(lab.number("SELECT count(*) FROM made_migrations").await, 1);
}
