//! The laws of a lane, under a scheduler that tries many interleavings of its callers.
//!
//! The scheduler may switch at every await, where the order of a lane's events is decided. The internals of tokio's
//! channels are left to tokio's own tests.

mod slow_store;

use std::sync::Arc;

use semel::{Error, Result, lane::Limits};
use shuttle::future::{block_on, spawn, yield_now};
use slow_store::{Call, LIMITS, SlowStore, TWO_FLIGHTS, always, answer, call_all, spawn_all, wait_for};
use tokio::sync::Semaphore;

/// Tries many interleavings: at random, and with few but well-placed switches. More with `make torture`.
fn in_many_orders(law: impl AsyncFn() + Send + Sync + 'static) {
    let rounds = if std::env::var_os("SEMEL_TORTURE").is_some() { 50_000 } else { 2000 };
    let law = Arc::new(law);
    let again = law.clone();
    shuttle::check_random(move || block_on(law()), rounds);
    shuttle::check_pct(move || block_on(again()), rounds, 3);
}

/// The same with one batch in flight, and with two.
fn with_one_flight_and_two(law: impl AsyncFn(Limits) + Send + Sync + 'static) {
    in_many_orders(async move || {
        for limits in [LIMITS, TWO_FLIGHTS] {
            law(limits).await;
        }
    });
}

#[test]
fn every_call_gets_its_own_answer_once_its_own_batch_is_durable() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(always);
        let (lane, _task) = store.open(limits);
        for (who, got) in call_all(&lane, &store, &[(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]).await {
            assert_eq!(got.expect("nothing was refused"), answer(who));
        }
        assert_eq!(store.seen().durable.len(), 6);
    });
}

#[test]
fn calls_that_queue_up_while_a_batch_is_in_flight_go_together() {
    in_many_orders(async || {
        let (began, may_end) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let store = SlowStore::with_gates(began.clone(), may_end.clone());
        let (lane, _task) = store.open(LIMITS);
        let first = spawn_all(&lane, &store, &[(1, 1)]);
        began.acquire().await.expect("never closed").forget();
        let mut answers = Vec::new();
        for who in 2..=4 {
            answers.push(lane.send((who, 1), 1).await.expect("the lane is open"));
        }
        may_end.add_permits(2);
        for receiver in answers {
            receiver.await.expect("answered").expect("made");
        }
        wait_for(first).await;
        let sizes: Vec<usize> = store.seen().batches.iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 3]);
    });
}

#[test]
fn a_batch_leaves_beside_another_once_it_is_worth_it() {
    in_many_orders(async || {
        let (began, may_end) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let store = SlowStore::with_gates(began.clone(), may_end.clone());
        let (lane, _task) = store.open(TWO_FLIGHTS);
        let first = spawn_all(&lane, &store, &[(1, 1)]);
        began.acquire().await.expect("never closed").forget();
        let mut answers = vec![lane.send((2, 1), 1).await.expect("the lane is open")];
        for _ in 0..5 {
            yield_now().await;
        }
        assert_eq!(store.seen().batches.len(), 1, "a single call waits");
        answers.push(lane.send((3, 1), 1).await.expect("the lane is open"));
        began.acquire().await.expect("never closed").forget();
        assert_eq!(store.seen().in_flight, 2);
        // A third batch has to wait, however large.
        for who in 4..=6 {
            answers.push(lane.send((who, 1), 1).await.expect("the lane is open"));
        }
        for _ in 0..5 {
            yield_now().await;
        }
        may_end.add_permits(3);
        for receiver in answers {
            receiver.await.expect("answered").expect("made");
        }
        wait_for(first).await;
        let batches: Vec<Vec<u32>> =
            store.seen().batches.iter().map(|batch| batch.iter().map(|(who, _)| *who).collect()).collect();
        assert_eq!(batches, [vec![1], vec![2, 3], vec![4, 5, 6]]);
    });
}

#[test]
fn a_batch_stays_within_its_limits_and_a_large_call_goes_alone() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(always);
        let (lane, _task) = store.open(limits);
        let got = call_all(&lane, &store, &[(1, 6), (2, 4), (3, 1), (4, 99), (5, 5), (6, 10)]).await;
        assert!(got.iter().all(|(who, got)| matches!(got, Ok(said) if *said == answer(*who))));
    });
}

#[test]
fn every_caller_enters_a_full_queue_in_the_end() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(always);
        let (lane, _task) = store.open(Limits { queue: 1, ..limits });
        let got = call_all(&lane, &store, &[(1, 1), (2, 9), (3, 1), (4, 9), (5, 1)]).await;
        assert!(got.iter().all(|(_, got)| got.is_ok()));
    });
}

#[test]
fn calls_of_one_caller_are_made_in_order_also_around_a_refused_one() {
    in_many_orders(async || {
        let store = SlowStore::new(refuses_culprits);
        let (lane, _task) = store.open(LIMITS);
        let others = spawn_all(&lane, &store, &[(7, 9), (8, 1)]);
        let mut answers = Vec::new();
        for who in 1..=5 {
            answers.push(lane.send((who, 3), 3).await.expect("the lane is open"));
        }
        for receiver in answers {
            let _ = receiver.await.expect("answered");
        }
        wait_for(others).await;
        let made: Vec<u32> = store.seen().made.iter().copied().filter(|who| *who < 6).collect();
        assert_eq!(made, [1, 3, 4]);
    });
}

