//! The outbox: put atomically, leased by one relay at a time, and never lost.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use semel::{
    Error, Fence,
    messaging::{
        Backlog, Lent, Mark, MarkRow, Message, Origin, OutboxFilter, OutboxState, Taken, Topic, UnreadableMessage, Wake,
    },
    prelude::*,
    store::Commit,
};
use semel_store::{Database, Tx};

use super::tools::*;
use crate::{Kind, Lab};

pub(super) const LEASE: Duration = secs(30);

/// A message of the suite's tenant.
pub(super) fn message(body: &str) -> Message {
    Message::new("acme", Topic::new("news").unwrap(), "note", body.to_owned())
}

/// A message with an ordering key.
pub(super) fn keyed(key: &str, body: &str) -> Message {
    Message { ordering_key: Some(key.into()), ..message(body) }
}

pub(super) async fn begin(store: &Database) -> Tx {
    soon(store.begin(store.longest_transaction())).await.unwrap()
}

pub(super) async fn commit(store: &Database, tx: &Tx) {
    assert!(matches!(soon(store.commit(tx)).await, Commit::Done));
}

/// Puts messages in their own transaction.
pub(super) async fn put(store: &Database, messages: Vec<Message>) {
    let tx = begin(store).await;
    soon(store.put(&tx, messages)).await.unwrap();
    commit(store, &tx).await;
}

pub(super) async fn take(store: &Database) -> Taken {
    soon(store.take(100, LEASE)).await.unwrap()
}

pub(super) fn body(lent: &Lent) -> String {
    String::from_utf8(lent.envelope.message.body.to_vec()).unwrap()
}

pub(super) fn bodies(taken: &Taken) -> Vec<String> {
    taken.rows.iter().map(body).collect()
}

/// The same mark for all taken rows; returns how many others became ready.
pub(super) async fn mark(store: &Database, taken: &Taken, mark: &Mark) -> u64 {
    let row = |lent: &Lent| MarkRow { id: lent.id, token: taken.token, mark: mark.clone() };
    soon(store.mark(taken.rows.iter().map(row).collect())).await.unwrap()
}

/// The states of all rows, oldest first.
pub(super) async fn states(store: &Database) -> Vec<(String, OutboxState)> {
    let filter = OutboxFilter { tenant: "acme".into(), ..OutboxFilter::default() };
    let listing = soon(store.outbox(&filter, None, 500)).await.unwrap();
    let read =
        |row: semel::messaging::OutboxRow| (String::from_utf8(row.envelope.message.body.to_vec()).unwrap(), row.state);
    listing.items.into_iter().map(read).collect()
}

/// Whether it was woken since the last wait.
async fn is_woken(wake: &Wake) -> bool {
    tokio::time::timeout(Duration::from_millis(50), wake.woken()).await.is_ok()
}

/// A message is published if its transaction commits, and not otherwise.
pub async fn a_message_is_published_only_if_its_transaction_commits(lab: Lab) {
    let store = lab.open().await;
    let tx = begin(&store).await;
    soon(store.put(&tx, vec![message("never"), keyed("k", "never")])).await.unwrap();
    store.roll_back(&tx).await;
    let tx = begin(&store).await;
    soon(store.put(&tx, vec![message("never either")])).await.unwrap();
    drop(tx);
    assert_eq!(bodies(&take(&store).await), [""; 0]);
    put(&store, vec![keyed("k", "there")]).await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["there"]);
    assert_eq!(taken.rows[0].envelope.number, Some(1), "a number that was rolled back is given again");
}

/// All properties of a message arrive at the relay.
pub async fn a_taken_message_equals_the_one_that_was_put(lab: Lab) {
    let store = lab.open().await;
    let whole = Message {
        body: Bytes::from_static(b"\xff\0binary"),
        headers: BTreeMap::from([("a".into(), "b\0\"é".into()), ("empty".into(), String::new())]),
        ordering_key: Some("kéy".into()),
        not_before: Some(Lab::START),
        receipt: true,
        origin: Some(Origin { operation: 7, fence: Fence(9) }),
        ..message("")
    };
    let plain = Message { kind: String::new(), ..message("") };
    put(&store, vec![whole.clone(), plain.clone()]).await;
    let taken = take(&store).await;
    assert_eq!((&taken.rows[0].envelope.message, &taken.rows[1].envelope.message), (&whole, &plain));
    assert_eq!((taken.rows[0].envelope.number, taken.rows[1].envelope.number), (Some(1), None));
    assert_eq!((taken.rows[0].envelope.put_at, taken.rows[0].failures), (Lab::START, 0));
    assert!(taken.token != 0);
}

