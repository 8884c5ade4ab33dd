//! Stories of whole lives. The state machine itself makes the rows and the notes.

use std::time::Duration;

use semel::{
    Backoff, Fence, Fingerprint, Key, Labels, OnLost, Operation, Outcome, Policy, Priority, Scope, State, Timestamp,
    Token,
    journal::Note,
    machine::{Event, Failure, Later, Next, Request, Retry, Verdict, Write, due, step},
};

use super::{Standing, View};

/// The first moment: 2023-11-14T22:13:20Z.
const START: i64 = 1_700_000_000_000_000;

/// An operation of the scope `shop/mail`, and its journal.
struct Life {
    row: Option<Operation>,
    notes: Vec<Note>,
    now: Timestamp,
    fence: i64,
    policy: Policy,
}

impl Life {
    fn new(policy: Policy) -> Self {
        Self { row: None, notes: Vec::new(), now: Timestamp::from_micros(START), fence: 0, policy }
    }

    fn takes(&mut self, event: &Event<'_>) {
        let step = step(self.row.as_ref(), event, self.now);
        self.notes.extend(step.notes);
        match step.next {
            Next::Same => {}
            Next::Put(row) | Next::Anew(row) => self.row = Some(*row),
            Next::Gone => self.row = None,
        }
    }

    fn fence(&mut self) -> Fence {
        self.fence += 1;
        Fence(self.fence)
    }

    fn row(&self) -> &Operation {
        self.row.as_ref().unwrap()
    }

    fn request(&self, owner: &str, later: Option<Later>) -> Request {
        Request {
            scope: Scope::parse("shop/mail").unwrap(),
            key: Key::new("order-4711").unwrap(),
            fingerprint: Fingerprint::of_bytes(b"a"),
            order: None,
            payload: Some("{}".into()),
            labels: Labels::default(),
            policy: self.policy.clone(),
            at_once: false,
            later,
            lease: None,
            token: Token([u8::try_from(self.fence).unwrap(); 16]),
            sent_again: false,
            owner: owner.to_owned(),
        }
    }

    fn enqueued(mut self, later: Later) -> Self {
        let (request, fence) = (self.request("", Some(later)), self.fence());
        self.takes(&Event::Claim { request: &request, fence });
        self
    }

    fn claimed(mut self, owner: &str) -> Self {
        let (request, fence) = (self.request(owner, None), self.fence());
        self.takes(&Event::Claim { request: &request, fence });
        assert!(self.row().lease.is_some(), "{:?}", self.row());
        self
    }

    fn after(mut self, seconds: u64) -> Self {
        self.now = self.now + Duration::from_secs(seconds);
        self
    }

    fn writes(mut self, write: Write) -> Self {
        let fence = self.row().fence;
        self.takes(&Event::Write { fence, write });
        self
    }

    fn fails(self, error: &str, retry: Retry) -> Self {
        self.writes(Write::Fail(Failure { error: error.into(), retry }))
    }

    fn completes(self) -> Self {
        self.writes(Write::Complete(Outcome::kept("done")))
    }

    fn released(self, why: Option<&str>) -> Self {
        self.writes(Write::Release { delay: Duration::ZERO, why: why.map(str::to_owned) })
    }

    fn lapses(mut self) -> Self {
        let fence = self.fence();
        self.takes(&Event::Lapse { fence });
        self
    }

    fn cancelled(mut self, reason: &str) -> Self {
        let fence = self.fence();
        self.takes(&Event::Cancel { fence, actor: "ana".into(), reason: reason.into() });
        self
    }

    fn retried(mut self) -> Self {
        let (fence, verdict) = (self.fence(), Verdict::Retry);
        let (actor, reason) = ("ana".into(), "mended".into());
        self.takes(&Event::Resolve { fence, expected: None, verdict, actor, reason });
        self
    }

    fn view(&self) -> View {
        let row = self.row();
        let waits = matches!(row.state, State::Pending | State::Failed | State::TimedOut);
        // As the store computes it at the end of a run.
        let never_due = waits && due(row, Some(&self.policy), self.now).is_none();
        View { notes: self.notes.clone(), never_due, ..View::bare(row.clone(), self.now) }
    }

