//! The connection to PostgreSQL is cut, swallows or trickles at the worst moment, and every answer is true.

use std::time::{Duration, Instant};

use semel::{
    Backoff, Claim, Failure, Held, Lease, Ledger, OnLost, Options, Outcome, Policy, Ran, Retry, Settled, State,
    Unfinished, machine::Answer, prelude::*, store::Commit,
};
use semel_store::{Database, Settings, Tx};
use semel_testkit::{
    Kind,
    faults::{Fault, On, Proxy, effect_rows, take_in, worker::policy},
    key, request, scope, work,
};

use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;

use crate::support::Site;

/// The end of an atomic run: its completion and the commit in one;
const COMMIT_OF_RUN: On = On::Query("SAVEPOINT semel");
/// if newer data may wait, and for any other transaction of a caller: the commit alone.
const COMMIT_OF_CALLER: On = On::Query("SELECT 1; COMMIT");
/// The end of one of the ledger's own transactions.
const COMMIT_OF_LEDGER: On = On::Query("COMMIT");
/// The statement that makes first claims.
const CLAIM: On = On::Execute("asked AS MATERIALIZED");
/// The statement that makes plain completions.
const COMPLETE: On = On::Execute("DELETE FROM semel_leases AS l USING asked");
/// The completion in a caller's transaction.
const COMPLETE_OF_CALLER: On = On::Execute("DELETE FROM semel_leases AS l WHERE");

/// A node behind a proxy, and the database without one.
struct Wire {
    site: Site,
    proxy: Proxy,
    db: Database,
    ledger: Ledger<Database>,
}

impl Wire {
    async fn new() -> Self {
        Self::with(Settings::default()).await
    }

    /// With a time limit of a second for an answer, for swallowed answers.
    async fn impatient() -> Self {
        Self::with(Settings { answer_limit: Duration::from_secs(1), ..Settings::default() }).await
    }

    async fn with(settings: Settings) -> Self {
        let site = Site::new(Kind::Postgres).await;
        let proxy = Proxy::start(&site.url).await;
        let db = Database::open(&proxy.url(&site.url), settings).await.unwrap();
        let ledger = Ledger::new(db.clone(), Options::default()).unwrap();
        Self { site, proxy, db, ledger }
    }

    /// An atomic run whose effect is a row.
    async fn run(&self, text: &str, policy: Policy, outcome: Outcome) -> semel::Result<Claim<Ran>> {
        let name = text.to_owned();
        let handler = move |ctx: semel::Context<Database>, tx: Tx| {
            let (name, outcome) = (name.clone(), outcome.clone());
            async move {
                take_in(&tx, &name, ctx.fence()).await.map_err(Unfinished::failed)?;
                Ok(outcome)
            }
        };
        self.ledger.run_atomic(work(text, policy), handler).await
    }

    /// Claims again like a client, until it has its outcome: then there is one effect.
    async fn until_completed(&self, text: &str) {
        let begun = Instant::now();
        let run = async || self.run(text, usual(), small()).await;
        while !matches!(run().await, Ok(Claim::Replay(_) | Claim::Acquired(Ran::Completed(_)))) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{text} is never completed");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.rows(text).await, 1, "{text}");
    }

    async fn rows(&self, text: &str) -> i64 {
        effect_rows(&self.site.db).await.get(text).copied().unwrap_or(0)
    }

    /// Claims keys concurrently; all must get the error that the store is unavailable.
    async fn claim_in_vain(&self, names: &[String], policy: &Policy) {
        let mut claims = JoinSet::new();
        for name in names {
            let (ledger, work) = (self.ledger.clone(), work(name, policy.clone()).payload(name.clone()));
            claims.spawn(async move { ledger.claim(work).await.map(|claim| claim.word()) });
        }
        for got in claims.join_all().await {
            assert!(got.as_ref().is_err_and(semel::Error::is_transient), "{got:?}");
        }
    }

