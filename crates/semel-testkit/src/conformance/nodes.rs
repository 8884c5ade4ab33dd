//! Listings of nodes and kinds of work.

use std::time::Duration;

use semel::{Context, Fingerprint, Kind, Outcome, Scope, Work, Worker, fleet::Sign, prelude::*};
use semel_store::{Database, KindOfWork};
use tokio::sync::watch;

use super::tools::*;
use crate::{Lab, key};

fn sign() -> Sign {
    Sign { roles: vec!["api".into(), "relay".into()], version: "1.2.3".into(), kinds: Vec::new() }
}

fn job(tenant: &str, kind: &str, name: &str) -> Work {
    let scope = Scope::new(tenant, "works", kind).unwrap();
    Work::new(scope, key(name), Fingerprint::of_bytes(name.as_bytes()))
}

/// A node stores a sign of life, and removes it when it ends. Its age is by the database's clock.
pub async fn a_node_stores_a_sign_of_life_and_removes_it_at_its_end(lab: Lab) {
    let (node, other) = (lab.ledger_of("node").await, lab.ledger_of("other").await);
    let (stop, stops) = watch::channel(false);
    let shown = tokio::spawn(async move { node.show_life(sign(), stops).await });
    let nodes = async || other.store().nodes().await.unwrap();
    eventually(|| async { nodes().await.len() == 1 }).await;
    lab.pass(secs(7));
    let seen = nodes().await.remove(0);
    assert_eq!((seen.owner.as_str(), &seen.sign, seen.age), ("node", &sign(), secs(7)));
    assert_eq!((seen.since, seen.seen), (Lab::START, Lab::START));
    stop.send_replace(true);
    soon(shown).await.unwrap();
    assert_eq!(nodes().await, []);
}

/// A stop may come while the first sign is being stored.
pub async fn a_sign_of_life_in_flight_does_not_outlive_its_node(lab: Lab) {
    let node = lab.ledger().await;
    for _ in 0..20 {
        let (stop, stops) = watch::channel(true);
        soon(node.show_life(sign(), stops)).await;
        drop(stop);
        // Takes longer than a sign of life.
        let _ = node.sweep().await.unwrap();
        assert_eq!(node.store().nodes().await.unwrap(), []);
    }
}

/// A worker leaves signs by itself, with the kinds that it runs.
pub async fn the_sign_of_a_worker_has_its_kinds(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let kind = Kind::leased("works", "mail", |_: Context<Database>| async { Ok(Outcome::kept("")) });
    let (stop, stops) = watch::channel(false);
    let hired = tokio::spawn(Worker::new(&ledger).on(kind).known_as(vec!["worker".into()], "1.2.3").run(stops));
    let nodes = async || ledger.store().nodes().await.unwrap();
    eventually(|| async { nodes().await.len() == 1 }).await;
    let Sign { roles, version, kinds } = nodes().await.remove(0).sign;
    assert_eq!((roles, version, kinds), (vec!["worker".into()], "1.2.3".into(), vec!["works/mail".into()]));
    stop.send_replace(true);
    soon(hired).await.unwrap();
    assert_eq!(nodes().await, []);
}

/// The last sign of a killed node stays for a day; then the sweep deletes it.
pub async fn a_node_that_is_gone_is_forgotten_after_a_day(lab: Lab) {
    let ledger = lab.ledger().await;
    let since = ledger.store().leave_sign("killed", &sign(), None).await.unwrap();
    lab.pass(secs(20 * 3600));
    ledger.store().leave_sign("other", &sign(), None).await.unwrap();
    assert_eq!(ledger.store().leave_sign("again", &sign(), Some(since)).await.unwrap(), since, "it began then");
    let owners = async || -> Vec<String> {
        ledger.sweep().await.unwrap();
        ledger.store().nodes().await.unwrap().into_iter().map(|node| node.owner).collect()
    };
    assert_eq!(owners().await, ["again", "other", "killed"]);
    lab.pass(secs(5 * 3600));
    assert_eq!(owners().await, ["again", "other"]);
    ledger.store().remove_sign("again", Lab::START + secs(1)).await.unwrap();
    assert_eq!(owners().await.len(), 2, "a sign of another process stays");
}

/// A sign that cannot be stored does not stop the work.
pub async fn work_continues_if_signs_of_life_cannot_be_stored(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    lab.execute("ALTER TABLE semel_nodes RENAME TO elsewhere").await.unwrap();
    let (done, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let kind = Kind::leased("works", "mail", move |_: Context<Database>| {
        let _ = done.send(());
        async { Ok(Outcome::kept("")) }
    });
    let (stop, stops) = watch::channel(false);
    let hired = tokio::spawn(Worker::new(&ledger).on(kind).run(stops));
    ledger.enqueue(job("acme", "mail", "k")).await.unwrap();
    soon(runs.recv()).await.unwrap();
    stop.send_replace(true);
    soon(hired).await.unwrap();
}

/// Waiting, due and running operations, the oldest due time, and pauses: by kind, over all tenants.
pub async fn kinds_of_work_are_listed(lab: Lab) {
    let ledger = lab.ledger().await;
    let works = [
        job("acme", "mail", "a"),
        job("other", "mail", "b"),
        job("acme", "mail", "later").delay(secs(3600)),
        job("acme", "print", "c").delay(secs(60)),
    ];
    ledger.enqueue_all(works.to_vec()).await.unwrap();
    let lease = acquire(&ledger, job("acme", "run", "d")).await;
    ledger.store().pause_kind("works", "mail", "ann", "the server is away").await.unwrap();
    ledger.store().pause_kind("works", "unheard of", "ann", "who knows").await.unwrap();
    lab.pass(secs(10));
    let kinds = ledger.store().kinds_of_work().await.unwrap();
    let got: Vec<_> = kinds
        .iter()
        .map(|of| (of.kind.as_str(), of.waiting, of.due, of.running, of.oldest, of.paused.is_some()))
        .collect();
    assert_eq!(
        got,
        [
            ("mail", 3, 2, 0, Some(secs(10)), true),
            ("print", 1, 0, 0, None, false),
            ("run", 0, 0, 1, None, false),
            ("unheard of", 0, 0, 0, None, true),
        ]
    );
    let paused = kinds[0].paused.as_ref().unwrap();
    assert_eq!((paused.at, paused.actor.as_str()), (Lab::START, "ann"));
    assert_eq!(paused.reason, "the server is away");
    drop(lease);
}

/// Counts are bounded: a listing costs the same for any number of waiting operations.
pub async fn kinds_of_work_are_counted_up_to_a_bound(lab: Lab) {
    let ledger = lab.ledger().await;
    let most = usize::try_from(KindOfWork::MOST).unwrap();
    ledger.enqueue_all((0..most + 50).map(|n| job("acme", "mail", &n.to_string())).collect()).await.unwrap();
    ledger.enqueue(job("acme", "print", "k")).await.unwrap();
    let kinds = soon(ledger.store().kinds_of_work()).await.unwrap();
    let got: Vec<_> = kinds.iter().map(|of| (of.kind.as_str(), of.waiting, of.due, of.oldest)).collect();
    let (most, now) = (KindOfWork::MOST, Some(Duration::ZERO));
    assert_eq!(got, [("mail", most, most, now), ("print", 1, 1, now)]);
}
