//! Random histories: both stores must do what the pure function does, step by step, column by column; also with
//! concurrent events, over several connections.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{collections::HashMap, sync::Arc, time::Duration};

use proptest::prelude::*;
use semel::{
    Backoff, Failure, Fence, OnLost, OnMismatch, Operation, Outcome, Policy, Retry, Runner, Timestamp, Verdict,
    machine::{Answer, Event, Later, Next, Request, Write, due, step},
    prelude::*,
    store::{Applied, Decision, LeaseWrite, Limits, Take, Want},
};
use semel_store::on;
use semel_testkit::{Kind, Lab, key, request, scope};

/// One event. Small numbers choose among keys, payloads, orders and known fences.
#[derive(Clone, Debug)]
enum Action {
    Claim {
        key: usize,
        payload: u8,
        order: Option<i64>,
        policy: usize,
        repeat: bool,
        stored: bool,
        at_once: bool,
        /// An enqueue with this delay in seconds.
        later: Option<u64>,
    },
    /// A take of due operations, under this policy.
    Take {
        policy: usize,
    },
    Write {
        key: usize,
        fence: usize,
        write: usize,
    },
    Renew {
        key: usize,
        fence: usize,
    },
    Decide {
        key: usize,
        decision: usize,
        expected: bool,
    },
    Sweep,
    Pass {
        seconds: u64,
    },
    /// Claims and writes in batches, from two nodes at once.
    Together {
        parts: Vec<(bool, Action)>,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let later = proptest::option::weighted(0.4, prop_oneof![Just(0), Just(7)]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), later);
    let claim = (0..2usize, 0..2u8, proptest::option::of(0..3i64), 0..10usize, flags).prop_map(
        |(key, payload, order, policy, (repeat, stored, at_once, later))| Action::Claim {
            key,
            payload,
            order,
            policy,
            repeat,
            stored,
            at_once,
            later,
        },
    );
    let claim = claim.boxed();
    let write = (0..2usize, 0..3usize, 0..WRITES).prop_map(|(key, fence, write)| Action::Write { key, fence, write });
    let part = prop_oneof![3 => claim.clone(), 2 => write.clone()];
    prop_oneof![
        6 => claim,
        5 => write,
        4 => proptest::collection::vec((any::<bool>(), part), 2..=MOST).prop_map(|parts| Action::Together { parts }),
        2 => (0..2usize, 0..3usize).prop_map(|(key, fence)| Action::Renew { key, fence }),
        1 => (0..2usize, 0..6usize, any::<bool>()).prop_map(|(key, decision, expected)| Action::Decide { key, decision, expected }),
        3 => (0..6usize).prop_map(|policy| Action::Take { policy }),
        2 => Just(Action::Sweep),
        4 => prop_oneof![Just(0), Just(1), Just(7), Just(31), Just(61), Just(100_000)].prop_map(|seconds| Action::Pass { seconds }),
    ]
}

fn policy(choice: usize) -> Policy {
    let base = Policy {
        max_attempts: Some(2),
        max_crashes: 2,
        backoff: Backoff { first: Duration::from_secs(5), cap: Duration::from_secs(8) },
        max_run: Duration::from_secs(60),
        retention: Some(Duration::from_secs(50)),
        ..Policy::default()
    };
    match choice {
        0 => base,
        1 => Policy { on_lost: OnLost::Hold, retention: None, ..base },
        2 => Policy { on_mismatch: OnMismatch::Replay, ..base },
        3 => Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..base },
        4 => Policy {
            on_mismatch: OnMismatch::SupersedeIfNewer,
            on_lost: OnLost::Probe,
            tombstone: Some(Duration::from_secs(20)),
            ..base
        },
        5 => Policy { tombstone: Some(Duration::from_secs(10)), retention: None, backoff: Backoff::NONE, ..base },
        6 => Policy { pinned: true, ..base },
        7 => Policy { runner: Runner::Caller, ..base },
        8 => Policy { runner: Runner::Caller, on_lost: OnLost::Hold, ..base },
        _ => Policy { pinned: true, on_mismatch: OnMismatch::Replay, tombstone: Some(Duration::from_secs(20)), ..base },
    }
}

/// The number of sorts of writes.
const WRITES: usize = 9;

/// The most concurrent events: every order of them is tried.
const MOST: usize = 5;

