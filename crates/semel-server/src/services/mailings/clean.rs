//! What the sweep removes: files that no mailing needs, and the rows of deleted mailings.
//!
//! What cannot be removed is logged, and keeps nothing else.

use semel::{Result, prelude::*};

use super::{
    Service,
    files::FILES_AT_ONCE,
    tables::{chunks, mailings},
};

/// How many files of deleted and cancelled mailings a round removes: a file of 4 GiB has 8,192 parts.
const FILES: usize = 64;

/// How many deleted mailings are looked for at a time, how many rows a transaction removes, and how many transactions a
/// round has: on SQLite each holds the only writer.
const LOOKED_AT: i64 = 20;
const REMOVED: i64 = 2_000;
const REMOVALS: usize = 20;

impl Service {
    /// Removes files whose mailing was deleted, or cancelled before the import ended.
    pub(super) async fn remove_unneeded(&self) -> Result<()> {
        let (mut after, mut removed) = (0, 0);
        while removed < FILES {
            let page = self.database.read(async |conn| chunks::unneeded(conn, after, FILES_AT_ONCE).await).await?;
            let Some((last, ..)) = page.last() else { break };
            after = *last;
            for (_, mailing, url) in page {
                match self.remove_one(url).await {
                    Ok(()) => removed += 1,
                    Err(error) => tracing::warn!(%error, mailing, "the file of a mailing could not be removed yet"),
                }
            }
        }
        Ok(())
    }

    async fn remove_one(&self, url: String) -> Result<()> {
        self.files.remove(&url).await?;
        let released = self
            .ledger
            .transact(move |tx| async move { chunks::release(&mut tx.connection().await?.get()?, &url).await });
        released.await
    }

    /// Removes the rows of deleted mailings.
    pub(super) async fn remove_deleted(&self) -> Result<()> {
        let (mut after, mut left) = (0, REMOVALS);
        while left > 0 {
            let page = self.database.read(async |conn| mailings::deleted(conn, after, LOOKED_AT).await).await?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            for (number, mailing) in page {
                let mut has_more = true;
                while has_more && left > 0 {
                    left -= 1;
                    has_more = match self.remove_rows(number).await {
                        Ok(has_more) => has_more,
                        Err(error) => {
                            tracing::warn!(%error, mailing, "a deleted mailing could not be removed yet");
                            false
                        }
                    };
                }
            }
        }
        Ok(())
    }

    async fn remove_rows(&self, number: i64) -> Result<bool> {
        let removed = self.ledger.transact(move |tx| async move {
            mailings::remove_some(&mut tx.connection().await?.get()?, number, REMOVED).await
        });
        removed.await
    }

    /// Removes files that belong to no mailing: their uploads were cut off.
    pub(super) async fn remove_forgotten(&self) -> Result<()> {
        let now = self.database.now().await?.as_micros();
        self.files.remove_forgotten(&self.database, now).await
    }
}
