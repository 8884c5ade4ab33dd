//! Reading: pages, sums of counters. Reads wait for no writer, and block none.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use semel::{
    Labels, Result, State, Timestamp,
    look::{Counted, DayTally, Filter, Listing, Page, Tallied, Tally, TallyFilter},
    micros,
};
use serde_json::{Value, json};

use crate::{
    Conn, Database, Reader,
    connection::{broken, read_failed},
    on, postgres,
    rows::Read,
};

/// How far the order of ids and the order of first claims may differ. Fences are drawn shortly before or after the time
/// is read, and PostgreSQL's clock may be set back: if by more than this, a listing by time may omit operations first
/// claimed around then.
const GRACE: Duration = Duration::from_secs(3600);

/// Planner settings of PostgreSQL for a read transaction: a table may have grown since it was last analysed. Due
/// operations are read in index order, no further than requested;
pub(crate) const IN_ORDER: &str = "BEGIN; SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

/// sums are aggregated in memory: there are few of them, however many counters. They are sorted afterwards, which the
/// planner overestimates so much that it would compile the query.
const ADDING_UP: &str = "BEGIN; SET LOCAL enable_sort = off; SET LOCAL jit = off";

/// Day or kind and labels, what was counted, and the number.
type TallyRow = (String, String, String, String, String, String, i64, i64);
type DayRow = (i64, String, String, String, i64);

impl Database {
    pub(crate) async fn look_list(&self, filter: &Filter, page: Page) -> Result<Listing> {
        let text = self.page_text(filter);
        let limit = page.limit.clamp(1, 500);
        let Labels([label1, label2, label3, label4]) = &filter.labels;
        let mut reader = self.reader().await?;
        let mut below = page.after.unwrap_or(i64::MAX);
        if filter.archived == Some(true) {
            // Archived operations are old: the newest of them is the starting point.
            let last: Option<i64> = on!(reader.conn(), c =>
                sqlx::query_scalar(self.look_sql().last_archived).fetch_one(&mut *c).await.map_err(read_failed)?);
            below = below.min(last.map_or(0, |last| last.saturating_add(1)));
        }
        let mut above = i64::MIN;
        if let Some(since) = filter.since {
            let safely = since.as_micros().saturating_sub(micros(GRACE));
            above = on!(reader.conn(), c =>
                sqlx::query_scalar(self.look_sql().last_before).bind(safely).fetch_one(&mut *c).await.map_err(read_failed)?);
        }
        let mut rows: Vec<Read> = on!(reader.conn(), c => sqlx::query_as(text)
            .bind(&filter.tenant)
            .bind(below)
            .bind(filter.before.map_or(i64::MAX, Timestamp::as_micros))
            .bind(&filter.service)
            .bind(&filter.kind)
            .bind(filter.state.map(State::as_str))
            .bind(i64::from(limit) + 1)
            .bind(filter.since.map_or(i64::MIN, Timestamp::as_micros))
            .bind(above)
            .bind(filter.archived)
            .bind(label1)
            .bind(label2)
            .bind(label3)
            .bind(label4)
            // Planned anew each time: whether ids or an index are faster depends on the time range.
            .persistent(false)
            .fetch_all(&mut *c)
            .await
            .map_err(read_failed)?);
        reader.leave();
        // One more than requested was read: it shows whether there is another page.
        let more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let next = rows.last().filter(|_| more).map(Read::id);
        let (items, unreadable) = Read::sorted(rows);
        Ok(Listing { items, unreadable, next })
    }