/// An invalid message, and an id that is in the outbox already, are refused, with the reason.
pub async fn an_invalid_message_is_not_put(lab: Lab) {
    let store = lab.open().await;
    let tx = begin(&store).await;
    let bad = Message { ordering_key: Some(String::new()), ..message("x") };
    let refused = soon(store.put(&tx, vec![message("good"), bad])).await;
    assert!(matches!(&refused, Err(Error::Invalid(why)) if why.contains("ordering_key")), "{refused:?}");
    store.roll_back(&tx).await;
    let first = message("first");
    put(&store, vec![first.clone()]).await;
    for batch in [vec![Message { body: "second".into(), ..first.clone() }], vec![message("a"); 2]] {
        let tx = begin(&store).await;
        let refused = soon(store.put(&tx, batch)).await;
        assert!(matches!(&refused, Err(Error::Refused(why)) if why.contains("already")), "{refused:?}");
        store.roll_back(&tx).await;
    }
    assert_eq!(bodies(&take(&store).await), ["first"]);
}

/// Relays are woken by a commit with messages, in the same process and, on PostgreSQL, on other nodes.
pub async fn a_commit_wakes_the_relays(lab: Lab) {
    let (store, other) = (lab.open().await, lab.open().await);
    let (one, two, far) = (store.outbox_wake(), store.outbox_wake(), other.outbox_wake());
    if lab.kind() == Kind::Postgres {
        // A new listener looks once, for what it may have missed.
        for wake in [&one, &two, &far] {
            soon(wake.woken()).await;
        }
    }
    let tx = begin(&store).await;
    soon(store.put(&tx, vec![message("x")])).await.unwrap();
    assert!(!is_woken(&one).await, "nothing is committed yet");
    store.roll_back(&tx).await;
    assert!(!is_woken(&one).await, "nothing was committed");
    put(&store, vec![message("y")]).await;
    soon(one.woken()).await;
    soon(two.woken()).await;
    if lab.kind() == Kind::Postgres {
        soon(far.woken()).await;
        assert!(!is_woken(&one).await, "a node does not wake itself twice");
    }
    // A transaction without messages, and one of an embedder that calls `wake_outbox`.
    let tx = begin(&store).await;
    commit(&store, &tx).await;
    assert!(!is_woken(&one).await);
    store.wake_outbox();
    soon(one.woken()).await;
}

/// Rows are leased oldest first, and never to two relays at once.
pub async fn a_row_is_leased_by_one_relay(lab: Lab) {
    let nodes = [lab.open().await, lab.open().await];
    put(&nodes[0], (0..200).map(|n| message(&format!("{n:03}"))).collect()).await;
    let first = soon(nodes[0].take(3, LEASE)).await.unwrap();
    assert_eq!(bodies(&first), ["000", "001", "002"]);
    let mut relays = tokio::task::JoinSet::new();
    for n in 0..4 {
        let store = nodes[n % 2].clone();
        relays.spawn(async move {
            let mut mine = Vec::new();
            loop {
                let taken = store.take(7, LEASE).await.unwrap();
                assert!(taken.rows.is_sorted_by_key(|row| row.id));
                assert!(taken.rows.len() <= 7);
                if taken.rows.is_empty() {
                    return mine;
                }
                mine.extend(bodies(&taken));
            }
        });
    }
    let mut all: Vec<String> = soon(relays.join_all()).await.into_iter().flatten().collect();
    all.sort();
    assert_eq!(all, (3..200).map(|n| format!("{n:03}")).collect::<Vec<_>>());
}

/// The rows that a relay takes fit into memory with bodies of any length; and the answer says that there are more.
pub async fn a_take_is_bounded_in_bytes(lab: Lab) {
    let store = lab.open().await;
    let long = "x".repeat(1 << 20);
    let fit = Taken::MOST_BYTES / long.len();
    // Each in its own transaction: on a busy machine, all of them would exceed the time limit of one.
    for _ in 0..fit + 2 {
        put(&store, vec![message(&long)]).await;
    }
    for (expected, more) in [(fit, true), (2, false), (0, false)] {
        let taken = take(&store).await;
        assert_eq!((taken.rows.len(), taken.more), (expected, more));
    }
}

