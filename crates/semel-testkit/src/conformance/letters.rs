//! Messages that could not be handled: stored once, retried when due, counted, and in the end dead letters.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use semel::{
    Error, Fence, Fingerprint,
    messaging::{LetterFilter, NewLetter, Origin, Received, Retry, RetryRow, UnreadableLetter},
    prelude::*,
    store::Commit,
};
use semel_store::{Database, Tx};

use super::tools::*;
use crate::Lab;

const LEASE: Duration = secs(30);

/// A message that failed once, under a key of the suite's consumer.
fn letter(key: &str, retry: Retry) -> NewLetter {
    let message = Received {
        id: Some(format!("id of {key}")),
        tenant: Some("acme".into()),
        queue: "news".into(),
        kind: "note".into(),
        body: Bytes::from(key.to_owned()),
        headers: BTreeMap::from([("a".into(), "b".into())]),
        number: Some(3),
        put_at: Some(Lab::START),
        origin: Some(Origin { operation: 7, fence: Fence(9) }),
    };
    NewLetter {
        tenant: "acme".into(),
        consumer: "reader".into(),
        key: key.into(),
        fingerprint: Fingerprint::of_bytes(key.as_bytes()),
        message,
        failures: 1,
        reason: format!("{key} failed"),
        retry,
    }
}

fn now() -> Retry {
    Retry::After(Duration::ZERO)
}

async fn keep(store: &Database, letter: NewLetter) {
    soon(store.put_letter(letter)).await.unwrap();
}

async fn take(store: &Database) -> Vec<RetryRow> {
    soon(store.take_retries("reader", 10, LEASE)).await.unwrap()
}

fn all() -> LetterFilter {
    LetterFilter { tenant: "acme".into(), ..LetterFilter::default() }
}

/// The keys of the dead letters that match, newest first.
async fn dead(store: &Database, filter: &LetterFilter) -> Vec<String> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = soon(store.letters(filter, after, 2)).await.unwrap();
        assert!(page.items.len() <= 2);
        found.extend(page.items.into_iter().map(|letter| letter.key));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    let count = store.count_letters(filter).await.unwrap();
    assert_eq!((count.n, count.exact), (found.len() as u64, true));
    found
}

async fn begin(store: &Database) -> Tx {
    soon(store.begin(store.longest_transaction())).await.unwrap()
}

/// A message is stored once per tenant, consumer, key and body.
pub async fn a_letter_is_kept_once(lab: Lab) {
    let store = lab.open().await;
    for retry in [now(), Retry::Dead] {
        for reason in ["first", "second"] {
            keep(&store, NewLetter { reason: reason.into(), ..letter("k", retry) }).await;
        }
        keep(&store, NewLetter { tenant: "other".into(), ..letter("k", retry) }).await;
        keep(&store, NewLetter { consumer: "other".into(), ..letter("k", retry) }).await;
        keep(&store, NewLetter { fingerprint: Fingerprint::of_bytes(b"another body"), ..letter("k", retry) }).await;
        keep(&store, letter("l", retry)).await;
    }
    for table in ["semel_retries", "semel_dead_letters"] {
        assert_eq!(lab.number(&format!("SELECT count(*) FROM {table}")).await, 5, "{table}");
        let kept = format!("SELECT reason FROM {table} WHERE key = 'k' ORDER BY id");
        assert_eq!(lab.texts(&kept).await[0], "first", "one that is kept stays as it is");
    }
}

