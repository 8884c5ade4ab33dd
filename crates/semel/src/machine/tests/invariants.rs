//! Invariants of every row and of every step.

use super::{super::*, life::Happening};
use crate::OnMismatch;

/// Holds for every row. The databases' constraints say the same.
pub(super) fn row(op: &Operation) {
    use State::{Completed, Failed, InDoubt, Pending, Processing, TimedOut};
    let only_in = |there: bool, states: &[State], what: &str| {
        assert!(!there || states.contains(&op.state), "{what} while {}: {op:?}", op.state);
    };
    let exactly_in = |there: bool, states: &[State], what: &str| {
        assert_eq!(there, states.contains(&op.state), "{what} while {}: {op:?}", op.state);
    };
    exactly_in(op.lease.is_some(), &[Processing], "a lease");
    exactly_in(op.settled_at.is_some(), &[Completed, Failed, TimedOut, InDoubt], "settled_at");
    exactly_in(op.outcome.is_some(), &[Completed], "an outcome");
    only_in(op.not_before.is_some(), &[Pending, Failed, TimedOut], "not_before");
    only_in(op.expires_at.is_some(), &[Completed, Failed, TimedOut], "expires_at");
    only_in(op.archive_at.is_some(), &[Completed], "archive_at");
    only_in(op.archived, &[Completed], "archived");
    only_in(op.parked, &[Failed, TimedOut], "parked");
    only_in(op.never_due, &[Pending, Failed, TimedOut], "never due");
    assert!(op.never_due || !op.parked, "no worker tries what is parked: {op:?}");
    only_in(op.successor.is_some(), &[Processing, InDoubt], "a successor");
    only_in(op.checkpoint.is_some(), &[Pending, Processing, Failed, TimedOut, InDoubt], "a checkpoint");

    assert!(op.fence.0 >= op.id, "the id is the first fence: {op:?}");
    assert!(op.look_at.is_some() || !has_an_end(op), "the sweep would never look at it: {op:?}");
    if op.archived {
        assert_eq!((op.outcome.as_ref().map(|o| o.kept), &op.payload, op.archive_at), (Some(false), &None, None));
    }
    if let Some(lease) = &op.lease {
        assert!(lease.deadline <= lease.run_until, "{op:?}");
    }
    if let Some(successor) = &op.successor {
        assert!(op.order.is_some_and(|order| order < successor.order), "equal is not newer: {op:?}");
    }
}

/// Whether the sweep will have something to do for it, as far as is known.
pub(super) fn has_an_end(op: &Operation) -> bool {
    let terms = op.lease.as_ref().map(|lease| &lease.terms);
    let will_have = terms.is_some_and(|terms| terms.retention.or(terms.tombstone).is_some());
    op.expires_at.or(op.archive_at).is_some() || will_have
}

/// Holds for every step. `fence` is the new one that it may use.
pub(super) fn step(before: Option<&Operation>, what: &Happening, fence: Fence, now: Timestamp, step: &Step) {
    let context = || format!("{what:?}\nat {} with {fence}, on {before:?}\nmade {step:?}", now.as_micros());
    let claims = matches!(what, Happening::Claim(_) | Happening::Inline(_));
    let live = before.is_some_and(|op| op.lease.is_some() && !lapsed(op, now));
    match (before, &step.next) {
        (_, Next::Same) => {}
        (Some(old), Next::Put(new)) => {
            row(new);
            assert_eq!(
                (old.id, &old.scope, &old.key, old.created_at),
                (new.id, &new.scope, &new.key, new.created_at),
                "{}",
                context()
            );
            changes(old, new, what, fence, now).unwrap_or_else(|law| panic!("{law}: {}", context()));
            due_is_when_a_claim_gets_it(old, new, now).unwrap_or_else(|law| panic!("{law}: {}", context()));
        }
        (None, Next::Put(_)) => panic!("a change of nothing: {}", context()),
        (_, Next::Anew(new)) => {
            row(new);
            assert!(before.is_none_or(|op| op.has_expired(now)), "only nothing is replaced: {}", context());
            let begins = matches!(step.answer, Answer::Acquired | Answer::Enqueued);
            assert!(claims && begins, "only a claim or an enqueue begins a life: {}", context());
            assert_eq!((Fence(new.id), new.fence), (fence, fence), "{}", context());
        }
        (_, Next::Gone) => match what {
            Happening::Write(fence, Write::Release { .. } | Write::Withdraw) => {
                let own = before.is_some_and(|op| op.fence == *fence && op.lease.is_some());
                assert!(own, "only its holder releases it: {}", context());
            }
            Happening::Tend => assert!(before.is_some_and(|op| op.has_expired(now)), "{}", context()),
            Happening::Purge => {
                assert!(!live, "it has a live lease: {}", context());
                assert!(before.is_none_or(|op| !op.is_final(now)), "it is pinned: {}", context());
            }
            _ => panic!("nothing else removes a row: {}", context()),
        },
    }
    answers(before, what, now, step).unwrap_or_else(|law| panic!("{law}: {}", context()));
}