fn write(choice: usize) -> Write {
    let failure = |retry| Write::Fail(Failure { error: "no \u{0} luck é".into(), retry });
    match choice {
        0 => Write::Complete(Outcome::kept(vec![0, 255, 1])),
        1 => Write::Complete(Outcome::not_kept("")),
        2 => failure(Retry::Backoff),
        3 => failure(Retry::Never),
        4 => Write::Release { delay: Duration::ZERO, why: None },
        5 => Write::Doubt { reason: "who knows".into() },
        6 => Write::Withdraw,
        7 => Write::Progress(vec![8; 2].into()),
        _ => Write::Checkpoint(vec![7; 3].into()),
    }
}

/// The store and, beside it, the rows of the pure function.
struct Run {
    lab: Lab,
    store: semel_store::Database,
    /// Another node.
    other: semel_store::Database,
    model: HashMap<usize, Operation>,
    /// The due time of each operation that does not run, if it has one.
    due: HashMap<usize, Option<Timestamp>>,
    /// Every fence ever drawn, by key: old ones are tried too.
    fences: HashMap<usize, Vec<(i64, Fence)>>,
    last: HashMap<usize, Request>,
    time: Timestamp,
}

const NAMES: [&str; 2] = ["first", "second key"];

impl Run {
    async fn new(kind: Kind) -> Self {
        let lab = Lab::new(kind).await;
        let (store, other) = (lab.open().await, lab.open().await);
        let (model, due, fences, last) = (HashMap::new(), HashMap::new(), HashMap::new(), HashMap::new());
        Self { lab, store, other, model, due, fences, last, time: Lab::START }
    }

    async fn act(&mut self, action: &Action) {
        match action {
            Action::Pass { seconds } => {
                self.lab.pass(Duration::from_secs(*seconds));
                self.time = self.time + Duration::from_secs(*seconds);
            }
            Action::Claim { key, .. } => {
                let asked = self.request(action);
                let applied = self.store.claim(vec![asked.clone()]).await.unwrap().remove(0);
                let fence = applied.operation.as_ref().unwrap().fence;
                self.check(*key, &Event::Claim { request: &asked, fence }, &applied.answer).await;
                self.learn(*key, &applied);
            }
            Action::Write { key, fence, write: choice } => {
                let Some((id, fence)) = self.known(*key, *fence) else { return };
                let asked = LeaseWrite { id, fence, write: write(*choice) };
                let applied = self.store.write(vec![asked.clone()]).await.unwrap().remove(0);
                self.check_write(*key, id, &Event::Write { fence, write: asked.write }, &applied.answer).await;
            }
            Action::Renew { key, fence } => {
                let Some((id, fence)) = self.known(*key, *fence) else { return };
                let answer = self.store.renew(vec![(id, fence)]).await.unwrap().remove(0);
                self.check_write(*key, id, &Event::Write { fence, write: Write::Renew }, &answer).await;
            }
            Action::Decide { key, decision, expected } => {
                let Some(op) = self.model.get(key).cloned() else { return };
                let expected = expected.then_some(op.fence);
                let resolve = |verdict| Decision::Resolve { verdict, expected };
                let decision = match decision {
                    0 => resolve(Verdict::Completed(Outcome::kept("by hand"))),
                    1 => resolve(Verdict::Failed),
                    2 => resolve(Verdict::Retry),
                    3 => resolve(Verdict::Rerun { archived: op.payload.clone() }),
                    4 => Decision::Cancel,
                    _ => Decision::Purge,
                };
                let applied = self.store.decide(op.id, decision.clone(), "ann", "because").await.unwrap();
                let (actor, reason) = ("ann".to_owned(), "because".to_owned());
                let fence = applied.operation.map_or(op.fence, |op| op.fence);
                let event = match decision {
                    Decision::Resolve { verdict, expected } | Decision::Found { verdict, expected } => {
                        Event::Resolve { fence, expected, verdict, actor, reason }
                    }
                    Decision::Cancel => Event::Cancel { fence, actor, reason },
                    Decision::Purge => Event::Purge { actor, reason },
                };
                self.check(*key, &event, &applied.answer).await;
            }
            Action::Take { policy: choice } => self.take(policy(*choice)).await,
            Action::Together { parts } => self.act_together(parts).await,
            Action::Sweep => {
                self.store.sweep(100).await.unwrap();
                for place in 0..NAMES.len() {
                    let fence = self.stored(place).await.map_or(Fence(0), |op| op.fence);
                    for event in [Event::Lapse { fence }, Event::Tend] {
                        self.model_step(place, &event);
                    }
                    self.compare(place).await;
                }
            }
        }
    }