    /// Waits until the operation under a key is as expected: absent, or in a state.
    async fn becomes(&self, text: &str, state: Option<State>) {
        let begun = Instant::now();
        loop {
            let found = self.site.db.by_key(&scope(), &key(text)).await.unwrap().map(|op| op.state);
            if found == state {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{text} is {found:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn claim(&self, text: &str) -> Lease<Database> {
        match self.ledger.claim(work(text, usual())).await.unwrap() {
            Claim::Acquired(lease) => lease,
            other => panic!("{text} is not its own: {}", other.word()),
        }
    }

    fn plan(&self, on: On, fault: Fault) {
        self.proxy.plan(on, fault);
    }

    fn assert_met(&self, what: &str) {
        assert!(self.proxy.met().is_some(), "{what}: the request was never sent");
    }

    /// The faults to try on an exchange: the request is lost, or its answer after each byte.
    async fn every_cut(&self, on: On, exchange: impl AsyncFn(&str)) -> Vec<Fault> {
        self.plan(on, Fault::Measure);
        exchange(&format!("{on:?}")).await;
        let length = self.proxy.met().unwrap();
        assert!(length > 12, "an answer of {length} bytes");
        std::iter::once(Fault::CutRequest).chain((0..=length).map(Fault::CutAnswer)).collect()
    }
}

/// An outcome that is sent with the commit.
fn small() -> Outcome {
    Outcome::kept("done")
}

/// An outcome so large that the completion is sent before the commit.
fn large() -> Outcome {
    Outcome::kept("done ".repeat(20_000))
}

fn usual() -> Policy {
    policy(Duration::from_secs(30))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_cut_after_every_byte_of_the_commit_reply() {
    let wire = Wire::new().await;
    for (commit, outcome) in [(COMMIT_OF_RUN, small()), (COMMIT_OF_CALLER, large())] {
        cut_the_commit(&wire, commit, outcome).await;
    }
    wire.site.check_counters().await;
}

async fn cut_the_commit(wire: &Wire, commit: On, outcome: Outcome) {
    let run = async |name: &str| wire.run(name, usual(), outcome.clone()).await.unwrap();
    let cuts = wire.every_cut(commit, async |name| drop(run(name).await)).await;
    for fault in &cuts {
        let name = format!("{commit:?} {fault:?}");
        wire.plan(commit, *fault);
        let answer = run(&name).await;
        wire.assert_met(&name);
        let rows = wire.rows(&name).await;
        let stored = wire.site.db.by_key(&scope(), &key(&name)).await.unwrap();
        match (fault, answer) {
            // The server had committed before its first byte: any other answer would be false.
            (Fault::CutAnswer(_), Claim::Acquired(Ran::Completed(outcome))) => {
                let stored = stored.unwrap();
                assert_eq!((rows, stored.state, stored.outcome), (1, State::Completed, Some(outcome)), "{name}");
            }
            // It did not happen, through no fault of the run: no attempt is counted.
            (Fault::CutRequest, Claim::Acquired(Ran::Released)) => {
                assert_eq!((rows, stored), (0, None), "{name}");
                let again = run(&name).await;
                assert!(matches!(again, Claim::Acquired(Ran::Completed(_))), "{name}: {again:?}");
            }
            (_, answer) => panic!("{name} was answered {answer:?} with {rows} rows and {stored:?}"),
        }
        let Claim::Replay(_) = run(&name).await else { panic!("{name} is not replayed") };
        assert_eq!(wire.rows(&name).await, 1, "{name}");
    }
    println!("{} cuts of a commit", cuts.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_cut_after_every_byte_of_an_inline_commit() {
    let wire = Wire::new().await;
    // One attempt of a caller: claims in its own transaction, makes its effect, commits.
    let attempt = async |name: &str| {
        let tx = wire.db.begin(Duration::from_secs(30)).await.unwrap();
        match wire.ledger.claim_inline(&tx, work(name, usual())).await.unwrap() {
            Claim::Acquired(()) => {
                take_in(&tx, name, semel::Fence(0)).await.unwrap();
                Some(wire.db.commit(&tx).await)
            }
            Claim::Replay(_) => None,
            other => panic!("{}", other.word()),
        }
    };
    let cuts = wire.every_cut(COMMIT_OF_CALLER, async |name| drop(attempt(name).await)).await;
    for fault in cuts {
        let name = format!("{fault:?}");
        wire.plan(COMMIT_OF_CALLER, fault);
        let first = attempt(&name).await.unwrap();
        wire.assert_met(&name);
        let whole = matches!(fault, Fault::CutAnswer(n) if n >= wire.proxy.met().unwrap());
        assert!(matches!((&first, whole), (Commit::Done, true) | (Commit::Unknown(_), false)), "{name}: {first:?}");
        // A caller with an unknown result claims again, and the ledger answers.
        match attempt(&name).await {
            None => {}
            Some(Commit::Done) => assert!(matches!(fault, Fault::CutRequest), "{name} was made a second time"),
            Some(other) => panic!("{name}: {other:?}"),
        }
        assert_eq!(wire.rows(&name).await, 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_cut_after_every_byte_of_a_claim_and_a_completion() {
    let wire = Wire::new().await;
    let claims = wire.every_cut(CLAIM, async |name| drop(wire.claim(name).await)).await;
    for fault in &claims {
        let name = format!("claim {fault:?}");
        wire.plan(CLAIM, *fault);
        let lease = wire.claim(&name).await;
        wire.assert_met(&name);
        let stored = wire.site.operation(&name).await;
        assert_eq!((lease.operation().id, lease.fence()), (stored.id, stored.fence), "{name}");
        assert_eq!(lease.complete(Outcome::kept("")).await.unwrap(), Settled::Yes { successor: false }, "{name}");
    }
    let complete = async |name: &str| {
        let settled = wire.claim(name).await.complete(Outcome::kept("done")).await.unwrap();
        assert_eq!(settled, Settled::Yes { successor: false }, "{name}");
        assert_eq!(wire.site.operation(name).await.outcome, Some(Outcome::kept("done")), "{name}");
    };
    let completions = wire.every_cut(COMPLETE, complete).await;
    for fault in &completions {
        let name = format!("complete {fault:?}");
        wire.plan(COMPLETE, *fault);
        complete(&name).await;
        wire.assert_met(&name);
    }
    println!("{} cuts of a claim, {} of a completion", claims.len(), completions.len());
    wire.site.check_counters().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_cut_after_every_byte_of_every_other_write() {
    let wire = Wire::new().await;
    let failure = || Failure { error: "no luck".into(), retry: Retry::Backoff };
    let fail = async |name: &str| {
        assert_eq!(wire.claim(name).await.fail(failure()).await.unwrap(), Settled::Yes { successor: false }, "{name}");
    };
    let cuts = wire.every_cut(COMMIT_OF_LEDGER, fail).await;
    for fault in &cuts {
        let name = |what: &str| format!("{what} {fault:?}");

        let failed = name("fail");
        wire.plan(COMMIT_OF_LEDGER, *fault);
        fail(&failed).await;
        wire.assert_met(&failed);
        let stored = wire.site.operation(&failed).await;
        assert_eq!((stored.state, stored.failures), (State::Failed, 1), "{failed}");

        // The same key once more: a takeover, whose answer is lost.
        wire.plan(COMMIT_OF_LEDGER, *fault);
        let lease = wire.claim(&failed).await;
        wire.assert_met("takeover");
        let stored = wire.site.operation(&failed).await;
        assert_eq!((lease.fence(), stored.state), (stored.fence, State::Processing), "{failed}");

        wire.plan(COMMIT_OF_LEDGER, *fault);
        assert_eq!(lease.checkpoint("here").await.unwrap(), Held::Yes, "{failed}");
        wire.assert_met("checkpoint");
        assert_eq!(wire.site.operation(&failed).await.checkpoint.unwrap(), "here");

        wire.plan(COMMIT_OF_LEDGER, *fault);
        assert_eq!(lease.doubt("who knows").await.unwrap(), Settled::Yes { successor: false }, "{failed}");
        wire.assert_met("doubt");
        let stored = wire.site.operation(&failed).await;
        assert_eq!((stored.state, stored.crashes), (State::InDoubt, 1), "{failed}");

        let released = name("release");
        let lease = wire.claim(&released).await;
        wire.plan(COMMIT_OF_LEDGER, *fault);
        assert_eq!(lease.release(Duration::ZERO).await.unwrap(), Settled::Yes { successor: false }, "{released}");
        wire.assert_met(&released);
        assert_eq!(wire.site.db.by_key(&scope(), &key(&released)).await.unwrap(), None, "{released}");
    }
    println!("{} cuts of each of five writes", cuts.len());
    wire.site.check_counters().await;
}

/// An answer may take a second here. Without that limit, only TCP would end the wait, after minutes.
async fn given_up<T>(name: &str, asked: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), asked).await.unwrap_or_else(|_| panic!("{name}: still waiting"))
}

/// No call hangs, and no answer is guessed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_swallows_everything_is_given_up() {
    let wire = Wire::impatient().await;
    let begun = Instant::now();
    for fault in [Fault::SwallowRequest, Fault::SwallowAnswer] {
        let name = format!("leased {fault:?}");
        wire.plan(CLAIM, fault);
        let lease = wire.claim(&name).await;
        wire.assert_met(&name);
        wire.plan(COMPLETE, fault);
        assert_eq!(lease.complete(Outcome::kept("")).await.unwrap(), Settled::Yes { successor: false }, "{name}");
        wire.assert_met(&name);

        // A short lease: the server ends an idle transaction after it.
        let name = format!("atomic {fault:?}");
        wire.plan(COMMIT_OF_RUN, fault);
        let answer = given_up(&name, wire.run(&name, policy(Duration::from_secs(2)), small())).await.unwrap();
        wire.assert_met(&name);
        match (fault, answer) {
            (Fault::SwallowAnswer, Claim::Acquired(Ran::Completed(_))) => {}
            (Fault::SwallowRequest, Claim::Acquired(Ran::Released)) => assert_eq!(wire.rows(&name).await, 0, "{name}"),
            (_, answer) => panic!("{name}: {answer:?}"),
        }
        wire.until_completed(&name).await;

        // A completion that is too large to be sent with the commit precedes it.
        let name = format!("large {fault:?}");
        wire.plan(COMMIT_OF_CALLER, fault);
        let answer = given_up(&name, wire.run(&name, policy(Duration::from_secs(2)), large())).await.unwrap();
        wire.assert_met(&name);
        match (fault, answer) {
            (Fault::SwallowAnswer, Claim::Acquired(Ran::Completed(_))) => {}
            (Fault::SwallowRequest, Claim::Acquired(Ran::Released)) => assert_eq!(wire.rows(&name).await, 0, "{name}"),
            (_, answer) => panic!("{name}: {answer:?}"),
        }
        wire.until_completed(&name).await;

        for on in [On::Query("BEGIN"), COMPLETE_OF_CALLER] {
            let name = format!("atomic {on:?} {fault:?}");
            wire.plan(on, fault);
            let answer = wire.run(&name, policy(Duration::from_secs(2)), large()).await;
            wire.assert_met(&name);
            // An unknown result is an answer as well, on which nothing may be built.
            let completed = matches!(answer, Ok(Claim::Acquired(Ran::Completed(_))));
            assert!(answer.as_ref().err().is_none_or(semel::Error::is_transient), "{name}: {answer:?}");
            assert_eq!(wire.rows(&name).await, i64::from(completed), "{name}: {answer:?}");
            wire.until_completed(&name).await;
        }
        wire.plan(On::Execute("JOIN semel_operations AS o"), fault);
        let error = wire.db.by_key(&scope(), &key("another")).await.unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert_eq!(wire.db.by_key(&scope(), &key("another")).await.unwrap(), None, "the next one is answered");
    }
    assert!(begun.elapsed() < Duration::from_secs(180), "it took {:?}", begun.elapsed());
    wire.site.check_counters().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_trickles_in_is_an_answer() {
    let wire = Wire::new().await;
    let slow = Fault::Trickle(Duration::from_millis(3));
    wire.plan(COMMIT_OF_RUN, slow);
    let answer = wire.run("atomic", usual(), small()).await.unwrap();
    wire.assert_met("atomic");
    assert!(matches!(answer, Claim::Acquired(Ran::Completed(_))), "{answer:?}");
    wire.plan(CLAIM, slow);
    let lease = wire.claim("leased").await;
    wire.plan(COMPLETE, slow);
    assert_eq!(lease.complete(Outcome::kept("")).await.unwrap(), Settled::Yes { successor: false });
    wire.assert_met("leased");
    assert_eq!(wire.rows("atomic").await, 1);
}

/// Claims are committed, their answers are lost, and the store is unavailable for longer than a caller waits. The
/// callers get an error; when the store is back, their claims are withdrawn: nothing runs, and nothing is in doubt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_with_lost_answers_are_withdrawn() {
    let wire = Wire::new().await;
    let hold = Policy { on_lost: OnLost::Hold, backoff: Backoff::NONE, ..usual() };
    let names: Vec<String> = (0..40).map(|n| format!("first {n}")).collect();
    wire.plan(CLAIM, Fault::GoAway);
    wire.claim_in_vain(&names, &hold).await;
    wire.assert_met("first claims");
    let made = wire.site.operations().await;
    assert!(made.values().any(|op| op.state == State::Processing), "some of them are committed");
    wire.proxy.mend();
    for name in &names {
        wire.becomes(name, None).await;
    }

    // The same for a takeover: it is released, without counting an attempt.
    let policy = || Policy { on_lost: OnLost::Hold, backoff: Backoff::NONE, ..usual() };
    let Claim::Acquired(lease) = wire.ledger.claim(work("taken over", policy()).payload("data")).await.unwrap() else {
        panic!("it is free")
    };
    let failure = Failure { error: "no luck".into(), retry: Retry::Backoff };
    assert_eq!(lease.fail(failure).await.unwrap(), Settled::Yes { successor: false });
    wire.plan(COMMIT_OF_LEDGER, Fault::GoAway);
    wire.claim_in_vain(&["taken over".into()], &hold).await;
    wire.assert_met("a takeover");
    assert_eq!(wire.site.operation("taken over").await.state, State::Processing);
    wire.proxy.mend();
    wire.becomes("taken over", Some(State::Pending)).await;
    let put_back = wire.site.operation("taken over").await;
    assert_eq!((put_back.failures, put_back.crashes), (1, 0));

    // The next claim gets it.
    for name in ["first 0", "taken over"] {
        let claim = wire.ledger.claim(work(name, hold.clone())).await.unwrap();
        assert_eq!(claim.word(), "acquired", "{name}");
    }
    wire.site.check_counters().await;
}

/// Data is stored under `rerun`, and the answer is lost. Its sender gets an error, and sends it again to another node,
/// where it is in flight: then the sender does not send it again. So withdrawing the first claim must not delete the
/// data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_answered_in_flight_outlives_the_withdrawn_claim_that_stored_it() {
    let wire = Wire::new().await;
    let rerun = Policy { lease: Duration::from_secs(600), max_run: Duration::from_secs(600), ..usual() };
    wire.plan(CLAIM, Fault::GoAway);
    wire.claim_in_vain(&["k".into()], &rerun).await;
    wire.assert_met("the claim");
    let elsewhere = Ledger::new(wire.site.db.clone(), Options::default()).unwrap();
    let again = elsewhere.claim(work("k", rerun.clone()).payload("k")).await.unwrap();
    assert_eq!(again.word(), "in_flight");
    wire.proxy.mend();
    wire.becomes("k", Some(State::Pending)).await;
    let kept = wire.site.operation("k").await;
    assert_eq!((kept.payload.as_deref(), kept.failures, kept.crashes), (Some(&b"k"[..]), 0, 0));
    let due = elsewhere.due_kinds(scope().service(), ("", "")).await.unwrap();
    assert_eq!(due.len(), 1, "it runs without being sent again");
    elsewhere.stop(Duration::from_secs(5)).await;
    wire.site.check_counters().await;
}

/// A claim that the database refuses to withdraw blocks no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_claim_that_cannot_be_withdrawn_blocks_no_other() {
    /// None may be withdrawn before all are lost.
    const REFUSE: &str = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
         CREATE TRIGGER refuse BEFORE DELETE ON semel_operations FOR EACH ROW EXECUTE FUNCTION refuse()";
    const REFUSE_ONE: &str = "DROP TRIGGER refuse ON semel_operations;
         CREATE TRIGGER refuse BEFORE DELETE ON semel_operations FOR EACH ROW WHEN (OLD.key = 'refused')
         EXECUTE FUNCTION refuse()";
    let wire = Wire::new().await;
    let mut person = PgConnection::connect(&wire.site.url).await.unwrap();
    sqlx::raw_sql(REFUSE).execute(&mut person).await.unwrap();
    let term = Duration::from_secs(300);
    let hold = Policy { on_lost: OnLost::Hold, lease: term, max_run: term, ..usual() };
    for name in ["one", "refused", "two"] {
        wire.plan(CLAIM, Fault::GoAway);
        wire.claim_in_vain(&[name.to_owned()], &hold).await;
        wire.assert_met(name);
        wire.proxy.mend();
    }
    for name in ["one", "refused", "two"] {
        assert_eq!(wire.site.operation(name).await.state, State::Processing, "{name}");
    }
    sqlx::raw_sql(REFUSE_ONE).execute(&mut person).await.unwrap();
    for name in ["one", "two"] {
        wire.becomes(name, None).await;
    }
    assert_eq!(wire.site.operation("refused").await.state, State::Processing);
}

/// A node that stops looks for them once more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stops_withdraws_claims_with_lost_answers() {
    let wire = Wire::new().await;
    let hold = Policy { on_lost: OnLost::Hold, ..usual() };
    wire.plan(CLAIM, Fault::GoAway);
    wire.claim_in_vain(&["k".into()], &hold).await;
    wire.assert_met("a claim");
    assert_eq!(wire.site.operation("k").await.state, State::Processing);
    wire.proxy.mend();
    wire.ledger.stop(Duration::ZERO).await;
    assert_eq!(wire.site.db.by_key(&scope(), &key("k")).await.unwrap(), None);
}

/// First claims of a batch that are committed are answered, also if the store becomes unavailable before the others
/// are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_that_are_committed_are_answered_when_the_rest_of_their_batch_fails() {
    let wire = Wire::impatient().await;
    let again = Policy { backoff: Backoff::NONE, ..usual() };
    let failure = Failure { error: "no luck".into(), retry: Retry::Backoff };
    let Claim::Acquired(lease) = wire.ledger.claim(work("known", again.clone())).await.unwrap() else {
        panic!("it is free")
    };
    assert_eq!(lease.fail(failure).await.unwrap(), Settled::Yes { successor: false });
    let batch: Vec<_> = ["new 1", "known", "new 2"]
        .map(|name| std::sync::Arc::new(request(name, name.as_bytes(), again.clone())))
        .to_vec();
    for fault in [Fault::GoAway, Fault::CutRequest, Fault::SwallowAnswer] {
        wire.plan(COMMIT_OF_LEDGER, fault);
        let answers = wire.db.claim(batch.clone()).await;
        wire.assert_met("the takeover");
        wire.proxy.mend();
        let answers: Vec<_> = answers.unwrap().into_iter().map(|applied| applied.answer).collect();
        assert_eq!(answers, [Answer::Acquired, Answer::Busy, Answer::Acquired], "{fault:?}");
        // Sent again, each is recognised by its token.
        let answers = wire.db.claim(batch.clone()).await.unwrap();
        assert!(answers.iter().all(|applied| applied.answer == Answer::Acquired), "{fault:?}");
        let op = answers[1].operation.as_ref().unwrap();
        let release = semel::machine::Write::Release { delay: Duration::ZERO, why: None };
        let release = semel::store::LeaseWrite { id: op.id, fence: op.fence, write: release };
        // The connection for settles may be lost with the others. The engine sends such a write again.
        if let Err(error) = wire.db.write(vec![release.clone()]).await {
            assert!(error.is_transient(), "{error}");
            wire.db.write(vec![release]).await.unwrap();
        }
    }
}
