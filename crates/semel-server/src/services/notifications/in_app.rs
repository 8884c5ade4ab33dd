//! Delivery in the app: a notification is sent when it has its place in the stream.
//!
//! Ids are given when rows are made, and rows may become visible in another order: a stream that went by id would pass
//! over those that commit late. Places are given afterwards, by one transaction at a time.

use std::{sync::Arc, time::Duration};

use semel::{Ledger, Store as _, crash_point, messaging::Wake};
use semel_store::{Database, Tx};
use tokio::sync::watch;

use super::{feed::Feed, tables::notifications};

/// How many places one transaction gives.
const AT_ONCE: u64 = 1_000;

/// How long to sleep if nobody wakes us: another node may have made notifications.
const POLL: Duration = Duration::from_secs(1);

/// Gives places until `stop` turns true.
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

/// Gives places to the oldest that wait; how many it were.
async fn round(ledger: &Ledger<Database>) -> semel::Result<u64> {
    let mut reader = ledger.store().reader().await?;
    let waiting = notifications::any_waiting(&mut reader.conn()).await?;
    reader.leave();
    // Most rounds find nothing, and should cost no transaction.
    if !waiting {
        return Ok(0);
    }
    let now = ledger.store().now().await?.as_micros();
    ledger
        .transact(move |tx| async move {
            let given = give(&tx, now).await;
            if given.is_ok() { Ok(given) } else { Err(given) }
        })
        .await?
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
