//! Looking: what is due, pages, sums of counters. None of it waits for a writer, or makes one wait.

use std::{collections::HashMap, time::Duration};

use semel::{
    Fence, Labels, Operation, Result, Scope, State, Timestamp,
    look::{Counted, DayTally, Due, DueKind, Filter, Listing, Page, Tallied, Tally, TallyFilter, Task, Unreadable},
    micros,
    store::Swept,
};
use serde_json::{Value, json};

use crate::{
    Conn, Database, Reader, apply,
    connection::{broken, read_failed},
    database::Inner,
    on, postgres,
    rows::Read,
    sqlite,
};

/// By how much the order of ids and the order of first claims may differ. Fences are drawn moments before or after the
/// time is read, and PostgreSQL's clock may be set back: if by more than this, a listing by time may leave out what was
/// first claimed around then.
const GRACE: Duration = Duration::from_secs(3600);

/// How PostgreSQL is to plan a look, for a transaction: what is few today may be many tomorrow, and nobody has told the
/// planner yet. What is due is read in the order of its index, and no further than asked for;
pub(crate) const IN_ORDER: &str = "BEGIN; SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off;
     SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

/// sums are added up in memory: there are few of them, however many counters.
/// The few are then sorted all the same, which looks so dear to the planner that it would compile the query first.
const ADDING_UP: &str = "BEGIN; SET LOCAL enable_sort = off; SET LOCAL jit = off";

/// How often a look at what is due begins anew, because all that it found had to be set aside.
const MOST_LOOKS: u32 = 8;

/// Day or kind and labels, what was counted, and how often.
type TallyRow = (String, String, String, String, String, String, i64, i64);
type DayRow = (i64, String, String, String, i64);

impl Database {
    /// What is due. One that cannot be read is set aside, and the next in line is looked for.
    pub(crate) async fn look_due(&self, scope: &Scope, limit: u32) -> Result<Due> {
        for _ in 0..MOST_LOOKS {
            let (due, unreadable) = self.look_due_once(scope, limit).await?;
            let unreadable: Vec<_> = unreadable.into_iter().map(|row| (row.id, row.why)).collect();
            if unreadable.is_empty() {
                return Ok(due);
            }
            let set_aside = self.set_aside(Task::Run, &unreadable, &mut Swept::default()).await;
            if let Err(error) = &set_aside {
                tracing::warn!(%error, "what is due and cannot be read could not be set aside");
            }
            if set_aside.is_err() || !due.operations.is_empty() {
                return Ok(due);
            }
        }
        Ok(Due::default())
    }

    async fn look_due_once(&self, scope: &Scope, limit: u32) -> Result<(Due, Vec<Unreadable>)> {
        let limit = limit.clamp(1, Due::MOST) as usize;
        let sql = self.sql();
        let mut reader = self.reader().await?;
        begin(&mut reader, IN_ORDER).await?;
        // One more than asked for: it tells when to ask again.
        let waiting: Vec<(i64, i64, i64, i64)> = on!(reader.conn(), c => sqlx::query_as(sql.find_waiting)
            .bind(scope.service())
            .bind(scope.kind())
            .bind(scope.tenant())
            .bind(self.clock())
            .bind(i64::try_from(limit + 1).unwrap_or(i64::MAX))
            .fetch_all(&mut *c)
            .await
            .map_err(read_failed)?);
        // By priority; what is due later follows what is due now, within each.
        let (mut ids, mut bytes, mut next) = (Vec::new(), 0, None::<(Timestamp, Timestamp)>);
        for (id, due, size, now) in waiting {
            let is_due = due <= now;
            bytes += if is_due { usize::try_from(size).unwrap_or(usize::MAX) } else { 0 };
            let fits = ids.is_empty() || (ids.len() < limit && bytes <= Due::BYTES);
            if is_due && fits {
                ids.push(id);
            } else {
                let later = (Timestamp::from_micros(due), Timestamp::from_micros(now));
                next = Some(next.map_or(later, |next| next.min(later)));
            }
        }
        let (found, unreadable) = apply::load_each(&mut reader.conn(), sql, &ids).await?;
        end(reader).await?;
        let mut found: HashMap<i64, Operation> = found.into_iter().map(|op| (op.id, op)).collect();
        // One may have been claimed since.
        let waits = |op: &Operation| matches!(op.state, State::Pending | State::Failed | State::TimedOut);
        let operations = ids.iter().filter_map(|id| found.remove(id)).filter(waits).collect();
        let due = Due { operations, next: next.map(|(due, _)| due), wait: next.map(|(due, now)| due.since(now)) };
        Ok((due, unreadable))
    }

    pub(crate) async fn look_due_kinds(&self, service: &str, after: (&str, &str)) -> Result<Vec<DueKind>> {
        let mut reader = self.reader().await?;
        begin(&mut reader, IN_ORDER).await?;
        let sql = self.sql().find_waiting_kinds;
        let rows: Vec<(String, String, Option<i64>, i64)> = on!(reader.conn(), c => sqlx::query_as(sql)
            .bind(service)
            .bind(after.0)
            .bind(after.1)
            .bind(self.clock())
            .bind(i64::from(DueKind::MOST))
            .fetch_all(&mut *c)
            .await
            .map_err(read_failed)?);
        end(reader).await?;
        let kind = |(kind, tenant, due, now): (String, String, Option<i64>, i64)| {
            let next = Timestamp::from_micros(due?);
            Some(DueKind { kind, tenant, next, wait: next.since(Timestamp::from_micros(now)) })
        };
        Ok(rows.into_iter().filter_map(kind).collect())
    }

