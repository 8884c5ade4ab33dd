//! Projections: the row of a service shows the state of its operation, from the same commit on.

use std::time::Duration;

use semel::{
    Context, Failure, Fingerprint, Ledger, OnLost, Options, Outcome, Policy, Retry, State, Unfinished, Verdict, Work,
    machine::Answer,
    prelude::*,
    store::{Decision, Limits, Want},
};
use semel_store::{Database, Settings, Tx, on};

use super::tools::*;
use crate::{
    Lab,
    faults::{FOLLOWERS, disagreements, make_followers, scenario::queue},
    key,
};

/// A node with a projection for the operations of the queue.
async fn node(lab: &Lab) -> Node {
    let settings = Settings { projections: vec![FOLLOWERS], ..lab.settings() };
    let ledger = Ledger::new(Database::open(&lab.url, settings).await.unwrap(), Options::default()).unwrap();
    make_followers(ledger.store()).await;
    ledger
}

fn job(name: &str, policy: Policy) -> Work {
    Work::new(queue(), key(name), Fingerprint::of_bytes(name.as_bytes())).policy(policy)
}

fn rerun() -> Policy {
    Policy { backoff: semel::Backoff { first: secs(60), cap: secs(60) }, ..Policy::default() }
}

fn hold() -> Policy {
    Policy { on_lost: OnLost::Hold, ..rerun() }
}

/// The row: state, whether it is due, error, attempt.
type Said = (String, bool, String, i64);

async fn said(lab: &Lab, name: &str) -> Option<Said> {
    let sql = format!(
        "SELECT state || '|' || CASE WHEN due IS NULL THEN 'no' ELSE 'due' END || '|' || CAST(attempt AS TEXT) || '|'
             || coalesce(error, '') FROM followers WHERE key = '{name}'"
    );
    let text = lab.texts(&sql).await.pop()?;
    let mut parts = text.splitn(4, '|').map(str::to_owned);
    let (state, due) = (parts.next()?, parts.next()? == "due");
    let attempt = parts.next()?.parse().ok()?;
    Some((state, due, parts.next()?, attempt))
}

/// The row must have these values, and those of the operation.
async fn says(lab: &Lab, node: &Node, name: &str, expected: (&str, bool, &str, i64)) {
    let row = said(lab, name).await.unwrap_or_else(|| panic!("{name} has no row"));
    let (state, due, error, attempt) = expected;
    assert_eq!((row.0.as_str(), row.1, row.3), (state, due, attempt), "{name}");
    assert!(row.2.contains(error) && (error.is_empty() == row.2.is_empty()), "{name}: {}", row.2);
    assert!(disagreements(node.store()).await.is_empty());
}