/// The stored message is the one that came.
pub async fn a_letter_keeps_the_whole_message(lab: Lab) {
    let store = lab.open().await;
    let whole = letter("whole", now());
    keep(&store, whole.clone()).await;
    let row = take(&store).await.remove(0);
    assert_eq!((&row.message, &row.key, &row.tenant), (&whole.message, &whole.key, &whole.tenant));
    assert_eq!((row.fingerprint, row.failures, row.starts), (whole.fingerprint, 1, 2));
    // Any program may have sent it: it may lack all properties, or have characters that no table stores.
    let strange = Received {
        id: Some("a\0b".into()),
        tenant: None,
        queue: "news".into(),
        kind: "k\0".into(),
        body: Bytes::from_static(b"\xff\0"),
        headers: BTreeMap::from([("h".into(), "\0".into())]),
        number: None,
        put_at: None,
        origin: None,
    };
    let reason = format!("\0{}", "x".repeat(10_000));
    keep(&store, NewLetter { message: strange.clone(), reason, ..letter("strange\0", Retry::Dead) }).await;
    let id = soon(store.letters(&all(), None, 10)).await.unwrap().items[0].id;
    let kept = soon(store.letter("acme", id)).await.unwrap().unwrap();
    assert_eq!((&kept.message.body, &kept.message.headers), (&strange.body, &strange.headers));
    assert_eq!((kept.message.id.as_deref(), kept.message.tenant), (Some("a\u{fffd}b"), None));
    assert_eq!((kept.failures, kept.died_at, kept.consumer.as_str()), (1, Lab::START, "reader"));
    assert_eq!(kept.reason.len(), 4096 + "\u{fffd}".len() - 1, "a reason is cut, not refused");
    assert!(soon(store.letter("other", id)).await.unwrap().is_none());
}

/// One consumer takes a due retry, and its start is counted even if its end is never stored.
pub async fn a_retry_is_begun_by_one_and_counted(lab: Lab) {
    let (store, other) = (lab.open().await, lab.open().await);
    let wake = store.retry_wake();
    keep(&store, letter("later", Retry::After(secs(10)))).await;
    soon(wake.woken()).await;
    assert_eq!(store.next_retry("reader").await.unwrap(), Some(Lab::START + secs(10)));
    assert_eq!(store.next_retry("nobody").await.unwrap(), None);
    lab.pass(secs(10) - TICK);
    assert!(take(&store).await.is_empty());
    lab.pass(TICK);
    assert!(soon(store.take_retries("nobody", 10, LEASE)).await.unwrap().is_empty());
    let (a, b) = tokio::join!(take(&store), take(&other));
    assert_eq!(a.len() + b.len(), 1);
    let first = a.into_iter().chain(b).next().unwrap();
    assert_eq!((first.starts, first.failures), (2, 1), "the run that failed was begun as well");
    assert_eq!(store.next_retry("reader").await.unwrap(), Some(Lab::START + secs(10) + LEASE));
    lab.pass(LEASE - TICK);
    assert!(take(&store).await.is_empty(), "it is leased");
    lab.pass(TICK);
    let second = take(&store).await.remove(0);
    assert_eq!((second.starts, second.failures), (3, 1), "it was started again, and no failure was stored");
    assert!(second.token > first.token);
}

/// A retry that was taken and not begun is due at once, and its start is not counted; a consumer that lost its lease
/// releases nothing.
pub async fn a_retry_that_was_not_begun_is_not_counted(lab: Lab) {
    let store = lab.open().await;
    keep(&store, letter("failed", now())).await;
    keep(&store, NewLetter { failures: 0, ..letter("never run", now()) }).await;
    let first = take(&store).await;
    assert_eq!(first.iter().map(|row| (row.failures, row.starts)).collect::<Vec<_>>(), [(1, 2), (0, 1)]);
    let wake = store.retry_wake();
    for row in &first {
        assert!(soon(store.retry_not_begun(row.id, row.token)).await.unwrap());
        assert!(!soon(store.retry_not_begun(row.id, row.token)).await.unwrap(), "once");
    }
    soon(wake.woken()).await;
    let second = take(&store).await;
    assert_eq!(second.iter().map(|row| (row.failures, row.starts)).collect::<Vec<_>>(), [(1, 2), (0, 1)]);
    for row in &first {
        assert!(!soon(store.retry_not_begun(row.id, row.token)).await.unwrap(), "another consumer has it");
    }
    assert!(take(&store).await.is_empty());
    // A late release is accepted if no other consumer has taken the retry.
    lab.pass(LEASE * 2);
    assert!(soon(store.retry_not_begun(second[0].id, second[0].token)).await.unwrap());
    let third = take(&store).await;
    assert_eq!(third.iter().map(|row| (row.failures, row.starts)).collect::<Vec<_>>(), [(1, 2), (0, 2)]);
}