    /// The story, with seconds since the start in place of times.
    fn told(&self) -> Vec<String> {
        let lines = self.view().story("").lines().join("\n");
        let second = |n: i64| Timestamp::from_micros(START + n * 1_000_000).to_string();
        let short = (0..10_000).fold(lines, |text, n| match text.contains("2023-11-1") || text.contains("2023-11-2") {
            true => text.replace(&second(n), &n.to_string()),
            false => text,
        });
        short.lines().map(str::to_owned).collect()
    }

    /// How each run ended, its owner, and its start and end in seconds.
    fn runs(&self) -> Vec<(Option<i64>, Option<i64>, &'static str, String)> {
        let second = |at: Timestamp| (at.as_micros() - START) / 1_000_000;
        let told = self.view().attempts().into_iter().map(|run| {
            let end = run.end.map_or("", |end| end.as_str());
            (run.started_at.map(second), run.ended_at.map(second), end, run.owner.unwrap_or_default())
        });
        told.collect()
    }
}

/// An operation that was claimed once and runs.
pub(super) fn operation() -> Operation {
    let life = Life::new(Policy::default()).claimed("a");
    Operation { lease: None, ..life.row().clone() }
}

/// A minute without a run.
const RETRY: &str =
    "semel operations resolve order-4711 --scope default/shop/mail --as completed|failed|retry --reason '…'";

fn two_attempts() -> Policy {
    Policy { max_attempts: Some(2), backoff: Backoff::NONE, ..Policy::default() }
}

#[test]
fn an_enqueued_operation_that_ran_is_shown_from_the_queue_to_its_end() {
    let life = Life::new(Policy::default()).enqueued(Later::default()).after(5).claimed("w1").after(2).completes();
    assert_eq!(
        life.told(),
        [
            "order-4711 in default/shop/mail: it took effect",
            "",
            "0  enqueued",
            "5  first run by w1",
            "7  completed by w1 after 2.0 s: 4 bytes of outcome",
            "",
            "Every repeat is answered with this outcome. It is kept until 2023-11-15T22:13:27.000000Z; then the key is free again.",
        ]
    );
    assert_eq!(life.runs(), [(Some(5), Some(7), "completed", "w1".to_owned())]);
}

#[test]
fn an_enqueued_operation_that_waits_is_shown_with_its_time_and_priority() {
    let later = Later { delay: Duration::from_secs(60), priority: Priority::new(2).unwrap(), ..Later::default() };
    let life = Life::new(Policy::default()).enqueued(later);
    let waits = "order-4711 in default/shop/mail: it waits to be run";
    assert_eq!(life.told(), [waits, "", "0  enqueued, not before 60, priority 2", "", "A worker runs it after 60."]);
    assert_eq!(life.runs(), []);
    let due = life.after(61).told();
    assert_eq!(due[4], "A worker runs it as soon as one is free.");
}

#[test]
fn a_cancelled_operation_is_shown_with_its_actor_and_reason() {
    let life = Life::new(Policy::default()).enqueued(Later::default()).after(5).cancelled("wrong\naddress");
    let last = format!("It runs again only if a person decides so: {RETRY}");
    assert_eq!(
        life.told(),
        [
            "order-4711 in default/shop/mail: it was cancelled",
            "",
            "0  enqueued",
            "5  cancelled by ana, because: wrong\\naddress",
            "",
            &last,
        ]
    );
    assert_eq!(life.runs(), []);
}

#[test]
fn a_cancelled_run_is_shown_as_running_until_it_stops() {
    let life =
        Life::new(Policy::default()).enqueued(Later::default()).after(1).claimed("w1").after(2).cancelled("slip");
    let told = life.told();
    assert_eq!(told[0], "order-4711 in default/shop/mail: it is running");
    assert_eq!(told[3..5], ["1  first run by w1", "3  its run was asked to stop by ana, because: slip"]);
    assert_eq!(told[6], "w1 holds the lease until 31; it stops at its next renewal.");
    let stopped = life.after(1).fails("cancelled", Retry::Never).told();
    assert_eq!(stopped[0], "order-4711 in default/shop/mail: it was cancelled");
    assert_eq!(stopped[5], "4  the run by w1 was cancelled after 3.0 s");
}

