//! Retries: their starts are counted before they run, and counted correctly.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use semel::{
    Fingerprint,
    messaging::{ConsumerOptions, NewLetter, Refusal, Retry},
    prelude::*,
};
use semel_testkit::Kind;
use tokio::sync::Semaphore;

use super::{
    brokers::{Feed, Word},
    tools::{Books, CONSUMER, Place, Running, TENANT, consumer, eventually, quick_consumer, received, soon},
    unreliable::Unreliable,
};
use crate::support::on_both_databases;

on_both_databases!(
    a_redelivered_message_is_counted_before_it_runs,
    a_redelivery_of_a_handled_message_is_acknowledged,
    a_retry_that_kills_its_process_becomes_a_dead_letter,
    a_retry_that_stops_before_its_turn_is_not_counted,
    a_retry_that_gets_no_turn_is_not_counted,
    a_retry_that_the_store_cut_off_is_not_counted,
    a_retry_whose_commit_has_no_answer_takes_effect_once,
    a_letter_that_is_redriven_is_handled,
);

async fn a_redelivered_message_is_counted_before_it_runs(kind: Kind) {
    let place = Place::new(kind).await;
    let (books, entered, gate) = Books::that_wait();
    let feed = Feed::new();
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    let message = received("m");
    feed.deliver_again(&message);
    soon(entered.notified()).await;
    assert_eq!(feed.words(), [("m".to_owned(), Word::Acked)], "it is stored as a retry before it is begun");
    gate.close();
    place.until_effects(1).await;
    feed.deliver_again(&message);
    eventually(async || feed.acked() == 2).await;
    running.stop().await;
    assert_eq!((books.entered("m"), books.committed()), (1, 1));
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
}

async fn a_redelivery_of_a_handled_message_is_acknowledged(kind: Kind) {
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    let message = received("m");
    feed.deliver(&message);
    eventually(async || feed.acked() == 1).await;
    feed.deliver_again(&message);
    eventually(async || feed.acked() == 2).await;
    running.stop().await;
    assert_eq!(books.entered("m"), 1);
    assert_eq!(place.db.next_retry(CONSUMER).await.unwrap(), None, "no retry is left");
}

/// Takes a retry like a consumer that dies before it stores the end.
async fn begin_and_die(place: &Place) {
    let lease = Duration::from_secs(10);
    let taken = place.db.take_retries(CONSUMER, 10, lease).await.unwrap();
    assert_eq!(taken.len(), 1);
    place.lab.pass(lease);
}

/// Puts a retry that is due.
async fn put_retry(place: &Place, text: &str) {
    let message = received(text);
    let letter = NewLetter {
        tenant: TENANT.into(),
        consumer: CONSUMER.into(),
        key: message.id.clone().unwrap(),
        fingerprint: Fingerprint::of_bytes(&message.body),
        message,
        failures: 0,
        reason: "delivered before".into(),
        retry: Retry::After(Duration::ZERO),
    };
    place.db.put_letter(letter).await.unwrap();
}

/// A retry that runs elsewhere in this process until the semaphore is closed, so that none can run alone.
async fn retry_running_elsewhere() -> (Place, Running, Arc<Semaphore>) {
    let place = Place::new(Kind::Postgres).await;
    let (books, entered, gate) = Books::that_wait();
    put_retry(&place, "long").await;
    let running = place.consumer(&Feed::new(), &books, quick_consumer()).await;
    soon(entered.notified()).await;
    (place, running, gate)
}

const STARTS: &str = "SELECT starts FROM semel_retries";

async fn a_retry_that_stops_before_its_turn_is_not_counted(kind: Kind) {
    let (_elsewhere, long, gate) = retry_running_elsewhere().await;
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    put_retry(&place, "unlucky").await;
    begin_and_die(&place).await;
    let lease = Duration::from_secs(3600);
    let options = ConsumerOptions { lease, max_crashes: 2, ..quick_consumer() };
    for _ in 0..2 {
        let running = place.consumer(&feed, &books, options.clone()).await;
        eventually(async || place.lab.number(STARTS).await == 2).await;
        running.stop().await;
        assert_eq!((place.lab.number(STARTS).await, books.entered("unlucky")), (1, 0));
    }
    gate.close();
    let running = place.consumer(&feed, &books, options).await;
    place.until_effects(1).await;
    running.stop().await;
    long.stop().await;
    assert_eq!((books.entered("unlucky"), place.letters().await.len()), (1, 0));
}