/// Refuses every batch with one of two offending calls: one that cannot be written, and one whose row cannot be read.
fn refuses_culprits(nth: usize, batch: &[Call]) -> Result<Vec<u32>> {
    match batch.iter().map(|(who, _)| who).find(|who| [2, 5].contains(who)) {
        Some(2) => Err(Error::Refused("no".into())),
        Some(_) => Err(Error::Corrupt("no")),
        None => always(nth, batch),
    }
}

#[test]
fn a_refused_call_fails_alone() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(refuses_culprits);
        let (lane, _task) = store.open(limits);
        for (who, got) in call_all(&lane, &store, &[(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]).await {
            match (who, got) {
                (_, Ok(said)) => assert_eq!(said, answer(who)),
                (2, Err(Error::Refused(_))) | (5, Err(Error::Corrupt(_))) => {}
                (_, Err(error)) => panic!("{who}: {error}"),
            }
        }
        let mut durable: Vec<_> = store.seen().durable.clone().into_iter().collect();
        durable.sort_unstable();
        assert_eq!(durable, [(1, 1), (3, 1), (4, 1), (6, 1)], "all other calls are made, and made once");
    });
}

/// The store is unavailable for the second batch.
fn away_once(nth: usize, batch: &[Call]) -> Result<Vec<u32>> {
    match nth {
        1 => Err(Error::Unavailable("away".into())),
        _ => always(nth, batch),
    }
}

#[test]
fn an_error_of_a_whole_batch_reaches_its_callers_only() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(away_once);
        let (lane, _task) = store.open(limits);
        let got = call_all(&lane, &store, &[(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]).await;
        for (who, got) in got {
            let unlucky = store.seen().batch_of[&who] == 1;
            assert_eq!(matches!(got, Err(Error::Unavailable(_))), unlucky, "{who}: {got:?}");
            assert_eq!(got.is_ok(), !unlucky, "{who}: {got:?}");
        }
    });
}

/// The first batch is answered with one answer too few.
fn forgets_one(nth: usize, batch: &[Call]) -> Result<Vec<u32>> {
    always(nth, if nth == 0 { &batch[1..] } else { batch })
}

#[test]
fn a_partial_answer_of_a_batch_is_an_error_and_no_caller_gets_anothers_answer() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(forgets_one);
        let (lane, _task) = store.open(limits);
        for (who, got) in call_all(&lane, &store, &[(1, 1), (2, 1), (3, 1), (4, 1)]).await {
            match got {
                Ok(said) => assert_eq!(said, answer(who)),
                Err(error) => {
                    assert!(matches!(error, Error::Contradiction(_)), "{error}");
                    assert_eq!(store.seen().batch_of[&who], 0);
                }
            }
        }
    });
}

#[test]
fn the_call_of_a_caller_that_stops_waiting_is_made() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(refuses_culprits);
        let (lane, _task) = store.open(limits);
        let gone = lane.clone();
        let leaver = spawn(async move {
            for who in [10, 11] {
                drop(gone.send((who, 4), 4).await.expect("the lane is open"));
            }
        });
        let got = call_all(&lane, &store, &[(1, 1), (2, 1), (3, 1), (4, 1)]).await;
        leaver.await.expect("it only sends");
        for (who, got) in got {
            assert_eq!(got.is_err(), who == 2, "{who}: {got:?}");
        }
        lane.call((20, 1), 1).await.expect("made after all that was queued before it");
        let seen = store.seen();
        assert_eq!((seen.durable.get(&10), seen.durable.get(&11)), (Some(&1), Some(&1)));
    });
}

#[test]
fn a_caller_cancelled_at_any_moment_affects_no_other() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(always);
        let (lane, _task) = store.open(Limits { queue: 1, ..limits });
        let (cancelled, watch) = (lane.clone(), store.clone());
        let caller = spawn(async move { cancelled.call((10, 4), 4).await });
        let others = spawn_all(&lane, &store, &[(1, 4), (2, 4), (3, 4)]);
        yield_now().await;
        caller.abort();
        assert!(wait_for(others).await.iter().all(|(_, got)| got.is_ok()));
        lane.call((20, 1), 1).await.expect("the lane goes on");
        assert!(watch.seen().durable.get(&10).is_none_or(|times| *times == 1), "made or not, but not twice");
    });
}

#[test]
fn the_lane_answers_queued_calls_and_ends_with_its_handles() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(refuses_culprits);
        let (lane, task) = store.open(limits);
        let senders = [1, 3].map(|first| {
            let lane = lane.clone();
            spawn(async move {
                let mut answers = Vec::new();
                for who in [first, first + 1] {
                    answers.push((who, lane.send((who, 6), 6).await.expect("the lane is open")));
                }
                answers
            })
        });
        drop(lane);
        task.await.expect("it ends by itself");
        for sender in senders {
            for (who, mut receiver) in sender.await.expect("it only sends") {
                let got = receiver.try_recv().expect("answered before the lane ended");
                assert_eq!(got.is_err(), who == 2, "{who}: {got:?}");
            }
        }
    });
}

#[test]
fn callers_of_a_dropped_lane_get_an_error() {
    with_one_flight_and_two(async |limits| {
        let store = SlowStore::new(always);
        let (lane, task) = store.open(Limits { queue: 1, ..limits });
        let callers = spawn_all(&lane, &store, &[(1, 1), (2, 1), (3, 1)]);
        yield_now().await;
        task.abort();
        for (who, got) in wait_for(callers).await {
            match got {
                Ok(said) => assert_eq!(said, answer(who)),
                Err(error) => assert!(matches!(error, Error::Stopping), "{who}: {error}"),
            }
        }
        assert!(lane.call((9, 1), 1).await.is_err_and(|error| error.is_transient()));
    });
}
