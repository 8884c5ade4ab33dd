//! The stores themselves: what they refuse, what people can read in them, how they open.

use std::time::Duration;

use semel::{Error, Policy, State};
use semel_store::{Database, Settings};

use super::tools::*;
use crate::{Kind, Lab, work};

/// The tables refuse invalid states.
pub async fn the_tables_refuse_nonsense(lab: Lab) {
    let ledger = lab.ledger().await;
    for text in ["completed", "failed", "doubted", "running"] {
        let lease = acquire(&ledger, work(text, Policy::default())).await;
        match text {
            "completed" => assert_eq!(lease.complete(done("x")).await.unwrap(), SETTLED),
            "failed" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            "doubted" => assert_eq!(lease.doubt("?").await.unwrap(), SETTLED),
            _ => drop(lease),
        }
    }
    let nonsense = [
        ("a completed one without an outcome", "outcome = NULL, outcome_kept = NULL WHERE state = 'completed'"),
        ("an outcome without outcome_kept", "outcome_kept = NULL WHERE state = 'completed'"),
        ("a completed one that was never settled", "settled_at = NULL, expires_at = NULL WHERE state = 'completed'"),
        ("an outcome of a failed one", "outcome = fingerprint, outcome_kept = (1 = 1) WHERE state = 'failed'"),
        ("completed without an outcome", "state = 'completed' WHERE state = 'failed'"),
        ("doubt that expires", "expires_at = 1 WHERE state = 'in_doubt'"),
        ("doubt without a time", "settled_at = NULL WHERE state = 'in_doubt'"),
        ("a running one that has settled", "settled_at = 1 WHERE state = 'processing'"),
        ("a running one that expires", "expires_at = 1 WHERE state = 'processing'"),
        ("an unknown state", "state = 'done' WHERE state = 'failed'"),
        ("no state", "state = NULL WHERE state = 'failed'"),
        ("an empty key", "key = '' WHERE state = 'failed'"),
        ("a fence that went back", "fence = id - 1 WHERE state = 'failed'"),
        ("fewer than no failures", "failures = -1 WHERE state = 'failed'"),
        ("two with one key", "key = 'completed' WHERE state = 'failed'"),
    ];
    for (what, sql) in nonsense {
        let refused = lab.execute(&format!("UPDATE semel_operations SET {sql}")).await;
        assert!(matches!(refused, Err(sqlx::Error::Database(_))), "{what} was accepted: {refused:?}");
    }
    let long = format!("UPDATE semel_operations SET key = '{}' WHERE state = 'failed'", "é".repeat(128));
    assert!(lab.execute(&long).await.is_err(), "a key of 256 bytes was accepted");
    assert!(lab.execute("UPDATE semel_leases SET deadline = run_until + 1").await.is_err(), "a lease past its run");
    assert!(lab.execute("UPDATE semel_backlog SET state = 'completed'").await.is_err(), "a backlog of what is done");
    assert!(lab.execute("INSERT INTO semel_repeats VALUES (1, 'other', '{}')").await.is_err(), "an unknown repeat");
    // The statements are otherwise correct: a valid one is accepted.
    assert_eq!(
        lab.execute("UPDATE semel_operations SET failures = 2, expires_at = 1 WHERE state = 'failed'").await.unwrap(),
        1
    );
}

