//! Commits that fail: a transient failure counts no attempt, a refusal is a failure of the handler.

use std::time::Duration;

use semel::{
    Claim, Context, Error, Handed, Operation, Options, Outcome, Policy, Ran, State, Unfinished, Work, prelude::*,
};
use semel_store::{Conn, Database, Settings, Tx};

use super::tools::*;
use crate::{Kind, Lab, work};

/// How a commit ends: an error code of PostgreSQL, or on SQLite `full` or the violated constraint.
const TROUBLE: [(Kind, &[&str]); 2] = [
    (Kind::Postgres, &["40001", "40003", "40P01", "53100", "53200", "57014", "57P01", "58030", "08006", "25006"]),
    (Kind::Sqlite, &["full"]),
];
const REFUSALS: [(Kind, &[&str]); 2] =
    [(Kind::Postgres, &["23503", "23505", "22000", "P0001", "25P03"]), (Kind::Sqlite, &["constraint"])];

fn of(lab: &Lab, all: [(Kind, &'static [&'static str]); 2]) -> &'static [&'static str] {
    all.into_iter().find(|(kind, _)| *kind == lab.kind()).unwrap().1
}

/// Outcomes that are sent with the commit, and before it. Neither fits into the space that SQLite has left.
fn sizes() -> [Outcome; 2] {
    [10_000, 100_000].map(|size| Outcome::kept("x".repeat(size)))
}

/// A database in which the commit of a transaction ends as requested.
async fn doomed_lab(lab: &Lab) {
    make_effects(lab).await;
    match lab.kind() {
        Kind::Postgres => {
            let raise = "CREATE FUNCTION doom() RETURNS trigger LANGUAGE plpgsql AS \
                $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = NEW.how; END $$";
            let at_commit = "CREATE CONSTRAINT TRIGGER doomed AFTER INSERT ON doomed DEFERRABLE INITIALLY DEFERRED \
                FOR EACH ROW EXECUTE FUNCTION doom()";
            for sql in ["CREATE TABLE doomed (how TEXT)", raise, at_commit] {
                lab.execute(sql).await.unwrap();
            }
        }
        Kind::Sqlite => {
            lab.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)").await.unwrap();
            let child = "CREATE TABLE doomed (id INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)";
            lab.execute(child).await.unwrap();
        }
    }
}

/// Lets the commit of this transaction end so.
async fn doom(tx: &Tx, how: &str) {
    let mut held = tx.connection().await.unwrap();
    let done = match held.get().unwrap() {
        Conn::Postgres(c) => sqlx::query("INSERT INTO doomed VALUES ($1)").bind(how).execute(c).await.map(drop),
        // As many pages as there are: a transaction that needs another one finds the disk full.
        Conn::Sqlite(c) if how == "full" => sqlx::raw_sql("PRAGMA max_page_count = 1").execute(c).await.map(drop),
        Conn::Sqlite(c) => sqlx::raw_sql("INSERT INTO doomed VALUES (1)").execute(c).await.map(drop),
    };
    done.unwrap();
}

/// Makes room again.
async fn make_room(ledger: &Node) {
    let tx = soon(ledger.store().begin(secs(5))).await.unwrap();
    if let Conn::Sqlite(c) = tx.connection().await.unwrap().get().unwrap() {
        sqlx::raw_sql("PRAGMA max_page_count = 1000000").execute(c).await.unwrap();
    }
    ledger.store().roll_back(&tx).await;
}

/// Runs it in a transaction whose commit ends so.
async fn run_doomed(ledger: &Node, work: Work, how: &'static str, outcome: Outcome) -> Ran {
    let handler = move |_: Context<Database>, tx: Tx| {
        let outcome = outcome.clone();
        async move {
            effect(&tx, how).await.unwrap();
            doom(&tx, how).await;
            (Ok(outcome), "it is committed")
        }
    };
    let lease = acquire(ledger, work).await;
    let (ran, handed) = soon(lease.run_atomic_handing(handler)).await.unwrap();
    make_room(ledger).await;
    assert_eq!(handed, Handed::NotStored, "{how}: the handler's word is not so, and goes nowhere");
    ran
}

