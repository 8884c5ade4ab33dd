//! SQLite: a file that others are opening, too.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use semel::{Policy, Store as _};

use semel_store::Database;
use semel_testkit::{Kind, Lab, request};
use sqlx::{ConnectOptions as _, sqlite::SqliteConnectOptions};

fn file(lab: &Lab, end: &str) -> PathBuf {
    PathBuf::from(format!("{}{end}", lab.url.strip_prefix("sqlite:").unwrap()))
}

fn mode(lab: &Lab, end: &str) -> u32 {
    fs::metadata(file(lab, end)).unwrap().mode() & 0o777
}

#[tokio::test]
async fn the_files_of_a_new_database_are_their_owners_alone() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let database = lab.open().await;
    database.claim(vec![Arc::new(request("a", b"k", Policy::default()))]).await.unwrap();
    for end in ["", "-wal", "-shm", "-next"] {
        assert_eq!(mode(&lab, end), 0o600, "semel.db{end}");
    }
}

#[tokio::test]
async fn a_file_that_is_there_keeps_its_mode() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    fs::write(file(&lab, ""), b"").unwrap();
    fs::set_permissions(file(&lab, ""), fs::Permissions::from_mode(0o640)).unwrap();
    let _database = lab.open().await;
    assert_eq!((mode(&lab, ""), mode(&lab, "-wal")), (0o640, 0o640));
}

/// A database that a killed process has left: its log holds what was committed.
async fn left_behind() -> Lab {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let database = lab.open().await;
    database.claim(vec![Arc::new(request("before", b"k", Policy::default()))]).await.unwrap();
    for end in ["", "-wal"] {
        fs::copy(file(&lab, end), file(&lab, &format!("-copy{end}"))).unwrap();
    }
    database.close().await;
    for end in ["", "-wal"] {
        fs::rename(file(&lab, &format!("-copy{end}")), file(&lab, end)).unwrap();
    }
    lab
}

#[tokio::test]
async fn a_log_without_its_database_is_refused_and_left_as_it_is() {
    for (how, database) in [("is not there", None), ("is empty", Some(b""))] {
        let lab = left_behind().await;
        let log = fs::read(file(&lab, "-wal")).unwrap();
        fs::rename(file(&lab, ""), file(&lab, "-moved")).unwrap();
        if let Some(bytes) = database {
            fs::write(file(&lab, ""), bytes).unwrap();
        }
        let refused = Database::open(&lab.url, lab.settings()).await.map(drop).unwrap_err().to_string();
        assert!(refused.contains(how) && refused.contains("-wal") && refused.contains("Put the database"), "{refused}");
        assert_eq!(fs::read(file(&lab, "-wal")).unwrap(), log, "the log was changed");
        // What it says to do helps: nothing was lost.
        fs::rename(file(&lab, "-moved"), file(&lab, "")).unwrap();
        lab.open().await;
        assert_eq!(lab.texts("SELECT key FROM semel_operations").await, ["before"]);
    }
}

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
