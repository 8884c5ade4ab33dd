//! Ends expired leases, so that the work of a killed node continues soon. The sweep does the same every 15 s.

use std::time::Duration;

use tokio::{sync::watch, time::Instant};

use super::is_over;
use crate::{Ledger, store::Store};

/// How often to look.
const EVERY: Duration = Duration::from_secs(2);

/// A look reads all leases. After a slow one the pause is so many times as long, which bounds its share of the time.
const PAUSE_PER_LOOK: u32 = 50;

/// Looks for expired leases until the stop.
pub(super) async fn end_expired_leases<S: Store>(ledger: &Ledger<S>, mut stop: watch::Receiver<bool>) {
    let mut last_error = None;
    while !is_over(&stop) {
        let begun = Instant::now();
        let error = match ledger.end_expired_leases().await {
            Ok(ended) if ended.more => continue,
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        // Once: it would fail every few seconds.
        if let Some(error) = error.as_ref().filter(|_| error != last_error) {
            tracing::warn!(%error, "expired leases could not be ended; trying again");
        }
        last_error = error;
        // Nodes that started together should not look together.
        let pause = EVERY.max(begun.elapsed() * PAUSE_PER_LOOK).mul_f64(0.9 + 0.2 * fastrand::f64());
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }
}
