//! An outbox in memory that writes down how it is used, and a broker that answers as it is told.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use semel::{
    Error, Fence, Key, Operation, Outcome, Result, Scope, Store, Timestamp, Token, Uptime,
    look::{Count, DayTally, Due, DueKind, Filter, Listing, Page, Tallied, Tally, TallyFilter},
    machine::{Answer, Request},
    messaging::{
        Backlog, BoxFuture, Broker, BrokerHealth, DeadLetter, Deliveries, Envelope, Lent, LetterCount, LetterFilter,
        LetterPage, Mark, MarkRow, Message, MessageId, MessageStore, NewLetter, OutboxFilter, OutboxListing, Published,
        Queue, Redriven, Retry, RetryRow, Taken, Tended, Topic, Wake,
    },
    store::{AnswerCount, Applied, Commit, Decision, Glance, LeaseWrite, SeenAgain, Story, Swept, Take},
};
use tokio::sync::Semaphore;

/// What the relay has no use for.
fn no_use<T>() -> Result<T> {
    Err(Error::Refused("a relay should not ask for this".into()))
}

/// An outbox without leases that end: there is one relay, and it does not die.
#[derive(Clone)]
pub(super) struct Memory {
    state: Arc<Mutex<State>>,
    wake: Wake,
    /// Marks wait here, if the test has closed it.
    pub(super) marking: Arc<Semaphore>,
}

#[derive(Default)]
pub(super) struct State {
    ready: BTreeMap<i64, Message>,
    leased: BTreeMap<i64, (i64, Message)>,
    pub(super) marked: Vec<Vec<MarkRow>>,
    pub(super) takes: Vec<u32>,
    /// How many rows each renewal was for.
    pub(super) holds: Vec<usize>,
    pub(super) tends: usize,
    /// How many marks from now on are refused, and whether the same may succeed later.
    pub(super) refuse_marks: usize,
    /// Marks with this row are refused for good.
    pub(super) bad_row: Option<i64>,
    next: i64,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self { state: Arc::default(), wake: Wake::default(), marking: Arc::new(Semaphore::new(1)) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Puts messages, and wakes the relay.
    pub(super) fn fill(&self, n: usize) {
        let topic = Topic::new("orders").unwrap();
        let mut state = self.state();
        for _ in 0..n {
            state.next += 1;
            let next = state.next;
            state.ready.insert(next, Message::new("acme", topic.clone(), "test", next.to_string()));
        }
        drop(state);
        self.wake.wake();
    }

    /// All marks, in the order in which they were made.
    pub(super) fn marks(&self) -> Vec<(i64, Mark)> {
        self.state().marked.iter().flatten().map(|row| (row.id, row.mark.clone())).collect()
    }

    pub(super) fn sent(&self) -> usize {
        self.marks().iter().filter(|(_, mark)| *mark == Mark::Sent).count()
    }
}

impl MessageStore for Memory {
    async fn put(&self, _tx: &(), _messages: Vec<Message>) -> Result<()> {
        no_use()
    }

    async fn take(&self, limit: u32, _lease: Duration) -> Result<Taken> {
        let mut state = self.state();
        state.takes.push(limit);
        state.next += 1;
        let token = state.next;
        let mut rows = Vec::new();
        while rows.len() < limit as usize
            && let Some((id, message)) = state.ready.pop_first()
        {
            state.leased.insert(id, (token, message.clone()));
            let envelope = Envelope { message, number: None, put_at: Timestamp::from_micros(1) };
            rows.push(Lent { id, failures: 0, envelope });
        }
        Ok(Taken { more: rows.len() >= limit as usize, rows, token })
    }

    async fn hold(&self, rows: Vec<(i64, i64)>, _lease: Duration) -> Result<Vec<i64>> {
        let mut state = self.state();
        state.holds.push(rows.len());
        let is_ours = |(id, token): &&(i64, i64)| state.leased.get(id).is_some_and(|(held, _)| held == token);
        Ok(rows.iter().filter(is_ours).map(|(id, _)| *id).collect())
    }

    async fn mark(&self, marks: Vec<MarkRow>) -> Result<u64> {
        drop(self.marking.acquire().await);
        let mut state = self.state();
        if state.refuse_marks > 0 {
            state.refuse_marks -= 1;
            return Err(Error::Unavailable("not now".into()));
        }
        if marks.iter().any(|row| Some(row.id) == state.bad_row) {
            return Err(Error::Refused("this row".into()));
        }
        for row in &marks {
            let Some((token, message)) = state.leased.remove(&row.id) else { continue };
            assert_eq!(token, row.token);
            if row.mark != Mark::Sent {
                state.ready.insert(row.id, message);
            }
        }
        state.marked.push(marks);
        Ok(0)
    }

    async fn tend(&self) -> Result<Tended> {
        self.state().tends += 1;
        Ok(Tended::default())
    }

    fn outbox_wake(&self) -> Wake {
        self.wake.clone()
    }

    async fn receipt(&self, _tenant: &str, _id: MessageId) -> Result<Option<Timestamp>> {
        no_use()
    }

    async fn outbox(&self, _filter: &OutboxFilter, _after: Option<i64>, _limit: u32) -> Result<OutboxListing> {
        no_use()
    }

    async fn redrive_outbox(&self, _tenant: &str, _id: MessageId, _actor: &str) -> Result<bool> {
        no_use()
    }

    async fn skip_outbox(&self, _tenant: &str, _id: MessageId, _actor: &str, _reason: &str) -> Result<bool> {
        no_use()
    }

    async fn backlog(&self) -> Result<Backlog> {
        no_use()
    }

    async fn put_letter(&self, _letter: NewLetter) -> Result<()> {
        no_use()
    }