    /// Takes due operations: exactly those, each as a claim by its key would have got it.
    async fn take(&mut self, policy: Policy) {
        let want = Want {
            scope: scope(),
            most: 10,
            since: Some(0),
            policy: policy.clone(),
            lease: None,
            limits: Limits::default(),
        };
        let token = semel::Token::random().unwrap();
        let take = Take { wants: vec![want], most: None, owner: "worker".into(), token };
        let taken = self.store.take_due(Arc::new(take)).await.unwrap();
        for (place, name) in NAMES.iter().enumerate() {
            let is_due = self.due.get(&place).copied().flatten().is_some_and(|due| due <= self.time);
            let expired = self.model.get(&place).is_some_and(|op| op.has_expired(self.time));
            let Some(op) = self.model.get(&place).cloned().filter(|_| is_due && !expired) else { continue };
            let asked = Request {
                order: op.order,
                payload: op.payload.clone(),
                fingerprint: op.fingerprint,
                labels: op.labels.clone(),
                owner: "worker".into(),
                token,
                ..request(name, &[], policy.clone())
            };
            let mine = taken.iter().find(|(_, applied)| applied.operation.as_ref().unwrap().id == op.id);
            let fence = mine.map_or(Fence(i64::MAX), |(_, applied)| applied.operation.as_ref().unwrap().fence);
            let said = self.model_step(place, &Event::Claim { request: &asked, fence });
            match mine {
                Some((_, applied)) => {
                    assert_eq!(said, Answer::Acquired);
                    self.learn(place, applied);
                    assert_eq!(applied.operation, self.model.get(&place).cloned());
                }
                None => {
                    assert_eq!(said, Answer::Exhausted, "it was due, and was not taken");
                    // It is no longer due, which no other event would change.
                    self.due.insert(place, None);
                    self.model.get_mut(&place).unwrap().never_due = true;
                }
            }
        }
        let due = self.model.values().filter(|op| op.lease.as_ref().is_some_and(|lease| lease.token == token)).count();
        assert_eq!(taken.len(), due, "an operation that is not due was taken");
        for place in 0..NAMES.len() {
            self.compare(place).await;
        }
    }

    /// The request of a claim.
    fn request(&mut self, action: &Action) -> Arc<Request> {
        let Action::Claim { key, payload, order, policy: choice, repeat, stored, at_once, later } = action else {
            panic!()
        };
        let mut asked = request(NAMES[*key], &[*payload], policy(*choice));
        asked.order = *order;
        asked.at_once = *at_once;
        asked.payload = stored.then(|| vec![*payload; 2].into());
        asked.later = later.map(|seconds| Later {
            delay: Duration::from_secs(seconds),
            priority: semel::Priority::new(i64::from(*payload) - 1).unwrap(),
            keeps_policy: *at_once,
            not_before: None,
        });
        if asked.later.is_some() {
            // The ledger refuses an enqueue that no worker may run.
            asked.policy.runner = Runner::Worker;
        }
        asked.labels = semel::Labels::default().with(1, "blue").unwrap();
        if let (true, Some(earlier)) = (*repeat, self.last.get(key)) {
            // The answer was lost, and the claim is sent again.
            asked = earlier.clone();
        }
        self.last.insert(*key, asked.clone());
        Arc::new(asked)
    }

    /// Remembers the fence of a claim that was acquired.
    fn learn(&mut self, key: usize, applied: &Applied) {
        if applied.answer == Answer::Acquired {
            let op = applied.operation.as_ref().unwrap();
            self.fences.entry(key).or_default().push((op.id, op.fence));
        }
    }

