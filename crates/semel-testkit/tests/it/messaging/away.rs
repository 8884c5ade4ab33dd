//! A consumer whose database is unavailable, or whose commit is not answered.

use semel::messaging::{ConsumerOptions, Received, Refusal};
use semel_testkit::{
    Kind,
    faults::{Fault, On, Proxy},
};

use super::{
    brokers::{Feed, Word},
    tools::{Books, Place, consumer, eventually, quick_consumer, received},
    unreliable::Unreliable,
};
use crate::support::on_both_databases;

on_both_databases!(
    an_unavailable_store_is_waited_for,
    a_failure_that_the_store_could_have_caused_is_not_counted,
    a_commit_without_an_answer_is_found_in_the_inbox,
    a_consumer_that_stops_during_an_outage_returns_its_deliveries,
    a_message_whose_commit_always_fails_transiently_becomes_a_dead_letter,
    an_outage_at_every_commit_counts_no_attempt,
);

/// The commit of one message is refused every time with a transient error code: a trigger that always finds the same
/// conflict. The store is available for all others.
async fn a_message_whose_commit_always_fails_transiently_becomes_a_dead_letter(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let books = Books::that({
        let unreliable = unreliable.clone();
        move |text, _| {
            if text == "cursed" {
                unreliable.fail_a_commit();
            }
            async { Ok(()) }
        }
    });
    let feed = Feed::new();
    // One after the other: the commit that fails is that of the message that asked for it.
    let options = ConsumerOptions { concurrency: 1, batch: 1, max_attempts: 2, ..quick_consumer() };
    let running = consumer(unreliable.clone(), &feed, &books, options);
    feed.deliver(&received("cursed"));
    eventually(async || feed.acked() == 1 && place.letters().await.len() == 1).await;
    (0..20).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    eventually(async || feed.acked() == 21).await;
    running.stop().await;
    let letters = place.letters().await;
    assert!(letters[0].reason.contains("could not serialize"), "{}", letters[0].reason);
    assert_eq!((&*letters[0].message.body, letters[0].failures), (&b"cursed"[..], 2));
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max(), effects.get("cursed")), (20, Some(&1), None));
    // In the delivery, and in each of the two retries, as often as the store may have been the cause.
    assert_eq!(books.entered("cursed"), 9);
}

/// More often than any message may fail, and each time the store is unavailable for all.
async fn an_outage_at_every_commit_counts_no_attempt(kind: Kind) {
    const TIMES: usize = 5;
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let books = Books::that({
        let unreliable = unreliable.clone();
        move |_, run| {
            if run <= TIMES {
                unreliable.go_away();
            }
            async { Ok(()) }
        }
    });
    let feed = Feed::new();
    let running = consumer(unreliable.clone(), &feed, &books, ConsumerOptions { max_attempts: 1, ..quick_consumer() });
    feed.deliver(&received("m"));
    for run in 1..=TIMES {
        eventually(async || books.entered("m") == run).await;
        let before = unreliable.refused();
        eventually(async || unreliable.refused() > before + 2).await;
        unreliable.come_back();
    }
    eventually(async || feed.acked() == 1).await;
    running.stop().await;
    assert_eq!((books.entered("m"), place.effects().await), (TIMES + 1, [("m".to_owned(), 1)].into()));
    assert_eq!((place.letters().await.len(), place.lab.number("SELECT count(*) FROM semel_retries").await), (0, 0));
}

async fn an_unavailable_store_is_waited_for(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let (feed, books) = (Feed::new(), Books::new());
    let running = consumer(unreliable.clone(), &feed, &books, quick_consumer());
    feed.deliver(&received("before"));
    eventually(async || feed.acked() == 1).await;
    unreliable.go_away();
    (0..10).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    feed.deliver_again(&received("again"));
    feed.deliver(&Received { id: None, ..received("nameless") });
    eventually(async || unreliable.refused() > 10).await;
    assert_eq!(feed.words(), [("before".to_owned(), Word::Acked)], "it keeps its delivery");
    unreliable.come_back();
    eventually(async || feed.acked() == 13).await;
    place.until_effects(12).await;
    running.stop().await;
    assert_eq!(place.effects().await.values().max(), Some(&1));
    let letters = place.letters().await;
    assert_eq!((letters.len(), &*letters[0].message.body), (1, &b"nameless"[..]));
}

/// It becomes unavailable in the middle of a run, and the handler cannot know why its statement failed.
async fn a_failure_that_the_store_could_have_caused_is_not_counted(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let books = Books::that({
        let unreliable = unreliable.clone();
        move |_, run| {
            let unreliable = unreliable.clone();
            async move {
                if run > 1 {
                    return Ok(());
                }
                unreliable.go_away();
                Err(Refusal::Retry("a statement failed".into()))
            }
        }
    });
    let feed = Feed::new();
    // One failure would be too many.
    let running = consumer(unreliable.clone(), &feed, &books, ConsumerOptions { max_attempts: 1, ..quick_consumer() });
    feed.deliver(&received("m"));
    eventually(async || unreliable.refused() > 2).await;
    unreliable.come_back();
    eventually(async || feed.acked() == 1).await;
    running.stop().await;
    assert_eq!((books.entered("m"), place.letters().await.len()), (2, 0));
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
}

async fn a_commit_without_an_answer_is_found_in_the_inbox(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let (feed, books) = (Feed::new(), Books::new());
    unreliable.make_commits_silent(1);
    (0..5).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    let running = consumer(unreliable, &feed, &books, ConsumerOptions { concurrency: 1, ..quick_consumer() });
    eventually(async || feed.acked() == 5).await;
    running.stop().await;
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max(), books.all_entered()), (5, Some(&1), 5));
    assert_eq!(place.letters().await.len(), 0);
}

async fn a_consumer_that_stops_during_an_outage_returns_its_deliveries(kind: Kind) {
    let place = Place::new(kind).await;
    let unreliable = Unreliable::new(place.lab.open().await);
    let (feed, books) = (Feed::new(), Books::new());
    unreliable.go_away();
    (0..6).for_each(|n| feed.deliver(&received(&format!("m{n}"))));
    feed.deliver_again(&received("m6"));
    let running = consumer(unreliable.clone(), &feed, &books, quick_consumer());
    eventually(async || unreliable.refused() > 3).await;
    running.stop().await;
    let words = feed.words();
    assert!(words.iter().all(|(_, word)| *word == Word::PutBack), "{words:?}");
    assert_eq!(books.all_entered(), 0);
}

/// Without a mock: the connection to PostgreSQL is cut at the commit, before it or after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_cut_at_the_commit_is_no_failure_and_no_second_effect() {
    let place = Place::in_real_time(Kind::Postgres).await;
    let proxy = Proxy::start(&place.lab.url).await;
    let db = semel_store::Database::open(&proxy.url(&place.lab.url), place.lab.settings()).await.unwrap();
    let (feed, books) = (Feed::new(), Books::new());
    let running = consumer(db, &feed, &books, quick_consumer());
    for (n, fault) in [Fault::CutRequest, Fault::CutAnswer(0), Fault::CutAnswer(5)].into_iter().enumerate() {
        proxy.plan(On::Query("SELECT 1; COMMIT"), fault);
        feed.deliver(&received(&format!("m{n}")));
        eventually(async || feed.acked() == n + 1).await;
        assert!(proxy.met().is_some(), "{fault:?}");
    }
    running.stop().await;
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max()), (3, Some(&1)));
    assert_eq!(place.letters().await.len(), 0);
}
