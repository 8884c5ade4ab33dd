//! A store that becomes unavailable and available again when the test says so.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use semel::{
    Error, Fence, Key, Operation, Result, Scope, Timestamp, Token,
    look::{Count, DayTally, DueKind, Filter, Listing, Page, Tallied, Tally, TallyFilter},
    machine::{Answer, Request, read},
    messaging::{ConsumerStore, MarkRow, NewLetter, RelayStore, Retry, RetryRow, Taken, Tended, Wake},
    store::{
        AnswerCount, Applied, Commit, Decision, Glance, LeaseWrite, Look, Operations, SeenAgain, Story, Sweep, Swept,
        Take, TimeSource, Transactions,
    },
};
use semel_store::{Database, Tx};
use tokio::sync::Notify;

/// A database, and a switch.
#[derive(Clone)]
pub(super) struct Unreliable {
    db: Database,
    away: Arc<AtomicBool>,
    /// How many of the next commits are made without an answer.
    silent_commits: Arc<AtomicUsize>,
    /// How many of the next commits are refused with a transient error.
    failing_commits: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
    given_back: Arc<AtomicUsize>,
    late: Arc<Late>,
}

/// Claims that are made, and whose answers wait for the test.
#[derive(Default)]
pub(super) struct Late {
    on: AtomicBool,
    /// A glimpse was made meanwhile.
    pub(super) glimpsed: Notify,
    go_on: Notify,
}

impl Late {
    pub(super) fn end(&self) {
        self.on.store(false, Ordering::SeqCst);
        self.go_on.notify_one();
    }
}

impl Unreliable {
    pub(super) fn new(db: Database) -> Self {
        let (refused, given_back) = (Arc::default(), Arc::default());
        let late = Arc::default();
        let (away, silent_commits, failing_commits) = (Arc::default(), Arc::default(), Arc::default());
        Self { db, away, silent_commits, failing_commits, refused, given_back, late }
    }

    pub(super) fn answer_late(&self) -> Arc<Late> {
        self.late.on.store(true, Ordering::SeqCst);
        self.late.clone()
    }

    pub(super) fn go_away(&self) {
        self.away.store(true, Ordering::SeqCst);
    }

    pub(super) fn come_back(&self) {
        self.away.store(false, Ordering::SeqCst);
    }

    pub(super) fn make_commits_silent(&self, n: usize) {
        self.silent_commits.store(n, Ordering::SeqCst);
    }

    /// The commit of the present transaction will be refused with a transient error code.
    pub(super) fn fail_a_commit(&self) {
        self.failing_commits.fetch_add(1, Ordering::SeqCst);
    }

    /// How many calls were made while it was unavailable.
    pub(super) fn refused(&self) -> usize {
        self.refused.load(Ordering::SeqCst)
    }

    /// How often a release of a retry was tried, with or without success.
    pub(super) fn given_back(&self) -> usize {
        self.given_back.load(Ordering::SeqCst)
    }

    fn db(&self) -> Result<&Database> {
        match self.away.load(Ordering::SeqCst) {
            false => Ok(&self.db),
            true => {
                self.refused.fetch_add(1, Ordering::SeqCst);
                Err(Error::Unavailable("the test says so".into()))
            }
        }
    }
}

impl TimeSource for Unreliable {
    async fn now(&self) -> Result<Timestamp> {
        self.db()?.now().await
    }
}

impl Transactions for Unreliable {
    type Tx = Tx;

    fn longest_transaction(&self) -> Duration {
        self.db.longest_transaction()
    }

    async fn begin(&self, limit: Duration) -> Result<Tx> {
        self.db()?.begin(limit).await
    }

    async fn commit(&self, tx: &Tx) -> Commit {
        if let Err(error) = self.db() {
            self.db.roll_back(tx).await;
            return Commit::Unknown(error.to_string());
        }
        let failing = self.failing_commits.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if failing.is_ok() {
            self.db.roll_back(tx).await;
            return Commit::Unavailable("could not serialize access".into());
        }
        let committed = self.db.commit(tx).await;
        let silent = self.silent_commits.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if silent.is_ok() { Commit::Unknown("the test says so".into()) } else { committed }
    }

    async fn roll_back(&self, tx: &Tx) {
        self.db.roll_back(tx).await;
    }
}

impl Operations for Unreliable {
    async fn claim(&self, batch: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        let done = self.db()?.claim(batch).await;
        if self.late.on.load(Ordering::SeqCst) {
            self.late.go_on.notified().await;
        }
        done
    }

    async fn write(&self, batch: Vec<LeaseWrite>) -> Result<Vec<Applied>> {
        self.db()?.write(batch).await
    }

    fn one_writer(&self) -> bool {
        self.db.one_writer()
    }

    async fn flush(&self, claims: Vec<Arc<Request>>, writes: Vec<LeaseWrite>) -> Result<(Vec<Applied>, Vec<Applied>)> {
        self.db()?.flush(claims, writes).await
    }

