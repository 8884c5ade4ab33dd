//! Broker to handler: once per key; retries and dead letters.

use std::time::Duration;

use bytes::Bytes;
use semel::{
    Fingerprint,
    messaging::{ConsumerOptions, Received, Refusal},
    prelude::*,
};
use semel_testkit::Kind;

use super::{
    brokers::{Feed, Word},
    tools::{Books, CONSUMER, Place, TENANT, eventually, quick_consumer, received, soon},
};
use crate::support::on_both_databases;

on_both_databases!(
    a_message_delivered_three_times_takes_effect_once,
    copies_in_one_batch_take_effect_once,
    two_copies_at_once_enter_the_handler_once,
    a_failing_message_is_retried_until_it_succeeds,
    a_refused_message_does_not_fail_the_others_of_its_batch,
    a_poison_message_becomes_a_dead_letter_and_the_queue_continues,
    a_permanent_refusal_is_a_dead_letter_at_once,
    a_panic_is_a_failure,
    an_unreadable_message_is_a_dead_letter,
    another_body_under_a_known_id_is_a_conflict,
    a_stopped_consumer_has_no_unacknowledged_messages,
    a_delivery_taken_by_another_consumer_is_not_begun,
);

/// A consumer that was paused for longer than its lease skips deliveries that another one has by now.
async fn a_delivery_taken_by_another_consumer_is_not_begun(kind: Kind) {
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    feed.deliver_late(&received("late"));
    feed.deliver(&received("m"));
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    eventually(async || feed.words().len() == 2).await;
    running.stop().await;
    assert_eq!(feed.words(), [("late".to_owned(), Word::Dropped), ("m".to_owned(), Word::Acked)]);
    assert_eq!((books.entered("late"), books.entered("m")), (0, 1));
}

async fn a_message_delivered_three_times_takes_effect_once(kind: Kind) {
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    let all: Vec<_> = (0..40).map(|n| received(&format!("m{n}"))).collect();
    for _ in 0..3 {
        all.iter().for_each(|message| feed.deliver(message));
    }
    eventually(async || feed.acked() == 120).await;
    running.stop().await;
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max()), (40, Some(&1)));
    assert_eq!(books.committed(), 40);
    assert_eq!(place.letters().await.len(), 0);
}

/// All wait before the consumer begins, so that it finds them together.
async fn copies_in_one_batch_take_effect_once(kind: Kind) {
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    let message = received("m");
    let other = Received { body: Bytes::from_static(b"other"), ..message.clone() };
    for message in [&message, &message, &other, &message, &received("n")] {
        feed.deliver(message);
    }
    let running = place.consumer(&feed, &books, ConsumerOptions { concurrency: 1, ..quick_consumer() }).await;
    eventually(async || feed.acked() == 5).await;
    running.stop().await;
    assert_eq!(place.effects().await, [("m".to_owned(), 1), ("n".to_owned(), 1)].into());
    let letters = place.letters().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].message.body, "other");
}

/// The first is running when the second comes, at another node.
async fn two_copies_at_once_enter_the_handler_once(kind: Kind) {
    let place = Place::new(kind).await;
    let (books, entered, gate) = Books::that_wait();
    let feeds = [Feed::new(), Feed::new()];
    let first = place.consumer(&feeds[0], &books, quick_consumer()).await;
    let second = place.consumer(&feeds[1], &books, quick_consumer()).await;
    let message = received("m");
    feeds[0].deliver(&message);
    soon(entered.notified()).await;
    feeds[1].deliver(&message);
    // If the second were let in, it would be now.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!((books.entered("m"), feeds[1].acked()), (1, 0));
    gate.close();
    eventually(async || feeds.iter().all(|feed| feed.acked() == 1)).await;
    first.stop().await;
    second.stop().await;
    assert_eq!((books.entered("m"), place.effects().await), (1, [("m".to_owned(), 1)].into()));
}

