//! Expiry, archive, and the time of the next look, decided by an operation's columns without its stored data: that may
//! be large, or unreadable for this version.

use semel::{
    Result, State, Timestamp, crash_point,
    look::Group,
    machine::{Aged, archived_note, tombstone},
};
use serde_json::json;

use super::{
    Part,
    round::{batch_with, by_ids},
};
use crate::{Database, apply::Tally, batch::saved, codec::encode, from_row, rows};

/// A row of `load_aged`.
struct AgedRow {
    id: i64,
    fence: i64,
    state: String,
    expires_at: Option<i64>,
    archive_at: Option<i64>,
    look_at: Option<i64>,
    tenant: String,
    service: String,
    kind: String,
    label1: String,
    label2: String,
}

from_row!(AgedRow { id, fence, state, expires_at, archive_at, look_at, tenant, service, kind, label1, label2 });

impl Database {
    /// Deletes, archives or postpones operations by their age.
    pub(super) async fn age(&self, ids: &[i64]) -> Result<Part> {
        self.in_round(ids.len(), async |round| {
            let locked = round.lock(ids).await?;
            let (now, _) = self.draw(round, 0).await?;
            let (sql, sweep) = (self.sql(), self.sweep_sql());
            let mut conn = round.conn();
            let (mut gone, mut buried, mut later) = (Vec::new(), Vec::new(), Vec::new());
            let (mut tally, mut notes) = (Tally::default(), Vec::new());
            for row in by_ids::<AgedRow>(&mut conn, sweep.load_aged, &locked).await? {
                let time = |at: Option<i64>| at.map(Timestamp::from_micros);
                if time(row.look_at).is_none_or(|at| at > now) {
                    continue;
                }
                let state: State = row.state.parse()?;
                let mut item = json!({ "id": row.id, "old_fence": row.fence });
                match Aged::of(state, time(row.expires_at), time(row.archive_at), now) {
                    Aged::Expired => {
                        tally.gone(row.group(), state, now);
                        gone.push(item);
                    }
                    Aged::Archive => {
                        notes.push(rows::note(row.id, &archived_note(semel::Fence(row.fence), now)));
                        buried.push(item);
                    }
                    Aged::LookAt(at) => {
                        item["look_at"] = json!(at.map(Timestamp::as_micros));
                        later.push(item);
                    }
                }
            }
            let all = |changed: u64, asked: &[serde_json::Value]| saved(changed == asked.len() as u64);
            all(conn.batch(sql.delete_operations, &gone).await?, &gone)?;
            let belongings = [sql.delete_archived, sql.delete_journal, sql.delete_repeats];
            for text in belongings.into_iter().chain([sql.delete_backlog, sql.delete_successors]) {
                conn.batch(text, &gone).await?;
            }
            batch_with(&mut conn, sweep.archive_data, &buried, now.as_micros()).await?;
            all(batch_with(&mut conn, sweep.bury, &buried, encode(&tombstone().body)).await?, &buried)?;
            all(conn.batch(sweep.look_again, &later).await?, &later)?;
            conn.batch(sql.insert_journal, &notes).await?;
            conn.batch(sql.insert_deltas, &tally.rows()).await?;
            crash_point!("sweep.tended");
            let mut part = Part { handled: locked.len(), ..Part::default() };
            (part.swept.expired, part.swept.archived) = (gone.len() as u64, buried.len() as u64);
            Ok(part)
        })
        .await
    }
}

impl AgedRow {
    fn group(self) -> Group {
        let Self { tenant, service, kind, label1, label2, .. } = self;
        Group { tenant, service, kind, label1, label2 }
    }
}