/// A consumer that lost its lease settles nothing.
pub async fn an_old_token_ends_no_retry(lab: Lab) {
    let store = lab.open().await;
    keep(&store, letter("k", now())).await;
    let old = take(&store).await.remove(0);
    lab.pass(LEASE);
    let new = take(&store).await.remove(0);
    let tx = begin(&store).await;
    assert!(!soon(store.retry_done(&tx, old.id, old.token)).await.unwrap());
    store.roll_back(&tx).await;
    for retry in [now(), Retry::Dead] {
        assert!(!soon(store.retry_failed(old.id, old.token, "late", retry)).await.unwrap());
    }
    assert!(dead(&store, &all()).await.is_empty());
    assert!(take(&store).await.is_empty(), "the new one still has it");
    let tx = begin(&store).await;
    assert!(soon(store.retry_done(&tx, new.id, new.token)).await.unwrap());
    assert!(matches!(store.commit(&tx).await, Commit::Done));
    assert_eq!(store.next_retry("reader").await.unwrap(), None);
}

/// A retry is deleted with its effect, or not at all.
pub async fn a_retry_ends_with_its_effect(lab: Lab) {
    let store = lab.open().await;
    keep(&store, letter("k", now())).await;
    let row = take(&store).await.remove(0);
    let tx = begin(&store).await;
    assert!(soon(store.retry_done(&tx, row.id, row.token)).await.unwrap());
    store.roll_back(&tx).await;
    assert_eq!(lab.number("SELECT count(*) FROM semel_retries").await, 1);
    let tx = begin(&store).await;
    assert!(soon(store.retry_done(&tx, row.id, row.token)).await.unwrap());
    assert!(matches!(store.commit(&tx).await, Commit::Done));
    assert_eq!(lab.number("SELECT count(*) FROM semel_retries").await, 0);
}

/// A failed retry is retried later, or becomes a dead letter.
pub async fn a_retry_that_fails_is_tried_again_or_dead(lab: Lab) {
    let store = lab.open().await;
    keep(&store, letter("k", now())).await;
    let row = take(&store).await.remove(0);
    assert!(soon(store.retry_failed(row.id, row.token, "again", Retry::After(secs(5)))).await.unwrap());
    assert!(take(&store).await.is_empty());
    lab.pass(secs(5));
    let row = take(&store).await.remove(0);
    assert_eq!((row.failures, row.starts), (2, 3));
    assert!(soon(store.retry_failed(row.id, row.token, "enough", Retry::Dead)).await.unwrap());
    assert_eq!(lab.number("SELECT count(*) FROM semel_retries").await, 0);
    let letter = soon(store.letters(&all(), None, 10)).await.unwrap().items.remove(0);
    assert_eq!((letter.key.as_str(), letter.reason.as_str(), letter.failures), ("k", "enough", 3));
    assert_eq!((letter.died_at, letter.message), (Lab::START + secs(5), row.message));
}

/// A copy of a dead letter's message may be retried, and fail for good as well: they are one letter, with the last
/// reason, and a re-drive that began before does not include it.
pub async fn a_dead_copy_of_a_message_is_the_same_letter(lab: Lab) {
    let store = lab.open().await;
    keep(&store, letter("k", Retry::Dead)).await;
    let asked = LetterFilter { before: Some(Lab::START + TICK), ..all() };
    lab.pass(secs(1));
    keep(&store, letter("k", now())).await;
    let row = take(&store).await.remove(0);
    assert!(soon(store.retry_failed(row.id, row.token, "as well", Retry::Dead)).await.unwrap());
    let letters = soon(store.letters(&all(), None, 10)).await.unwrap().items;
    let got: Vec<_> = letters.iter().map(|letter| (letter.reason.as_str(), letter.failures, letter.died_at)).collect();
    assert_eq!(got, [("as well", 2, Lab::START + secs(1))]);
    assert_eq!(soon(store.redrive_letters(&asked, None, 10, "ann")).await.unwrap().moved, 0);
    assert_eq!(soon(store.redrive_letters(&all(), None, 10, "ann")).await.unwrap().moved, 1);
    assert_eq!(take(&store).await.len(), 1);
}