/// An unreadable row is parked for a person, and counted there; the others are published. Once it is readable, it is
/// re-driven like any parked one.
pub async fn an_unreadable_row_is_parked_and_blocks_no_other(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![message("a"), message("b"), message("c"), message("d")]).await;
    damage_body(&lab, "semel_outbox", "id = (SELECT min(id) FROM semel_outbox)").await;
    damage_column(&lab, "semel_outbox", "id = (SELECT min(id) + 1 FROM semel_outbox)").await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["c", "d"]);
    mark(&store, &taken, &Mark::Sent).await;
    let counts = store.backlog().await.unwrap().counts;
    assert!(counts.contains(&(OutboxState::Parked, 2)), "nothing is lost: {counts:?}");
    lab.pass(secs(3600));
    assert_eq!(take(&store).await.rows.len(), 0, "it is not tried for ever");
    let filter = OutboxFilter { tenant: "acme".into(), state: Some(OutboxState::Parked), ..OutboxFilter::default() };
    let page = soon(store.outbox(&filter, None, 10)).await.unwrap();
    assert!(page.items.is_empty() && page.unreadable.len() == 2, "{:?}", page.unreadable);
    // As stored: a version, no key, the text.
    store_body(&lab, "semel_outbox", "id = (SELECT min(id) FROM semel_outbox)", "010061").await;
    let id = page.unreadable[0].message_id.parse().unwrap();
    assert!(store.redrive_outbox("acme", id, "me").await.unwrap());
    assert_eq!(bodies(&take(&store).await), ["a"]);
}

/// During a rolling update, an older relay postpones rows of a newer version. No failure is counted, and they are
/// published once a relay can read them.
pub async fn a_row_of_another_version_is_postponed_and_not_parked(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![message("a"), message("b")]).await;
    store_as_newer(&lab, "semel_outbox", "id = (SELECT min(id) FROM semel_outbox)").await;
    for _ in 0..2 {
        let taken = take(&store).await;
        mark(&store, &taken, &Mark::Sent).await;
        let counts = store.backlog().await.unwrap().counts;
        assert!(counts.contains(&(OutboxState::Waiting, 1)), "{counts:?}");
        assert_eq!((lab.number("SELECT failures FROM semel_outbox").await, store.count_put_off()), (0, 1));
        lab.pass(secs(300) - TICK);
        assert_eq!(store.tend().await.unwrap().ready, 0, "it is postponed");
        lab.pass(TICK);
        assert_eq!(store.tend().await.unwrap().ready, 1);
    }
    store_body(&lab, "semel_outbox", "id > 0", "010061").await;
    assert_eq!(bodies(&take(&store).await), ["a"]);
}

/// A page with an unreadable row lists it as such, and all others; also if it is the last of its page.
pub async fn a_page_of_the_outbox_shows_unreadable_rows(lab: Lab) {
    let store = lab.open().await;
    let messages: Vec<Message> = ["a", "b", "c", "d", "e"].into_iter().map(message).collect();
    let ids: Vec<String> = messages.iter().map(|message| message.id.to_string()).collect();
    put(&store, messages).await;
    damage_body(&lab, "semel_outbox", &format!("message_id = '{}'", ids[1])).await;
    damage_column(&lab, "semel_outbox", &format!("message_id = '{}'", ids[3])).await;
    for limit in 1..=6 {
        let filter = OutboxFilter { tenant: "acme".into(), ..OutboxFilter::default() };
        let (mut readable, mut unreadable, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let page = soon(store.outbox(&filter, after, limit)).await.unwrap();
            assert!(page.items.len() + page.unreadable.len() <= limit as usize);
            readable.extend(page.items.into_iter().map(|row| row.envelope.message.id.to_string()));
            unreadable.extend(page.unreadable);
            let Some(next) = page.next else { break };
            after = Some(next);
        }
        assert_eq!(readable, [&*ids[0], &*ids[2], &*ids[4]], "{limit} at a time");
        let got: Vec<_> = unreadable.iter().map(|row| row.message_id.as_str()).collect();
        assert_eq!(got, [&*ids[1], &*ids[3]], "{limit} at a time");
        let is_told = |row: &UnreadableMessage| row.state == "ready" && row.topic == "news" && row.kind == "note";
        assert!(unreadable.iter().all(|row| is_told(row) && !row.why.is_empty()), "{unreadable:?}");
        assert_eq!(unreadable[0].put_at, Lab::START);
    }
}