/// People can read times and payloads at the database's prompt.
pub async fn a_person_can_read_the_rows(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("k", Policy::default()).payload(r#"{"to": "José"}"#)).await;
    let see = async |column: &str| {
        let sql = format!("SELECT CAST({column} AS TEXT) FROM semel_operations_readable WHERE key = 'k'");
        lab.texts(&sql).await.remove(0)
    };
    assert_eq!(see("payload").await, r#"{"to": "José"}"#);
    assert!(["0", "false"].contains(&see("pinned").await.as_str()), "{}", see("pinned").await);
    // The test's clock began at 2020-09-13 12:26:40 UTC.
    assert!(see("created_at").await.starts_with("2020-09-13"), "{}", see("created_at").await);
    assert!(see("created_at").await.contains("12:26:40"));
    assert!(see("lease_ends_at").await.contains("12:27:10"));
    lab.pass(Duration::from_micros(1_500_000));
    assert_eq!(lease.checkpoint("row 7").await.unwrap(), semel::Held::Yes);
    assert_eq!(see("checkpoint").await, "row 7");
    assert_eq!(lease.complete(done("thanks")).await.unwrap(), SETTLED);
    assert_eq!(see("outcome").await, "thanks");
    assert!(see("settled_at").await.contains("12:26:41.5"), "{}", see("settled_at").await);
    assert_eq!(acquire(&ledger, work("f", Policy::default())).await.fail(failure("no luck")).await.unwrap(), SETTLED);
    assert_eq!(lab.texts("SELECT error FROM semel_operations_readable WHERE state = 'failed'").await, ["no luck"]);
    // Bytes that are not text do not break the listing.
    drop(acquire(&ledger, work("b", Policy::default()).payload(vec![0xff, 0, b'x'])).await);
    assert_eq!(
        lab.texts("SELECT key FROM semel_operations_readable WHERE payload IS NOT NULL ORDER BY key").await,
        ["b", "k"]
    );
    assert_eq!(lab.number("SELECT count(*) FROM semel_operations_readable").await, 3);
}

/// Many nodes that open a fresh database together migrate it once, and all of them can work.
pub async fn nodes_that_start_together_migrate_once(lab: Lab) {
    let mut nodes = tokio::task::JoinSet::new();
    for n in 0..8 {
        let (url, settings) = (lab.url.clone(), lab.settings());
        nodes.spawn(async move {
            let store = Database::open(&url, settings).await.unwrap();
            let ledger = semel::Ledger::new(store, semel::Options::default()).unwrap();
            ask(&ledger, work(&format!("k{}", n % 2), Policy::default())).await
        });
    }
    let words = soon(nodes.join_all()).await;
    assert_eq!(words.iter().filter(|word| **word == "acquired").count(), 2);
    let migrations = lab.number("SELECT count(*) FROM semel_migrations").await;
    assert_eq!(migrations, lab.number("SELECT count(DISTINCT version) FROM semel_migrations WHERE success").await);
    drop(lab.open().await);
    assert_eq!(lab.number("SELECT count(*) FROM semel_migrations").await, migrations, "opening again migrates nothing");
}

/// A node that does not know a migration of the database reports it, with the remedy; it changes nothing. This holds
/// for the tables of the ledger and of the services.
pub async fn an_older_node_on_a_newer_schema_is_refused_and_changes_nothing(lab: Lab) {
    let refused = |error: Error, table: &str, unknown: &str, newest: &str| {
        let text = error.to_string();
        assert!(matches!(error, Error::Invalid(_)), "{text}");
        assert!([table, unknown, newest, "Upgrade this program"].iter().all(|part| text.contains(part)), "{text}");
    };
    let db = lab.open().await;
    let known = lab.number("SELECT max(version) FROM semel_migrations").await;
    let (a, b, c) =
        (("0001_a", "CREATE TABLE a (n INT)"), ("0002_b", "CREATE TABLE b (n INT)"), ("0003_c", "DROP TABLE a"));
    let migrate = async |files: &[(&'static str, &'static str)]| {
        db.migrate("other_migrations", semel_store::migrator(files), semel_store::migrator(files)).await
    };
    migrate(&[a, b]).await.unwrap();
    // It knows the first and has a third, but not the second.
    refused(migrate(&[a, c]).await.unwrap_err(), "other_migrations", "migration 2", "up to 3");
    assert_eq!(lab.number("SELECT count(*) FROM other_migrations").await, 2);
    assert_eq!(lab.number("SELECT count(*) FROM a").await, 0, "the table is still there");

    lab.execute("INSERT INTO semel_migrations SELECT 9999, description, installed_on, success, checksum, execution_time FROM semel_migrations WHERE version = 1").await.unwrap();
    let error = Database::open(&lab.url, lab.settings()).await.err().expect("it must be refused");
    refused(error, "semel_migrations", "migration 9999", &format!("up to {known}"));
}

/// A migration whose comments were reworded is the one that the database knows. Another text is another migration.
pub async fn a_reworded_migration_is_known_by_its_first_checksum(lab: Lab) {
    const FIRST: &str = "-- Rows.\nCREATE TABLE a (n INT);\n";
    const REWORDED: &str = "-- Checksum of the first text: \
        e396c5db51518649c98d42bde0b6579167a1ca822d13664a9b47dbd0e1f7f45fa6530030a47f2db6b799e2d82285c384
-- The rows of a.
CREATE TABLE a (n INT);
";
    let db = lab.open().await;
    let migrate = async |text: &'static str| {
        let files = [("0001_a", text)];
        db.migrate("other_migrations", semel_store::migrator(&files), semel_store::migrator(&files)).await
    };
    migrate(FIRST).await.unwrap();
    migrate(REWORDED).await.unwrap();
    assert_eq!(lab.number("SELECT count(*) FROM other_migrations").await, 1, "it is not run again");
    // A node that has the first text opens a database that was made with the second.
    lab.execute("DROP TABLE a").await.unwrap();
    lab.execute("DROP TABLE other_migrations").await.unwrap();
    migrate(REWORDED).await.unwrap();
    migrate(FIRST).await.unwrap();
    let error = migrate("-- The rows of a.\nCREATE TABLE a (n INT);\n").await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert!(error.to_string().contains("migration 1 of other_migrations is not the one"), "{error}");
}

/// A database that stored the checksums of the released migrations opens, although their comments were reworded.
pub async fn a_database_with_the_released_checksums_opens(lab: Lab) {
    // SHA-384 of 0001_ledger and 0004_due as they were released.
    let [ledger, due] = match lab.kind() {
        Kind::Postgres => [
            "decode('1058f5a5ec004e0baa9d5b91d14cdc70a61f71ae54fa44d2c41dac60fc2229c9\
                     a7cc67e1aefbdd32c52a7b2593d13968', 'hex')",
            "decode('4f31271d1d9864217f115cf15e4a87f9fe70b83aba839129e50523327bdff744\
                     ef60361db2411246383e165da5d08ae3', 'hex')",
        ],
        Kind::Sqlite => [
            "x'1f1437f4b51b6f9a4ae406cc9aeadfeb7bc476d05a2efc29c184e86bc0231b0fe3c34e4ea281b1821159e54d29be9b41'",
            "x'3e924cd69204840acdfb29017eef96ce57aab49f8450c3490184ee06872c5080b7ff9123e6285dbd66981970c81d74ce'",
        ],
    };
    let store = async |version: i64, checksum: &str| {
        let sql = format!("UPDATE semel_migrations SET checksum = {checksum} WHERE version = {version}");
        assert_eq!(lab.execute(&sql).await.unwrap(), 1);
    };
    drop(lab.open().await);
    store(1, ledger).await;
    store(4, due).await;
    drop(lab.open().await);
    store(4, ledger).await;
    let error = Database::open(&lab.url, lab.settings()).await.err().expect("it must be refused");
    assert!(error.to_string().contains("migration 4 of semel_migrations is not the one"), "{error}");
}

/// Stored data is there for the next process: a database can be closed and opened again.
pub async fn a_database_can_be_opened_again(lab: Lab) {
    let ledger = lab.ledger().await;
    let mut last = semel::Fence(0);
    for n in 0..3 {
        let ledger = lab.ledger().await;
        let lease = acquire(&ledger, work(&format!("k{n}"), Policy::default()).payload("data")).await;
        assert!(lease.fence() > last, "fences go on where they were");
        last = lease.fence();
        assert_eq!(lease.complete(done("outcome")).await.unwrap(), SETTLED);
        ledger.stop(Duration::ZERO).await;
    }
    for n in 0..3 {
        let op = row(&ledger, &format!("k{n}")).await;
        assert_eq!(
            (op.state, op.outcome, op.payload.as_deref()),
            (State::Completed, Some(done("outcome")), Some(&b"data"[..]))
        );
    }
}

/// An unusable URL is refused with the reason, at once.
pub async fn a_wrong_url_is_refused_with_the_reason(lab: Lab) {
    let refused = async |url: &str| {
        let opened = soon(Database::open(url, Settings::default())).await;
        opened.err().unwrap_or_else(|| panic!("{url} was accepted"))
    };
    for url in ["", "ledger.db", "mysql://localhost/x", "sqlite", "SQLITE:x.db", "/tmp/x.db"] {
        let error = refused(url).await;
        assert!(matches!(&error, Error::Invalid(why) if why.contains("sqlite:PATH")), "{url}: {error}");
    }
    match lab.kind() {
        Kind::Sqlite => {
            for url in ["sqlite::memory:", "sqlite:", "sqlite://", "sqlite:file.db?mode=memory"] {
                let error = refused(url).await;
                assert!(matches!(&error, Error::Invalid(why) if why.contains("loses data")), "{url}: {error}");
            }
            let missing = lab.url.replace("ledger.db", "no/such/folder/ledger.db");
            let error = refused(&missing).await;
            assert!(error.to_string().contains("no/such/folder/ledger.db"), "{error}");
            assert!(error.to_string().contains("unable to open"), "{error}");
        }
        Kind::Postgres => {
            let error = refused("postgres://localhost:notaport/x").await;
            assert!(matches!(error, Error::Invalid(_)), "{error}");
            // No process listens on port 1.
            let error = refused("postgres://semel@127.0.0.1:1/semel").await;
            assert!(matches!(error, Error::Unavailable(_)), "{error}");
            let error = refused(&lab.url.replace("/semel?", "/no_such_database?")).await;
            assert!(error.to_string().contains("no_such_database"), "{error}");
        }
    }
}
