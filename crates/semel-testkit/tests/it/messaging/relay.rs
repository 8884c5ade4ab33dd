//! Outbox to broker.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use semel::{
    messaging::{BrokerHealth, OutboxState, Published, RelayOptions},
    prelude::*,
};
use semel_testkit::Kind;
use tokio::sync::Semaphore;

use super::{
    brokers::Script,
    tools::{Place, eventually, keyed, message, messages, quick_relay, relay, text},
    unreliable::Unreliable,
};
use crate::support::on_both_databases;

on_both_databases!(
    every_message_is_published_once_and_leaves_the_outbox,
    a_commit_wakes_the_relay,
    a_batch_that_is_confirmed_late_blocks_no_other,
    a_refused_message_backs_off_and_is_then_parked,
    an_unroutable_message_is_published_once_there_is_a_queue,
    an_unreachable_broker_counts_no_failure,
    a_broker_that_asks_for_a_pause_gets_one,
    a_batch_that_outlives_its_lease_does_not_publish_its_tail,
    a_confirmation_after_three_leases_is_published_once,
    a_silent_broker_is_asked_again_under_the_same_id,
    a_message_that_cuts_the_connection_blocks_no_other,
    order_is_kept_per_key_by_two_relays,
    a_short_outage_of_the_store_loses_nothing,
    a_stopped_relay_has_no_leased_rows,
    a_message_with_a_time_is_published_at_that_time,
);

fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort();
    texts
}

fn texts_of(n: usize) -> Vec<String> {
    sorted((0..n).map(|n| format!("m{n}")).collect())
}

async fn every_message_is_published_once_and_leaves_the_outbox(kind: Kind) {
    let place = Place::new(kind).await;
    let script = Script::new();
    place.put(messages(300)).await;
    let options = RelayOptions { batch: 16, ..quick_relay() };
    let running = [place.relay(&script, options.clone()).await, place.relay(&script, options).await];
    for n in 300..400 {
        place.put(vec![message(&format!("m{n}"))]).await;
    }
    place.until_outbox_is_empty().await;
    for running in running {
        running.stop().await;
    }
    assert_eq!(sorted(script.texts()), texts_of(400));
}