    /// Sends claims and writes to two nodes at once, a batch of each to each. There must be an order in which the
    /// machine gives the same answers and leaves the same rows, due at the same times.
    async fn act_together(&mut self, parts: &[(bool, Action)]) {
        let (mut claims, mut writes) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for (node, part) in parts {
            match part {
                Action::Claim { key, .. } => claims[usize::from(*node)].push((*key, self.request(part))),
                Action::Write { key, fence, write: choice } => {
                    let Some((id, fence)) = self.known(*key, *fence) else { continue };
                    writes[usize::from(*node)].push((*key, LeaseWrite { id, fence, write: write(*choice) }));
                }
                _ => unreachable!("only these are done together"),
            }
        }
        let ([a, b], [c, d]) = (&claims, &writes);
        let (a, b, c, d) = tokio::join!(
            decided(a, |batch| self.store.claim(batch)),
            decided(b, |batch| self.other.claim(batch)),
            decided(c, |batch| self.store.write(batch)),
            decided(d, |batch| self.other.write(batch)),
        );
        let mut done = Vec::new();
        for ((key, request), applied) in claims.into_iter().flatten().zip(a.into_iter().chain(b)) {
            self.learn(key, &applied);
            done.push((key, Part::Claim(request, applied.operation.unwrap().fence), applied.answer));
        }
        for ((key, write), applied) in writes.into_iter().flatten().zip(c.into_iter().chain(d)) {
            done.push((key, Part::Write(write), applied.answer));
        }
        let mut rows = HashMap::new();
        for place in 0..NAMES.len() {
            rows.extend(self.row(place).await.map(|op| (place, op)));
        }
        let (before, waiting) = ((self.model.clone(), self.due.clone()), self.waiting().await);
        let explained = orders(done.len()).into_iter().any(|order| {
            (self.model, self.due) = before.clone();
            order.iter().all(|n| self.part_step(&done[*n].1, done[*n].0) == done[*n].2)
                && self.model == rows
                && self.expected_waiting() == waiting
        });
        assert!(explained, "no order explains {done:#?}\nfrom {:#?}\nto {rows:#?}", before.0);
    }

    fn part_step(&mut self, part: &Part, place: usize) -> Answer {
        match part {
            Part::Claim(request, fence) => self.model_step(place, &Event::Claim { request, fence: *fence }),
            Part::Write(LeaseWrite { id, fence, write }) => {
                let event = Event::Write { fence: *fence, write: write.clone() };
                match self.model.get(&place).is_some_and(|op| op.id == *id) {
                    true => self.model_step(place, &event),
                    false => step(None, &event, self.time).answer,
                }
            }
        }
    }

    fn known(&self, key: usize, choice: usize) -> Option<(i64, Fence)> {
        let known = self.fences.get(&key)?;
        // The newest first: most writes come from the present owner.
        known.get(known.len().checked_sub(1 + choice)?).copied()
    }

    async fn stored(&self, place: usize) -> Option<Operation> {
        self.store.by_key(&scope(), &key(NAMES[place])).await.unwrap()
    }

    fn model_step(&mut self, place: usize, event: &Event<'_>) -> Answer {
        let old = self.model.get(&place).cloned();
        let done = step(old.as_ref(), event, self.time);
        match done.next {
            Next::Same => {}
            Next::Put(op) | Next::Anew(op) => {
                // A tended row is due as before: its lease, and with it the terms, ended earlier.
                if !matches!(event, Event::Tend) {
                    let terms = old.as_ref().and_then(|op| op.lease.as_ref()).map(|lease| &lease.terms);
                    self.due.insert(place, due(&op, terms, self.time));
                }
                self.model.insert(place, *op);
            }
            Next::Gone => drop((self.model.remove(&place), self.due.remove(&place))),
        }
        done.answer
    }

    async fn check(&mut self, place: usize, event: &Event<'_>, answer: &Answer) {
        let said = self.model_step(place, event);
        assert_eq!(&said, answer, "{event:?}");
        self.compare(place).await;
    }

    /// A write names an id, and the row under the key may be another one by now.
    async fn check_write(&mut self, place: usize, id: i64, event: &Event<'_>, answer: &Answer) {
        if self.model.get(&place).is_some_and(|op| op.id == id) {
            self.check(place, event, answer).await;
        } else {
            assert_eq!(&step(None, event, self.time).answer, answer, "{event:?} on a row that is gone");
            self.compare(place).await;
        }
    }

    /// The row itself.
    async fn row(&self, place: usize) -> Option<Operation> {
        let mut stored = self.stored(place).await;
        if let Some(op) = stored.as_mut().filter(|op| op.archived) {
            // Reading an archived operation restores its data; the row itself has none.
            op.outcome = Some(Outcome::not_kept(""));
            op.payload = None;
        }
        stored
    }

