//! The claimed work: like that of a service, with labels, for a day.

use anyhow::{Result, bail};
use semel::{Claim, Fingerprint, Key, Labels, Ledger, Outcome, Scope, Settled, Work};
use semel_store::Database;

/// Tenant, service and kind of all operations.
pub(crate) const SCOPE: [&str; 3] = ["bench", "orders", "charge"];

/// The number of event types: the first label is one of them, and a dimension of the counters.
pub(crate) const EVENTS: u32 = 8;

/// The outcome: the size of a small JSON answer.
pub(crate) const OUTCOME: [u8; 100] = [b'o'; 100];

/// A new key, as a UUID-like text.
pub(crate) fn new_key() -> Result<Key> {
    Ok(Key::new(&uuid())?)
}

fn uuid() -> String {
    let text = format!("{:032x}", fastrand::u128(..));
    [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
}

/// Work under a key: a first label with few values, a third with many.
pub(crate) fn work(key: Key) -> Result<Work> {
    let scope = Scope::new(SCOPE[0], SCOPE[1], SCOPE[2])?;
    let fingerprint = Fingerprint::of_bytes(key.as_str().as_bytes());
    let labels = Labels::default()
        .with(1, &format!("order.event-{}", fastrand::u32(..EVENTS)))?
        .with(3, &format!("process-{}", uuid()))?;
    Ok(Work::new(scope, key, fingerprint).labels(labels))
}

/// Claims a new key and completes it: the operation that is counted.
pub(crate) async fn claim_and_complete(ledger: &Ledger<Database>, key: Key) -> Result<()> {
    let lease = match ledger.claim(work(key)?).await? {
        Claim::Acquired(lease) => lease,
        other => bail!("a new key was answered {}", other.word()),
    };
    match lease.complete(Outcome::kept(&OUTCOME[..])).await? {
        Settled::Yes { .. } => Ok(()),
        Settled::LeaseLost => bail!("a lease was lost within moments"),
    }
}

/// Claims a completed key.
pub(crate) async fn replay(ledger: &Ledger<Database>, key: Key) -> Result<()> {
    match ledger.claim(work(key)?).await? {
        Claim::Replay(replay) if replay.outcome.body == OUTCOME[..] => Ok(()),
        other => bail!("a completed key was answered {}", other.word()),
    }
}