/// Every change of an operation is in its row when the call is answered.
pub async fn a_row_follows_its_operation_through_every_change(lab: Lab) {
    let node = node(&lab).await;
    // A first claim changes no row; a failure does, and the completion after it.
    let lease = acquire(&node, job("a", rerun())).await;
    assert_eq!(said(&lab, "a").await, None);
    assert_eq!(lease.fail(failure("no\0luck")).await.unwrap(), SETTLED);
    says(&lab, &node, "a", ("failed", true, "luck", 1)).await;
    lab.pass(secs(61));
    let lease = acquire(&node, job("a", rerun())).await;
    says(&lab, &node, "a", ("failed", true, "luck", 1)).await;
    assert_eq!(lease.complete(done("ok")).await.unwrap(), SETTLED);
    says(&lab, &node, "a", ("completed", false, "", 2)).await;
    // The end of all attempts, and a person who has it run again.
    let lease = acquire(&node, job("b", Policy { max_attempts: Some(1), ..rerun() })).await;
    let id = lease.operation().id;
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    says(&lab, &node, "b", ("failed", false, "no", 1)).await;
    let verdict = |verdict| Decision::Resolve { verdict, expected: None };
    assert_eq!(decide(&node, id, verdict(Verdict::Retry)).await.answer, Answer::Resolved);
    says(&lab, &node, "b", ("pending", true, "no", 1)).await;
    assert_eq!(decide(&node, id, Decision::Cancel).await.answer, Answer::Cancelled);
    says(&lab, &node, "b", ("failed", false, "cancelled", 0)).await;
    // Released, and in doubt.
    let run = async |name: &'static str, end: Unfinished| {
        let handler = move |_: Context<Database>| {
            let end = end.clone();
            async move { Err(end) }
        };
        let _ = node.run(job(name, hold()), handler).await.unwrap();
    };
    run("c", Unfinished::released_because(secs(5), "away")).await;
    says(&lab, &node, "c", ("pending", true, "away", 1)).await;
    run("d", Unfinished::Doubted("who knows".into())).await;
    says(&lab, &node, "d", ("in_doubt", false, "who knows", 1)).await;
    let id = node.store().by_key(&queue(), &key("d")).await.unwrap().unwrap().id;
    assert_eq!(decide(&node, id, verdict(Verdict::Completed(done("sent")))).await.answer, Answer::Resolved);
    says(&lab, &node, "d", ("completed", false, "", 1)).await;
    // An expired lease: found by the sweep, by a claim that takes over, and by one that does not.
    for (name, policy) in [("e", rerun()), ("f", rerun()), ("g", hold())] {
        drop(acquire(&node, job(name, policy)).await);
    }
    lab.pass(secs(31));
    let taken_over = acquire(&node, job("f", rerun())).await;
    says(&lab, &node, "f", ("processing", false, "expired", 2)).await;
    assert_eq!(ask(&node, job("g", hold())).await, "in_doubt");
    says(&lab, &node, "g", ("in_doubt", false, "expired", 1)).await;
    assert_eq!(node.sweep().await.unwrap().lapsed, 1);
    says(&lab, &node, "e", ("timed_out", true, "expired", 1)).await;
    drop(taken_over);
}

/// What a person purges before it took effect is shown as purged. Anything else stays as it was shown, and so does an
/// operation that expires.
pub async fn a_row_shows_that_its_operation_was_purged(lab: Lab) {
    let node = node(&lab).await;
    let id_of = async |name: &str| node.store().by_key(&queue(), &key(name)).await.unwrap().unwrap().id;
    node.enqueue(job("new", rerun())).await.unwrap();
    let once = Policy { max_attempts: Some(1), ..rerun() };
    assert_eq!(acquire(&node, job("failed", once)).await.fail(failure("no luck")).await.unwrap(), SETTLED);
    assert_eq!(acquire(&node, job("released", rerun()).payload("x")).await.release(secs(60)).await.unwrap(), SETTLED);
    assert_eq!(acquire(&node, job("doubt", hold())).await.doubt("who knows").await.unwrap(), SETTLED);
    let kept = || Policy { retention: Some(secs(600)), ..rerun() };
    for name in ["done", "expired"] {
        assert_eq!(acquire(&node, job(name, kept())).await.complete(done("ok")).await.unwrap(), SETTLED);
    }
    for name in ["new", "failed", "released", "doubt", "done"] {
        assert_eq!(decide(&node, id_of(name).await, Decision::Purge).await.answer, Answer::Purged, "{name}");
    }
    lab.pass(secs(3600));
    assert_eq!(node.sweep().await.unwrap().expired, 1);
    says(&lab, &node, "new", ("purged", false, "purged", 0)).await;
    says(&lab, &node, "failed", ("purged", false, "no luck", 1)).await;
    says(&lab, &node, "released", ("purged", false, "purged", 0)).await;
    says(&lab, &node, "doubt", ("in_doubt", false, "who knows", 1)).await;
    for name in ["done", "expired"] {
        says(&lab, &node, name, ("completed", false, "", 1)).await;
    }
}

