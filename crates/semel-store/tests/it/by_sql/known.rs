//! Enqueues of keys that exist.

use std::time::Duration;

use semel::{
    Claim, Fingerprint, Lease, OnLost, Outcome, Policy, Settled, Work,
    machine::{Failure, Retry},
    prelude::*,
    store::Commit,
};
use semel_store::Database;
use semel_testkit::key;

use super::{Place, answer, enqueue, mail, refused, run};

fn work(name: &str, policy: &Policy) -> Work {
    Work::new(mail(), key(name), Fingerprint::of_bytes(b"x")).policy(policy.clone()).payload("x")
}

async fn lease(place: &Place, name: &str, policy: &Policy) -> Lease<Database> {
    match place.ledger.claim(work(name, policy)).await.unwrap() {
        Claim::Acquired(lease) => lease,
        other => panic!("{name}: {}", other.word()),
    }
}

fn failed() -> Failure {
    Failure { error: "no".into(), retry: Retry::Backoff }
}

/// The answer that the library gives in a transaction.
async fn of_library(place: &Place, name: &str, policy: &Policy, payload: &[u8]) -> String {
    let tx = place.ledger.store().begin(Duration::from_secs(5)).await.unwrap();
    let again = Work::new(mail(), key(name), Fingerprint::of_bytes(payload)).policy_of_worker(policy.clone());
    let word = place.ledger.enqueue_in(&tx, vec![again]).await.unwrap()[0].word().to_owned();
    assert!(matches!(place.ledger.store().commit(&tx).await, Commit::Done));
    word
}

#[tokio::test]
async fn a_known_key_is_answered_as_the_library_answers_it_and_is_not_changed() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let (plain, once) = (Policy::default(), Policy { max_attempts: Some(1), ..Policy::default() });
    let held = Policy { on_lost: OnLost::Hold, ..Policy::default() };
    let settled = Settled::Yes { successor: false };

    assert_eq!(answer(&mut program, "'shop', 'mail', 'waiting', 'x'").await, "enqueued");
    let running = lease(&place, "in_flight", &plain).await;
    assert_eq!(lease(&place, "replay", &plain).await.complete(Outcome::kept("done")).await.unwrap(), settled);
    assert_eq!(lease(&place, "not_yet", &plain).await.fail(failed()).await.unwrap(), settled);
    assert_eq!(
        lease(&place, "parked", &plain).await.fail(Failure { retry: Retry::Never, ..failed() }).await.unwrap(),
        settled
    );
    assert_eq!(lease(&place, "exhausted", &once).await.fail(failed()).await.unwrap(), settled);
    assert_eq!(lease(&place, "in_doubt", &held).await.doubt("who knows").await.unwrap(), settled);
    // Enqueued under a policy of its own, which counts and not that of the next enqueue.
    place.ledger.enqueue(work("own policy", &once)).await.unwrap();
    assert_eq!(lease(&place, "own policy", &plain).await.fail(failed()).await.unwrap(), settled);
    assert_eq!(lease(&place, "released", &plain).await.release(Duration::from_secs(60)).await.unwrap(), settled);
    // Of an algorithm that this version does not know.
    assert_eq!(lease(&place, "another version", &plain).await.complete(Outcome::kept("")).await.unwrap(), settled);
    run(
        &mut program,
        "UPDATE semel_operations SET fingerprint = set_byte(fingerprint, 0, 9) WHERE key = 'another version'",
    )
    .await;
    // It crashed as often as it may.
    assert_eq!(lease(&place, "crashed", &plain).await.fail(failed()).await.unwrap(), settled);
    run(&mut program, "UPDATE semel_operations SET crashes = 5 WHERE key = 'crashed'").await;
    let backlog =
        "UPDATE semel_backlog SET due = NULL FROM semel_operations AS o WHERE o.id = operation AND o.key = 'crashed'";
    run(&mut program, backlog).await;

    let rows = "SELECT to_jsonb(o)::text FROM semel_operations AS o ORDER BY id";
    let (before, deltas) = (place.lab.texts(rows).await, place.lab.number("SELECT count(*) FROM semel_deltas").await);
    for (name, said) in [
        ("waiting", "waiting"),
        ("in_flight", "in_flight"),
        ("replay", "replay"),
        ("not_yet", "not_yet"),
        ("parked", "exhausted"),
        ("exhausted", "exhausted"),
        ("in_doubt", "in_doubt"),
        ("own policy", "exhausted"),
        ("released", "waiting"),
        ("another version", "replay"),
        ("crashed", "exhausted"),
    ] {
        let (ours, id, created) = enqueue(&mut program, &format!("'shop', 'mail', '{name}', 'x'")).await;
        let op = place.ledger.store().by_key(&mail(), &key(name)).await.unwrap().unwrap();
        assert_eq!((ours.as_str(), id, created), (said, op.id, false), "{name}");
        assert_eq!(of_library(&place, name, &plain, b"x").await, said, "{name}");
        let other = answer(&mut program, &format!("'shop', 'mail', '{name}', 'y'")).await;
        assert_eq!(of_library(&place, name, &plain, b"y").await, other, "{name}");
    }
    // The policy of its last run decides whether it runs again, not that of an enqueue.
    assert_eq!(answer(&mut program, "'shop', 'mail', 'not_yet', 'x', max_attempts => 1").await, "not_yet");
    assert_eq!(of_library(&place, "not_yet", &once, b"x").await, "not_yet");
    assert_eq!(place.lab.texts(rows).await, before, "nothing has changed");
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_deltas").await, deltas);
    drop(running);
}