/// Holds for every change of a row.
fn changes(
    old: &Operation,
    new: &Operation,
    what: &Happening,
    fence: Fence,
    now: Timestamp,
) -> Result<(), &'static str> {
    let law = |kept: bool, law| if kept { Ok(()) } else { Err(law) };
    let superseded = old.fingerprint != new.fingerprint;
    let claims = matches!(what, Happening::Claim(_) | Happening::Inline(_));
    // Under replay, any payload runs if nothing has taken effect.
    let replaces = matches!(what, Happening::Claim(request) | Happening::Inline(request)
        if request.policy.on_mismatch == OnMismatch::Replay);
    law(!old.has_expired(now), "expired is absent, and not to be changed")?;
    law(new.fence == old.fence || new.fence == fence, "a fence is the old one or the new one")?;
    if let Happening::Write(named, _) = what {
        law(*named == old.fence && new.fence == old.fence, "a write is made under the present fence only")?;
        law(old.lease.is_some(), "a write needs a lease")?;
    } else if old.lease.is_some() && new.lease.is_none() {
        law(lapsed(old, now), "only its holder ends a live lease")?;
    }
    if old.lease.is_some() && new.lease.is_none() && !matches!(what, Happening::Write(..)) {
        law(new.fence == fence, "a lease ended by another gets a new fence")?;
    }
    let doubted = old.lease.as_ref().is_some_and(|lease| lease.terms.on_lost.doubts() && lapsed(old, now));
    if doubted && !matches!(what, Happening::Write(..) | Happening::Resolve(..) | Happening::Tend) {
        law(new.state == State::InDoubt, "a lease lost under hold or probe is a doubt")?;
    }
    if old.is_final(now) {
        let archived = matches!(what, Happening::Tend) && new.archived;
        let tended = Operation { look_at: old.look_at, ..new.clone() } == *old;
        law(archived || tended, "a pinned operation does not change")?;
    }
    let again = matches!(what, Happening::Resolve(_, Verdict::Rerun { .. })) && new.state == State::Pending;
    if old.state == State::Completed && new.state != State::Completed && !again {
        law(claims && superseded && new.order > old.order, "only newer data runs after a completion")?;
    }
    if old.state == State::Completed && new.state == State::Completed && !superseded {
        let archived = matches!(what, Happening::Tend) && new.archived && !old.archived;
        law(old.outcome == new.outcome || archived, "an outcome stays as it was given")?;
        law(old.settled_at == new.settled_at, "a completion happens once")?;
    }
    if old.state == State::InDoubt && new.state != State::InDoubt {
        law(matches!(what, Happening::Resolve(..)), "a doubt ends by a verdict")?;
    }
    if let (Some(waited), Some(waits)) = (&old.successor, &new.successor) {
        law(waited == waits || waited.order < waits.order, "newer data gave way to older")?;
    }
    if matches!(what, Happening::Cancel) {
        law(new.successor.is_none(), "a cancel withdraws the newer data, too")?;
    } else if old.successor.is_some() && new.successor.is_none() {
        let waited = old.successor.as_ref().map(|s| (s.fingerprint, Some(s.order), &s.payload));
        let there = Some((new.fingerprint, new.order, &new.payload));
        law(waited == there || replaces || new.order > waited.and_then(|w| w.1), "newer data was lost")?;
        law(claims || new.state != State::Completed, "newer data was not run")?;
        runs_under_its_own_terms(old, new, now)?;
    }
    if new.failures > old.failures {
        let cancelled = old.lease.as_ref().is_some_and(|lease| lease.cancelled);
        let fails = match what {
            Happening::Write(_, Write::Fail(_)) => true,
            Happening::Write(_, Write::Release { .. } | Write::Withdraw) => cancelled,
            _ => false,
        };
        law(fails, "only a failure counts as one, and the release of a cancelled run")?;
    }
    if new.crashes > old.crashes {
        let doubted = matches!(what, Happening::Write(_, Write::Doubt { .. }));
        law(doubted || lapsed(old, now), "only a lost lease counts as a crash")?;
    }
    Ok(())
}