/// A lease expires: the row is taken again, and marks of its former holder are refused.
pub async fn an_expired_lease_is_taken_again(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![Message { receipt: true, ..message("x") }]).await;
    let old = take(&store).await;
    lab.pass(LEASE - TICK);
    assert!(take(&store).await.rows.is_empty(), "its lease has not ended");
    lab.pass(TICK);
    let new = take(&store).await;
    assert_eq!(bodies(&new), ["x"]);
    assert!(new.token > old.token);
    let error = || "late".to_owned();
    for late in [
        Mark::Sent,
        Mark::PutBack,
        Mark::Retry { error: error(), after: secs(1) },
        Mark::Later { error: error(), after: secs(1) },
        Mark::Unroutable { error: error(), after: secs(1) },
        Mark::Park { error: error() },
    ] {
        mark(&store, &old, &late).await;
        assert_eq!(states(&store).await, [("x".to_owned(), OutboxState::Ready)], "{late:?}");
        assert!(take(&store).await.rows.is_empty(), "{late:?} ended another's lease");
    }
    let id = new.rows[0].envelope.message.id;
    assert_eq!(store.receipt("acme", id).await.unwrap(), None);
    mark(&store, &new, &Mark::Sent).await;
    assert!(states(&store).await.is_empty());
}

/// Rows and tokens of taken rows.
fn leased(taken: &Taken) -> Vec<(i64, i64)> {
    taken.rows.iter().map(|row| (row.id, taken.token)).collect()
}

/// A renewed lease does not expire; one that another relay has is not renewed, and its former holder is informed.
pub async fn a_lease_is_renewed_by_its_own_token_only(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![message("x"), message("y")]).await;
    let old = take(&store).await;
    let ids: Vec<i64> = old.rows.iter().map(|row| row.id).collect();
    for _ in 0..3 {
        lab.pass(LEASE - TICK);
        let mut ours = soon(store.hold(leased(&old), LEASE)).await.unwrap();
        ours.sort_unstable();
        assert_eq!(ours, ids);
        assert!(take(&store).await.rows.is_empty(), "it was renewed");
    }
    lab.pass(LEASE);
    let new = soon(store.take(1, LEASE)).await.unwrap();
    assert_eq!(bodies(&new), ["x"]);
    // Another relay has the first row; the second has only expired, and is renewed.
    lab.pass(LEASE - TICK);
    assert_eq!(soon(store.hold(leased(&old), LEASE)).await.unwrap(), [ids[1]]);
    lab.pass(TICK);
    assert_eq!(bodies(&take(&store).await), ["x"], "the lease of the new one was not renewed by the old one");
}

/// A row that another transaction has locked delays the renewal of no other, and counts as still held.
pub async fn a_locked_row_blocks_no_renewal(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![message("x"), message("y")]).await;
    let taken = take(&store).await;
    let ids: Vec<i64> = taken.rows.iter().map(|row| row.id).collect();
    lab.pass(secs(1));
    // SQLite has no row locks: there, all of them are renewed.
    let locks = lab.kind() == Kind::Postgres;
    let mut tx = None;
    if locks {
        let tx = tx.insert(begin(&store).await);
        let mut held = tx.connection().await.unwrap();
        let sql = "UPDATE semel_outbox SET failures = 0 WHERE id = $1";
        semel_store::on!(held.get().unwrap(), c => sqlx::query(sql).bind(ids[0]).execute(c).await.map(drop)).unwrap();
    }
    let mut ours = soon(store.hold(leased(&taken), LEASE)).await.unwrap();
    ours.sort_unstable();
    assert_eq!(ours, ids);
    if let Some(tx) = tx {
        store.roll_back(&tx).await;
    }
    let ends = lab.texts("SELECT CAST(lease_until AS TEXT) FROM semel_outbox ORDER BY id").await;
    let end = |pass| (Lab::START + secs(pass) + LEASE).as_micros().to_string();
    assert_eq!(ends, [end(u64::from(!locks)), end(1)]);
}

