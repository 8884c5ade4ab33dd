//! Events while another transaction holds a row: only requests that need the row wait for it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions as _, Executor as _, postgres::PgConnectOptions};

use crate::{
    notifications::{Api, of_restaurant},
    place::Place,
    webhooks_trouble::Holder,
};

/// Without the short waits, each of these took ten seconds.
const SOON: Duration = Duration::from_secs(5);

/// Holds a row, and posts the event that needs it repeatedly beside events that do not.
fn only_the_locked_event_is_refused(lock: &'static str, held: &str, restaurant: u64) {
    let place = Place::postgres();
    let api = Api::start(&place);
    api.event(&of_restaurant("first", 5));
    let options: PgConnectOptions = place.url.parse().unwrap();
    let holder = Holder::of(async move { options.connect().await }, async move |connection| {
        connection.execute(lock).await.map(drop).unwrap();
    });
    let held = of_restaurant(held, restaurant);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let retrying = scope.spawn(|| {
            loop {
                let answer = api.post("/events", &held);
                assert_eq!((answer.status, answer.problem().as_str()), (503, "store-unavailable"), "{}", answer.body);
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let others = (0..40).map(|n| {
            let began = Instant::now();
            api.event(&of_restaurant(&format!("other {n}"), 6));
            began.elapsed()
        });
        let longest = others.max().unwrap();
        over.store(true, Ordering::Relaxed);
        assert!(longest < SOON, "an event of another aggregate took {longest:?}");
        retrying.join().unwrap();
    });
    holder.let_go();
    api.event(&held);
}

#[test]
fn an_aggregate_locked_by_another_transaction_blocks_no_other() {
    only_the_locked_event_is_refused("BEGIN; SELECT last_number FROM semel_outbox_keys FOR UPDATE", "second", 5);
}

#[test]
fn an_event_id_held_by_another_transaction_blocks_no_other() {
    only_the_locked_event_is_refused(
        "BEGIN; INSERT INTO semel_operations
             (id, tenant, service, kind, key, fingerprint, state, fence, owner, created_at, claimed_at, settled_at,
              outcome, outcome_kept)
         SELECT id + 1000000, tenant, service, kind, 'held', fingerprint, state, fence + 1000000, owner, created_at,
                claimed_at, settled_at, outcome, outcome_kept
         FROM semel_operations WHERE key = 'first'",
        "held",
        7,
    );
}
