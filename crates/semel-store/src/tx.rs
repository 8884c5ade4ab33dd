//! Callers' transactions.

use std::{
    collections::BTreeSet,
    sync::{Arc, OnceLock},
    time::Duration,
};

use semel::{
    Error, Operation, Outcome, Result, Timestamp,
    machine::Answer,
    store::{Applied, Commit, Ended},
};
use sqlx::Row as _;
use tokio::{
    sync::{Mutex, MutexGuard},
    task::AbortHandle,
    time::timeout,
};

use crate::{
    Conn,
    connection::{broken, is_passing, words},
    postgres::Seat,
    sqlite::WriteTx,
    wakes::{News, Wakes},
};

/// A transaction: a handle that can be shared with the code that uses it.
///
/// It ends by commit, by rollback, or by its time limit; then the handle and its clones are unusable. Dropping the last
/// handle rolls back.
#[derive(Clone)]
pub struct Tx(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Ends it at its time limit.
    watch: OnceLock<AbortHandle>,
    /// The wakes to send after the commit.
    news: parking_lot::Mutex<Option<(Arc<Wakes>, BTreeSet<News>)>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Most transactions end long before their limit: nothing of them should stay behind.
        if let Some(watch) = self.watch.get() {
            watch.abort();
        }
    }
}

enum State {
    Postgres(Seat),
    Sqlite(WriteTx),
    Over,
}

/// The transaction's connection, while it is held.
pub struct TxConnection<'a> {
    state: MutexGuard<'a, State>,
}