#[tokio::test]
async fn a_key_past_its_retention_is_free_although_the_sweep_has_not_come() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let policy = Policy { retention: Some(Duration::from_secs(3600)), ..Policy::default() };
    let mut old = Vec::new();
    for name in ["completed", "failed"] {
        let run = lease(&place, name, &policy).await;
        old.push(run.operation().id);
        let ended = match name {
            "completed" => run.complete(Outcome::kept("done")).await.unwrap(),
            _ => run.fail(failed()).await.unwrap(),
        };
        assert_eq!(ended, Settled::Yes { successor: false });
    }
    run(&mut program, "INSERT INTO semel_repeats SELECT id, 'duplicate', '[]' FROM semel_operations").await;
    for (name, said) in [("completed", "replay"), ("failed", "not_yet")] {
        assert_eq!(answer(&mut program, &format!("'shop', 'mail', '{name}', 'x'")).await, said);
    }
    run(&mut program, "UPDATE semel_operations SET expires_at = 1").await;
    // Rolled back, it has changed nothing.
    run(&mut program, "BEGIN; SELECT * FROM semel_enqueue('shop', 'mail', 'failed', 'other'); ROLLBACK").await;
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_repeats").await, 2);
    for (name, old) in ["completed", "failed"].into_iter().zip(old) {
        let (said, id, created) = enqueue(&mut program, &format!("'shop', 'mail', '{name}', 'other'")).await;
        assert_eq!((said.as_str(), created), ("enqueued", true), "{name}");
        assert!(id > old);
    }
    for table in ["semel_repeats", "semel_journal", "semel_leases"] {
        assert_eq!(place.lab.number(&format!("SELECT count(*) FROM {table}")).await, 0, "{table} of the old ones");
    }
    let backlog = "SELECT count(*) FROM semel_backlog AS b JOIN semel_operations AS o ON o.id = b.operation
                   WHERE b.state = 'pending'";
    assert_eq!(place.lab.number(backlog).await, 2);
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_backlog").await, 2);
    place.counters_are_exact().await;
}

/// As the documentation says; the library would end the lease first.
#[tokio::test]
async fn an_operation_whose_lease_has_expired_is_in_flight_until_that_is_noticed() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let running = lease(&place, "k", &Policy::default()).await;
    run(&mut program, "UPDATE semel_leases SET deadline = 1, run_until = 1").await;
    assert_eq!(answer(&mut program, "'shop', 'mail', 'k', 'x'").await, "in_flight");
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_leases").await, 1);
    assert_eq!(of_library(&place, "k", &Policy::default(), b"x").await, "not_yet");
    assert_eq!(answer(&mut program, "'shop', 'mail', 'k', 'x'").await, "not_yet");
    drop(running);
}

/// The program runs its transaction again, as after any serialization failure.
#[tokio::test]
async fn a_key_that_is_newer_than_the_snapshot_is_a_serialization_failure() {
    let place = Place::new().await;
    let (mut program, mut other) = (place.program().await, place.program().await);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        run(&mut program, &format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await;
        assert_eq!(answer(&mut other, &format!("'shop', 'mail', '{level}', 'x'")).await, "enqueued");
        let again = format!("SELECT * FROM semel_enqueue('shop', 'mail', '{level}', 'x')");
        assert_eq!(refused(&mut program, &again).await.0, "40001", "{level}");
        run(&mut program, &format!("ROLLBACK; BEGIN ISOLATION LEVEL {level}")).await;
        assert_eq!(answer(&mut program, &format!("'shop', 'mail', '{level}', 'x'")).await, "waiting");
        run(&mut program, "COMMIT").await;
    }
}