async fn a_failing_message_is_retried_until_it_succeeds(kind: Kind) {
    let place = Place::new(kind).await;
    let feed = Feed::new();
    let books = Books::that(|_, run| async move {
        match run {
            1 | 2 => Err(Refusal::Retry("not yet".into())),
            _ => Ok(()),
        }
    });
    let backoff = semel::Backoff { first: Duration::from_secs(10), cap: Duration::from_secs(60) };
    let running = place.consumer(&feed, &books, ConsumerOptions { backoff, ..quick_consumer() }).await;
    feed.deliver(&received("m"));
    eventually(async || feed.acked() == 1).await;
    for runs in 1..=2 {
        eventually(async || place.db.next_retry(CONSUMER).await.unwrap().is_some()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(books.entered("m"), runs, "it waits for its time");
        assert_eq!(place.effects().await.len(), 0, "what failed was rolled back");
        place.lab.pass(Duration::from_secs(60));
        eventually(async || books.entered("m") > runs).await;
    }
    place.until_effects(1).await;
    running.stop().await;
    assert_eq!((books.entered("m"), books.committed()), (3, 1));
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
    assert_eq!(place.db.next_retry(CONSUMER).await.unwrap(), None, "and the retry is gone");
}

async fn a_refused_message_does_not_fail_the_others_of_its_batch(kind: Kind) {
    let place = Place::new(kind).await;
    let feed = Feed::new();
    let books = Books::that(|text, _| async move {
        match &*text {
            "m7" => Err(Refusal::Dead("seven".into())),
            _ => Ok(()),
        }
    });
    (0..20).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    let running = place.consumer(&feed, &books, ConsumerOptions { concurrency: 1, ..quick_consumer() }).await;
    eventually(async || feed.acked() == 20).await;
    running.stop().await;
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max(), effects.get("m7")), (19, Some(&1), None));
    let letters = place.letters().await;
    assert_eq!((letters.len(), &*letters[0].reason, letters[0].failures), (1, "seven", 1));
}

async fn a_poison_message_becomes_a_dead_letter_and_the_queue_continues(kind: Kind) {
    let place = Place::new(kind).await;
    let feed = Feed::new();
    let books = Books::that(|text, run| async move {
        match text.starts_with("poison") {
            true => Err(Refusal::Retry(format!("run {run} was no good\n\0"))),
            false => Ok(()),
        }
    });
    let options = ConsumerOptions { max_attempts: 4, ..quick_consumer() };
    let running = place.consumer(&feed, &books, options).await;
    for n in 0..5 {
        feed.deliver(&received(&format!("poison{n}")));
        feed.deliver(&received(&format!("m{n}")));
    }
    eventually(async || place.letters().await.len() == 5).await;
    eventually(async || feed.acked() == 10).await;
    running.stop().await;
    assert_eq!(place.effects().await.len(), 5);
    for letter in place.letters().await {
        assert_eq!((letter.failures, letter.consumer.as_str(), letter.tenant.as_str()), (4, CONSUMER, TENANT));
        assert!(letter.reason.starts_with("run ") && !letter.reason.contains('\0'), "{:?}", letter.reason);
    }
    assert_eq!(place.db.next_retry(CONSUMER).await.unwrap(), None);
}

async fn a_permanent_refusal_is_a_dead_letter_at_once(kind: Kind) {
    let place = Place::new(kind).await;
    let feed = Feed::new();
    let books = Books::that(|_, _| async { Err(Refusal::Dead("no such customer".into())) });
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    feed.deliver(&received("m"));
    eventually(async || feed.acked() == 1).await;
    running.stop().await;
    let letters = place.letters().await;
    assert_eq!((letters.len(), &*letters[0].reason, books.entered("m")), (1, "no such customer", 1));
    assert_eq!(place.effects().await.len(), 0);
}

async fn a_panic_is_a_failure(kind: Kind) {
    let place = Place::new(kind).await;
    let feed = Feed::new();
    let books = Books::that(|text, _| async move {
        assert!(text != "poison", "cannot digest this");
        Ok(())
    });
    for text in ["m0", "poison", "m1"] {
        feed.deliver(&received(text));
    }
    let running = place.consumer(&feed, &books, ConsumerOptions { max_attempts: 2, ..quick_consumer() }).await;
    eventually(async || feed.acked() == 3 && place.letters().await.len() == 1).await;
    running.stop().await;
    let letters = place.letters().await;
    assert!(letters[0].reason.contains("cannot digest this"), "{}", letters[0].reason);
    assert_eq!(letters[0].failures, 2);
    assert_eq!(place.effects().await.keys().collect::<Vec<_>>(), ["m0", "m1"]);
}

