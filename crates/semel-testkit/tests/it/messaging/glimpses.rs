//! A claim that waits for SQLite's writer is answered without it if possible.

use semel::{Claim, Ledger, Options, Outcome, Policy, Settled, prelude::*};
use semel_testkit::{Kind, Lab, key, scope, work};

use super::{tools::eventually, unreliable::Unreliable};

/// The read may find the very claim that it was made for, whose answer is still in flight. That is no second lease, and
/// no reason to release the first one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_reads_its_own_row_keeps_its_lease() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let store = Unreliable::new(lab.open().await);
    let ledger = Ledger::new(store.clone(), Options::default()).unwrap();
    let late = store.answer_late();
    let claim = tokio::spawn({
        let ledger = ledger.clone();
        async move { ledger.claim(work("k", Policy::default())).await.unwrap() }
    });
    eventually(async || store.by_key(&scope(), &key("k")).await.unwrap().is_some()).await;
    late.glimpsed.notified().await;
    late.end();
    let Claim::Acquired(lease) = claim.await.unwrap() else { panic!("it is its own") };
    // A release would go through the same lane, before this.
    drop(ledger.claim(work("another", Policy::default())).await.unwrap());
    assert_eq!(lease.complete(Outcome::kept("")).await.unwrap(), Settled::Yes { successor: false });
}