impl Tx {
    /// The server ends it too at its time limit: a process that is frozen cannot, and the node that takes over would
    /// wait for its locks.
    pub(crate) async fn postgres(mut seat: Seat, limit: Duration) -> Result<Self> {
        let idle = limit.as_millis().max(1);
        let begin = format!("BEGIN; SET LOCAL idle_in_transaction_session_timeout = {idle}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(begin)).execute(&mut *seat).await.map_err(broken)?;
        Ok(Self::limited(State::Postgres(seat), limit))
    }

    pub(crate) fn sqlite(tx: WriteTx, limit: Duration) -> Self {
        Self::limited(State::Sqlite(tx), limit)
    }

    /// An open transaction must never be forgotten: on SQLite it holds the only writer, on PostgreSQL locks and a
    /// snapshot.
    fn limited(state: State, limit: Duration) -> Self {
        let shared =
            Arc::new(Shared { state: Mutex::new(state), watch: OnceLock::new(), news: parking_lot::Mutex::default() });
        let watched = Arc::downgrade(&shared);
        let watch = tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            if let Some(shared) = watched.upgrade() {
                // Dropping its content rolls back.
                *shared.state.lock().await = State::Over;
            }
        });
        let _ = shared.watch.set(watch.abort_handle());
        Self(shared)
    }

    /// The connection to work with.
    ///
    /// # Errors
    /// [`Error::Refused`] if the transaction is over.
    pub async fn connection(&self) -> Result<TxConnection<'_>> {
        let state = self.0.state.lock().await;
        match *state {
            State::Over => Err(over()),
            _ => Ok(TxConnection { state }),
        }
    }

    /// Sends this wake after the commit.
    pub(crate) fn wake_after_commit(&self, wakes: &Arc<Wakes>, news: News) {
        let mut news_of = self.0.news.lock();
        news_of.get_or_insert_with(|| (wakes.clone(), BTreeSet::new())).1.insert(news);
    }

    pub(crate) async fn commit(&self) -> Commit {
        let state = std::mem::replace(&mut *self.0.state.lock().await, State::Over);
        let news = self.0.news.lock().take();
        // In its own task: a caller that goes away must not leave it undecided.
        let done = tokio::spawn(async move {
            let done = match state {
                State::Over => Commit::Refused("the transaction is over".into()),
                State::Sqlite(tx) => match tx.commit().await {
                    Ok(()) => Commit::Done,
                    Err(error) => commit_error(&error),
                },
                State::Postgres(mut seat) => {
                    // COMMIT rolls back a transaction in which a statement failed, and reports success; the statement
                    // before it shows that.
                    let limit = seat.answer_limit();
                    match timeout(limit, sqlx::raw_sql("SELECT 1; COMMIT").execute(&mut *seat)).await {
                        Ok(Ok(_)) => {
                            seat.leave();
                            Commit::Done
                        }
                        Ok(Err(error)) => commit_error(&error),
                        Err(_) => Commit::Unknown("no answer to the commit in time".into()),
                    }
                }
            };
            // A superfluous wake is harmless; a missing one would delay committed rows.
            if let (Some((wakes, news)), Commit::Done | Commit::Unknown(_)) = (news, &done) {
                news.into_iter().for_each(|news| wakes.wake(news));
            }
            done
        });
        done.await.unwrap_or_else(|error| Commit::Unknown(error.to_string()))
    }

    /// The completion of an operation and the commit, in one round trip; `None` if that is not possible, and nothing
    /// was ended.
    pub(crate) async fn complete_and_commit(&self, last: Last) -> Option<Ended> {
        let state = std::mem::replace(&mut *self.0.state.lock().await, State::Over);
        let news = self.0.news.lock().take();
        // In its own task, like any commit.
        let done = tokio::spawn(async move {
            let (ended, state) = match (state, last) {
                (State::Postgres(seat), Last::Postgres(complete)) => match on_postgres(seat, &complete).await {
                    Ok(ended) => (Some(ended), None),
                    Err(seat) => (None, Some(State::Postgres(seat))),
                },
                (State::Sqlite(mut tx), Last::Sqlite { held, outcome, host_clock }) => {
                    match tx.complete_and_commit(&held, &outcome, host_clock).await {
                        Ok(None) => (None, Some(State::Sqlite(tx))),
                        Ok(Some(now)) => (Some(Ended::Committed(completed(now))), None),
                        Err(error) => (Some(ended(commit_error(&error))), None),
                    }
                }
                (state, _) => (None, Some(state)),
            };
            if let (Some((wakes, news)), Some(Ended::Committed(_) | Ended::Unknown { .. })) = (&news, &ended) {
                news.iter().for_each(|news| wakes.wake(news.clone()));
            }
            (ended, state.map(|state| (state, news)))
        });
        let (ended, open) = match done.await {
            Ok(done) => done,
            Err(error) => (Some(ended(Commit::Unknown(error.to_string()))), None),
        };
        if let Some((state, news)) = open {
            *self.0.news.lock() = news;
            *self.0.state.lock().await = state;
        }
        ended
    }

    pub(crate) async fn roll_back(&self) {
        match std::mem::replace(&mut *self.0.state.lock().await, State::Over) {
            State::Over => {}
            State::Sqlite(tx) => tx.roll_back().await,
            State::Postgres(mut seat) => {
                // The answer does not matter: without one the connection is closed, which also rolls back.
                let rolled_back = timeout(Duration::from_secs(1), sqlx::raw_sql("ROLLBACK").execute(&mut *seat)).await;
                if matches!(rolled_back, Ok(Ok(_))) {
                    seat.leave();
                }
            }
        }
    }
}

impl TxConnection<'_> {
    /// The transaction, if it is SQLite's.
    pub(crate) fn sqlite(&mut self) -> Option<&mut WriteTx> {
        match &mut *self.state {
            State::Sqlite(tx) => Some(tx),
            _ => None,
        }
    }

    /// The connection, whichever database it is.
    ///
    /// # Errors
    /// [`Error::Refused`] if the transaction is over.
    pub fn get(&mut self) -> Result<Conn<'_>> {
        match &mut *self.state {
            State::Postgres(seat) => Ok(Conn::Postgres(seat)),
            State::Sqlite(tx) => Ok(Conn::Sqlite(tx.connection())),
            State::Over => Err(over()),
        }
    }
}

