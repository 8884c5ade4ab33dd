//! Messages in the database: the outbox, what could not be handled, and a broker for those who need no other.
//!
//! - `outbox`: into it, out of it; `look`: what people see of it and may do
//! - `letters`: retries and dead letters
//! - `embedded`, `deliveries`, `hands`, `queue`: the broker in the database
//! - `hold`: renews the leases of what a process has in its hands
//! - `notify`: who is woken
//! - `unread`: rows that cannot be read; `aside`: what becomes of them
//! - `sql`, `rows`: how it is stored; `work`: transactions of its own

mod aside;
mod deliveries;
mod embedded;
mod hands;
mod hold;
mod letters;
mod look;
mod notify;
mod outbox;
mod queue;
mod rows;
mod sql;
mod unread;
mod work;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use semel::{
    Result, Timestamp,
    messaging::{
        Backlog, DeadLetter, LetterCount, LetterFilter, LetterPage, MarkRow, Message, MessageId, MessageStore,
        NewLetter, OutboxFilter, OutboxListing, Redriven, Retry, RetryRow, Taken, Tended, Wake,
    },
};

use self::aside::PutOff;
pub use self::embedded::EmbeddedBroker;
pub(crate) use self::notify::{News, Wakes};
pub(crate) use self::sql::MessageSql;
#[cfg(test)]
pub(crate) use self::sql::{HOT_POSTGRES, HOT_SQLITE};
use crate::{Database, Tx, database::Inner, sql::Dialect};

/// What a process keeps in mind about the messages in a database.
pub(crate) struct Messages {
    sql: MessageSql,
    pub(crate) wakes: Arc<Wakes>,
    /// The last ordering key that was looked at for rows that nothing blocks.
    cursor: Mutex<(String, String)>,
    /// What this process could not read of late.
    put_off: PutOff,
}

impl Messages {
    pub(crate) fn new(inner: &Inner) -> Self {
        let (sql, wakes) = match inner {
            Inner::Postgres(db) => (MessageSql::new(Dialect::Postgres), Wakes::among_nodes(db)),
            Inner::Sqlite(_) => (MessageSql::new(Dialect::Sqlite), Wakes::alone()),
        };
        Self { sql, wakes, cursor: Mutex::default(), put_off: PutOff::default() }
    }

    fn looked_at(&self) -> (String, String) {
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn look_on_from(&self, key: (String, String)) {
        *self.cursor.lock().unwrap_or_else(PoisonError::into_inner) = key;
    }
}

impl MessageStore for Database {
    async fn put(&self, tx: &Tx, messages: Vec<Message>) -> Result<()> {
        self.answer(async {
            let mut held = tx.connection().await?;
            self.put_on(&mut held.get()?, messages).await
        })
        .await?;
        tx.tell(&self.messages().wakes, News::Outbox);
        Ok(())
    }

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
        self.messages().wakes.wait_for(News::Outbox)
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

    async fn put_letter(&self, letter: NewLetter) -> Result<()> {
        self.answer(self.keep_letter(&letter)).await
    }

    async fn take_retries(&self, consumer: &str, limit: u32, lease: Duration) -> Result<Vec<RetryRow>> {
        self.answer(self.take_due(consumer, limit, lease)).await
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
        self.messages().wakes.wait_for(News::Retries)
    }

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
