//! The clean-up of what keyed changes left behind.

use std::time::Duration;

use semel::{Ledger, Result, Store as _, micros};
use semel_store::{Database, Tx};
use tokio::sync::watch;

use super::tables;

/// How many rows one transaction deletes: on SQLite it holds the only writer.
const AT_ONCE: u64 = 1_000;

/// Deletes what is older than `keep`, again and again until `stop` turns true. Any number of nodes may do so.
pub(super) async fn every(ledger: Ledger<Database>, keep: Duration, pause: Duration, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        match round(&ledger, keep, &stop).await {
            Ok(0) => {}
            Ok(deleted) => tracing::debug!(deleted, "old submissions were deleted"),
            Err(error) => tracing::warn!(%error, "old submissions were not deleted; the next round tries again"),
        }
    }
}

async fn round(ledger: &Ledger<Database>, keep: Duration, stop: &watch::Receiver<bool>) -> Result<u64> {
    let before = ledger.store().now().await?.as_micros().saturating_sub(micros(keep));
    let mut deleted = 0;
    loop {
        let gone = ledger
            .transact(move |tx| async move {
                let gone = delete(&tx, before).await;
                if gone.is_ok() { Ok(gone) } else { Err(gone) }
            })
            .await??;
        deleted += gone;
        if gone < AT_ONCE || *stop.borrow() {
            return Ok(deleted);
        }
    }
}

async fn delete(tx: &Tx, before: i64) -> Result<u64> {
    let mut held = tx.connection().await?;
    tables::delete_operacoes(&mut held.get()?, before, AT_ONCE.cast_signed()).await
}
