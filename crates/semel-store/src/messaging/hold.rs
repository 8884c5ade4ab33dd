//! Renews the leases of a process, in one statement.

use std::{collections::HashSet, time::Duration};

use semel::{Result, micros};
use serde_json::{Value, json};

use crate::{Database, connection::read_failed, on};

impl Database {
    /// Renews leases, each given by row and token; returns the ids of those still held. The first statement renews, the
    /// second returns which rows have the token. It is needed only for rows that the first has skipped: another process
    /// has them, or they are locked.
    pub(super) async fn hold_rows(
        &self,
        (hold, held): (&'static str, &'static str),
        rows: &[(i64, i64)],
        lease: Duration,
    ) -> Result<Vec<i64>> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        self.answer(async {
            let mut work = self.statement().await?;
            let renewed: Vec<i64> = on!(work.conn(), c => sqlx::query_scalar(hold)
                .bind(batch(rows)).bind(self.clock()).bind(micros(lease)).fetch_all(c).await)
            .map_err(read_failed)?;
            self.finish(work, rows.len()).await?;
            let renewed: HashSet<i64> = renewed.into_iter().collect();
            let rest: Vec<(i64, i64)> = rows.iter().filter(|(id, _)| !renewed.contains(id)).copied().collect();
            let mut ours: Vec<i64> = renewed.into_iter().collect();
            if !rest.is_empty() {
                let mut reader = self.reader().await?;
                let found: Vec<i64> =
                    on!(reader.conn(), c => sqlx::query_scalar(held).bind(batch(&rest)).fetch_all(c).await)
                        .map_err(read_failed)?;
                reader.leave();
                ours.extend(found);
            }
            Ok(ours)
        })
        .await
    }
}

/// Rows and tokens as a batch.
fn batch(rows: &[(i64, i64)]) -> String {
    Value::Array(rows.iter().map(|(id, token)| json!({ "id": id, "token": token })).collect()).to_string()
}