    async fn take_retries(&self, _consumer: &str, _limit: u32, _lease: Duration) -> Result<Vec<RetryRow>> {
        no_use()
    }

    async fn retry_done(&self, _tx: &(), _id: i64, _token: i64) -> Result<bool> {
        no_use()
    }

    async fn retry_not_begun(&self, _id: i64, _token: i64) -> Result<bool> {
        no_use()
    }

    async fn retry_failed(&self, _id: i64, _token: i64, _reason: &str, _retry: Retry) -> Result<bool> {
        no_use()
    }

    async fn next_retry(&self, _consumer: &str) -> Result<Option<Timestamp>> {
        no_use()
    }

    fn retry_wake(&self) -> Wake {
        Wake::default()
    }

    async fn letters(&self, _filter: &LetterFilter, _after: Option<i64>, _limit: u32) -> Result<LetterPage> {
        no_use()
    }

    async fn letter(&self, _tenant: &str, _id: i64) -> Result<Option<DeadLetter>> {
        no_use()
    }

    async fn count_letters(&self, _filter: &LetterFilter) -> Result<LetterCount> {
        no_use()
    }

    async fn redrive_letters(
        &self,
        _filter: &LetterFilter,
        _after: Option<i64>,
        _limit: u32,
        _actor: &str,
    ) -> Result<Redriven> {
        no_use()
    }

    async fn discard_letter(&self, _tenant: &str, _id: i64, _actor: &str, _reason: &str) -> Result<bool> {
        no_use()
    }
}

impl Store for Memory {
    type Tx = ();

    async fn claim(&self, _batch: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        no_use()
    }

    async fn write(&self, _batch: Vec<LeaseWrite>) -> Result<Vec<Applied>> {
        no_use()
    }

    async fn held_by(&self, _tokens: Vec<Token>) -> Result<Vec<(Token, i64, Fence)>> {
        no_use()
    }

    async fn renew(&self, _batch: Vec<(i64, Fence)>) -> Result<Vec<Answer>> {
        no_use()
    }

    async fn decide(&self, _id: i64, _decision: Decision, _actor: &str, _reason: &str) -> Result<Applied> {
        no_use()
    }

    fn longest_transaction(&self) -> Duration {
        Duration::from_secs(1)
    }

    async fn begin(&self, _limit: Duration) -> Result<()> {
        no_use()
    }

    async fn complete_in(&self, _tx: &(), _id: i64, _fence: Fence, _outcome: Outcome) -> Result<Applied> {
        no_use()
    }

    async fn claim_in(&self, _tx: &(), _request: Arc<Request>) -> Result<Applied> {
        no_use()
    }

    async fn commit(&self, _tx: &()) -> Commit {
        Commit::Done
    }

    async fn roll_back(&self, _tx: &()) {}

    async fn read_back(&self, _id: i64) -> Result<Option<Operation>> {
        no_use()
    }

    async fn sweep(&self, _limit: u32) -> Result<Swept> {
        no_use()
    }

    async fn note_repeats(&self, _repeats: Vec<SeenAgain>, _answers: Vec<AnswerCount>) -> Result<Vec<SeenAgain>> {
        no_use()
    }

    async fn glance(&self, _ids: Vec<i64>) -> Result<Vec<Glance>> {
        no_use()
    }

    async fn now(&self) -> Result<Timestamp> {
        Ok(Timestamp::from_micros(1))
    }

    async fn by_id(&self, _tenant: &str, _id: i64) -> Result<Option<Operation>> {
        no_use()
    }

    async fn by_key(&self, _scope: &Scope, _key: &Key) -> Result<Option<Operation>> {
        no_use()
    }

    async fn due(&self, _scope: &Scope, _limit: u32) -> Result<Due> {
        no_use()
    }

    async fn due_kinds(&self, _service: &str, _after: (&str, &str)) -> Result<Vec<DueKind>> {
        no_use()
    }

    async fn take_due(&self, _take: Arc<Take>) -> Result<Vec<(usize, Applied)>> {
        no_use()
    }

    async fn not_due(&self, _id: i64, _fence: Fence) -> Result<()> {
        no_use()
    }

    async fn list(&self, _filter: &Filter, _page: Page) -> Result<Listing> {
        no_use()
    }

    async fn journal(&self, _id: i64) -> Result<Story> {
        no_use()
    }

    async fn counts(&self, _tenant: &str, _since_hour: i64) -> Result<Vec<Count>> {
        no_use()
    }

    async fn tally(&self, _filter: &TallyFilter) -> Result<Tallied<Tally>> {
        no_use()
    }

    async fn tally_days(&self, _filter: &TallyFilter) -> Result<Tallied<DayTally>> {
        no_use()
    }
}

type Answering = dyn Fn(usize, Vec<Envelope>, Uptime) -> BoxFuture<'static, Vec<Published>> + Send + Sync;

/// Answers the n-th batch as the test says.
pub(super) struct Script {
    answering: Box<Answering>,
    pub(super) calls: Mutex<usize>,
    pub(super) health: Mutex<BrokerHealth>,
}

impl Script {
    pub(super) fn new<F: Future<Output = Vec<Published>> + Send + 'static>(
        answering: impl Fn(usize, Vec<Envelope>, Uptime) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        let answering = Box::new(move |n, batch, until| -> BoxFuture<'static, Vec<Published>> {
            Box::pin(answering(n, batch, until))
        });
        Arc::new(Self { answering, calls: Mutex::default(), health: Mutex::new(BrokerHealth::Up) })
    }
}

impl Broker for Script {
    fn declare(&self, _queues: Vec<Queue>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        (self.answering)(*calls, batch, until)
    }

    fn consume(&self, _queue: &str, _prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>> {
        Box::pin(async { no_use() })
    }

    fn health(&self) -> BrokerHealth {
        self.health.lock().unwrap().clone()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}