/// An operation with one attempt is tried again after a transient failure, and then completes. If nothing was stored
/// with it, its key is free at once.
pub async fn a_transient_commit_failure_counts_no_attempt(lab: Lab) {
    doomed_lab(&lab).await;
    let ledger = lab.ledger().await;
    let once = Policy { max_attempts: Some(1), ..Policy::default() };
    for how in of(&lab, TROUBLE) {
        for outcome in sizes() {
            let name = format!("{how} {}", outcome.body.len());
            let stored = || work(&name, once.clone()).payload("kept");
            assert_eq!(run_doomed(&ledger, stored(), how, outcome.clone()).await, Ran::Released, "{name}");
            let op = row(&ledger, &name).await;
            assert_eq!((op.state, op.failures, op.crashes, op.error), (State::Pending, 0, 0, None), "{name}");
            assert_eq!(ask(&ledger, stored()).await, "not_yet", "{name}: without a pause");
            lab.pass(secs(1));
            let again = |_: Context<Database>, _: Tx| async { Ok::<_, Unfinished>(done("made")) };
            let again = soon(ledger.run_atomic(stored(), again)).await.unwrap();
            assert!(matches!(again, Claim::Acquired(Ran::Completed(_))), "{name}: {again:?}");

            let bare = format!("bare {name}");
            assert_eq!(run_doomed(&ledger, work(&bare, once.clone()), how, outcome).await, Ran::Released, "{bare}");
            assert_eq!(find(&ledger, &bare).await, None, "{bare}");
        }
    }
    assert_eq!(effects(&lab).await, [""; 0]);
}

/// A write that violates a constraint of the handler's own tables would do so again: that counts as a failure. So does
/// holding a transaction open for longer than the server allows.
pub async fn a_refused_commit_is_a_failure(lab: Lab) {
    doomed_lab(&lab).await;
    let ledger = lab.ledger().await;
    let once = Policy { max_attempts: Some(1), ..Policy::default() };
    for how in of(&lab, REFUSALS) {
        for outcome in sizes() {
            let name = format!("{how} {}", outcome.body.len());
            let said = run_doomed(&ledger, work(&name, once.clone()).payload("kept"), how, outcome).await;
            assert!(matches!(said, Ran::Failed(_)), "{name}: {said:?}");
            let op = row(&ledger, &name).await;
            assert_eq!((op.state, op.failures), (State::Failed, 1), "{name}");
            assert_eq!(ask(&ledger, work(&name, once.clone())).await, "exhausted", "{name}");
        }
    }
    assert_eq!(effects(&lab).await, [""; 0]);
}

/// A second, then half its age, up to a minute: a worker does not retry in a loop. Only its caller can bring an
/// operation without data again, so its delay is short at any age.
pub async fn an_endless_transient_failure_is_retried_ever_more_rarely(lab: Lab) {
    doomed_lab(&lab).await;
    let ledger = lab.ledger().await;
    let how = of(&lab, TROUBLE)[0];
    let [outcome, _] = sizes();
    for (age, wait) in [(0, 1), (1, 1), (20, 10), (100, 50), (2000, 60)] {
        lab.clock.set(Lab::START + secs(age));
        let work = work("k", Policy::default()).payload("kept");
        assert_eq!(run_doomed(&ledger, work, how, outcome.clone()).await, Ran::Released, "after {age} s");
        let not_before = row(&ledger, "k").await.not_before;
        assert_eq!(not_before, Some(Lab::START + secs(age + wait)), "after {age} s");
    }
    lab.clock.set(Lab::START);
    let fails = |_: Context<Database>, _: Tx| async { Err::<Outcome, _>(Unfinished::failed("the first time")) };
    let bare = || work("bare", Policy::default());
    assert!(matches!(soon(ledger.run_atomic(bare(), fails)).await.unwrap(), Claim::Acquired(Ran::Failed(_))));
    lab.clock.set(Lab::START + secs(3000));
    assert_eq!(run_doomed(&ledger, bare(), how, outcome).await, Ran::Released);
    assert_eq!(row(&ledger, "bare").await.not_before, Some(Lab::START + secs(3001)));
}

