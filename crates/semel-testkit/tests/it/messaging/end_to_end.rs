//! All of it: outbox, relay, the broker in the database, inbox, handler.

use std::{sync::Arc, time::Duration};

use semel::{
    Timestamp, Uptime,
    messaging::{Broker as _, ConsumerOptions, Envelope, LetterFilter, Published, Queue, Refusal, RelayOptions},
    prelude::*,
};
use semel_store::EmbeddedBroker;
use semel_testkit::Kind;

use super::{
    brokers::Feed,
    tools::{Books, Place, QUEUE, TENANT, eventually, message, messages, quick_consumer, quick_relay, received},
};
use crate::support::on_both_databases;

on_both_databases!(
    two_relays_and_four_consumers_at_once,
    each_message_published_three_times_takes_effect_once,
    nothing_is_lost_when_all_is_stopped_and_started,
    a_handler_that_takes_three_leases_is_entered_once,
    a_retry_that_takes_three_leases_is_entered_once,
    damaged_copies_that_are_mended_and_redriven_take_effect_once,
);

/// Shorter than a transaction may be on SQLite, three times.
const LEASE: Duration = Duration::from_millis(500);

/// A handler that takes longer than three leases.
fn slow() -> Books {
    Books::that(|_, _| async {
        tokio::time::sleep(LEASE * 3 + LEASE / 5).await;
        Ok(())
    })
}

/// Another consumer waits for its message all the time, and never gets it.
async fn a_handler_that_takes_three_leases_is_entered_once(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let books = slow();
    let mut running = Vec::new();
    for _ in 0..2 {
        let broker = Arc::new(EmbeddedBroker::with_lease(place.lab.open().await, LEASE));
        broker.declare(vec![Queue::new(QUEUE)]).await.unwrap();
        running.push(place.consumer(&broker, &books, quick_consumer()).await);
    }
    let relay = place.relay(&broker(&place).await, quick_relay()).await;
    place.put(messages(1)).await;
    place.until_effects(1).await;
    eventually(async || place.lab.number("SELECT count(*) FROM semel_queue").await == 0).await;
    for running in running.into_iter().chain([relay]) {
        running.stop().await;
    }
    assert_eq!((books.all_entered(), place.effects().await.values().max()), (1, Some(&1)));
}

async fn a_retry_that_takes_three_leases_is_entered_once(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let (feed, books) = (Feed::new(), slow());
    let options = ConsumerOptions { lease: LEASE, ..quick_consumer() };
    let running =
        [place.consumer(&feed, &books, options.clone()).await, place.consumer(&Feed::new(), &books, options).await];
    feed.deliver_again(&received("m0"));
    place.until_effects(1).await;
    for running in running {
        running.stop().await;
    }
    assert_eq!((books.all_entered(), place.effects().await), (1, [("m0".to_owned(), 1)].into()));
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_retries").await, 0);
}

/// The letter of an unreadable message has the id of its row as its key. Once it is repaired and re-driven, it has the
/// message's own id again.
async fn damaged_copies_that_are_mended_and_redriven_take_effect_once(kind: Kind) {
    let place = Place::new(kind).await;
    let (broker, books) = (broker(&place).await, Books::new());
    let copy = Envelope { message: message("m"), number: None, put_at: Timestamp::from_micros(1) };
    let until = Uptime::now() + Duration::from_secs(10);
    assert_eq!(broker.publish(vec![copy.clone(), copy], until).await, vec![Published::Confirmed; 2]);
    place.lab.execute("UPDATE semel_queue SET headers = 'damaged'").await.unwrap();
    let running = place.consumer(&broker, &books, quick_consumer()).await;
    let count = async |table: &str| place.lab.number(&format!("SELECT count(*) FROM {table}")).await;
    eventually(async || count("semel_dead_letters").await == 2).await;
    place.lab.execute("UPDATE semel_dead_letters SET headers = '{}'").await.unwrap();
    let filter = LetterFilter { tenant: TENANT.into(), ..LetterFilter::default() };
    assert_eq!(place.db.redrive_letters(&filter, None, 10, "me").await.unwrap().moved, 2);
    eventually(async || count("semel_retries").await == 0).await;
    running.stop().await;
    assert_eq!((books.entered("m"), place.effects().await), (1, [("m".to_owned(), 1)].into()));
    assert_eq!((count("semel_dead_letters").await, count("semel_queue").await), (0, 0));
}