    /// How a page finds its rows: by the filter that leaves the fewest to read.
    fn page_text(&self, filter: &Filter) -> &'static str {
        let sql = self.look_sql();
        let [plain, since] = match (filter.state, &filter.labels.0, &filter.service, &filter.kind) {
            (Some(State::Processing), ..) => [sql.list_processing; 2],
            (Some(State::Pending | State::Failed | State::TimedOut | State::InDoubt), ..) => [sql.list_backlog; 2],
            // The last two labels have many values, the first two few.
            (_, [_, _, _, Some(_)], ..) => [sql.list_label4, sql.list_label4_since],
            (_, [_, _, Some(_), _], ..) => [sql.list_label3, sql.list_label3_since],
            (_, [_, Some(_), _, _], ..) => [sql.list_label2, sql.list_label2_since],
            (_, [Some(_), _, _, _], ..) => [sql.list_label1, sql.list_label1_since],
            (_, _, Some(_), Some(_)) => [sql.list_scope, sql.list_scope_since],
            _ => [sql.list; 2],
        };
        if filter.since.is_some() { since } else { plain }
    }

    /// The kinds of a tenant's operations of a service with this prefix, in order; at most [`Database::MOST_KINDS`].
    /// The cost depends on the number of kinds, not on the number of operations.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn kinds(&self, tenant: &str, service: &str, prefix: &str) -> Result<Vec<String>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            begin(&mut reader, IN_ORDER).await?;
            let kinds = on!(reader.conn(), c => sqlx::query_scalar(self.look_sql().find_kinds)
                .bind(tenant)
                .bind(service)
                .bind(prefix)
                .bind(i64::from(Self::MOST_KINDS))
                .fetch_all(&mut *c)
                .await
                .map_err(read_failed)?);
            end(reader).await?;
            Ok(kinds)
        })
        .await
    }

    /// The most kinds that are returned.
    pub const MOST_KINDS: u32 = 1000;

    /// When each of these operations last restarted, with newer data or by a decision; operations that never did are
    /// omitted. It reads their journals, newest notes first.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn begun_anew(&self, ids: &[i64]) -> Result<HashMap<i64, Timestamp>> {
        self.answered(async {
            let ids = Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string();
            let mut reader = self.reader().await?;
            let rows: Vec<(i64, Option<i64>)> = on!(reader.conn(), c =>
                sqlx::query_as(self.look_sql().begun_anew).bind(ids).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(rows.into_iter().filter_map(|(id, at)| Some((id, Timestamp::from_micros(at?)))).collect())
        })
        .await
    }

    /// Those of these operations that wait and that no worker runs: they are parked, or the policy of their last run
    /// allows no further attempt. An operation in doubt is not among them. The row of an operation does not tell it: the
    /// policy may be that of the worker, which the row does not have.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn never_due(&self, ids: &[i64]) -> Result<HashSet<i64>> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        self.answered(async {
            let ids = Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string();
            let mut reader = self.reader().await?;
            let found: Vec<i64> = on!(reader.conn(), c =>
                sqlx::query_scalar(self.look_sql().never_due).bind(ids).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(found.into_iter().collect())
        })
        .await
    }

    pub(crate) async fn look_tally(&self, filter: &TallyFilter) -> Result<Tallied<Tally>> {
        let rows: Vec<TallyRow> = self.tally_rows(self.look_sql().tally, filter).await?;
        let line = |(kind, label1, label2, from, to, answer, bucket, n): TallyRow| {
            let bucket = i32::try_from(bucket).unwrap_or(i32::MAX);
            Tally { kind, label1, label2, what: counted(from, to, answer, bucket), n }
        };
        Ok(tallied(rows, line))
    }

    pub(crate) async fn look_tally_days(&self, filter: &TallyFilter) -> Result<Tallied<DayTally>> {
        let rows: Vec<DayRow> = self.tally_rows(self.look_sql().tally_days, filter).await?;
        let line = |(day, from, to, answer, n): DayRow| DayTally { day, what: counted(from, to, answer, 0), n };
        Ok(tallied(rows, line))
    }

    async fn tally_rows<R>(&self, text: &'static str, filter: &TallyFilter) -> Result<Vec<R>>
    where
        R: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
        R: Send + Unpin,
    {
        let kinds: Vec<_> = filter.kinds.iter().map(|kind| json!({ "kind": kind })).collect();
        let kinds = (!kinds.is_empty()).then(|| Value::Array(kinds).to_string());
        let mut reader = self.reader().await?;
        begin(&mut reader, ADDING_UP).await?;
        let rows = on!(reader.conn(), c => sqlx::query_as(text)
            .bind(&filter.tenant)
            .bind(filter.since_hour)
            .bind(filter.until_hour.unwrap_or(i64::MAX))
            .bind(&filter.service)
            .bind(&kinds)
            .bind(&filter.label1)
            .bind(&filter.label2)
            .bind(i64::from(Tallied::<R>::MOST) + 1)
            .bind(filter.by.as_str())
            .fetch_all(&mut *c)
            .await
            .map_err(read_failed)?);
        end(reader).await?;
        Ok(rows)
    }
}

/// Begins a read transaction with these planner settings. Differs because SQLite plans by its indexes alone.
pub(crate) async fn begin(reader: &mut Reader, planned: &'static str) -> Result<()> {
    match reader.conn() {
        Conn::Postgres(c) => sqlx::raw_sql(planned).execute(c).await.map(drop).map_err(broken),
        Conn::Sqlite(_) => Ok(()),
    }
}

pub(crate) async fn end(mut reader: Reader) -> Result<()> {
    if let Conn::Postgres(c) = reader.conn() {
        postgres::commit(c).await?;
    }
    reader.leave();
    Ok(())
}

fn counted(from: String, to: String, answer: String, bucket: i32) -> Counted {
    if answer.is_empty() { Counted::Change { from, to, bucket } } else { Counted::Answer(answer) }
}

fn tallied<R, T: Ord>(mut rows: Vec<R>, line: impl Fn(R) -> T) -> Tallied<T> {
    let most = Tallied::<T>::MOST as usize;
    let cut = rows.len() > most;
    rows.truncate(most);
    let mut lines: Vec<T> = rows.into_iter().map(line).collect();
    lines.sort_unstable();
    Tallied { lines, cut }
}
