//! Ordering keys of the outbox: the messages of a key are published one after the other.

use semel::{
    messaging::{Mark, Message},
    prelude::*,
};

use super::{
    outbox::{LEASE, begin, bodies, commit, keyed, mark, message, put, take},
    tools::*,
};
use crate::{Kind, Lab};

/// A mark costs the same however many rows wait behind it, also if the database has planned the statement when there
/// were none.
pub async fn a_long_ordering_key_costs_no_more_than_a_short_one(lab: Lab) {
    let store = lab.open().await;
    lab.execute("ANALYZE semel_outbox").await.unwrap();
    put(&store, vec![keyed("before", "x")]).await;
    assert_eq!(mark(&store, &take(&store).await, &Mark::Sent).await, 0);
    put(&store, (1000..1100).map(|line| keyed(&line.to_string(), "first")).collect()).await;
    let sql = "INSERT INTO semel_outbox (tenant, message_id, topic, kind, body, headers, ordering_key, number, receipt, put_at, state)
        WITH RECURSIVE counted(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM counted WHERE i < 79999)
        SELECT o.tenant, 'm' || i, o.topic, o.kind, o.body, o.headers, CAST(1000 + i % 100 AS TEXT), 2 + i / 100, o.receipt, o.put_at, 'blocked'
        FROM counted CROSS JOIN semel_outbox AS o WHERE o.ordering_key = '1000'";
    lab.execute(sql).await.unwrap();
    let taken = take(&store).await;
    assert_eq!((taken.rows.len(), mark(&store, &taken, &Mark::Sent).await), (100, 100));
    let next = "SELECT count(*) FROM semel_outbox WHERE state = 'ready' AND number = 2";
    assert_eq!(lab.number(next).await, 100, "the next of each line");
}

/// Of an ordering key one message is leased at a time, in the order of the numbers, which have no gaps.
pub async fn the_messages_of_a_key_go_one_after_the_other(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![keyed("k", "1"), keyed("l", "1"), message("plain"), keyed("k", "2")]).await;
    let tx = begin(&store).await;
    soon(store.put(&tx, vec![keyed("k", "never")])).await.unwrap();
    store.roll_back(&tx).await;
    put(&store, vec![keyed("k", "3"), keyed("k", "4")]).await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["1", "1", "plain"]);
    assert!(take(&store).await.rows.is_empty());
    mark(&store, &taken, &Mark::Retry { error: "no".into(), after: secs(1) }).await;
    put(&store, vec![keyed("k", "5")]).await;
    assert!(take(&store).await.rows.is_empty(), "a waiting first message blocks the others");
    lab.pass(secs(1));
    soon(store.tend()).await.unwrap();
    let mut taken = take(&store).await;
    assert_eq!(bodies(&taken), ["1", "1", "plain"]);
    assert_eq!(mark(&store, &taken, &Mark::Sent).await, 1);
    for n in 2..=5 {
        taken = take(&store).await;
        assert_eq!(bodies(&taken), [n.to_string()]);
        assert_eq!(taken.rows[0].envelope.number, Some(n));
        assert_eq!(mark(&store, &taken, &Mark::Sent).await, u64::from(n < 5));
    }
    put(&store, vec![keyed("k", "6")]).await;
    let taken = take(&store).await;
    assert_eq!((bodies(&taken), taken.rows[0].envelope.number), (vec!["6".to_owned()], Some(6)));
}

/// A parked message blocks its own key, not others, until a person re-drives or skips it.
pub async fn a_parked_message_blocks_its_own_key_only(lab: Lab) {
    let store = lab.open().await;
    let heads = [keyed("a", "a1"), keyed("b", "b1")];
    put(&store, heads.to_vec()).await;
    put(&store, vec![keyed("a", "a2"), keyed("b", "b2"), keyed("c", "c1")]).await;
    let taken = soon(store.take(2, LEASE)).await.unwrap();
    assert_eq!(bodies(&taken), ["a1", "b1"]);
    mark(&store, &taken, &Mark::Park { error: "refused".into() }).await;
    let others = take(&store).await;
    assert_eq!(bodies(&others), ["c1"]);
    mark(&store, &others, &Mark::Sent).await;
    lab.pass(secs(3600));
    soon(store.tend()).await.unwrap();
    assert!(take(&store).await.rows.is_empty(), "no person has decided");
    let [a, b] = heads.map(|head| head.id);
    for id in [a, b] {
        assert!(!store.redrive_outbox("other", id, "ann").await.unwrap());
        assert!(!store.skip_outbox("other", id, "ann", "x").await.unwrap());
    }
    let wake = store.outbox_wake();
    assert!(soon(store.redrive_outbox("acme", a, "ann")).await.unwrap());
    soon(wake.woken()).await;
    let taken = take(&store).await;
    assert_eq!(bodies(&taken), ["a1"]);
    assert!(!store.redrive_outbox("acme", a, "ann").await.unwrap(), "a relay has leased it");
    assert!(!store.skip_outbox("acme", a, "ann", "x").await.unwrap(), "a relay has leased it");
    assert_eq!(mark(&store, &taken, &Mark::Sent).await, 1);
    assert!(soon(store.skip_outbox("acme", b, "bob", "it is nonsense")).await.unwrap());
    assert!(!store.skip_outbox("acme", b, "bob", "again").await.unwrap());
    assert_eq!(bodies(&take(&store).await), ["a2", "b2"]);
    let got = "SELECT actor || ' ' || action || ' ' || reason || ' ' || tenant FROM semel_audit ORDER BY id";
    assert_eq!(lab.texts(got).await, ["ann outbox.redrive  acme", "bob outbox.skip it is nonsense acme"]);
    let subjects = lab.texts("SELECT subject FROM semel_audit ORDER BY id").await;
    assert_eq!(subjects, [a.to_string(), b.to_string()]);
    assert!(lab.texts("SELECT before FROM semel_audit ORDER BY id").await[1].contains("parked"));
}