async fn broker(place: &Place) -> Arc<EmbeddedBroker> {
    let broker = EmbeddedBroker::new(place.lab.open().await);
    broker.declare(vec![Queue::new(QUEUE)]).await.unwrap();
    Arc::new(broker)
}

/// Every fifth message fails the first time.
fn fickle() -> Books {
    Books::that(|text, run| async move {
        match text.ends_with('5') && run == 1 {
            true => Err(Refusal::Retry("not at first".into())),
            false => Ok(()),
        }
    })
}

async fn two_relays_and_four_consumers_at_once(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let books = fickle();
    let mut running = Vec::new();
    for _ in 0..2 {
        let options = RelayOptions { batch: 32, ..quick_relay() };
        running.push(place.relay(&broker(&place).await, options).await);
    }
    for _ in 0..4 {
        let options = ConsumerOptions { prefetch: 32, ..quick_consumer() };
        running.push(place.consumer(&broker(&place).await, &books, options).await);
    }
    for chunk in messages(400).chunks(20) {
        place.put(chunk.to_vec()).await;
    }
    place.until_effects(400).await;
    place.until_outbox_is_empty().await;
    for running in running {
        running.stop().await;
    }
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max()), (400, Some(&1)));
    assert_eq!(place.letters().await.len(), 0);
}

async fn each_message_published_three_times_takes_effect_once(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let (books, broker) = (fickle(), broker(&place).await);
    let envelopes: Vec<_> = messages(100)
        .into_iter()
        .map(|message| Envelope { message, number: None, put_at: Timestamp::from_micros(1) })
        .collect();
    let running = [
        place.consumer(&broker, &books, quick_consumer()).await,
        place.consumer(&broker, &books, quick_consumer()).await,
    ];
    for _ in 0..3 {
        let answers = broker.publish(envelopes.clone(), Uptime::now() + Duration::from_secs(10)).await;
        assert!(answers.iter().all(|answer| *answer == Published::Confirmed), "{answers:?}");
    }
    place.until_effects(100).await;
    eventually(async || place.lab.number("SELECT count(*) FROM semel_queue").await == 0).await;
    for running in running {
        running.stop().await;
    }
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max()), (100, Some(&1)));
}

async fn nothing_is_lost_when_all_is_stopped_and_started(kind: Kind) {
    let place = Place::in_real_time(kind).await;
    let books = fickle();
    place.put(messages(200)).await;
    let mut rounds = 0;
    while place.effects().await.len() < 200 {
        let broker = broker(&place).await;
        let relay = place.relay(&broker, RelayOptions { batch: 8, ..quick_relay() }).await;
        let consumer = place.consumer(&broker, &books, ConsumerOptions { batch: 4, ..quick_consumer() }).await;
        // Longer each time, so that it ends.
        rounds += 1;
        tokio::time::sleep(Duration::from_millis(20 * rounds)).await;
        relay.stop().await;
        consumer.stop().await;
        let left = async |table: &str| place.lab.number(&format!("SELECT count(*) FROM {table}")).await;
        assert!(
            rounds < 60,
            "{} of 200 took effect; in the outbox are {}, in the queue {}, to be tried again {}",
            place.effects().await.len(),
            left("semel_outbox").await,
            left("semel_queue").await,
            left("semel_retries").await
        );
    }
    assert!(rounds > 1, "it was never stopped half-way");
    assert_eq!(place.effects().await.values().max(), Some(&1));
    assert_eq!(place.letters().await.len(), 0);
}