/// The rows of the handler, the completion and the row that follows are one commit. If the handler fails, the row shows
/// it, and the handler's rows are not stored.
pub async fn a_row_follows_in_the_transaction_of_the_effect(lab: Lab) {
    let node = node(&lab).await;
    let work = |context: Context<Database>, tx: Tx| async move {
        let name = context.operation().key.as_str().to_owned();
        let mut held = tx.connection().await.map_err(|error| Unfinished::failed(error.to_string()))?;
        let sql = "INSERT INTO followers (id, tenant, key, state, attempt) VALUES ($1, 'acme', $2, 'effect', 0)";
        let conn = held.get().map_err(|error| Unfinished::failed(error.to_string()))?;
        let made =
            on!(conn, c => sqlx::query(sql).bind(-context.fence().0).bind(&name).execute(&mut *c).await.map(drop));
        made.map_err(|error| Unfinished::failed(error.to_string()))?;
        if name == "fails" { Err(Unfinished::failed("no")) } else { Ok(Outcome::kept(name)) }
    };
    for name in ["works", "fails"] {
        let _ = soon(node.run_atomic(job(name, rerun()), work)).await.unwrap();
    }
    let states =
        async |name: &str| lab.texts(&format!("SELECT state FROM followers WHERE key = '{name}' ORDER BY id")).await;
    assert_eq!(states("works").await, ["effect", "completed"]);
    assert_eq!(states("fails").await, ["failed"]);
    // Inline mode has no lease: the claim itself completes it.
    let store = node.store();
    let tx = store.begin(secs(5)).await.unwrap();
    let request = crate::request("inline", b"x", rerun());
    let request = semel::machine::Request { scope: queue(), ..request };
    assert_eq!(store.claim_in(&tx, std::sync::Arc::new(request)).await.unwrap().answer, Answer::Acquired);
    assert!(matches!(store.commit(&tx).await, semel::store::Commit::Done));
    assert_eq!(states("inline").await, ["completed"]);
    assert!(disagreements(store).await.is_empty());
}

/// The first run of an enqueued operation is taken and completed on the fast path of plain operations, except here.
pub async fn a_row_follows_an_operation_that_a_worker_runs(lab: Lab) {
    let node = node(&lab).await;
    node.enqueue(job("a", rerun()).policy_of_worker(rerun())).await.unwrap();
    let want = Want { scope: queue(), most: 9, since: None, policy: rerun(), lease: None, limits: Limits::default() };
    let (_, lease) = node.take(vec![want]).await.unwrap().pop().unwrap();
    assert_eq!(lease.complete(done("ok")).await.unwrap(), SETTLED);
    says(&lab, &node, "a", ("completed", false, "", 1)).await;
}

/// An operation that a worker finds without attempts left is no longer due, and its row shows it.
pub async fn a_row_follows_an_operation_that_a_worker_finds_exhausted(lab: Lab) {
    let node = node(&lab).await;
    for name in ["a", "b"] {
        let lease = acquire(&node, job(name, rerun())).await;
        let failure = Failure { error: "no".into(), retry: Retry::After(Duration::ZERO) };
        assert_eq!(lease.fail(failure).await.unwrap(), SETTLED);
        says(&lab, &node, name, ("failed", true, "no", 1)).await;
    }
    let policy = Policy { max_attempts: Some(1), ..rerun() };
    let want = Want { scope: queue(), most: 9, since: None, policy, lease: None, limits: Limits::default() };
    assert!(node.take(vec![want]).await.unwrap().is_empty());
    for name in ["a", "b"] {
        says(&lab, &node, name, ("failed", false, "no", 1)).await;
    }
    assert!(node.store().due_kinds("bank", ("", "")).await.unwrap().is_empty());
}