#[test]
fn an_operation_out_of_attempts_is_shown_as_failed_until_a_person_decides() {
    let later = Later { keeps_policy: true, ..Later::default() };
    let once =
        Life::new(two_attempts()).enqueued(later).after(1).claimed("w1").after(1).fails("no luck", Retry::Backoff);
    let next = once.told().pop().unwrap();
    assert_eq!(
        next,
        format!("It has failed once, and runs again. It has 2 attempts in all. A person can decide, too: {RETRY}")
    );
    let life = once.after(3).claimed("w2").after(1).fails("no luck", Retry::Backoff);
    let last = format!("Its policy allows no further attempt: it runs again only if a person decides so: {RETRY}");
    assert_eq!(
        life.told(),
        [
            "order-4711 in default/shop/mail: it failed",
            "",
            "0  enqueued",
            "2  the run by w1 failed: no luck",
            "5  claimed again by w2: attempt 2, after a run that failed",
            "6  the run by w2 failed after 1.0 s: no luck",
            "",
            &last,
        ]
    );
    let runs = [(None, Some(2), "failed", "w1".to_owned()), (Some(5), Some(6), "failed", "w2".to_owned())];
    assert_eq!(life.runs(), runs, "when the first run began is told only until the second");
    let again = life.after(4).retried().after(1).claimed("w3").after(1).completes();
    let told = again.told();
    let since = told.iter().position(|line| line == "10  decided by ana: it may run again: mended").unwrap();
    let end = "12  completed by w3 after 1.0 s: 4 bytes of outcome";
    assert_eq!(told[since + 1..since + 3], ["11  claimed by w3: attempt 1", end]);
}

/// The row does not have the worker's policy, but the backlog says that no worker runs it.
#[test]
fn an_operation_that_failed_as_often_as_the_worker_allows_is_told_as_parked() {
    let once = Life::new(two_attempts()).enqueued(Later::default()).after(1).claimed("w1");
    let once = once.after(1).fails("no luck", Retry::Backoff);
    assert_eq!(
        once.told().pop().unwrap(),
        format!("It has failed once. A worker runs it again. A person can decide, too: {RETRY}")
    );
    let life = once.after(3).claimed("w2").after(1).fails("no luck", Retry::Backoff);
    let last = format!("Its policy allows no further attempt: it runs again only if a person decides so: {RETRY}");
    assert_eq!((life.view().standing(), life.told().pop()), (Standing::Parked, Some(last)));
}

#[test]
fn a_claimed_operation_without_attempts_left_runs_again_for_a_claim_that_allows_more() {
    let once = Life::new(two_attempts()).claimed("a").fails("no", Retry::Backoff);
    let life = once.after(1).claimed("a").fails("no", Retry::Backoff);
    let last = "It has failed twice, and may run again for a claim that allows 3 attempts or more.";
    let last = format!("{last} A person can decide, too: {RETRY}");
    assert_eq!((life.view().standing(), life.told().pop()), (Standing::Parked, Some(last)));
}

#[test]
fn a_permanent_failure_is_shown_as_failed_until_a_person_decides() {
    let life = Life::new(Policy::default()).enqueued(Later::default()).after(1).claimed("w1").fails("no", Retry::Never);
    let told = life.told();
    assert_eq!(told[0], "order-4711 in default/shop/mail: it failed");
    assert_eq!(told[3..5], ["1  first run by w1", "1  the run by w1 failed after less than 1 ms: no"]);
    assert_eq!(told[6], format!("It runs again only if a person decides so: {RETRY}"));
}

