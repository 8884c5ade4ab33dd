//! Writes how notifications stand, after the ledger has said so.

use std::time::Duration;

use semel::{Ledger, Result, Store as _, crash_point};
use semel_store::Database;
use tokio::sync::mpsc;

use super::{
    deliver::in_transaction,
    deliver_tables::{self as tables, Due, Mark},
};

/// How many statuses are written in one transaction.
pub(super) const AT_ONCE: usize = 256;

/// A notification that was looked at.
pub(super) struct Looked {
    pub(super) due: Due,
    pub(super) stands: Stands,
    /// Which attempt to deliver it was made, if one was.
    pub(super) attempt: Option<u32>,
}

/// How a notification stands after somebody looked.
pub(super) enum Stands {
    Sent,
    Failed(String),
    InDoubt(String),
    /// To be looked at again after this long.
    Later(Duration, Option<String>),
}

/// Writes how notifications stand, as many at a time as there are. What is lost here is found again: the ledger knows.
pub(super) async fn write_marks(ledger: Ledger<Database>, mut marks: mpsc::Receiver<Looked>) {
    let mut batch = Vec::with_capacity(AT_ONCE);
    while marks.recv_many(&mut batch, AT_ONCE).await > 0 {
        let written = write(&ledger, std::mem::take(&mut batch)).await;
        match written {
            Ok(()) => crash_point!("deliver.marked"),
            Err(error) => tracing::warn!(%error, "notifications could not be marked; the next look does it"),
        }
    }
}

async fn write(ledger: &Ledger<Database>, batch: Vec<Looked>) -> Result<()> {
    let now = ledger.store().now().await?;
    let mark = |Looked { due, stands, attempt }: Looked| {
        let (status, error, due_at, sent_at) = match stands {
            Stands::Sent => ("SENT", None, 0, Some(now.as_micros())),
            Stands::Failed(error) => ("FAILED", Some(error), 0, None),
            Stands::InDoubt(reason) => ("IN_DOUBT", Some(reason), 0, None),
            Stands::Later(wait, error) => ("PENDING", error, (now + wait).as_micros(), None),
        };
        Mark { tenant: due.tenant, id: due.id, status, error, attempt, due_at, sent_at }
    };
    let mut marks: Vec<_> = batch.into_iter().map(mark).collect();
    // In one order everywhere, so that two nodes cannot wait for one another.
    marks.sort_by_key(|mark| mark.id);
    in_transaction(ledger, move |tx| async move {
        let mut held = tx.connection().await?;
        tables::mark(&mut held.get()?, &marks).await
    })
    .await
}
