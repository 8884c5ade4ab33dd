//! SQLite: a file that others are opening, too.

use std::time::Duration;

use semel_store::Database;
use semel_testkit::{Kind, Lab};
use sqlx::{ConnectOptions as _, sqlite::SqliteConnectOptions};

/// It turns to write-ahead logging when it is first opened, and SQLite tells whoever comes second at once that it is
/// locked.
#[tokio::test]
async fn a_new_file_that_another_process_is_writing_is_waited_for() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let path = lab.url.strip_prefix("sqlite:").unwrap();
    let mut other = SqliteConnectOptions::new().filename(path).create_if_missing(true).connect().await.unwrap();
    sqlx::raw_sql("CREATE TABLE others (n); BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    let (url, settings) = (lab.url.clone(), lab.settings());
    let opening = tokio::spawn(async move { Database::open(&url, settings).await.map(drop) });
    tokio::time::sleep(Duration::from_millis(200)).await;
    sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    opening.await.unwrap().unwrap();
}