/// The relay would not poll for an hour.
async fn a_commit_wakes_the_relay(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let script = Script::new();
    let options = RelayOptions { poll: Duration::from_secs(3600), ..RelayOptions::default() };
    let running = relay(place.db.clone(), &script, options);
    for n in 0..40 {
        place.put(vec![message(&format!("m{n}"))]).await;
        let committed = Instant::now();
        while script.texts().len() <= n {
            assert!(committed.elapsed() < Duration::from_secs(20), "the relay was not woken");
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        // Idle again, so that each has to wake it.
        place.until_outbox_is_empty().await;
    }
    running.stop().await;
}

async fn a_batch_that_is_confirmed_late_blocks_no_other(kind: Kind) {
    let place = Place::new(kind).await;
    let (gate, waits) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
    let script = Script::doing({
        let (gate, waits) = (gate.clone(), waits.clone());
        move |batch, _| {
            let (gate, waits) = (gate.clone(), waits.clone());
            async move {
                if batch.iter().any(|envelope| text(&envelope.message.body) == "m0") {
                    waits.fetch_add(1, Ordering::SeqCst);
                    drop(gate.acquire().await);
                }
                batch.iter().map(|_| Published::Confirmed).collect()
            }
        }
    });
    place.put(messages(12)).await;
    let options = RelayOptions { batch: 2, in_flight: 2, ..quick_relay() };
    let running = place.relay(&script, options).await;
    eventually(async || place.outbox().await.len() == 2).await;
    assert_eq!(waits.load(Ordering::SeqCst), 1);
    let left: Vec<_> = place.outbox().await.iter().map(|row| text(&row.envelope.message.body)).collect();
    assert_eq!(left, ["m0", "m1"], "the first batch is the one that is left");
    gate.add_permits(1);
    place.until_outbox_is_empty().await;
    running.stop().await;
    assert_eq!(sorted(script.texts()), texts_of(12));
}

async fn a_refused_message_backs_off_and_is_then_parked(kind: Kind) {
    let place = Place::new(kind).await;
    let tries = Arc::new(AtomicUsize::new(0));
    let script = Script::that({
        let tries = tries.clone();
        move |envelope| match &*text(&envelope.message.body) {
            "poison" => {
                tries.fetch_add(1, Ordering::SeqCst);
                Published::Refused("it is too sour".into())
            }
            _ => Published::Confirmed,
        }
    });
    place.put(vec![message("poison"), keyed("k", "poison"), keyed("k", "behind"), message("m0")]).await;
    let options = RelayOptions { max_attempts: 3, ..quick_relay() };
    let running = place.relay(&script, options.clone()).await;
    for failures in 1..=3 {
        eventually(async || {
            let rows = place.outbox().await;
            rows.len() == 3 && rows.iter().filter(|row| row.failures == failures).count() == 2
        })
        .await;
        let rows = place.outbox().await;
        let states: Vec<_> = rows.iter().map(|row| row.state).collect();
        let state = if failures < 3 { OutboxState::Waiting } else { OutboxState::Parked };
        assert_eq!(states, [state, state, OutboxState::Blocked], "after {failures}");
        assert_eq!(rows[0].error.as_deref(), Some("it is too sour"));
        // Nothing is tried before its time: a little less than the whole wait passes, then the rest.
        let wait = options.backoff.after(failures, rows[0].id).min(options.backoff.after(failures, rows[1].id));
        place.lab.pass(wait - Duration::from_millis(1));
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(tries.load(Ordering::SeqCst), usize::try_from(failures).unwrap() * 2);
        place.lab.pass(Duration::from_secs(60));
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(tries.load(Ordering::SeqCst), 6, "parked messages are not tried");
    assert_eq!(script.texts(), ["m0"]);
    running.stop().await;
}

async fn an_unroutable_message_is_published_once_there_is_a_queue(kind: Kind) {
    let place = Place::new(kind).await;
    let script = Script::that(|_| Published::Unroutable("no such queue".into()));
    place.put(messages(2)).await;
    let running = place.relay(&script, quick_relay()).await;
    let all_are = async |state| {
        let rows = place.outbox().await;
        rows.len() == 2 && rows.iter().all(|row| row.state == state && row.failures == 0)
    };
    eventually(async || all_are(OutboxState::Unroutable).await).await;
    assert_eq!(place.outbox().await[0].error.as_deref(), Some("no such queue"));
    script.answer(|_| Published::Confirmed);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(all_are(OutboxState::Unroutable).await, "it waits for its time");
    place.lab.pass(quick_relay().unroutable);
    place.until_outbox_is_empty().await;
    running.stop().await;
    assert_eq!(sorted(script.texts()), texts_of(2));
}

async fn an_unreachable_broker_counts_no_failure(kind: Kind) {
    let place = Place::new(kind).await;
    let script = Script::that(|_| Published::NotSent("no connection".into()));
    script.set_health(BrokerHealth::Down("no connection".into()));
    place.put(messages(20)).await;
    let running = place.relay(&script, quick_relay()).await;
    // The delays grow: half a second has room for few attempts.
    let begun = Instant::now();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (tries, most) = (script.calls(), 2 + begun.elapsed().as_millis() / 75);
    assert!(tries >= 1 && tries as u128 <= most, "{tries} tries");
    eventually(async || script.calls() > tries).await;
    assert_eq!(place.outbox().await.len(), 20);
    script.answer(|_| Published::Confirmed);
    script.set_health(BrokerHealth::Up);
    // Sooner than the next attempt would have been.
    place.until_outbox_is_empty().await;
    running.stop().await;
    assert_eq!(sorted(script.texts()), texts_of(20));
}

async fn a_broker_that_asks_for_a_pause_gets_one(kind: Kind) {
    let place = Place::new(kind).await;
    let script = Script::new();
    script.set_health(BrokerHealth::Blocked("low on memory".into()));
    let running = place.relay(&script, quick_relay()).await;
    place.put(messages(5)).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(script.calls(), 0);
    // Nothing is leased meanwhile, either: another relay could publish it.
    assert_eq!(place.db.take(10, Duration::from_secs(1)).await.unwrap().rows.len(), 5);
    place.lab.pass(Duration::from_secs(1));
    script.set_health(BrokerHealth::Up);
    place.until_outbox_is_empty().await;
    running.stop().await;
    assert_eq!(sorted(script.texts()), texts_of(5));
}

/// A broker that is slow for each message, and respects its deadline.
async fn a_batch_that_outlives_its_lease_does_not_publish_its_tail(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    // Long enough for a slow disk; twenty messages of a twentieth of it each are too many for the time to send.
    let lease = Duration::from_secs(4);
    let batches = Arc::new(Mutex::new(Vec::new()));
    let script = Script::doing({
        let batches = batches.clone();
        move |batch, until| {
            let batches = batches.clone();
            async move {
                let mut answers = Vec::new();
                for _ in &batch {
                    if until.has_passed() {
                        answers.push(Published::NotSent("the time is up".into()));
                    } else {
                        tokio::time::sleep(lease / 20).await;
                        answers.push(Published::Confirmed);
                    }
                }
                let sent = answers.iter().filter(|answer| **answer == Published::Confirmed).count();
                batches.lock().unwrap().push((batch.len(), sent));
                answers
            }
        }
    });
    place.put(messages(20)).await;
    let options = RelayOptions { lease, in_flight: 1, ..quick_relay() };
    let running = [place.relay(&script, options.clone()).await, place.relay(&script, options).await];
    place.until_outbox_is_empty().await;
    for running in running {
        running.stop().await;
    }
    let batches = batches.lock().unwrap().clone();
    assert!(batches.iter().any(|(all, sent)| sent < all), "no batch was slow: {batches:?}");
    assert_eq!(sorted(script.texts()), texts_of(20), "each once: {batches:?}");
}

/// The broker confirms after three leases. The first relay keeps its row; the second finds nothing to publish.
async fn a_confirmation_after_three_leases_is_published_once(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let lease = Duration::from_secs(3);
    let script = Script::doing(move |batch, _| async move {
        tokio::time::sleep(lease * 3 + lease / 5).await;
        batch.iter().map(|_| Published::Confirmed).collect()
    });
    place.put(messages(1)).await;
    let options = RelayOptions { lease, ..quick_relay() };
    let running = [place.relay(&script, options.clone()).await, place.relay(&script, options).await];
    place.until_outbox_is_empty().await;
    for running in running {
        running.stop().await;
    }
    assert_eq!((script.calls(), script.texts()), (1, texts_of(1)));
}

async fn a_silent_broker_is_asked_again_under_the_same_id(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let ids = Arc::new(Mutex::new(Vec::new()));
    let script = Script::doing({
        let ids = ids.clone();
        move |batch, _| {
            ids.lock().unwrap().push(batch[0].message.id);
            let silent = ids.lock().unwrap().len() == 1;
            async move {
                if silent {
                    std::future::pending::<()>().await;
                }
                batch.iter().map(|_| Published::Confirmed).collect()
            }
        }
    });
    place.put(messages(1)).await;
    let options = RelayOptions { patience: Duration::from_millis(300), in_flight: 1, ..quick_relay() };
    let running = place.relay(&script, options).await;
    eventually(async || place.outbox().await.iter().all(|row| row.failures == 0) && script.texts().len() == 1).await;
    place.until_outbox_is_empty().await;
    running.stop().await;
    let ids = ids.lock().unwrap().clone();
    assert!(ids.len() >= 2 && ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

async fn a_message_that_cuts_the_connection_blocks_no_other(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let cuts = Arc::new(AtomicUsize::new(0));
    let script = Script::doing({
        let cuts = cuts.clone();
        move |batch, _| {
            let poisoned = batch.iter().any(|envelope| text(&envelope.message.body) == "poison");
            if poisoned {
                cuts.fetch_add(1, Ordering::SeqCst);
            }
            let answer = || match poisoned {
                true => Published::Unknown("the connection was lost".into()),
                false => Published::Confirmed,
            };
            std::future::ready(batch.iter().map(|_| answer()).collect())
        }
    });
    let mut all = messages(20);
    all.insert(0, message("poison"));
    place.put(all).await;
    let options = RelayOptions { batch: 8, ..quick_relay() };
    let running = place.relay(&script, options).await;
    eventually(async || place.outbox().await.len() == 1).await;
    running.stop().await;
    let rest = place.outbox().await;
    assert_eq!((text(&rest[0].envelope.message.body).as_str(), rest[0].failures), ("poison", 0));
    assert_eq!(sorted(script.texts()), texts_of(20), "each once, after {} cuts", cuts.load(Ordering::SeqCst));
}

async fn order_is_kept_per_key_by_two_relays(kind: Kind) {
    const KEYS: usize = 8;
    const EACH: usize = 12;
    let place = Place::in_real_time(kind).await;
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    // Every third message is refused the first time.
    let script = Script::that(move |envelope| match envelope.number.is_some_and(|number| number % 3 == 0) {
        true if seen.lock().unwrap().insert(envelope.message.id) => Published::Refused("not now".into()),
        _ => Published::Confirmed,
    });
    let backoff = semel::Backoff { first: Duration::from_millis(20), cap: Duration::from_millis(20) };
    let options = RelayOptions { batch: 4, backoff, ..quick_relay() };
    let running = [place.relay(&script, options.clone()).await, place.relay(&script, options).await];
    for n in 0..EACH {
        let round = (0..KEYS).map(|key| keyed(&format!("k{key}"), &format!("k{key}-{n}")));
        place.put(round.collect()).await;
    }
    place.until_outbox_is_empty().await;
    for running in running {
        running.stop().await;
    }
    let mut numbers: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for envelope in script.kept() {
        numbers.entry(envelope.message.ordering_key.unwrap()).or_default().push(envelope.number.unwrap());
    }
    assert_eq!(numbers.len(), KEYS);
    for (key, numbers) in numbers {
        assert_eq!(numbers, (1..=i64::try_from(EACH).unwrap()).collect::<Vec<_>>(), "{key}");
    }
}

/// It becomes unavailable while a batch is at the broker, so that its marks cannot be stored.
async fn a_short_outage_of_the_store_loses_nothing(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let gate = Arc::new(Semaphore::new(0));
    let script = Script::doing({
        let gate = gate.clone();
        move |batch, _| {
            let gate = gate.clone();
            async move {
                drop(gate.acquire().await);
                batch.iter().map(|_| Published::Confirmed).collect()
            }
        }
    });
    place.put(messages(10)).await;
    let running = relay(unreliable.clone(), &script, quick_relay());
    eventually(async || script.calls() == 1).await;
    unreliable.go_away();
    gate.close();
    eventually(async || script.texts().len() == 10 && unreliable.refused() > 3).await;
    assert_eq!(place.outbox().await.len(), 10);
    place.put(vec![message("m10")]).await;
    unreliable.come_back();
    place.until_outbox_is_empty().await;
    running.stop().await;
    assert_eq!(sorted(script.texts()), texts_of(11), "each once: the marks were made in time");
}

async fn a_stopped_relay_has_no_leased_rows(kind: Kind) {
    let place = Place::new(kind).await;
    let gate = Arc::new(Semaphore::new(0));
    let script = Script::doing({
        let gate = gate.clone();
        move |batch, _| {
            let gate = gate.clone();
            async move {
                drop(gate.acquire().await);
                batch.iter().map(|_| Published::Confirmed).collect()
            }
        }
    });
    place.put(messages(20)).await;
    let running = place.relay(&script, RelayOptions { batch: 4, in_flight: 2, ..quick_relay() }).await;
    eventually(async || script.calls() == 2).await;
    running.ask_to_stop();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!running.has_ended(), "it waits for the confirmation of published batches");
    gate.close();
    running.stop().await;
    assert_eq!((script.calls(), script.texts().len()), (2, 8), "nothing new was taken");
    assert_eq!(place.outbox().await.len(), 12);
    let free = place.db.take(100, Duration::from_secs(1)).await.unwrap();
    assert_eq!(free.rows.len(), 12, "unpublished rows are not leased");
}

async fn a_message_with_a_time_is_published_at_that_time(kind: Kind) {
    let place = Place::new(kind).await;
    let script = Script::new();
    let later = semel_testkit::Lab::START + Duration::from_secs(3600);
    place.put(vec![semel::messaging::Message { not_before: Some(later), ..message("m0") }, message("m1")]).await;
    let running = place.relay(&script, quick_relay()).await;
    eventually(async || place.outbox().await.len() == 1).await;
    place.lab.pass(Duration::from_secs(3599));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(script.texts(), ["m1"]);
    place.lab.pass(Duration::from_secs(1));
    place.until_outbox_is_empty().await;
    running.stop().await;
    assert_eq!(script.texts(), ["m1", "m0"]);
}