/// A published row is deleted. Its receipt, if requested, is kept for a week.
pub async fn a_published_row_is_deleted_and_its_receipt_stays(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let (asked, unasked) = (Message { receipt: true, ..message("asked") }, message("unasked"));
    put(store, vec![asked.clone(), unasked.clone()]).await;
    lab.pass(secs(1));
    let taken = take(store).await;
    assert_eq!(mark(store, &taken, &Mark::Sent).await, 0);
    // Sending it again is harmless.
    assert_eq!(mark(store, &taken, &Mark::Sent).await, 0);
    assert!(states(store).await.is_empty());
    assert_eq!(store.receipt("acme", asked.id).await.unwrap(), Some(Lab::START + secs(1)));
    assert_eq!(store.receipt("acme", unasked.id).await.unwrap(), None);
    assert_eq!(store.receipt("other", asked.id).await.unwrap(), None);
    lab.pass(secs(7 * 24 * 3600));
    ledger.sweep().await.unwrap();
    assert!(store.receipt("acme", asked.id).await.unwrap().is_some(), "it is a week old, not more");
    lab.pass(TICK);
    ledger.sweep().await.unwrap();
    assert_eq!(store.receipt("acme", asked.id).await.unwrap(), None);
}

/// Each mark has its own state, time and count.
pub async fn a_mark_sets_the_state_of_its_row(lab: Lab) {
    let store = lab.open().await;
    let error = |text: &str| text.to_owned();
    let cases = [
        ("a", Mark::PutBack, OutboxState::Ready, 0, None),
        ("b", Mark::Retry { error: error("no"), after: secs(10) }, OutboxState::Waiting, 1, Some(10)),
        ("c", Mark::Later { error: error("?"), after: secs(20) }, OutboxState::Waiting, 0, Some(20)),
        ("d", Mark::Unroutable { error: error("nowhere"), after: secs(30) }, OutboxState::Unroutable, 0, Some(30)),
        ("e", Mark::Park { error: error("enough") }, OutboxState::Parked, 1, None),
        ("f", Mark::Sent, OutboxState::Ready, 0, None),
    ];
    put(&store, cases.iter().map(|(name, ..)| message(name)).collect()).await;
    let taken = take(&store).await;
    let row = |(lent, (_, mark, ..)): (&Lent, &(_, Mark, _, _, _))| MarkRow {
        id: lent.id,
        token: taken.token,
        mark: mark.clone(),
    };
    soon(store.mark(taken.rows.iter().zip(&cases).map(row).collect())).await.unwrap();
    let filter = OutboxFilter { tenant: "acme".into(), ..OutboxFilter::default() };
    let listed = store.outbox(&filter, None, 500).await.unwrap().items;
    assert_eq!(listed.len(), 5, "one was sent");
    for (row, (name, mark, state, failures, after)) in listed.iter().zip(&cases) {
        assert_eq!((row.state, row.failures), (*state, *failures), "{name}");
        assert_eq!(row.due_at, after.map(|after| Lab::START + secs(after)), "{name}");
        let got = match mark {
            Mark::Sent | Mark::PutBack => None,
            Mark::Retry { error, .. }
            | Mark::Later { error, .. }
            | Mark::Unroutable { error, .. }
            | Mark::Park { error } => Some(error.clone()),
        };
        assert_eq!(row.error, got, "{name}");
    }
    assert_eq!(bodies(&take(&store).await), ["a"], "a released row is ready at once");
    // They become due one after the other.
    for (after, due) in [(10, "b"), (20, "c"), (30, "d")] {
        assert_eq!(soon(store.tend()).await.unwrap().next_due, Some(Lab::START + secs(after)));
        lab.pass(secs(10) - TICK);
        assert_eq!(soon(store.tend()).await.unwrap().ready, 0);
        lab.pass(TICK);
        assert_eq!(soon(store.tend()).await.unwrap().ready, 1);
        let taken = soon(store.take(100, secs(3600))).await.unwrap();
        let taken: Vec<String> = bodies(&taken).into_iter().filter(|body| body != "a").collect();
        assert_eq!(taken, [due]);
    }
    assert_eq!(
        soon(store.tend()).await.unwrap(),
        semel::messaging::Tended::default(),
        "a parked row waits for a person"
    );
}

