//! A consumer whose database is away, or whose commit has no answer.

use semel::messaging::{ConsumerOptions, Received, Refusal};
use semel_testkit::{
    Kind,
    faults::{Fault, On, Proxy},
};

use super::{
    brokers::{Hand, Word},
    moody::Moody,
    tools::{Books, Place, consumer, eventually, quick_consumer, received},
};
use crate::support::on_both_databases;

on_both_databases!(
    a_store_that_is_away_is_waited_for,
    a_failure_that_the_store_could_have_caused_is_not_counted,
    a_commit_without_an_answer_is_found_in_the_inbox,
    a_consumer_that_stops_while_the_store_is_away_gives_back_what_it_holds,
    a_commit_that_always_fails_in_passing_is_a_dead_letter_in_the_end_and_the_others_go_on,
    a_store_that_goes_away_at_every_commit_costs_no_message_an_attempt,
);

/// The commit of one message is refused every time with a code that says "try again": a trigger that always meets the
/// same conflict. The store is there for all others.
async fn a_commit_that_always_fails_in_passing_is_a_dead_letter_in_the_end_and_the_others_go_on(kind: Kind) {
    let place = Place::new(kind).await;
    let moody = Moody::new(place.lab.open().await);
    let books = Books::that({
        let moody = moody.clone();
        move |text, _| {
            if text == "cursed" {
                moody.fail_a_commit();
            }
            async { Ok(()) }
        }
    });
    let hand = Hand::new();
    // One after the other: the commit that fails is that of the message that asked for it.
    let options = ConsumerOptions { concurrency: 1, batch: 1, max_failures: 2, ..quick_consumer() };
    let running = consumer(moody.clone(), &hand, &books, options);
    hand.deliver(&received("cursed"));
    eventually(async || hand.acked() == 1 && place.letters().await.len() == 1).await;
    (0..20).for_each(|n| hand.deliver(&received(&format!("m{n}"))));
    eventually(async || hand.acked() == 21).await;
    running.stop().await;
    let letters = place.letters().await;
    assert!(letters[0].reason.contains("could not serialize"), "{}", letters[0].reason);
    assert_eq!((&*letters[0].message.body, letters[0].failures), (&b"cursed"[..], 2));
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max(), effects.get("cursed")), (20, Some(&1), None));
    // In the delivery, and in each of the two retries, as often as it may have been the store.
    assert_eq!(books.entered("cursed"), 9);
}

/// More often than any message may fail, and each time the store is away for all.
async fn a_store_that_goes_away_at_every_commit_costs_no_message_an_attempt(kind: Kind) {
    const TIMES: usize = 5;
    let place = Place::new(kind).await;
    let moody = Moody::new(place.lab.open().await);
    let books = Books::that({
        let moody = moody.clone();
        move |_, run| {
            if run <= TIMES {
                moody.go_away();
            }
            async { Ok(()) }
        }
    });
    let hand = Hand::new();
    let running = consumer(moody.clone(), &hand, &books, ConsumerOptions { max_failures: 1, ..quick_consumer() });
    hand.deliver(&received("m"));
    for run in 1..=TIMES {
        eventually(async || books.entered("m") == run).await;
        let before = moody.refused();
        eventually(async || moody.refused() > before + 2).await;
        moody.come_back();
    }
    eventually(async || hand.acked() == 1).await;
    running.stop().await;
    assert_eq!((books.entered("m"), place.effects().await), (TIMES + 1, [("m".to_owned(), 1)].into()));
    assert_eq!((place.letters().await.len(), place.lab.number("SELECT count(*) FROM semel_retries").await), (0, 0));
}

async fn a_store_that_is_away_is_waited_for(kind: Kind) {
    let place = Place::new(kind).await;
    let moody = Moody::new(place.lab.open().await);
    let (hand, books) = (Hand::new(), Books::new());
    let running = consumer(moody.clone(), &hand, &books, quick_consumer());
    hand.deliver(&received("before"));
    eventually(async || hand.acked() == 1).await;
    moody.go_away();
    (0..10).for_each(|n| hand.deliver(&received(&format!("m{n}"))));
    hand.deliver_again(&received("again"));
    hand.deliver(&Received { id: None, ..received("nameless") });
    eventually(async || moody.refused() > 10).await;
    assert_eq!(hand.words(), [("before".to_owned(), Word::Acked)], "it holds what it has");
    moody.come_back();
    eventually(async || hand.acked() == 13).await;
    place.until_effects(12).await;
    running.stop().await;
    assert_eq!(place.effects().await.values().max(), Some(&1));
    let letters = place.letters().await;
    assert_eq!((letters.len(), &*letters[0].message.body), (1, &b"nameless"[..]));
}