async fn an_unreadable_message_is_a_dead_letter(kind: Kind) {
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    let nameless = Received { id: None, ..received("nameless") };
    feed.deliver(&nameless);
    feed.deliver(&nameless);
    feed.deliver(&Received { id: Some("x".repeat(300)), ..received("long name") });
    feed.deliver(&Received { id: Some("a\0b".into()), ..received("odd name") });
    feed.deliver(&received("m"));
    eventually(async || feed.acked() == 5).await;
    running.stop().await;
    let mut letters: Vec<_> =
        place.letters().await.into_iter().map(|letter| (letter.message.body, letter.reason)).collect();
    letters.sort();
    assert_eq!(letters.len(), 3, "{letters:?}");
    assert_eq!(letters[1], (Bytes::from_static(b"nameless"), "the message has no id".to_owned()));
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
}

async fn another_body_under_a_known_id_is_a_conflict(kind: Kind) {
    let place = Place::new(kind).await;
    let (feed, books) = (Feed::new(), Books::new());
    let running = place.consumer(&feed, &books, quick_consumer()).await;
    let first = received("first");
    feed.deliver(&first);
    eventually(async || feed.acked() == 1).await;
    let second = Received { body: Bytes::from_static(b"second"), ..first.clone() };
    feed.deliver(&second);
    let third = Received { body: Bytes::from_static(b"third"), ..first.clone() };
    feed.deliver_again(&third);
    eventually(async || feed.acked() == 3).await;
    running.stop().await;
    assert_eq!(place.effects().await, [("first".to_owned(), 1)].into());
    let letters = place.letters().await;
    assert_eq!(letters.len(), 2);
    for letter in letters {
        assert!(letter.reason.starts_with("conflict"), "{}", letter.reason);
        for body in [&first.body, &letter.message.body] {
            assert!(letter.reason.contains(&Fingerprint::of_bytes(body).to_string()), "{}", letter.reason);
        }
    }
}

async fn a_stopped_consumer_has_no_unacknowledged_messages(kind: Kind) {
    let place = Place::new(kind).await;
    let (books, entered, gate) = Books::that_wait();
    let feed = Feed::new();
    let options = ConsumerOptions { concurrency: 1, batch: 1, prefetch: 4, ..quick_consumer() };
    let running = place.consumer(&feed, &books, options).await;
    (0..10).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    soon(entered.notified()).await;
    running.ask_to_stop();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!running.has_ended(), "it ends what it has begun");
    gate.close();
    running.stop().await;
    let words = feed.words();
    assert_eq!(words[0], ("m0".to_owned(), Word::Acked));
    assert!(words[1..].iter().all(|(_, word)| *word == Word::PutBack), "{words:?}");
    assert!((1..=5).contains(&words.len()), "no more was taken than may be: {words:?}");
    assert_eq!(place.effects().await, [("m0".to_owned(), 1)].into());
}

/// On SQLite, where a transaction has five seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_takes_too_long_is_a_failure() {
    let place = Place::in_real_time(Kind::Sqlite).await;
    let books = Books::that(|text, _| async move {
        if text == "slow" {
            std::future::pending::<()>().await;
        }
        Ok(())
    });
    let feed = Feed::new();
    let running = place.consumer(&feed, &books, ConsumerOptions { max_attempts: 1, ..quick_consumer() }).await;
    feed.deliver(&received("slow"));
    eventually(async || place.letters().await.len() == 1).await;
    feed.deliver(&received("m"));
    eventually(async || feed.acked() == 2).await;
    running.stop().await;
    let letters = place.letters().await;
    assert!(letters[0].reason.contains("open for more than"), "{}", letters[0].reason);
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
}