/// A message is not published before its time.
pub async fn a_message_waits_for_its_time(lab: Lab) {
    let store = lab.open().await;
    let later = |body, key: Option<&str>| Message {
        not_before: Some(Lab::START + secs(60)),
        ordering_key: key.map(Into::into),
        ..message(body)
    };
    put(&store, vec![keyed("k", "head"), later("plain", None), later("behind", Some("k"))]).await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["head"]);
    assert_eq!(mark(&store, &taken, &Mark::Sent).await, 0, "the one behind it is not due");
    assert_eq!(soon(store.tend()).await.unwrap().next_due, Some(Lab::START + secs(60)));
    lab.pass(secs(60) - TICK);
    soon(store.tend()).await.unwrap();
    assert!(take(&store).await.rows.is_empty());
    lab.pass(TICK);
    let tended = soon(store.tend()).await.unwrap();
    assert_eq!((tended.ready, tended.next_due, tended.more), (2, None, false));
    assert_eq!(bodies(&take(&store).await), ["plain", "behind"]);
}

/// Rows commit in another order than that of their ids. None is missed.
pub async fn a_row_that_commits_late_is_still_taken(lab: Lab) {
    let store = lab.open().await;
    let late = begin(&store).await;
    soon(store.put(&late, vec![message("late")])).await.unwrap();
    if lab.kind() == Kind::Sqlite {
        // One transaction after the other: the second begins after the first has committed.
        let other = store.clone();
        let early = tokio::spawn(async move { put(&other, vec![message("early")]).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(states(&store).await, [], "neither has committed");
        commit(&store, &late).await;
        soon(early).await.unwrap();
        assert_eq!(bodies(&take(&store).await), ["late", "early"]);
        return;
    }
    put(&store, vec![message("early")]).await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["early"]);
    mark(&store, &taken, &Mark::Sent).await;
    assert!(take(&store).await.rows.is_empty());
    commit(&store, &late).await;
    let after = take(&store).await;
    assert_eq!(bodies(&after), ["late"]);
    assert!(after.rows[0].id < taken.rows[0].id);
}

/// A thousand at once, in their order.
pub async fn a_thousand_messages_go_in_one_put(lab: Lab) {
    let store = lab.open().await;
    let name = |n: usize| format!("{n:04}");
    put(&store, (0..1000).map(|n| message(&name(n))).collect()).await;
    let taken = soon(store.take(1000, LEASE)).await.unwrap();
    assert_eq!(bodies(&taken), (0..1000).map(name).collect::<Vec<_>>());
    assert_eq!(mark(&store, &taken, &Mark::Sent).await, 0);
    assert!(states(&store).await.is_empty());
    put(&store, Vec::new()).await;
}

/// Equal ids and keys of two tenants do not conflict.
pub async fn tenants_have_outboxes_of_their_own(lab: Lab) {
    let store = lab.open().await;
    let ours = keyed("k", "ours");
    let theirs = Message { tenant: "other".into(), body: "theirs".into(), ..ours.clone() };
    put(&store, vec![ours.clone(), theirs]).await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["ours", "theirs"]);
    assert!(taken.rows.iter().all(|row| row.envelope.number == Some(1)));
    assert_eq!(states(&store).await, [("ours".to_owned(), OutboxState::Ready)]);
    put(&store, vec![keyed("k", "next")]).await;
    let (a, b) = (&taken.rows[0], &taken.rows[1]);
    let sent = |lent: &Lent| vec![MarkRow { id: lent.id, token: taken.token, mark: Mark::Sent }];
    assert_eq!(soon(store.mark(sent(b))).await.unwrap(), 0);
    assert!(take(&store).await.rows.is_empty());
    assert_eq!(soon(store.mark(sent(a))).await.unwrap(), 1);
}

