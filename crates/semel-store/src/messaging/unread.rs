//! Rows that may be unreadable: damaged, or written by a newer version or with another key. An unreadable row must not
//! hide the others of its query.

use std::result::Result;

use semel::{
    Timestamp,
    messaging::{DeadLetter, OutboxRow, UnreadableLetter, UnreadableMessage},
};
use sqlx::{FromRow, Row as _};

use super::rows::{DeadRow, ListedRow};
use crate::codec::is_of_another;

/// A row, or its readable columns.
pub(super) struct Each<T, U> {
    pub(super) id: i64,
    pub(super) read: Result<T, U>,
}

/// A taken row, or why its columns cannot be read.
pub(super) struct Taken<T> {
    pub(super) id: i64,
    pub(super) token: i64,
    pub(super) read: Result<T, sqlx::Error>,
}

/// A taken row that is unreadable.
#[derive(Debug)]
pub(super) struct Unread {
    pub(super) id: i64,
    pub(super) token: i64,
    /// Whether another version or key has stored it: during a rolling update, an older node meets rows of a newer one.
    /// Otherwise it is damaged.
    pub(super) of_another: bool,
    /// The reason, for people.
    pub(super) why: String,
}

/// The readable ones, and the unreadable ones.
pub(super) fn sorted<T, R>(rows: Vec<Taken<T>>, read: impl Fn(T) -> semel::Result<R>) -> (Vec<R>, Vec<Unread>) {
    let (mut readable, mut unread) = (Vec::with_capacity(rows.len()), Vec::new());
    for Taken { id, token, read: row } in rows {
        let (why, of_another) = match row.map(&read) {
            Ok(Ok(row)) => {
                readable.push(row);
                continue;
            }
            Ok(Err(error)) => (error.to_string(), is_of_another(&error)),
            Err(error) => (error.to_string(), false),
        };
        unread.push(Unread { id, token, of_another, why: format!("unreadable: {why}") });
    }
    (readable, unread)
}

/// A page of at most this many rows, from one more if there are more: the readable ones, the unreadable ones, and where
/// the next page begins.
pub(super) fn page<T, U>(mut rows: Vec<Each<T, U>>, limit: u32) -> (Vec<T>, Vec<U>, Option<i64>) {
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next = rows.last().filter(|_| more).map(|row| row.id);
    let (mut items, mut unreadable) = (Vec::new(), Vec::new());
    for row in rows {
        match row.read {
            Ok(item) => items.push(item),
            Err(row) => unreadable.push(row),
        }
    }
    (items, unreadable, next)
}

/// The row, or why it is unreadable.
fn whole<T>(read: Result<semel::Result<T>, sqlx::Error>) -> Result<T, String> {
    read.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

macro_rules! each_from {
    ($($row:ty),+) => {$(
        impl<'r, T: FromRow<'r, $row>> FromRow<'r, $row> for Taken<T> {
            fn from_row(row: &'r $row) -> Result<Self, sqlx::Error> {
                // Without an id, no action is possible. So below.
                Ok(Self { id: row.try_get("id")?, token: row.try_get("token")?, read: T::from_row(row) })
            }
        }

        impl FromRow<'_, $row> for Each<OutboxRow, UnreadableMessage> {
            fn from_row(row: &$row) -> Result<Self, sqlx::Error> {
                let id = row.try_get("id")?;
                let text = |column| row.try_get::<String, _>(column).unwrap_or_default();
                let read = whole(ListedRow::from_row(row).map(ListedRow::read)).map_err(|why| UnreadableMessage {
                    id,
                    message_id: text("message_id"),
                    state: text("state"),
                    topic: text("topic"),
                    kind: text("kind"),
                    put_at: Timestamp::from_micros(row.try_get("put_at").unwrap_or_default()),
                    why,
                });
                Ok(Self { id, read })
            }
        }

        impl FromRow<'_, $row> for Each<DeadLetter, UnreadableLetter> {
            fn from_row(row: &$row) -> Result<Self, sqlx::Error> {
                let id = row.try_get("id")?;
                let text = |column| row.try_get::<String, _>(column).unwrap_or_default();
                let read = whole(DeadRow::from_row(row).map(DeadRow::read)).map_err(|why| UnreadableLetter {
                    id,
                    message_id: row.try_get("message_id").unwrap_or_default(),
                    consumer: text("consumer"),
                    queue: text("queue"),
                    kind: text("kind"),
                    key: text("key"),
                    died_at: Timestamp::from_micros(row.try_get("died_at").unwrap_or_default()),
                    why,
                });
                Ok(Self { id, read })
            }
        }
    )+};
}

each_from!(sqlx::postgres::PgRow, sqlx::sqlite::SqliteRow);
