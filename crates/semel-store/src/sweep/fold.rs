//! Folds counter rows.

use semel::{Result, crash_point};
use serde_json::json;

use super::Part;
use crate::{Conn, Database, connection::read_failed, counters, postgres, sqlite};

impl Database {
    /// Folds counter rows: deletes them and adds them to the counters, in one transaction.
    pub(super) async fn fold(&self, ids: &[i64]) -> Result<Part> {
        self.in_round(ids.len(), async |round| {
            let mut conn = round.conn();
            let taken: Vec<counters::CountRow> = match &mut conn {
                Conn::Postgres(c) => sqlx::query_as(postgres::TAKE_DELTAS).bind(ids).fetch_all(&mut **c).await,
                Conn::Sqlite(c) => {
                    sqlx::query_as(sqlite::TAKE_DELTAS).bind(json!(ids).to_string()).fetch_all(&mut **c).await
                }
            }
            .map_err(read_failed)?;
            let mut part = Part { handled: taken.len(), ..Part::default() };
            part.swept.folded = taken.len() as u64;
            conn.batch(self.sql().fold_counters, &counters::fold(taken)).await?;
            crash_point!("sweep.folded");
            Ok(part)
        })
        .await
    }
}