    async fn glimpse(&self, request: &Arc<Request>) -> Result<Option<Applied>> {
        if !self.late.on.load(Ordering::SeqCst) {
            return self.db()?.glimpse(request).await;
        }
        let (now, found) = (self.now().await?, self.by_key(&request.scope, &request.key).await?);
        let applied = found.and_then(|op| Some(Applied { answer: read(&op, request, now)?, operation: Some(op), now }));
        self.late.glimpsed.notify_one();
        Ok(applied)
    }

    async fn held_by(&self, tokens: Vec<Token>) -> Result<Vec<(Token, i64, Fence)>> {
        self.db()?.held_by(tokens).await
    }

    async fn renew(&self, batch: Vec<(i64, Fence)>) -> Result<Vec<Answer>> {
        self.db()?.renew(batch).await
    }

    async fn tell_renewals(&self) -> Result<()> {
        self.db()?.tell_renewals().await
    }

    async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        self.db()?.decide(id, decision, actor, reason).await
    }

    async fn write_in(&self, tx: &Tx, write: LeaseWrite) -> Result<Applied> {
        self.db()?.write_in(tx, write).await
    }

    async fn claim_in(&self, tx: &Tx, request: Arc<Request>) -> Result<Applied> {
        self.db()?.claim_in(tx, request).await
    }

    async fn claim_all_in(&self, tx: &Tx, requests: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        self.db()?.claim_all_in(tx, requests).await
    }

    async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        self.db()?.read_back(id).await
    }

    async fn note_repeats(&self, repeats: Vec<SeenAgain>, answers: Vec<AnswerCount>) -> Result<Vec<SeenAgain>> {
        self.db()?.note_repeats(repeats, answers).await
    }

    async fn take_due(&self, take: Arc<Take>) -> Result<Vec<(usize, Applied)>> {
        self.db()?.take_due(take).await
    }
}

impl Look for Unreliable {
    async fn glance(&self, ids: Vec<i64>) -> Result<Vec<Glance>> {
        self.db()?.glance(ids).await
    }

    async fn by_id(&self, tenant: &str, id: i64) -> Result<Option<Operation>> {
        self.db()?.by_id(tenant, id).await
    }

    async fn by_key(&self, scope: &Scope, key: &Key) -> Result<Option<Operation>> {
        self.db()?.by_key(scope, key).await
    }

    async fn due_kinds(&self, service: &str, after: (&str, &str)) -> Result<Vec<DueKind>> {
        self.db()?.due_kinds(service, after).await
    }

    async fn taken_under(&self, token: Token) -> Result<Vec<(i64, Fence)>> {
        self.db()?.taken_under(token).await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Listing> {
        self.db()?.list(filter, page).await
    }

    async fn journal(&self, id: i64) -> Result<Story> {
        self.db()?.journal(id).await
    }

    async fn counts(&self, tenant: &str, since_hour: i64) -> Result<Vec<Count>> {
        self.db()?.counts(tenant, since_hour).await
    }

    async fn tally(&self, filter: &TallyFilter) -> Result<Tallied<Tally>> {
        self.db()?.tally(filter).await
    }

    async fn tally_days(&self, filter: &TallyFilter) -> Result<Tallied<DayTally>> {
        self.db()?.tally_days(filter).await
    }
}

impl Sweep for Unreliable {
    async fn sweep(&self, limit: u32) -> Result<Swept> {
        self.db()?.sweep(limit).await
    }

    async fn end_expired_leases(&self, limit: u32) -> Result<Swept> {
        self.db()?.end_expired_leases(limit).await
    }
}

impl RelayStore for Unreliable {
    async fn take(&self, limit: u32, lease: Duration) -> Result<Taken> {
        self.db()?.take(limit, lease).await
    }

    async fn hold(&self, rows: Vec<(i64, i64)>, lease: Duration) -> Result<Vec<i64>> {
        self.db()?.hold(rows, lease).await
    }

    async fn mark(&self, marks: Vec<MarkRow>) -> Result<u64> {
        self.db()?.mark(marks).await
    }

    async fn tend(&self) -> Result<Tended> {
        self.db()?.tend().await
    }

    fn outbox_wake(&self) -> Wake {
        self.db.outbox_wake()
    }
}

impl ConsumerStore for Unreliable {
    async fn put_letter(&self, letter: NewLetter) -> Result<()> {
        self.db()?.put_letter(letter).await
    }

    async fn take_retries(&self, consumer: &str, limit: u32, lease: Duration) -> Result<Vec<RetryRow>> {
        self.db()?.take_retries(consumer, limit, lease).await
    }

    async fn retry_done(&self, tx: &Tx, id: i64, token: i64) -> Result<bool> {
        self.db()?.retry_done(tx, id, token).await
    }

    async fn retry_not_begun(&self, id: i64, token: i64) -> Result<bool> {
        self.given_back.fetch_add(1, Ordering::SeqCst);
        self.db()?.retry_not_begun(id, token).await
    }

    async fn retry_failed(&self, id: i64, token: i64, reason: &str, retry: Retry) -> Result<bool> {
        self.db()?.retry_failed(id, token, reason, retry).await
    }

    async fn next_retry(&self, consumer: &str) -> Result<Option<Timestamp>> {
        self.db()?.next_retry(consumer).await
    }

    fn retry_wake(&self) -> Wake {
        self.db.retry_wake()
    }
}