/// Each part of a filter counts, and wildcards are literal.
pub async fn letters_are_found_by_their_filter(lab: Lab) {
    let store = lab.open().await;
    let reasons =
        [("a", "100% wrong"), ("b", "100 times wrong"), ("c", "under_score"), ("d", "underXscore"), ("e", "Wow!")];
    for (key, reason) in reasons {
        keep(&store, NewLetter { reason: reason.into(), ..letter(key, Retry::Dead) }).await;
        lab.pass(secs(1));
    }
    keep(&store, NewLetter { consumer: "other".into(), ..letter("f", Retry::Dead) }).await;
    let mut elsewhere = letter("g", Retry::Dead);
    elsewhere.message.queue = "elsewhere".into();
    keep(&store, elsewhere).await;
    keep(&store, NewLetter { tenant: "other".into(), ..letter("h", Retry::Dead) }).await;
    assert_eq!(dead(&store, &all()).await, ["g", "f", "e", "d", "c", "b", "a"]);
    for (text, keys) in
        [("100%", vec!["a"]), ("r_s", vec!["c"]), ("WRONG", vec!["b", "a"]), ("w!", vec!["e"]), ("\\", vec![])]
    {
        assert_eq!(dead(&store, &LetterFilter { reason: Some(text.into()), ..all() }).await, keys, "{text}");
    }
    let since = |n| Some(Lab::START + secs(n));
    assert_eq!(dead(&store, &LetterFilter { since: since(1), before: since(3), ..all() }).await, ["c", "b"]);
    assert_eq!(dead(&store, &LetterFilter { consumer: Some("other".into()), ..all() }).await, ["f"]);
    assert_eq!(dead(&store, &LetterFilter { queue: Some("elsewhere".into()), ..all() }).await, ["g"]);
    assert_eq!(dead(&store, &LetterFilter { tenant: "other".into(), ..all() }).await, ["h"]);
    let page = soon(store.letters(&all(), None, 500)).await.unwrap();
    let ids = vec![page.items[1].id, page.items[6].id, i64::MAX];
    assert_eq!(dead(&store, &LetterFilter { ids: ids.clone(), ..all() }).await, ["f", "a"]);
    assert_eq!(dead(&store, &LetterFilter { ids, tenant: "other".into(), ..all() }).await, [""; 0]);
}

