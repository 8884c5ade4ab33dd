//! SQLite: a host's clock that was ahead, and came back.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use semel::{Claim, Policy, prelude::*};
use semel_store::{Clock, Database, Settings, repair_clock};
use semel_testkit::{Kind, Lab, work};

const HOUR: Duration = Duration::from_secs(3600);

fn policy() -> Policy {
    Policy { lease: Duration::from_secs(30), ..Policy::default() }
}

/// A file whose host was an hour ahead when it was written, and is right again.
async fn was_ahead() -> Lab {
    let lab = Lab::new(Kind::Sqlite).await;
    let ledger = lab.ledger().await;
    lab.clock.set(Lab::START + HOUR);
    drop(ledger.claim(work("seen", policy())).await.unwrap());
    lab.clock.set(Lab::START);
    lab
}

#[tokio::test]
async fn a_clock_set_back_revives_no_expired_lease() {
    let lab = Lab::new(Kind::Sqlite).await;
    let ledger = lab.ledger().await;
    let Claim::Acquired(mut zombie) = ledger.claim(work("k", policy())).await.unwrap() else { panic!() };
    lab.pass(policy().lease);
    // A write that reads the time.
    assert!(matches!(ledger.claim(work("other", policy())).await.unwrap(), Claim::Acquired(_)));
    lab.clock.set(Lab::START);
    assert_eq!(ledger.store().now().await.unwrap(), Lab::START + policy().lease);
    assert_eq!(zombie.renew().await.unwrap(), semel::Held::LeaseLost);
    // Another process, whose clock was never wrong, sees it too.
    let settings = Settings { clock: Clock::manual(semel::Timestamp::from_micros(0)), ..Settings::default() };
    let behind = Database::open(&lab.url, settings).await.unwrap();
    assert_eq!(behind.now().await.unwrap(), Lab::START + policy().lease);
    let behind = semel::Ledger::new(behind, semel::Options::default()).unwrap();
    let Claim::Acquired(owner) = behind.claim(work("k", policy())).await.unwrap() else { panic!() };
    assert_eq!(owner.operation().attempt(), 2);
    assert!(owner.operation().created_at <= owner.operation().claimed_at);
}

#[tokio::test]
async fn leases_expire_after_a_clock_that_was_ahead_came_back() {
    let lab = was_ahead().await;
    let (ledger, other) = (lab.ledger().await, lab.ledger().await);
    let Claim::Acquired(lease) = ledger.claim(work("k", policy())).await.unwrap() else { panic!("the key is free") };
    let operation = lease.operation().id;
    assert!(matches!(other.claim(work("k", policy())).await.unwrap(), Claim::InFlight(_)));
    assert_eq!(other.store().clock_is_ahead(), Some(HOUR));

    // A tenth longer than a lease, and not an hour.
    lab.pass(Duration::from_secs(32));
    assert!(matches!(other.claim(work("k", policy())).await.unwrap(), Claim::InFlight(_)), "it expired early");
    lab.pass(Duration::from_secs(2));
    let Claim::Acquired(next) = other.claim(work("k", policy())).await.unwrap() else { panic!("it never expired") };
    assert_eq!(next.operation().id, operation);
    drop((lease, next));
}

#[tokio::test]
async fn a_time_that_is_ahead_never_goes_back_and_meets_the_hosts_clock_again() {
    let lab = was_ahead().await;
    let database = lab.open().await;
    let mut last = database.now().await.unwrap();
    assert_eq!(last, Lab::START + HOUR);
    for _ in 0..11 {
        lab.pass(HOUR);
        let now = database.now().await.unwrap();
        assert!(now > last, "{now} after {last}");
        last = now;
    }
    assert_eq!((last, database.clock_is_ahead()), (Lab::START + 11 * HOUR, None));
}

#[tokio::test]
async fn time_that_is_ahead_passes_also_while_no_process_has_the_file_open() {
    let lab = was_ahead().await;
    // The first process to open the file finds the mark, and stores it for later ones.
    lab.open().await.close().await;
    lab.pass(Duration::from_secs(600));
    let now = lab.open().await.now().await.unwrap();
    assert_eq!(now, Lab::START + HOUR + Duration::from_secs(540));
}

#[tokio::test]
async fn a_restart_of_the_host_neither_stops_the_time_nor_sets_it_back() {
    let lab = was_ahead().await;
    lab.open().await.close().await;
    lab.pass(Duration::from_secs(600));
    // Another start of the host: its boot clock begins anew.
    let host = Clock::manual(Lab::START + Duration::from_secs(600));
    let settings = Settings { clock: host.clone(), ..Settings::default() };
    let database = Database::open(&lab.url, settings).await.unwrap();
    let now = database.now().await.unwrap();
    assert!(now >= Lab::START + HOUR, "{now}");
    host.advance(Duration::from_secs(100));
    assert_eq!(database.now().await.unwrap(), now + Duration::from_secs(90));
}

#[tokio::test]
async fn a_repair_sets_the_time_back_to_the_hosts_clock_and_is_audited() {
    let lab = was_ahead().await;
    let ledger = lab.ledger().await;
    // Backs off until a time of the wrong clock.
    let Claim::Acquired(lease) = ledger.claim(work("failed", policy())).await.unwrap() else { panic!() };
    let delay = Duration::from_secs(100);
    let failed = semel::Failure { error: "no".into(), retry: semel::Retry::After(delay) };
    assert_ne!(lease.fail(failed).await.unwrap(), semel::Settled::LeaseLost);

    let repair = async || repair_clock(&lab.url, lab.clock.clone(), ("ana", "the clock was wrong")).await;
    let refused = repair().await.unwrap_err().to_string();
    assert!(refused.contains("another process"), "{refused}");
    // "seen" is still leased.
    ledger.store().close().await;
    let refused = repair().await.unwrap_err().to_string();
    assert!(refused.contains("1 operations are leased"), "{refused}");
    lab.pass(Duration::from_secs(60));
    let ledger = lab.ledger().await;
    ledger.sweep().await.unwrap();
    ledger.store().close().await;

    let repaired = repair().await.unwrap();
    assert_eq!(repaired.after, Lab::START + Duration::from_secs(60));
    assert_eq!(repaired.before, Lab::START + HOUR + Duration::from_secs(54));
    let audit = lab.texts("SELECT actor || ' ' || action || ' ' || reason FROM semel_audit").await;
    assert_eq!(audit, ["ana clock.repair the clock was wrong"]);

    let ledger = lab.ledger().await;
    assert_eq!(ledger.store().now().await.unwrap(), repaired.after);
    assert_eq!(ledger.store().clock_is_ahead(), None);
    // The rest of its delay, not an hour more.
    assert!(matches!(ledger.claim(work("failed", policy())).await.unwrap(), Claim::NotYet(_)));
    lab.pass(delay);
    assert!(matches!(ledger.claim(work("failed", policy())).await.unwrap(), Claim::Acquired(_)));
    // Nothing to repair is no error.
    ledger.store().close().await;
    assert!(repair().await.unwrap().by.is_zero());
}