/// A message that was put while the one before it was being published becomes ready.
pub async fn a_row_that_nothing_blocks_becomes_ready(lab: Lab) {
    let store = lab.open().await;
    put(&store, vec![keyed("k", "1")]).await;
    let first = take(&store).await;
    if lab.kind() == Kind::Postgres {
        let tx = begin(&store).await;
        soon(store.put(&tx, vec![keyed("k", "2"), keyed("k", "3")])).await.unwrap();
        assert_eq!(mark(&store, &first, &Mark::Sent).await, 0, "the next is not visible yet");
        commit(&store, &tx).await;
    } else {
        // This needs two concurrent transactions; with one writer, the test changes the row.
        put(&store, vec![keyed("k", "2"), keyed("k", "3")]).await;
        lab.execute("DELETE FROM semel_outbox WHERE number = 1").await.unwrap();
    }
    assert!(take(&store).await.rows.is_empty());
    put(&store, vec![keyed("l", "head"), keyed("l", "tail")]).await;
    assert_eq!(soon(store.tend()).await.unwrap().ready, 1);
    assert_eq!(bodies(&take(&store).await), ["2", "head"], "and nothing overtakes what is there");
    assert_eq!(soon(store.tend()).await.unwrap().ready, 0);
}

/// Tending goes through all keys, a bounded number at a time.
pub async fn tending_goes_round_all_keys(lab: Lab) {
    let store = lab.open().await;
    let put_keys =
        |n: std::ops::Range<usize>, body: &'static str| n.map(move |n| keyed(&format!("{n:05}"), body)).collect();
    put(&store, put_keys(0..1100, "head")).await;
    put(&store, put_keys(0..1100, "tail")).await;
    lab.execute("DELETE FROM semel_outbox WHERE number = 1 AND ordering_key IN ('00003', '01050', '01099')")
        .await
        .unwrap();
    assert_eq!(soon(store.tend()).await.unwrap().ready, 1);
    assert_eq!(soon(store.tend()).await.unwrap().ready, 2);
    lab.execute("DELETE FROM semel_outbox WHERE number = 1 AND ordering_key = '00000'").await.unwrap();
    assert_eq!(soon(store.tend()).await.unwrap().ready, 1, "it begins again at the first");
}

/// Two transactions that put under the same keys in opposite orders both succeed.
pub async fn crossing_puts_never_deadlock(lab: Lab) {
    let nodes = [lab.open().await, lab.open().await];
    let mut putting = tokio::task::JoinSet::new();
    for n in 0..4 {
        let store = nodes[n % 2].clone();
        putting.spawn(async move {
            for _ in 0..10 {
                let mut batch: Vec<Message> = (0..20).map(|k| keyed(&format!("{k:02}"), "x")).collect();
                if n % 2 == 1 {
                    batch.reverse();
                }
                put(&store, batch).await;
            }
        });
    }
    soon(putting.join_all()).await;
    assert_eq!(lab.number("SELECT count(*) FROM semel_outbox").await, 800);
    assert_eq!(lab.number("SELECT count(DISTINCT number) FROM semel_outbox WHERE ordering_key = '07'").await, 40);
    assert_eq!(lab.number("SELECT max(number) FROM semel_outbox WHERE ordering_key = '07'").await, 40);
    assert_eq!(lab.number("SELECT count(*) FROM semel_outbox WHERE state = 'ready'").await, 20, "one of each key");
}