/// Re-driven letters become retries with all counts at zero, all of a round or none.
pub async fn redriven_letters_become_retries(lab: Lab) {
    let store = lab.open().await;
    for key in ["a", "b", "c"] {
        keep(&store, letter(key, Retry::Dead)).await;
    }
    keep(&store, NewLetter { tenant: "other".into(), ..letter("d", Retry::Dead) }).await;
    // In a caller's transaction that is rolled back.
    let tx = begin(&store).await;
    assert_eq!(soon(store.redrive_letters_in(&tx, &all(), None, 10, "ann")).await.unwrap().moved, 3);
    store.roll_back(&tx).await;
    assert!(take(&store).await.is_empty());
    assert_eq!(dead(&store, &all()).await.len(), 3);
    // In rounds.
    let wake = store.retry_wake();
    let first = soon(store.redrive_letters(&all(), None, 2, "ann")).await.unwrap();
    assert_eq!((first.moved, first.more), (2, true));
    soon(wake.woken()).await;
    let second = soon(store.redrive_letters(&all(), first.last, 2, "ann")).await.unwrap();
    assert_eq!((second.moved, second.more), (1, false));
    let none = soon(store.redrive_letters(&all(), second.last, 2, "ann")).await.unwrap();
    assert_eq!((none.moved, none.last, none.more), (0, None, false));
    let rows = take(&store).await;
    assert_eq!(rows.iter().map(|row| row.key.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
    assert!(rows.iter().all(|row| (row.failures, row.starts) == (0, 1)));
    assert_eq!(lab.number("SELECT count(*) FROM semel_dead_letters").await, 1, "another tenant's stays");
    let audit = lab.texts("SELECT actor || ' ' || action || ' ' || tenant FROM semel_audit ORDER BY id").await;
    assert_eq!(audit, ["ann letters.redrive acme", "ann letters.redrive acme"]);
    assert!(lab.texts("SELECT after FROM semel_audit ORDER BY id").await[0].contains("\"moved\":2"));
}

/// A discarded letter is deleted, and the audit has the person and the reason.
pub async fn a_discarded_letter_is_audited(lab: Lab) {
    let store = lab.open().await;
    keep(&store, letter("k", Retry::Dead)).await;
    let id = soon(store.letters(&all(), None, 10)).await.unwrap().items[0].id;
    assert!(!soon(store.discard_letter("other", id, "ann", "x")).await.unwrap());
    assert!(soon(store.discard_letter("acme", id, "ann", "a duplicate")).await.unwrap());
    assert!(!soon(store.discard_letter("acme", id, "ann", "again")).await.unwrap());
    assert!(dead(&store, &all()).await.is_empty());
    let got = "SELECT actor || ' ' || action || ' ' || subject || ' ' || reason FROM semel_audit";
    assert_eq!(lab.texts(got).await, [format!("ann letters.discard {id} a duplicate")]);
    assert!(lab.texts("SELECT before FROM semel_audit").await[0].contains("k failed"));
    // The same message may become a letter again.
    keep(&store, letter("k", Retry::Dead)).await;
    assert_eq!(dead(&store, &all()).await, ["k"]);
}

/// An unreadable retry is postponed, and nothing is counted; the next one is taken at once.
pub async fn an_unreadable_retry_blocks_no_other(lab: Lab) {
    let store = lab.open().await;
    for key in ["a", "b", "c", "d"] {
        keep(&store, letter(key, now())).await;
    }
    damage_body(&lab, "semel_retries", "key = 'a'").await;
    damage_column(&lab, "semel_retries", "key = 'b'").await;
    let take_one = async || soon(store.take_retries("reader", 1, LEASE)).await.unwrap();
    let keys = |rows: Vec<RetryRow>| rows.into_iter().map(|row| row.key).collect::<Vec<_>>();
    assert_eq!(keys(take_one().await), ["c"], "as a consumer takes them, one by one");
    assert_eq!(keys(take(&store).await), ["d"]);
    assert_eq!(keys(take(&store).await), [""; 0]);
    lab.pass(LEASE);
    assert_eq!(keys(take(&store).await), ["c", "d"], "unreadable retries are postponed");
    let starts = "SELECT sum(starts) FROM semel_retries WHERE key IN ('a', 'b')";
    let starts = format!("SELECT CAST(({starts}) AS BIGINT)");
    assert_eq!(lab.number(&starts).await, 2, "each began once, when it failed");

    assert_eq!(store.count_put_off(), 2, "the node that met them counts them");
    store_body(&lab, "semel_retries", "key = 'a'", "010061").await;
    lab.pass(secs(300));
    let rows = take(&store).await;
    assert_eq!((rows[0].key.as_str(), rows[0].starts, rows.len()), ("a", 2, 3));
    assert_eq!(lab.number("SELECT count(*) FROM semel_retries").await, 4, "nothing is lost");
}

/// A page with an unreadable letter lists it as such, and all others; also if it is the last of its page.
pub async fn a_page_of_letters_shows_unreadable_ones(lab: Lab) {
    let store = lab.open().await;
    for key in ["a", "b", "c", "d", "e"] {
        keep(&store, letter(key, Retry::Dead)).await;
    }
    damage_body(&lab, "semel_dead_letters", "key = 'b'").await;
    damage_column(&lab, "semel_dead_letters", "key = 'd'").await;
    for limit in 1..=6 {
        let (mut readable, mut unreadable, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let page = soon(store.letters(&all(), after, limit)).await.unwrap();
            assert!(page.items.len() + page.unreadable.len() <= limit as usize);
            readable.extend(page.items.into_iter().map(|letter| letter.key));
            unreadable.extend(page.unreadable);
            let Some(next) = page.next else { break };
            after = Some(next);
        }
        assert_eq!(readable, ["e", "c", "a"], "{limit} at a time");
        let got: Vec<_> = unreadable.iter().map(|row| (row.key.as_str(), row.message_id.as_deref())).collect();
        assert_eq!(got, [("d", Some("id of d")), ("b", Some("id of b"))], "{limit} at a time");
        let is_told = |row: &UnreadableLetter| row.consumer == "reader" && row.queue == "news" && row.kind == "note";
        assert!(unreadable.iter().all(|row| is_told(row) && row.died_at == Lab::START && !row.why.is_empty()));
    }
    let one = async |id| soon(store.letter("acme", id)).await;
    let id = lab.number("SELECT id FROM semel_dead_letters WHERE key = 'b'").await;
    assert!(matches!(one(id).await, Err(Error::Corrupt(_))), "alone it is an error");
    assert!(soon(store.discard_letter("acme", id, "ana", "damaged")).await.unwrap(), "a person can remove it");
}
