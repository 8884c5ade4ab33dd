//! Messages in the database: the outbox, retries, dead letters, and the embedded broker.
//!
//! - `outbox`: put, take, mark; `look`: what people see and may do
//! - `letters`: retries and dead letters
//! - `embedded`, `deliveries`, `unacked`, `queue`: the broker in the database
//! - `hold`: renews leases
//! - `unread`: unreadable rows; `aside`: sets them aside
//! - `sql`, `rows`: statements and stored forms; `work`: the transactions of messaging

mod aside;
mod deliveries;
mod embedded;
mod hold;
mod letters;
mod look;
mod outbox;
mod queue;
mod rows;
mod sql;
mod unacked;
mod unread;
mod work;

use std::time::Duration;

use parking_lot::Mutex;
use semel::{
    Result, Timestamp,
    messaging::{
        Backlog, ConsumerStore, DeadLetter, LetterCount, LetterFilter, LetterPage, LetterStore, MarkRow, Message,
        MessageId, NewLetter, OutboxFilter, OutboxListing, OutboxStore, Redriven, RelayStore, Retry, RetryRow, Taken,
        Tended, Wake,
    },
};

use self::aside::PutOff;
pub(crate) use self::sql::MessageSql;
#[cfg(test)]
pub(crate) use self::sql::{HOT_POSTGRES, HOT_SQLITE};
pub use self::{embedded::EmbeddedBroker, look::HeldMessage};
use crate::{Database, Tx, sql::Dialect, wakes::News};

/// The in-memory state of messaging.
pub(crate) struct Messages {
    sql: MessageSql,
    /// The last ordering key that was checked for rows that are no longer blocked.
    cursor: Mutex<(String, String)>,
    /// The rows that this process could not read recently.
    put_off: PutOff,
}

impl Messages {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self { sql: MessageSql::new(dialect), cursor: Mutex::default(), put_off: PutOff::default() }
    }

    fn looked_at(&self) -> (String, String) {
        self.cursor.lock().clone()
    }

    fn look_on_from(&self, key: (String, String)) {
        *self.cursor.lock() = key;
    }
}

impl OutboxStore for Database {
    async fn put(&self, tx: &Tx, messages: Vec<Message>) -> Result<()> {
        self.answer(async {
            let mut held = tx.connection().await?;
            self.put_on(&mut held.get()?, messages).await
        })
        .await?;
        tx.wake_after_commit(self.wakes(), News::Outbox);
        Ok(())
    }

    async fn receipt(&self, tenant: &str, id: MessageId) -> Result<Option<Timestamp>> {
        self.answer(self.find_receipt(tenant, id)).await
    }

    async fn outbox(&self, filter: &OutboxFilter, after: Option<i64>, limit: u32) -> Result<OutboxListing> {
        self.answer(self.list_outbox(filter, after, limit)).await
    }

    async fn redrive_outbox(&self, tenant: &str, id: MessageId, actor: &str) -> Result<bool> {
        self.answer(self.redrive_row(tenant, id, actor)).await
    }

    async fn skip_outbox(&self, tenant: &str, id: MessageId, actor: &str, reason: &str) -> Result<bool> {
        self.answer(self.skip_row(tenant, id, actor, reason)).await
    }

    async fn backlog(&self) -> Result<Backlog> {
        self.answer(self.count_outbox()).await
    }
}

impl RelayStore for Database {
    async fn take(&self, limit: u32, lease: Duration) -> Result<Taken> {
        self.answer(self.take_rows(limit, lease)).await
    }

    async fn hold(&self, rows: Vec<(i64, i64)>, lease: Duration) -> Result<Vec<i64>> {
        let sql = &self.messages().sql;
        self.hold_rows((sql.hold_outbox, sql.held_outbox), &rows, lease).await
    }

    async fn mark(&self, marks: Vec<MarkRow>) -> Result<u64> {
        self.answer(self.mark_rows(marks)).await
    }

    async fn tend(&self) -> Result<Tended> {
        self.answer(self.tend_rows()).await
    }

    fn outbox_wake(&self) -> Wake {
        self.wakes().wait_for(News::Outbox)
    }
}

impl ConsumerStore for Database {
    async fn put_letter(&self, letter: NewLetter) -> Result<()> {
        self.answer(self.keep_letter(&letter)).await
    }

    async fn take_retries(&self, consumer: &str, limit: u32, lease: Duration) -> Result<Vec<RetryRow>> {
        self.answer(self.take_retry_rows(consumer, limit, lease)).await
    }

    async fn retry_done(&self, tx: &Tx, id: i64, token: i64) -> Result<bool> {
        self.answer(self.end_retry(tx, id, token)).await
    }

    async fn retry_not_begun(&self, id: i64, token: i64) -> Result<bool> {
        self.answer(self.give_back_retry(id, token)).await
    }

    async fn retry_failed(&self, id: i64, token: i64, reason: &str, retry: Retry) -> Result<bool> {
        self.answer(self.fail_retry(id, token, reason, retry)).await
    }

    async fn next_retry(&self, consumer: &str) -> Result<Option<Timestamp>> {
        self.answer(self.find_next_retry(consumer)).await
    }

    fn retry_wake(&self) -> Wake {
        self.wakes().wait_for(News::Retries)
    }
}

impl LetterStore for Database {
    async fn letters(&self, filter: &LetterFilter, after: Option<i64>, limit: u32) -> Result<LetterPage> {
        self.answer(self.list_letters(filter, after, limit)).await
    }

    async fn letter(&self, tenant: &str, id: i64) -> Result<Option<DeadLetter>> {
        self.answer(self.find_letter(tenant, id)).await
    }

    async fn count_letters(&self, filter: &LetterFilter) -> Result<LetterCount> {
        self.answer(self.count_matching(filter)).await
    }

    async fn redrive_letters(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
        actor: &str,
    ) -> Result<Redriven> {
        self.answer(self.redrive_matching(filter, after, limit, actor)).await
    }

    async fn discard_letter(&self, tenant: &str, id: i64, actor: &str, reason: &str) -> Result<bool> {
        self.answer(self.discard(tenant, id, actor, reason)).await
    }
}