    pub(crate) async fn take_off_due(&self, id: i64, fence: Fence) -> Result<()> {
        match self.inner() {
            Inner::Postgres(db) => {
                let mut seat = db.lane_seat().await?;
                // Whoever lets it run again holds these; only then is what we see of it the last word.
                postgres::lock(&mut seat, &[id]).await?;
                let off = sqlx::query(db.sql.not_due).bind(id).bind(fence.0);
                off.execute(&mut *seat).await.map_err(broken)?;
                postgres::commit(&mut seat).await?;
                seat.leave();
            }
            Inner::Sqlite(db) => {
                let mut tx = sqlite::Writer::begin(&db.writer).await?;
                let off = sqlx::query(db.sql.not_due).bind(id).bind(fence.0);
                off.execute(tx.connection()).await.map_err(broken)?;
                tx.commit().await.map_err(broken)?;
            }
        }
        Ok(())
    }

    pub(crate) async fn look_list(&self, filter: &Filter, page: Page) -> Result<Listing> {
        let sql = self.sql();
        let text = self.page_text(filter);
        let limit = page.limit.clamp(1, 500);
        let Labels([label1, label2, label3, label4]) = &filter.labels;
        let mut reader = self.reader().await?;
        let mut below = page.after.unwrap_or(i64::MAX);
        if filter.archived == Some(true) {
            // What is archived is old: the newest of it is where to begin.
            let last: Option<i64> = on!(reader.conn(), c =>
                sqlx::query_scalar(sql.last_archived).fetch_one(&mut *c).await.map_err(read_failed)?);
            below = below.min(last.map_or(0, |last| last.saturating_add(1)));
        }
        let mut above = i64::MIN;
        if let Some(since) = filter.since {
            let safely = since.as_micros().saturating_sub(micros(GRACE));
            above = on!(reader.conn(), c =>
                sqlx::query_scalar(sql.last_before).bind(safely).fetch_one(&mut *c).await.map_err(read_failed)?);
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
            // Planned anew each time: whether to go by ids or by an index depends on how long ago.
            .persistent(false)
            .fetch_all(&mut *c)
            .await
            .map_err(read_failed)?);
        reader.leave();
        // One more than asked for was read: it tells whether there is another page.
        let more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let next = rows.last().filter(|_| more).map(Read::id);
        let (items, unreadable) = Read::sorted(rows);
        Ok(Listing { items, unreadable, next })
    }

    /// How a page finds its rows: by whatever leaves the fewest to read.
    fn page_text(&self, filter: &Filter) -> &'static str {
        let sql = self.sql();
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

    /// The kinds of a tenant's operations of a service that begin with a text, in their order; at most
    /// [`Database::MOST_KINDS`]. It costs by the number of kinds, however much there is of each.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn kinds(&self, tenant: &str, service: &str, prefix: &str) -> Result<Vec<String>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            begin(&mut reader, IN_ORDER).await?;
            let kinds = on!(reader.conn(), c => sqlx::query_scalar(self.sql().find_kinds)
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

    /// How many kinds are told at most.
    pub const MOST_KINDS: u32 = 1000;

    /// When each of these operations last began anew, with newer data or because somebody decided so; those that never
    /// did are not among them. It reads their journals from the newest note on.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn begun_anew(&self, ids: &[i64]) -> Result<HashMap<i64, Timestamp>> {
        self.answered(async {
            let ids = Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string();
            let mut reader = self.reader().await?;
            let rows: Vec<(i64, Option<i64>)> = on!(reader.conn(), c =>
                sqlx::query_as(self.sql().begun_anew).bind(ids).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(rows.into_iter().filter_map(|(id, at)| Some((id, Timestamp::from_micros(at?)))).collect())
        })
        .await
    }

    pub(crate) async fn look_tally(&self, filter: &TallyFilter) -> Result<Tallied<Tally>> {
        let rows: Vec<TallyRow> = self.tally_rows(self.sql().tally, filter).await?;
        let line = |(kind, label1, label2, from, to, answer, bucket, n): TallyRow| {
            let bucket = i32::try_from(bucket).unwrap_or(i32::MAX);
            Tally { kind, label1, label2, what: counted(from, to, answer, bucket), n }
        };
        Ok(tallied(rows, line))
    }

    pub(crate) async fn look_tally_days(&self, filter: &TallyFilter) -> Result<Tallied<DayTally>> {
        let rows: Vec<DayRow> = self.tally_rows(self.sql().tally_days, filter).await?;
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

/// Begins a look that is planned as said. Differs because SQLite plans by its indexes alone.
async fn begin(reader: &mut Reader, planned: &'static str) -> Result<()> {
    match reader.conn() {
        Conn::Postgres(c) => sqlx::raw_sql(planned).execute(c).await.map(drop).map_err(broken),
        Conn::Sqlite(_) => Ok(()),
    }
}

async fn end(mut reader: Reader) -> Result<()> {
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
