//! Helpers of the laws.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use semel::{
    Claim, Failure, Held, Lease, Ledger, Operation, Outcome, Retry, Settled, State, Unfinished, Work,
    journal::{Event, Note},
    look::in_state,
    prelude::*,
    store::{Applied, Decision},
};
use semel_store::{Database, Tx, on};

use crate::{Kind, Lab, key, scope};

/// A node of the system under test.
pub(super) type Node = Ledger<Database>;

/// A settle without a successor.
pub(super) const SETTLED: Settled = Settled::Yes { successor: false };

/// The smallest step of the ledger's time.
pub(super) const TICK: Duration = Duration::from_micros(1);

/// Whole seconds.
pub(super) const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Awaits something that must happen soon. A broken law fails instead of hanging.
pub(super) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(secs(20), what).await.expect("this should have happened long ago")
}

/// Polls until it is true: for background work without a signal.
pub(super) async fn eventually<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    soon(async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Drops a future after this many microseconds, unless it is done by then. Tokio's own timer is far too coarse to hit
/// the moments that matter.
pub(super) async fn dropped_after<T>(delay: Duration, what: impl Future<Output = T>) -> Option<T> {
    let start = Instant::now();
    let over = async {
        while start.elapsed() < delay {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        done = what => Some(done),
        () = over => None,
    }
}

/// A claim that must get the lease.
pub(super) async fn acquire(node: &Node, work: Work) -> Lease<Database> {
    match soon(node.claim(work)).await.unwrap() {
        Claim::Acquired(lease) => lease,
        other => panic!("should have been acquired, and is {}", other.word()),
    }
}

/// The word of a claim's answer.
pub(super) async fn ask(node: &Node, work: Work) -> &'static str {
    soon(node.claim(work)).await.unwrap().word()
}

/// The row under a key of the suite's scope.
pub(super) async fn find(node: &Node, text: &str) -> Option<Operation> {
    node.store().by_key(&scope(), &key(text)).await.unwrap()
}

/// The row under a key, which must exist.
pub(super) async fn row(node: &Node, text: &str) -> Operation {
    find(node, text).await.expect("there should be such an operation")
}

/// The notes of an operation.
pub(super) async fn notes(node: &Node, id: i64) -> Vec<Note> {
    node.store().journal(id).await.unwrap().0
}

/// The events of an operation's notes.
pub(super) async fn story(node: &Node, id: i64) -> Vec<Event> {
    notes(node, id).await.into_iter().map(|note| note.event).collect()
}

/// The number of operations in a state, by the counters.
pub(super) async fn counted(node: &Node, state: State) -> i64 {
    in_state(&node.store().counts(scope().tenant(), 0).await.unwrap(), state)
}

/// A person decides.
pub(super) async fn decide(node: &Node, id: i64, decision: Decision) -> Applied {
    soon(node.decide(id, decision, "ann", "because")).await.unwrap()
}

/// An outcome.
pub(super) fn done(text: &str) -> Outcome {
    Outcome::kept(text.to_owned())
}

/// A failure that is retried after the policy's backoff.
pub(super) fn failure(text: &str) -> Failure {
    Failure { error: text.to_owned(), retry: Retry::Backoff }
}

/// One of the six writes under a lease, by number; whether it was made.
pub(super) async fn write_nth(mut lease: Lease<Database>, nth: usize) -> bool {
    let settled = match nth {
        0 => lease.complete(done("of a zombie")).await,
        1 => lease.fail(failure("of a zombie")).await,
        2 => lease.release(Duration::ZERO).await,
        3 => lease.doubt("of a zombie").await,
        4 => return lease.checkpoint("of a zombie").await.unwrap() == Held::Yes,
        _ => return lease.renew().await.unwrap() == Held::Yes,
    };
    settled.unwrap() != Settled::LeaseLost
}

/// The number of these writes.
pub(super) const WRITES: usize = 6;

/// A table of effects, beside the ledger's tables.
pub(super) async fn make_effects(lab: &Lab) {
    // The store opens first: it creates the file.
    drop(lab.open().await);
    lab.execute("CREATE TABLE effects (name TEXT NOT NULL)").await.unwrap();
}

/// An effect, in a transaction.
pub(super) async fn effect(tx: &Tx, name: &str) -> Result<(), Unfinished> {
    let sql = "INSERT INTO effects (name) VALUES ($1)";
    let mut held = tx.connection().await.map_err(|error| Unfinished::failed(error.to_string()))?;
    let conn = held.get().map_err(|error| Unfinished::failed(error.to_string()))?;
    let made = on!(conn, c => sqlx::query(sql).bind(name).execute(c).await.map(drop));
    made.map_err(|error| Unfinished::failed(error.to_string()))
}

/// The committed effects.
pub(super) async fn effects(lab: &Lab) -> Vec<String> {
    lab.texts("SELECT name FROM effects ORDER BY name").await
}

/// Sets the stored body of some messages, in hex.
pub(super) async fn store_body(lab: &Lab, table: &str, which: &str, hex: &str) {
    let body = if lab.kind() == Kind::Sqlite { format!("x'{hex}'") } else { format!(r"'\x{hex}'") };
    assert!(lab.execute(&format!("UPDATE {table} SET body = {body} WHERE {which}")).await.unwrap() > 0);
}

/// Truncates the bodies of some messages: no version can read them.
pub(super) async fn damage_body(lab: &Lab, table: &str, which: &str) {
    store_body(lab, table, which, "01").await;
}

/// Stores the bodies of some messages as a newer version might.
pub(super) async fn store_as_newer(lab: &Lab, table: &str, which: &str) {
    store_body(lab, table, which, "0900ff").await;
}

/// Damages other columns of some messages: on SQLite with a value of the wrong type.
pub(super) async fn damage_column(lab: &Lab, table: &str, which: &str) {
    let set = if lab.kind() == Kind::Sqlite { "put_at = 'never'" } else { "headers = '{'" };
    assert!(lab.execute(&format!("UPDATE {table} SET {set} WHERE {which}")).await.unwrap() > 0);
}