/// Newer data that waited has the time, the priority and the policy of its enqueue.
fn runs_under_its_own_terms(old: &Operation, new: &Operation, now: Timestamp) -> Result<(), &'static str> {
    let law = |kept: bool, law| if kept { Ok(()) } else { Err(law) };
    let Some(waited) = old.successor.as_ref().filter(|waited| Some(waited.order) == new.order) else { return Ok(()) };
    law((new.priority, &new.terms) == (waited.priority, &waited.terms), "newer data has its own priority and policy")?;
    let from = waited.not_before.filter(|from| *from > now);
    law(new.state != State::Pending || new.not_before == from, "newer data has its own time")?;
    let granted = new.lease.as_ref().zip(waited.terms.as_ref());
    law(granted.is_none_or(|(lease, terms)| lease.terms == *terms), "newer data runs under its own policy")
}

/// When a lease ends, the due time agrees with the answer to a claim under the same terms.
fn due_is_when_a_claim_gets_it(old: &Operation, new: &Operation, now: Timestamp) -> Result<(), &'static str> {
    let law = |kept: bool, law| if kept { Ok(()) } else { Err(law) };
    let (Some(lease), None) = (&old.lease, &new.lease) else { return Ok(()) };
    let claim = |at: Timestamp, at_once: bool| {
        let (policy, token) = (lease.terms.clone(), Token([99; 16]));
        let fingerprint = new.fingerprint;
        let request = Request { fingerprint, policy, token, at_once, ..super::life::ask("") };
        super::super::step(Some(new), &Event::Claim { request: &request, fence: Fence(i64::MAX) }, at).answer
    };
    let never = !matches!(new.state, State::Completed | State::InDoubt) && due(new, Some(&lease.terms), now).is_none();
    law(new.never_due == never, "the end of a lease decides whether a worker tries it again")?;
    match due(new, Some(&lease.terms), now) {
        Some(at) => {
            law(at >= now, "due is not in the past")?;
            law(claim(at, false) == Answer::Acquired, "a due operation is acquired")?;
            law(claim(now, true) == Answer::Acquired, "and a claim that ignores the backoff acquires it now")?;
            let before = Timestamp::from_micros(at.as_micros() - 1);
            law(at == now || claim(before, false) == Answer::NotYet { until: at }, "and not before")
        }
        None => {
            let ended = matches!(new.state, State::Completed | State::InDoubt);
            let exhausted = claim(now, true) == Answer::Exhausted;
            law(ended || exhausted == new.is_given_up(), "an operation is given up when no claim acquires it")?;
            let is_callers = new.is_left_to_callers();
            law(ended || exhausted || is_callers, "one that is never due is out of attempts, or left to callers")
        }
    }
}

/// Holds for every answer.
fn answers(before: Option<&Operation>, what: &Happening, now: Timestamp, step: &Step) -> Result<(), &'static str> {
    let law = |kept: bool, law| if kept { Ok(()) } else { Err(law) };
    let after = match &step.next {
        Next::Same => before,
        Next::Put(op) | Next::Anew(op) => Some(&**op),
        Next::Gone => None,
    };
    match &step.answer {
        Answer::Acquired => match what {
            Happening::Claim(request) => {
                let lease = after.and_then(|op| op.lease.as_ref());
                let held = lease.is_some_and(|lease| lease.token == request.token && lease.deadline > now);
                law(held, "the acquirer holds the lease")
            }
            _ => law(
                after.is_some_and(|op| op.settled_at == Some(now) && op.outcome.is_some()),
                "inline is done at once",
            ),
        },
        Answer::Replay { .. } => law(after.is_some_and(|op| op.outcome.is_some()), "a replay has an outcome"),
        Answer::InFlight { until, .. } => law(after.is_some_and(|op| op.lease.is_some()) && *until > now, "in flight"),
        Answer::InDoubt { .. } => law(after.is_some_and(|op| op.state == State::InDoubt), "in doubt"),
        Answer::NotYet { until } => {
            let at_once = matches!(what, Happening::Claim(request) | Happening::Inline(request) if request.at_once);
            // An enqueue leaves it to the worker also if the backoff is over.
            let later = matches!(what, Happening::Claim(request) if request.later.is_some());
            law(!later || after.is_some_and(|op| !op.never_due), "a worker will try what is enqueued again")?;
            law(
                (*until > now || later) && !at_once,
                "not yet is in the future, and never the answer to a claim that ignores the backoff",
            )
        }
        Answer::Exhausted if matches!(what, Happening::Claim(request) if request.later.is_some()) => {
            law(after.is_some_and(|op| op.never_due), "an enqueue is exhausted if no worker tries it")
        }
        Answer::Waiting { .. } => law(after.is_some_and(|op| !op.never_due), "a worker will run what waits"),
        Answer::Lost | Answer::NotNow(_) => law(step.next == Next::Same, "a refusal changes nothing"),
        Answer::Settled { .. } => law(after.is_none_or(|op| op.lease.is_none()), "a settled operation has no lease"),
        _ => Ok(()),
    }
}
