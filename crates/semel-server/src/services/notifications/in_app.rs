//! Delivery in the app: a notification is SENT when it has its position in the stream.
//!
//! Ids are assigned when rows are inserted, and rows may become visible in another order: a stream by id would skip
//! rows that commit late. Positions are assigned afterwards, by one transaction at a time.

use std::{sync::Arc, time::Duration};

use semel::{Ledger, crash_point, messaging::Wake, prelude::*};
use semel_store::{Database, Tx};
use tokio::sync::watch;

use super::{feed::Feed, tables::notifications};

/// How many positions one transaction assigns.
const AT_ONCE: u64 = 1_000;

/// The poll interval without a wake-up: another node may have created notifications.
const POLL: Duration = Duration::from_secs(1);

/// Assigns positions until `stop` turns true.
pub(super) async fn work(ledger: Ledger<Database>, wake: Wake, feed: Arc<Feed>, mut stop: watch::Receiver<bool>) {
    loop {
        match round(&ledger).await {
            Ok(0) => {}
            Ok(given) => {
                feed.look();
                if given == AT_ONCE && !*stop.borrow() {
                    continue;
                }
            }
            Err(error) if *stop.borrow() => {
                tracing::debug!(%error, "the last round of the stream was cut off");
            }
            Err(error) => {
                tracing::warn!(%error, "notifications could not be put into the stream; the next round tries again")
            }
        }
        tokio::select! {
            () = wake.woken() => {}
            () = tokio::time::sleep(POLL) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Assigns positions to the oldest that wait; returns how many.
async fn round(ledger: &Ledger<Database>) -> semel::Result<u64> {
    let waiting = ledger.store().read(async |conn| notifications::any_waiting(conn).await).await?;
    // Most rounds find nothing and should cost no transaction.
    if !waiting {
        return Ok(0);
    }
    let now = ledger.store().now().await?.as_micros();
    ledger.transact(move |tx| async move { give(&tx, now).await }).await
}

async fn give(tx: &Tx, now: i64) -> semel::Result<u64> {
    let mut held = tx.connection().await?;
    let mut conn = held.get()?;
    let last = notifications::lock_stream(&mut conn).await?;
    let given = notifications::give_places(&mut conn, last, AT_ONCE.cast_signed(), now).await?;
    notifications::advance_stream(&mut conn, last.saturating_add_unsigned(given)).await?;
    crash_point!("in_app.given");
    Ok(given)
}
