//! SQLite: the write-ahead log, and the file when no process uses it.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use semel::{Claim, Outcome, Policy, prelude::*};
use semel_store::{Database, FILE_LOST, Settings};
use semel_testkit::{Kind, Lab, key, request, scope, work};
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::oneshot;

fn file(lab: &Lab, end: &str) -> PathBuf {
    PathBuf::from(format!("{}{end}", lab.url.strip_prefix("sqlite:").unwrap()))
}

async fn prompt(lab: &Lab) -> SqliteConnection {
    SqliteConnectOptions::new().filename(file(lab, "")).connect().await.unwrap()
}

/// Readers that overlap all the time: at every moment one reads.
async fn overlapping_readers(lab: Arc<Lab>, mut stop: oneshot::Receiver<()>) {
    let mut readers = [prompt(&lab).await, prompt(&lab).await];
    for turn in 0.. {
        let begin = "BEGIN; SELECT count(*) FROM semel_leases";
        sqlx::raw_sql(begin).execute(&mut readers[turn % 2]).await.unwrap();
        if turn > 0 {
            sqlx::raw_sql("COMMIT").execute(&mut readers[(turn + 1) % 2]).await.unwrap();
        }
        if stop.try_recv().is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_stays_bounded_under_constant_reads() {
    let lab = Arc::new(Lab::in_real_time(Kind::Sqlite).await);
    let database = lab.open().await;
    let (stop, stopped) = oneshot::channel();
    let readers = tokio::spawn(overlapping_readers(lab.clone(), stopped));
    let mut largest = 0;
    for n in 0..80 {
        let mut request = request(&format!("k{n}"), b"k", Policy::default());
        request.payload = Some(vec![7; 2 << 20].into());
        database.claim(vec![Arc::new(request)]).await.unwrap();
        largest = largest.max(fs::metadata(file(&lab, "-wal")).unwrap().len() >> 20);
    }
    stop.send(()).unwrap();
    readers.await.unwrap();
    // 160 MB were written. The log is emptied at 64 MB, and may contain one more batch by then.
    assert!((32..80).contains(&largest), "it grew to {largest} MB");
}

#[tokio::test]
async fn after_the_last_process_has_closed_it_the_file_alone_is_the_database() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let (first, last) = (lab.ledger().await, lab.ledger().await);
    for (ledger, key) in [(&first, "a"), (&last, "b")] {
        let Claim::Acquired(lease) = ledger.claim(work(key, Policy::default())).await.unwrap() else { panic!() };
        assert_ne!(lease.complete(Outcome::kept(key)).await.unwrap(), semel::Settled::LeaseLost);
    }
    first.store().close().await;
    assert!(last.store().by_key(&scope(), &key("a")).await.unwrap().is_some(), "the other goes on");
    last.store().close().await;
    assert!(!file(&lab, "-wal").exists() && !file(&lab, "-shm").exists());
    assert_eq!(lab.texts("SELECT key FROM semel_operations WHERE state = 'completed' ORDER BY key").await, ["a", "b"]);
    // Later calls get an error, and nothing panics.
    assert!(last.claim(work("c", Policy::default())).await.is_err());
    assert!(last.store().now().await.is_err());
}

#[tokio::test]
async fn a_log_that_is_deleted_under_its_process_is_noticed_and_nothing_committed_is_lost() {
    for end in ["-wal", "-shm", ""] {
        let lab = Lab::in_real_time(Kind::Sqlite).await;
        let database = lab.open().await;
        database.claim(vec![Arc::new(request("before", b"k", Policy::default()))]).await.unwrap();
        database.check_writes().await.unwrap();
        let copy = file(&lab, "-copy");
        fs::rename(file(&lab, end), &copy).unwrap();
        let error = database.claim(vec![Arc::new(request("after", b"k", Policy::default()))]).await.unwrap_err();
        assert_eq!(error.reason(), Some(FILE_LOST), "{end:?}: {error}");
        assert!(error.is_transient(), "{error}");
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(database.check_writes().await.unwrap_err().reason(), Some(FILE_LOST));
        if end == "-wal" {
            // As a killed process leaves it: the log is gone for good.
            fs::remove_file(&copy).unwrap();
            fs::copy(file(&lab, ""), file(&lab, "-alone")).unwrap();
            let alone = SqliteConnectOptions::new().filename(file(&lab, "-alone"));
            let mut alone = alone.connect().await.unwrap();
            let keys: Vec<String> =
                sqlx::query_scalar("SELECT key FROM semel_operations").fetch_all(&mut alone).await.unwrap();
            assert_eq!(keys, ["before"]);
        }
    }
}

#[tokio::test]
async fn a_database_deleted_while_open_is_not_created_again_after_a_clean_stop() {
    // The process writes once more and gets an error, or it stops without having noticed.
    for writes in [true, false] {
        let lab = Lab::in_real_time(Kind::Sqlite).await;
        let database = lab.open().await;
        database.claim(vec![Arc::new(request("before", b"k", Policy::default()))]).await.unwrap();
        let away = file(&lab, "-away");
        fs::rename(file(&lab, ""), &away).unwrap();
        if writes {
            let error = database.claim(vec![Arc::new(request("after", b"k", Policy::default()))]).await.unwrap_err();
            assert!(error.to_string().contains("put the file back"), "{error}");
        }
        database.close().await;
        let refused = Database::open(&lab.url, Settings::default()).await.err().unwrap().to_string();
        assert!(refused.contains("-lost first"), "{refused}");
        assert!(!file(&lab, "").exists(), "nothing is made");
        // An empty file is not a restored database.
        fs::write(file(&lab, ""), "").unwrap();
        assert!(Database::open(&lab.url, Settings::default()).await.is_err());
        fs::rename(&away, file(&lab, "")).unwrap();
        let back = Database::open(&lab.url, Settings::default()).await.unwrap();
        assert!(back.by_key(&scope(), &key("before")).await.unwrap().is_some(), "nothing committed is lost");
        back.close().await;
        assert!(!file(&lab, "-lost").exists(), "the mark has done its work");
    }
}

#[tokio::test]
async fn a_database_truncated_while_open_is_not_created_again() {
    for left in ["", "a few bytes"] {
        let lab = Lab::in_real_time(Kind::Sqlite).await;
        let database = lab.open().await;
        database.claim(vec![Arc::new(request("before", b"k", Policy::default()))]).await.unwrap();
        // In place: the name still belongs to the same file.
        fs::write(file(&lab, ""), left).unwrap();
        let error = database.claim(vec![Arc::new(request("after", b"k", Policy::default()))]).await.unwrap_err();
        assert_eq!(error.reason(), Some(FILE_LOST), "{error}");
        database.close().await;
        let Err(refused) = Database::open(&lab.url, Settings::default()).await else {
            panic!("it created a new database")
        };
        assert!(refused.to_string().contains("Nothing was changed"), "{refused}");
        assert!(fs::metadata(file(&lab, "")).unwrap().len() < 512, "nothing is made of what is left");
    }
}