#[test]
fn an_operation_in_doubt_is_shown_with_the_owner_of_the_lost_lease() {
    let policy = Policy { on_lost: OnLost::Hold, ..Policy::default() };
    let life = Life::new(policy).enqueued(Later::default()).after(1).claimed("w1").after(60).lapses();
    let last = format!("A person must resolve it: {RETRY}");
    assert_eq!(
        life.told(),
        [
            "order-4711 in default/shop/mail: it is in doubt whether it took effect",
            "",
            "0  enqueued",
            "1  first run by w1",
            "61  the lease of w1 expired; it is in doubt whether it took effect",
            "",
            &last,
        ]
    );
    assert_eq!(life.runs(), [(Some(1), Some(61), "inDoubt", String::new())]);
}

/// The journal keeps since when the lease was held: the next claim overwrites it in the row.
#[test]
fn a_lost_first_run_from_the_queue_is_shown_after_a_takeover() {
    let life = Life::new(Policy::default()).enqueued(Later::default()).after(1).claimed("w1").after(60).lapses();
    let life = life.after(1).claimed("w2").after(1).completes();
    let told = life.told();
    assert_eq!(
        told[2..6],
        [
            "0  enqueued",
            "61  the lease of w1 expired; it may run again",
            "62  claimed again by w2: attempt 2, after the lease of the last run ended",
            "63  completed by w2 after 1.0 s: 4 bytes of outcome",
        ]
    );
    assert_eq!(life.runs()[0], (Some(1), Some(61), "timedOut", String::new()));
}

#[test]
fn an_ended_turn_is_distinguished_from_a_short_run() {
    let life = Life::new(Policy::default()).enqueued(Later::default()).after(1).claimed("w1");
    let life = life.after(20).released(None).after(1).claimed("w2").released(None).claimed("w3");
    let told = life.released(Some("the printer is away")).told();
    assert_eq!(
        told[2..8],
        [
            "0  enqueued",
            "21  released by w1; no attempt is counted",
            "22  claimed by w2: attempt 1",
            "22  released by w2; no attempt is counted",
            "22  claimed by w3: attempt 1",
            "22  released by w3 after less than 1 ms; no attempt is counted: the printer is away",
        ]
    );
    let life = Life::new(Policy::default()).enqueued(Later::default()).after(1).claimed("w1").after(20).released(None);
    assert_eq!(life.told()[3..5], ["1  first run by w1", "21  w1 ended its turn after 20.0 s; no attempt is counted"]);
}

/// In every later state.
#[test]
fn a_claimed_operation_is_never_shown_as_enqueued() {
    let new = || Life::new(two_attempts()).claimed("a");
    let lives = [
        new(),
        new().completes(),
        new().fails("x", Retry::Backoff),
        new().fails("x", Retry::Backoff).after(1).claimed("b").completes(),
        new().after(1).released(None),
        new().after(1).released(None).claimed("b").after(60).lapses(),
        new().after(60).lapses(),
        new().after(60).lapses().after(1).claimed("b"),
        new().after(60).lapses().after(1).retried().claimed("c").completes(),
        new().after(60).lapses().after(1).cancelled("x"),
        new().cancelled("x").after(60).lapses(),
    ];
    for life in lives {
        let told = life.told();
        assert!(told[2].starts_with("0  first claimed"), "{told:#?}");
        assert_eq!(life.runs()[0].0, Some(0), "{told:#?}");
    }
}

/// In every later state, and also if only the first note shows it.
#[test]
fn an_enqueued_operation_is_never_shown_as_claimed() {
    let new = || Life::new(Policy::default()).enqueued(Later::default()).after(1);
    let ran = || new().claimed("a").after(1);
    let lives = [
        new(),
        new().cancelled("x"),
        new().retried(),
        ran(),
        ran().completes(),
        ran().fails("x", Retry::Backoff),
        ran().fails("x", Retry::Backoff).after(60).claimed("b").completes(),
        ran().released(None).claimed("b"),
        ran().after(60).lapses(),
        ran().after(60).lapses().after(60).claimed("b").completes(),
        ran().cancelled("x").after(60).lapses(),
        ran().cancelled("x").after(60).lapses().retried().claimed("b"),
    ];
    for life in lives {
        let told = life.told();
        assert_eq!(told[2], "0  enqueued", "{told:#?}");
        assert!(life.runs().first().is_none_or(|run| run.0 != Some(0)), "{told:#?}");
    }
}