    async fn compare(&self, place: usize) {
        let stored = self.row(place).await;
        assert_eq!(
            stored.as_ref(),
            self.model.get(&place),
            "the row and the machine disagree about {:?}",
            NAMES[place]
        );
    }

    /// Operations that are due now or later and have not expired, with the time, in the order in which they are taken.
    async fn waiting(&self) -> Vec<(i64, i64)> {
        const WAITING: &str = "SELECT b.operation, b.due
             FROM semel_backlog AS b JOIN semel_operations AS o ON o.id = b.operation
             WHERE b.due IS NOT NULL AND (o.expires_at IS NULL OR o.expires_at > $1)
             ORDER BY b.priority DESC, b.due, b.operation";
        let tx = self.store.begin(Duration::from_secs(5)).await.unwrap();
        let mut held = tx.connection().await.unwrap();
        let now = self.time.as_micros();
        let waiting = on!(held.get().unwrap(), c => sqlx::query_as(WAITING).bind(now).fetch_all(c).await.unwrap());
        drop(held);
        self.store.roll_back(&tx).await;
        waiting
    }

    /// The same according to the machine.
    fn expected_waiting(&self) -> Vec<(i64, i64)> {
        let counts = |place: &usize| self.model.get(place).is_some_and(|op| !op.has_expired(self.time));
        let waits = self.due.iter().filter(|(place, _)| counts(place));
        let place = |(place, due): (&usize, &Option<Timestamp>)| {
            let op = &self.model[place];
            Some((std::cmp::Reverse(op.priority), (*due)?, op.id))
        };
        let mut waits: Vec<_> = waits.filter_map(place).collect();
        waits.sort_unstable();
        waits.into_iter().map(|(_, due, id)| (id, due.as_micros())).collect()
    }

    /// Operations to run, and from when on.
    async fn compare_due(&self) {
        assert_eq!(self.waiting().await, self.expected_waiting(), "at {}", self.time);
        // A kind has only the first due time, including that of expired operations.
        let kinds = self.store.due_kinds(scope().service(), ("", "")).await.unwrap();
        let listed: Vec<_> = kinds.into_iter().map(|due| (due.kind, due.next)).collect();
        let first = self.due.values().filter_map(|due| *due).min();
        let expected: Vec<_> = first.into_iter().map(|first| (scope().kind().to_owned(), first)).collect();
        assert_eq!(listed, expected, "at {}", self.time);
    }
}

/// One of several concurrent events.
#[derive(Debug)]
enum Part {
    Claim(Arc<Request>, Fence),
    Write(LeaseWrite),
}

/// Sends a batch, and sends those again that another transaction blocked.
async fn decided<I: Clone, Fut: Future<Output = semel::Result<Vec<Applied>>>>(
    batch: &[(usize, I)],
    send: impl Fn(Vec<I>) -> Fut,
) -> Vec<Applied> {
    let mut answers: Vec<Option<Applied>> = batch.iter().map(|_| None).collect();
    while answers.iter().any(Option::is_none) {
        let left: Vec<usize> = (0..batch.len()).filter(|n| answers[*n].is_none()).collect();
        let applied = send(left.iter().map(|n| batch[*n].1.clone()).collect()).await.unwrap();
        for (n, applied) in left.into_iter().zip(applied) {
            answers[n] = applied.decided().ok();
        }
    }
    answers.into_iter().flatten().collect()
}

/// Every permutation of this many.
fn orders(n: usize) -> Vec<Vec<usize>> {
    let Some(last) = n.checked_sub(1) else { return vec![Vec::new()] };
    let insert = |shorter: Vec<usize>| {
        (0..n).map(move |at| {
            let mut order = shorter.clone();
            order.insert(at, last);
            order
        })
    };
    orders(last).into_iter().flat_map(insert).collect()
}

fn play(kind: Kind, history: &[Action]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut run = Run::new(kind).await;
        for action in history {
            run.act(action).await;
            run.compare_due().await;
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn prop_sqlite_agrees_with_the_machine(history in proptest::collection::vec(action(), 1..40)) {
        play(Kind::Sqlite, &history);
    }

    #[test]
    fn prop_postgres_agrees_with_the_machine(history in proptest::collection::vec(action(), 1..40)) {
        play(Kind::Postgres, &history);
    }
}