/// Listings and counts agree with the rows, in pages.
pub async fn the_outbox_can_be_listed_and_counted(lab: Lab) {
    let store = lab.open().await;
    assert_eq!(store.backlog().await.unwrap().oldest, None);
    put(&store, (0..5).map(|n| message(&n.to_string())).collect()).await;
    lab.pass(secs(5));
    let elsewhere = Message { topic: Topic::new("elsewhere").unwrap(), ..message("e") };
    let soon_due = Message { not_before: Some(Lab::START + secs(60)), ..message("w") };
    put(&store, vec![elsewhere, soon_due, keyed("k", "head"), keyed("k", "tail")]).await;
    let taken = soon(store.take(2, LEASE)).await.unwrap();
    let with = |mark: Mark, lent: &Lent| MarkRow { id: lent.id, token: taken.token, mark };
    let unroutable = Mark::Unroutable { error: "no queue".into(), after: secs(60) };
    let marks = vec![with(unroutable, &taken.rows[0]), with(Mark::Park { error: "no".into() }, &taken.rows[1])];
    soon(store.mark(marks)).await.unwrap();
    let backlog: Backlog = store.backlog().await.unwrap();
    let counted: Vec<u64> = backlog.counts.iter().map(|(_, n)| *n).collect();
    assert_eq!(counted, [5, 1, 1, 1, 1]);
    assert_eq!(backlog.counts.iter().map(|(state, _)| *state).collect::<Vec<_>>(), OutboxState::ALL);
    assert_eq!(backlog.oldest, Some(Lab::START));
    let filter = |state: Option<OutboxState>, topic: Option<&str>| OutboxFilter {
        tenant: "acme".into(),
        state,
        topic: topic.map(|topic| Topic::new(topic).unwrap()),
    };
    let list = async |filter: &OutboxFilter| {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = store.outbox(filter, after, 2).await.unwrap();
            assert!(page.items.len() <= 2);
            found.extend(page.items.iter().map(|row| String::from_utf8(row.envelope.message.body.to_vec()).unwrap()));
            match page.next {
                Some(next) => after = Some(next),
                None => return found,
            }
        }
    };
    assert_eq!(list(&filter(None, None)).await, ["0", "1", "2", "3", "4", "e", "w", "head", "tail"]);
    assert_eq!(list(&filter(Some(OutboxState::Ready), None)).await, ["2", "3", "4", "e", "head"]);
    assert_eq!(list(&filter(Some(OutboxState::Unroutable), None)).await, ["0"]);
    assert_eq!(list(&filter(Some(OutboxState::Parked), None)).await, ["1"]);
    assert_eq!(list(&filter(Some(OutboxState::Waiting), None)).await, ["w"]);
    assert_eq!(list(&filter(Some(OutboxState::Blocked), None)).await, ["tail"]);
    assert_eq!(list(&filter(None, Some("elsewhere"))).await, ["e"]);
    assert_eq!(list(&OutboxFilter { tenant: "other".into(), ..OutboxFilter::default() }).await, [""; 0]);
}

/// The tables refuse invalid states, and are readable for people.
pub async fn the_outbox_tables_refuse_nonsense(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![keyed("k", "José")]).await;
    for (what, sql) in [
        ("an unknown state", "state = 'sent'"),
        ("waiting for no time", "state = 'waiting'"),
        ("ready at a time", "due_at = 1"),
        ("parked without a reason", "state = 'parked'"),
        ("unroutable without a reason", "state = 'unroutable', due_at = 1"),
        ("blocked and leased", "state = 'blocked', token = 1"),
        ("a number without a key", "ordering_key = NULL"),
        ("a key without a number", "number = NULL"),
        ("a number below one", "number = 0"),
        ("blocked by no key", "state = 'blocked', ordering_key = NULL, number = NULL"),
        ("half an origin", "operation = 1"),
        ("fewer than no failures", "failures = -1"),
    ] {
        let refused = lab.execute(&format!("UPDATE semel_outbox SET {sql}")).await;
        assert!(matches!(refused, Err(sqlx::Error::Database(_))), "{what} was accepted: {refused:?}");
    }
    assert_eq!(lab.execute("UPDATE semel_outbox SET failures = 2").await.unwrap(), 1);
    assert_eq!(lab.texts("SELECT body FROM semel_outbox_readable").await, ["José"]);
    assert!(lab.texts("SELECT CAST(put_at AS TEXT) FROM semel_outbox_readable").await[0].contains("12:26:40"));
}