async fn a_retry_that_gets_no_turn_is_not_counted(kind: Kind) {
    let (_elsewhere, long, gate) = retry_running_elsewhere().await;
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let (feed, books) = (Feed::new(), Books::new());
    put_retry(&place, "unlucky").await;
    begin_and_die(&place).await;
    let lease = Duration::from_millis(200);
    let options = ConsumerOptions { lease, max_crashes: 2, ..quick_consumer() };
    let running = consumer(unreliable.clone(), &feed, &books, options);
    eventually(async || unreliable.given_back() > 2).await;
    assert_eq!(books.entered("unlucky"), 0);
    gate.close();
    place.until_effects(1).await;
    running.stop().await;
    long.stop().await;
    assert_eq!((books.entered("unlucky"), place.letters().await.len()), (1, 0));
}

/// The clock does not move, so that a retry that is not released does not become due.
async fn a_retry_that_the_store_cut_off_is_not_counted(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let books = Books::that({
        let unreliable = unreliable.clone();
        move |_, run| {
            if run <= 3 {
                unreliable.go_away();
            }
            async { Ok(()) }
        }
    });
    let feed = Feed::new();
    put_retry(&place, "m").await;
    // One crash would be too many.
    let lease = Duration::from_millis(200);
    let options = ConsumerOptions { lease, max_crashes: 1, ..quick_consumer() };
    let running = consumer(unreliable.clone(), &feed, &books, options);
    for run in 1..=3 {
        let before = unreliable.given_back();
        eventually(async || books.entered("m") == run && unreliable.given_back() > before).await;
        unreliable.come_back();
        eventually(async || books.entered("m") > run).await;
    }
    place.until_effects(1).await;
    running.stop().await;
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
    assert_eq!(place.letters().await.len(), 0);
}

async fn a_retry_that_kills_its_process_becomes_a_dead_letter(kind: Kind) {
    let place = Place::new(kind).await;
    let options = ConsumerOptions { max_crashes: 2, ..quick_consumer() };
    let (feed, books) = (Feed::new(), Books::new());
    put_retry(&place, "killer").await;
    begin_and_die(&place).await;
    begin_and_die(&place).await;
    let running = place.consumer(&feed, &books, options.clone()).await;
    eventually(async || place.letters().await.len() == 1).await;
    running.stop().await;
    let letters = place.letters().await;
    assert!(letters[0].reason.contains("2 runs"), "{}", letters[0].reason);
    assert_eq!(books.entered("killer"), 0, "it was not run a third time");

    put_retry(&place, "unlucky").await;
    begin_and_die(&place).await;
    let running = place.consumer(&feed, &books, options).await;
    place.until_effects(1).await;
    running.stop().await;
    assert_eq!(place.letters().await.len(), 1, "one crash is allowed");
}

async fn a_retry_whose_commit_has_no_answer_takes_effect_once(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let books = Books::that({
        let unreliable = unreliable.clone();
        move |_, _| {
            unreliable.make_commits_silent(1);
            async { Ok(()) }
        }
    });
    let feed = Feed::new();
    let running = consumer(unreliable, &feed, &books, quick_consumer());
    feed.deliver_again(&received("m"));
    eventually(async || books.committed() == 1).await;
    running.stop().await;
    assert_eq!((books.entered("m"), place.effects().await), (1, [("m".to_owned(), 1)].into()));
    assert_eq!(place.db.next_retry(CONSUMER).await.unwrap(), None);
    assert_eq!(place.letters().await.len(), 0);
}

async fn a_letter_that_is_redriven_is_handled(kind: Kind) {
    let place = Place::new(kind).await;
    let mended = Arc::new(AtomicUsize::new(0));
    let books = Books::that({
        let mended = mended.clone();
        move |_, _| {
            let works = mended.load(Ordering::SeqCst) > 0;
            async move { if works { Ok(()) } else { Err(Refusal::Dead("out of order".into())) } }
        }
    });
    let feed = Feed::new();
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    (0..3).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    eventually(async || place.letters().await.len() == 3).await;
    mended.store(1, Ordering::SeqCst);
    let filter = semel::messaging::LetterFilter { tenant: TENANT.into(), ..Default::default() };
    let redriven = place.db.redrive_letters(&filter, None, 10, "me").await.unwrap();
    assert_eq!(redriven.moved, 3);
    place.until_effects(3).await;
    running.stop().await;
    assert_eq!(place.effects().await.values().max(), Some(&1));
    assert_eq!(place.letters().await.len(), 0);
}
