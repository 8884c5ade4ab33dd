//! Reading operations.

use semel::{
    Fence, Key, Operation, Outcome, Result, Scope, State, Token,
    look::{Count, DayTally, DueKind, Filter, Listing, Page, Tallied, Tally, TallyFilter},
    prelude::*,
    store::{Glance, Look, MOST_NOTES, Story},
};
use serde_json::json;

use crate::{
    Conn, Database, Reader, apply, connection::read_failed, counters::CountRow, on, postgres, repeats, rows, sqlite,
};

impl Look for Database {
    async fn glance(&self, ids: Vec<i64>) -> Result<Vec<Glance>> {
        self.answered(async {
            let now = self.now().await?.as_micros();
            let rows: Vec<_> = ids.iter().map(|id| json!({ "id": id })).collect();
            let json = serde_json::Value::Array(rows).to_string();
            let mut reader = self.reader().await?;
            let sql = self.look_sql().glance;
            let seen: Vec<(i64, String, i64, Option<i64>)> =
                on!(reader.conn(), c => sqlx::query_as(sql).bind(json).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            let glance = |(id, state, fence, deadline): (i64, String, i64, Option<i64>)| {
                let state: State = state.parse()?;
                Ok(Glance { id, state, fence: Fence(fence), live: deadline.is_some_and(|deadline| deadline > now) })
            };
            seen.into_iter().map(glance).collect()
        })
        .await
    }

    async fn by_id(&self, tenant: &str, id: i64) -> Result<Option<Operation>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let found = apply::load_by_id(&mut reader.conn(), self.sql(), &[id]).await?.remove(&id);
            let found = found.filter(|op| op.scope.tenant() == tenant);
            let found = self.with_archived(&mut reader, found).await?;
            reader.leave();
            Ok(found)
        })
        .await
    }

    async fn by_key(&self, scope: &Scope, key: &Key) -> Result<Option<Operation>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let found = apply::load_by_key(&mut reader.conn(), self.sql(), std::iter::once((scope, key))).await?;
            let found = self.with_archived(&mut reader, found.into_values().next()).await?;
            reader.leave();
            Ok(found)
        })
        .await
    }

    async fn due_kinds(&self, service: &str, after: (&str, &str)) -> Result<Vec<DueKind>> {
        self.answered(self.look_due_kinds(service, after)).await
    }

    async fn taken_under(&self, token: Token) -> Result<Vec<(i64, Fence)>> {
        self.answered(async {
            let now = self.now().await?.as_micros();
            let mut reader = self.reader().await?;
            let (text, conn) = match reader.conn() {
                conn @ Conn::Postgres(_) => (postgres::hot::TAKEN_UNDER, conn),
                conn @ Conn::Sqlite(_) => (sqlite::hot::TAKEN_UNDER, conn),
            };
            let found: Vec<(i64, i64)> = on!(conn, c =>
                sqlx::query_as(text).bind(&token.0[..]).bind(now).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(found.into_iter().map(|(id, fence)| (id, Fence(fence))).collect())
        })
        .await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Listing> {
        self.answered(self.look_list(filter, page)).await
    }

    async fn journal(&self, id: i64) -> Result<Story> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let most = i64::try_from(MOST_NOTES).unwrap_or(i64::MAX);
            let notes: Vec<rows::NoteRow> = on!(reader.conn(), c =>
                sqlx::query_as(self.look_sql().load_journal).bind(id).bind(most).fetch_all(&mut *c).await.map_err(read_failed)?);
            let repeats = repeats::load(&mut reader.conn(), self.sql(), &[id]).await?;
            reader.leave();
            let notes = notes.into_iter().filter_map(rows::NoteRow::read).collect();
            let mut repeats: Vec<_> = repeats.into_iter().map(|((_, repeat), repeats)| (repeat, repeats)).collect();
            repeats.sort_by_key(|(repeat, _)| *repeat);
            Ok((notes, repeats))
        })
        .await
    }

    async fn counts(&self, tenant: &str, since_hour: i64) -> Result<Vec<Count>> {
        self.answered(async {
            let sql = self.look_sql().load_counts;
            let mut reader = self.reader().await?;
            let rows: Vec<CountRow> = on!(reader.conn(), c =>
                sqlx::query_as(sql).bind(tenant).bind(since_hour).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(rows.into_iter().map(CountRow::read).collect())
        })
        .await
    }

    async fn tally(&self, filter: &TallyFilter) -> Result<Tallied<Tally>> {
        self.answered(self.look_tally(filter)).await
    }

    async fn tally_days(&self, filter: &TallyFilter) -> Result<Tallied<DayTally>> {
        self.answered(self.look_tally_days(filter)).await
    }
}

impl Database {
    /// An archived operation with its data restored.
    async fn with_archived(&self, reader: &mut Reader, found: Option<Operation>) -> Result<Option<Operation>> {
        let Some(mut op) = found else { return Ok(None) };
        if op.archived {
            let sql = self.look_sql().load_archived;
            let data: Option<(Option<Vec<u8>>, Vec<u8>, bool)> = on!(reader.conn(), c =>
                sqlx::query_as(sql).bind(op.id).fetch_optional(&mut *c).await.map_err(read_failed)?);
            if let Some((payload, outcome, kept)) = data {
                op.payload = payload.map(crate::codec::decode).transpose()?;
                op.outcome = Some(Outcome { kept, body: crate::codec::decode(outcome)? });
            }
        }
        Ok(Some(op))
    }
}
