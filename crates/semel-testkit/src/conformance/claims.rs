//! Who executes.
#![expect(clippy::unwrap_used, clippy::missing_panics_doc, reason = "these are tests")]

use semel::{Claim, Outcome, Policy, Settled};

use crate::{Lab, work};

/// The first claim of a key gets the lease.
pub async fn a_first_claim_acquires(lab: Lab) {
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("k", Policy::default())).await.unwrap() else { panic!() };
    assert_eq!(lease.complete(Outcome::kept("done")).await.unwrap(), Settled::Yes { successor: false });
    let Claim::Replay(replay) = ledger.claim(work("k", Policy::default())).await.unwrap() else { panic!() };
    assert_eq!(replay.outcome, Outcome::kept("done"));
}

/// While somebody is at it, another claim is told so.
pub async fn a_second_claim_is_in_flight(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let Claim::Acquired(_lease) = a.claim(work("k", Policy::default())).await.unwrap() else { panic!() };
    let Claim::InFlight(there) = b.claim(work("k", Policy::default())).await.unwrap() else { panic!() };
    assert_eq!(there.retry_after, Policy::default().lease);
}