/// A row that refuses its change fails the change of its own operation, and no other settle, lease expiry or take.
pub async fn a_row_that_refuses_harms_its_own_operation_only(lab: Lab) {
    let node = node(&lab).await;
    let names: Vec<String> = (0..40).map(|n| n.to_string()).chain(["poison".to_owned()]).collect();
    let mut leases = Vec::new();
    for name in &names {
        leases.push(acquire(&node, job(name, rerun())).await);
    }
    let settled: Vec<_> =
        leases.into_iter().map(|lease| tokio::spawn(async { lease.complete(done("ok")).await })).collect();
    for (name, settled) in names.iter().zip(settled) {
        let settled = soon(settled).await.unwrap();
        assert_eq!(settled.is_ok(), name != "poison", "{name}: {settled:?}");
    }
    let state = async |name: &str| node.store().by_key(&queue(), &key(name)).await.unwrap().unwrap().state;
    assert_eq!((state("0").await, state("poison").await), (State::Completed, State::Processing));
    drop(acquire(&node, job("lost", rerun())).await);
    lab.pass(secs(31));
    assert_eq!(node.sweep().await.unwrap().lapsed, 1);
    assert_eq!((state("lost").await, state("poison").await), (State::TimedOut, State::Processing));
    // An operation without a following row costs nothing more: the hot statement completes it.
    drop(acquire(&node, crate::work("plain", rerun())).await);
    drop(acquire(&node, job("followed", rerun())).await);
    let general = "SELECT o.key FROM semel_leases AS l JOIN semel_operations AS o ON o.id = l.operation
                   WHERE l.successor AND o.key IN ('plain', 'followed')";
    assert_eq!(lab.texts(general).await, ["followed"]);
    assert!(disagreements(node.store()).await.is_empty());
}

/// Rows that are older than their projection, or that missed a change, are found and updated.
pub async fn older_rows_are_brought_up_to_date(lab: Lab) {
    let plain = lab.ledger().await;
    make_followers(plain.store()).await;
    let once = Policy { max_attempts: Some(1), ..rerun() };
    let failure = || Failure { error: "no".into(), retry: Retry::After(Duration::ZERO) };
    assert_eq!(acquire(&plain, job("done", rerun())).await.complete(done("ok")).await.unwrap(), SETTLED);
    assert_eq!(acquire(&plain, job("doubt", hold())).await.doubt("cut").await.unwrap(), SETTLED);
    assert_eq!(acquire(&plain, job("exhausted", once)).await.fail(failure()).await.unwrap(), SETTLED);
    assert_eq!(acquire(&plain, job("again", rerun())).await.fail(failure()).await.unwrap(), SETTLED);
    let running = acquire(&plain, job("running", rerun())).await;
    plain.enqueue(job("pending", rerun())).await.unwrap();
    assert_eq!(said(&lab, "done").await, None);

    let node = node(&lab).await;
    let names = ["done", "absent", "doubt", "exhausted", "again", "running", "pending"];
    let ended = node.store().ended(&names.map(|name| (queue(), key(name)))).await.unwrap();
    let has_ended = ended.iter().map(Option::is_some).collect::<Vec<_>>();
    assert_eq!(has_ended, [true, false, true, true, false, false, false]);
    let again = node.store().by_key(&queue(), &key("again")).await.unwrap().unwrap().id;
    let ids: Vec<i64> = ended.into_iter().flatten().chain([again]).collect();
    let tx = node.store().begin(secs(5)).await.unwrap();
    let mut projected = node.store().project_in(&tx, &ids).await.unwrap();
    assert!(matches!(node.store().commit(&tx).await, semel::store::Commit::Done));
    projected.sort_unstable();
    assert_eq!(projected, ids, "ids grow with time");
    says(&lab, &node, "done", ("completed", false, "", 1)).await;
    says(&lab, &node, "doubt", ("in_doubt", false, "cut", 1)).await;
    says(&lab, &node, "exhausted", ("failed", false, "no", 1)).await;
    says(&lab, &node, "again", ("failed", true, "no", 1)).await;
    drop(running);
}
