//! SQLite: a file that other processes open, too.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use semel::{Policy, prelude::*};

use semel_store::{Database, repair_clock};
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

#[tokio::test]
async fn a_new_file_that_links_lead_to_is_its_owners_alone() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    std::os::unix::fs::symlink("link", file(&lab, "")).unwrap();
    std::os::unix::fs::symlink("target", file(&lab, "").with_file_name("link")).unwrap();
    let _database = lab.open().await;
    assert!(file(&lab, "").with_file_name("target").is_file());
    assert_eq!(mode(&lab, ""), 0o600);
}

/// The locks that this process has on a file. Linux lists them by process and inode.
#[cfg(target_os = "linux")]
fn locks(path: &std::path::Path) -> Vec<String> {
    let (process, inode) = (std::process::id().to_string(), format!(":{}", fs::metadata(path).unwrap().ino()));
    let all = fs::read_to_string("/proc/locks").unwrap();
    let ours = |line: &&str| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.contains(&process.as_str()) && words.iter().any(|word| word.ends_with(&inode))
    };
    all.lines().filter(ours).map(str::to_owned).collect()
}

/// When a process closes any descriptor of a file, it loses all its locks on it. Without them, the last other process
/// to close the database would delete the log that this one still writes to.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_second_opening_in_one_process_keeps_the_locks_of_the_first() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let _first = lab.open().await;
    assert_ne!(locks(&file(&lab, "")), [""; 0], "a database that is open has a lock");
    let _second = lab.open().await;
    assert_ne!(locks(&file(&lab, "")), [""; 0], "the lock is lost");
}

/// A database that a killed process has left: its log has committed data.
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
    for (how, database) in [("is missing", None), ("is empty", Some(b""))] {
        let lab = left_behind().await;
        let log = fs::read(file(&lab, "-wal")).unwrap();
        fs::rename(file(&lab, ""), file(&lab, "-moved")).unwrap();
        if let Some(bytes) = database {
            fs::write(file(&lab, ""), bytes).unwrap();
        }
        let refused = Database::open(&lab.url, lab.settings()).await.map(drop).unwrap_err().to_string();
        assert!(refused.contains(how) && refused.contains("-wal") && refused.contains("Put the database"), "{refused}");
        let by = ("ana", "the clock was wrong");
        let repair = repair_clock(&lab.url, lab.clock.clone(), by).await.map(drop).unwrap_err().to_string();
        assert_eq!(repair, refused);
        assert_eq!(fs::read(file(&lab, "-wal")).unwrap(), log, "the log was changed");
        // The advice of the error helps: nothing was lost.
        fs::rename(file(&lab, "-moved"), file(&lab, "")).unwrap();
        lab.open().await;
        assert_eq!(lab.texts("SELECT key FROM semel_operations").await, ["before"]);
    }
}

/// The first opening switches to write-ahead logging, and SQLite answers the second process "locked" at once.
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
