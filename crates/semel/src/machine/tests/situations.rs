//! Every situation that an operation can be in.

use std::time::Duration;

use super::{
    super::*,
    life::{LEASE, Life, RETENTION, ask_newer, complete, doubt, fail},
};
use crate::{OnLost, OnMismatch};

fn life(tell: impl FnOnce(&mut Life)) -> Life {
    let mut life = Life::new();
    tell(&mut life);
    life
}

/// The same claim, by a policy that pins what it completes.
fn pinned(request: &Request) -> Request {
    let policy = Policy { pinned: true, on_mismatch: OnMismatch::Reject, ..request.policy.clone() };
    Request { policy, ..request.clone() }
}

/// Every situation of an operation, under each `on_lost`, with its name.
///
/// Only a running or doubtful operation can have newer data waiting: in any other state the newer data replaces the
/// older at once.
pub(super) fn situations() -> Vec<(String, Life)> {
    let mut all = vec![("absent".to_owned(), Life::new())];
    for on_lost in [OnLost::Rerun, OnLost::Hold, OnLost::Probe] {
        let mut there = |name: &str, tell: &dyn Fn(&mut Life, &Request)| {
            let mut first = ask_newer("first", 1);
            first.policy.on_lost = on_lost;
            all.push((format!("{name}, under {on_lost:?}"), life(|life| tell(life, &first))));
        };
        let lapsing = |life: &mut Life| life.pass(LEASE);
        let newer = |life: &mut Life| {
            let answer = life.claim(&ask_newer("second", 2));
            assert!(matches!(answer, Answer::InFlight { kept: true, .. } | Answer::InDoubt { kept: true }));
        };
        let crash = |life: &mut Life, first: &Request| {
            life.acquire(first);
            life.crash();
        };
        let end = |life: &mut Life, first: &Request, write: Write| {
            let fence = life.acquire(first);
            life.settle(fence, write);
        };
        let release_for_later = Write::Release { delay: Duration::from_secs(4), why: None };
        there("processing", &|life, first| {
            life.acquire(first);
        });
        there("processing, newer data waits", &|life, first| {
            life.acquire(first);
            newer(life);
        });
        there("lapsed", &|life, first| {
            life.acquire(first);
            lapsing(life);
        });
        there("expired lease, newer data waits", &|life, first| {
            life.acquire(first);
            newer(life);
            lapsing(life);
        });
        there("in doubt", &|life, first| end(life, first, doubt()));
        there("in doubt, newer data waits", &|life, first| {
            end(life, first, doubt());
            newer(life);
        });
        there("timed out or in doubt", &crash);
        there("pending, for later", &|life, first| end(life, first, release_for_later.clone()));
        there("pending", &|life, first| {
            end(life, first, release_for_later.clone());
            life.pass(Duration::from_secs(4));
        });
        there("pending with newer data", &|life, first| {
            let fence = life.acquire(first);
            newer(life);
            life.settle(fence, complete("first"));
        });
        there("completed", &|life, first| end(life, first, complete("first")));
        there("completed and pinned", &|life, first| end(life, &pinned(first), complete("first")));
        there("completed, pinned and expired", &|life, first| {
            end(life, &pinned(first), complete("first"));
            life.pass(RETENTION);
        });
        there("failed and pinned", &|life, first| end(life, &pinned(first), fail(Retry::Never)));
        there("completed and expired", &|life, first| {
            end(life, first, complete("first"));
            life.pass(RETENTION);
        });
        there("completed and archived", &|life, first| {
            let mut first = first.clone();
            first.policy.tombstone = Some(LEASE);
            end(life, &first, complete("first"));
            life.pass(LEASE);
            assert_eq!(life.tend(), Answer::Archived);
        });
        there("failed, backing off", &|life, first| end(life, first, fail(Retry::Backoff)));
        there("failed, due", &|life, first| {
            end(life, first, fail(Retry::Backoff));
            life.pass(Duration::from_secs(4));
        });
        there("failed and exhausted", &|life, first| {
            for _ in 0..2 {
                end(life, first, fail(Retry::Backoff));
                life.pass(Duration::from_secs(8));
            }
        });
        there("failed and parked", &|life, first| end(life, first, fail(Retry::Never)));
        there("failed and expired", &|life, first| {
            end(life, first, fail(Retry::Never));
            life.pass(RETENTION);
        });
        there("timed out and parked, or in doubt", &|life, first| {
            crash(life, first);
            if life.state() == Some(State::TimedOut) {
                crash(life, first);
            }
        });
    }
    all
}