/// It goes away in the middle of a run, and the handler cannot tell why its statement failed.
async fn a_failure_that_the_store_could_have_caused_is_not_counted(kind: Kind) {
    let place = Place::new(kind).await;
    let moody = Moody::new(place.lab.open().await);
    let books = Books::that({
        let moody = moody.clone();
        move |_, run| {
            let moody = moody.clone();
            async move {
                if run > 1 {
                    return Ok(());
                }
                moody.go_away();
                Err(Refusal::Retry("a statement failed".into()))
            }
        }
    });
    let hand = Hand::new();
    // One failure would be too many.
    let running = consumer(moody.clone(), &hand, &books, ConsumerOptions { max_failures: 1, ..quick_consumer() });
    hand.deliver(&received("m"));
    eventually(async || moody.refused() > 2).await;
    moody.come_back();
    eventually(async || hand.acked() == 1).await;
    running.stop().await;
    assert_eq!((books.entered("m"), place.letters().await.len()), (2, 0));
    assert_eq!(place.effects().await, [("m".to_owned(), 1)].into());
}

async fn a_commit_without_an_answer_is_found_in_the_inbox(kind: Kind) {
    let place = Place::new(kind).await;
    let moody = Moody::new(place.lab.open().await);
    let (hand, books) = (Hand::new(), Books::new());
    moody.make_commits_silent(1);
    (0..5).for_each(|n| hand.deliver(&received(&format!("m{n}"))));
    let running = consumer(moody, &hand, &books, ConsumerOptions { concurrency: 1, ..quick_consumer() });
    eventually(async || hand.acked() == 5).await;
    running.stop().await;
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max(), books.all_entered()), (5, Some(&1), 5));
    assert_eq!(place.letters().await.len(), 0);
}

async fn a_consumer_that_stops_while_the_store_is_away_gives_back_what_it_holds(kind: Kind) {
    let place = Place::new(kind).await;
    let moody = Moody::new(place.lab.open().await);
    let (hand, books) = (Hand::new(), Books::new());
    moody.go_away();
    (0..6).for_each(|n| hand.deliver(&received(&format!("m{n}"))));
    hand.deliver_again(&received("m6"));
    let running = consumer(moody.clone(), &hand, &books, quick_consumer());
    eventually(async || moody.refused() > 3).await;
    running.stop().await;
    let words = hand.words();
    assert!(words.iter().all(|(_, word)| *word == Word::PutBack), "{words:?}");
    assert_eq!(books.all_entered(), 0);
}

/// The real thing: the connection to PostgreSQL is cut at the commit, before it or after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_cut_at_the_commit_is_no_failure_and_no_second_effect() {
    let place = Place::in_real_time(Kind::Postgres).await;
    let proxy = Proxy::start(&place.lab.url).await;
    let db = semel_store::Database::open(&proxy.url(&place.lab.url), place.lab.settings()).await.unwrap();
    let (hand, books) = (Hand::new(), Books::new());
    let running = consumer(db, &hand, &books, quick_consumer());
    for (n, fault) in [Fault::CutRequest, Fault::CutAnswer(0), Fault::CutAnswer(5)].into_iter().enumerate() {
        proxy.plan(On::Query("SELECT 1; COMMIT"), fault);
        hand.deliver(&received(&format!("m{n}")));
        eventually(async || hand.acked() == n + 1).await;
        assert!(proxy.met().is_some(), "{fault:?}");
    }
    running.stop().await;
    let effects = place.effects().await;
    assert_eq!((effects.len(), effects.values().max()), (3, Some(&1)));
    assert_eq!(place.letters().await.len(), 0);
}