/// A completion that ends a transaction.
pub(crate) enum Last {
    /// As SQL.
    Postgres(String),
    Sqlite {
        held: Box<Operation>,
        outcome: Outcome,
        host_clock: i64,
    },
}

/// The error of PostgreSQL for a completion that is not plain, see `semel_complete`.
const NOT_PLAIN: &str = "SM001";

/// The error of a distributed database if one of its nodes was lost during the commit.
const MAYBE_DONE: &str = "40003";

/// The error of PostgreSQL for a transaction that was idle for too long.
const HELD_TOO_LONG: &str = "25P03";

/// Completes and commits. If it is not a plain completion, it returns the seat with the transaction as it was before:
/// without the savepoint, all of it would be lost. After a failed statement even the savepoint cannot be set.
async fn on_postgres(mut seat: Seat, complete: &str) -> Result<Ended, Seat> {
    let limit = seat.answer_limit();
    let all = format!("SAVEPOINT semel; {complete}; COMMIT");
    Ok(match timeout(limit, sqlx::raw_sql(sqlx::AssertSqlSafe(all)).fetch_all(&mut *seat)).await {
        Ok(Ok(rows)) => {
            seat.leave();
            match rows.first().map(|row| row.try_get(0)) {
                Some(Ok(now)) => Ended::Committed(completed(now)),
                // It has committed; reading it back will show that.
                _ => Ended::Unknown { why: "the completion returned no time".into(), successor: false },
            }
        }
        Ok(Err(sqlx::Error::Database(refused))) if refused.code().as_deref() == Some(NOT_PLAIN) => {
            let back = sqlx::raw_sql("ROLLBACK TO SAVEPOINT semel").execute(&mut *seat);
            match timeout(limit, back).await {
                Ok(Ok(_)) => return Err(seat),
                _ => Ended::Unavailable("the connection was lost before the commit".into()),
            }
        }
        Ok(Err(error)) => ended(commit_error(&error)),
        Err(_) => Ended::Unknown { why: "no answer to the commit in time".into(), successor: false },
    })
}

fn completed(now: i64) -> Box<Applied> {
    let now = Timestamp::from_micros(now);
    Box::new(Applied { answer: Answer::Settled { successor: false }, operation: None, now })
}

fn ended(commit: Commit) -> Ended {
    match commit {
        Commit::Refused(why) => Ended::Refused(why),
        Commit::Unavailable(why) => Ended::Unavailable(why),
        Commit::Unknown(why) => Ended::Unknown { why, successor: false },
        Commit::Done => Ended::Unknown { why: "the answer of the commit was not read".into(), successor: false },
    }
}

fn over() -> Error {
    Error::Refused("the transaction is over: its time was up, or it has been committed or rolled back".into())
}

/// The meaning of an error in answer to a commit. A refusal was not committed. If the connection broke, or the server
/// was stopping, it may have been. A transaction that was open for too long failed through its caller, not through the
/// database.
pub(crate) fn commit_error(error: &sqlx::Error) -> Commit {
    let why = words(error);
    match error {
        sqlx::Error::Database(db) => match db.code().as_deref() {
            Some(code) if code.len() == 5 && (code.starts_with("57") || code.starts_with("08")) => Commit::Unknown(why),
            Some(MAYBE_DONE) => Commit::Unknown(why),
            Some(HELD_TOO_LONG) => Commit::Refused(why),
            _ if is_passing(db.as_ref()) => Commit::Unavailable(why),
            _ => Commit::Refused(why),
        },
        _ => Commit::Unknown(why),
    }
}

/// Begins; if the connection has died while idle, once more on a new one.
pub(crate) async fn begin_on(seats: &Arc<crate::postgres::Seats>, limit: Duration) -> Result<Tx> {
    let seat = seats.take().await?;
    let reused = seat.is_reused();
    match seats.answered(Tx::postgres(seat, limit)).await {
        Err(error) if reused && error.is_transient() => {
            let seat = seats.take().await?;
            seats.answered(Tx::postgres(seat, limit)).await
        }
        done => done,
    }
}