/// A handler that ended the transaction itself, or was in it for too long, would do so again.
pub async fn a_transaction_that_is_over_is_a_failure(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    for outcome in sizes() {
        let name = format!("over {}", outcome.body.len());
        let store = ledger.store().clone();
        let handler = move |_: Context<Database>, tx: Tx| {
            let (store, outcome) = (store.clone(), outcome.clone());
            async move {
                store.roll_back(&tx).await;
                Ok(outcome)
            }
        };
        let said = soon(ledger.run_atomic(work(&name, Policy::default()), handler)).await.unwrap();
        assert!(matches!(said, Claim::Acquired(Ran::Failed(_))), "{name}: {said:?}");
    }
}

/// A handler that blocks its runtime cannot be interrupted, and PostgreSQL ends the transaction: that looks like a lost
/// connection, but is not a transient failure.
pub async fn a_handler_that_blocks_in_its_transaction_for_too_long_has_failed(lab: Lab) {
    let lab = lab.with_real_clock();
    make_effects(&lab).await;
    // The lease is counted from before the claim, so a slow commit must fit into it. On SQLite any end is right.
    let (at_once, lease, blocks) = match lab.kind() {
        Kind::Postgres => (2, secs(3), secs(5)),
        Kind::Sqlite => (1, Duration::from_millis(500), secs(1)),
    };
    for outcomes in sizes().chunks(at_once) {
        let blocked = outcomes.iter().map(|outcome| {
            let (url, settings, outcome) = (lab.url.clone(), lab.settings(), outcome.clone());
            std::thread::spawn(move || block_in_a_transaction(&url, settings, lease, blocks, outcome))
        });
        for blocked in blocked.collect::<Vec<_>>() {
            let (claim, op) = blocked.join().unwrap();
            match claim {
                Claim::Acquired(Ran::Failed(_)) => assert_eq!((op.state, op.failures), (State::Failed, 1)),
                // On SQLite nothing ends it, because no one else can write: it may be in time.
                Claim::Acquired(Ran::Completed(_) | Ran::LeaseLost) if lab.kind() == Kind::Sqlite => {}
                other => panic!("{other:?}"),
            }
            let name = op.key.as_str();
            assert_eq!(effects(&lab).await.iter().any(|made| made == name), op.state == State::Completed, "{name}");
        }
    }
}

/// Runs it in a transaction, on a runtime whose only thread the handler blocks.
fn block_in_a_transaction(
    url: &str,
    settings: Settings,
    lease: Duration,
    blocks: Duration,
    outcome: Outcome,
) -> (Claim<Ran>, Operation) {
    let text = format!("k {}", outcome.body.len());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ledger = semel::Ledger::new(Database::open(url, settings).await.unwrap(), Options::default()).unwrap();
        let handler = move |context: Context<Database>, tx: Tx| {
            let outcome = outcome.clone();
            async move {
                effect(&tx, context.operation().key.as_str()).await?;
                std::thread::sleep(blocks);
                Ok(outcome)
            }
        };
        let work = work(&text, Policy { lease, ..Policy::default() }).payload("kept");
        (ledger.run_atomic(work, handler).await.unwrap(), row(&ledger, &text).await)
    })
}

/// A caller without a key decides itself whether to retry.
pub async fn a_transaction_without_a_key_distinguishes_transient_failures_from_refusals(lab: Lab) {
    doomed_lab(&lab).await;
    let ledger = lab.ledger().await;
    let refused = of(&lab, REFUSALS).iter().map(|how| (*how, false));
    // Without a completion, SQLite has nothing to write that the handler has not written before.
    let trouble = of(&lab, TROUBLE).iter().filter(|how| **how != "full").map(|how| (*how, true));
    for (how, transient) in refused.chain(trouble) {
        let got = ledger.transact(move |tx: Tx| async move {
            doom(&tx, how).await;
            Ok::<(), Error>(())
        });
        let error = soon(got).await.unwrap_err();
        assert_eq!(error.is_transient(), transient, "{how}: {error}");
        assert_eq!(matches!(error, Error::Refused(_)), !transient, "{how}: {error}");
        // A server that stops, a lost connection: the answer never claims that nothing happened.
        let maybe = ["57014", "57P01", "08006", "40003"].contains(&how);
        assert_eq!(matches!(error, Error::OutcomeUnknown(_)), maybe, "{how}: {error}");
    }
}
