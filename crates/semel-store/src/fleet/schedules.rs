//! The marks of schedules.

use semel::{Error, Result, Schedule, Scope, Timestamp, fleet::Mark};
use serde_json::{Value, json};

use crate::{
    Conn, Database, Tx,
    connection::{broken, read_failed},
    from_row, on,
};

/// The most schedules that are listed.
const MOST: i64 = 1000;

/// A mark as stored; without a spec, there is none.
struct MarkRow {
    tenant: String,
    service: String,
    kind: String,
    name: String,
    spec: Option<String>,
    since: Option<i64>,
    mark: Option<i64>,
    last_due: Option<i64>,
    next_due: Option<i64>,
    paused: bool,
    now: i64,
}

from_row!(MarkRow { tenant, service, kind, name, spec, since, mark, last_due, next_due, paused, now });

impl MarkRow {
    fn read(self) -> Result<Option<Mark>> {
        let (Some(spec), Some(since), Some(mark)) = (self.spec, self.since, self.mark) else { return Ok(None) };
        let scope = Scope::new(&self.tenant, &self.service, &self.kind);
        let scope = scope.map_err(|_| Error::Corrupt("the scope of a schedule"))?;
        let time = Timestamp::from_micros;
        let (last, next) = (self.last_due.map(time), self.next_due.map(time));
        let paused = self.paused;
        Ok(Some(Mark { scope, name: self.name, spec, since: time(since), at: time(mark), last, next, paused }))
    }
}

impl Database {
    pub(super) async fn load_marks(&self, schedules: &[Schedule]) -> Result<(Vec<Mark>, Timestamp)> {
        let key = |schedule: &Schedule| {
            let scope = schedule.scope();
            json!({ "tenant": scope.tenant(), "service": scope.service(), "kind": scope.kind(), "name": schedule.name() })
        };
        let keys = Value::Array(schedules.iter().map(key).collect()).to_string();
        let rows = self.read(async |conn| {
            on!(conn, c => sqlx::query_as(self.fleet_sql().marks).bind(keys).bind(self.clock()).fetch_all(&mut **c).await)
                .map_err(read_failed)
        });
        marks(rows.await?)
    }

    /// All schedules that a node has run, by scope and name, and the time: the last and the next due time of each. A
    /// schedule that no program has any more stays, overdue.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn schedules(&self) -> Result<(Vec<Mark>, Timestamp)> {
        let rows = self.read(async |conn| {
            on!(conn, c => sqlx::query_as(self.fleet_sql().all_marks)
                .bind(self.clock()).bind(MOST).fetch_all(&mut **c).await)
            .map_err(read_failed)
        });
        marks(self.answered(rows).await?)
    }

    pub(super) async fn move_mark_in(&self, tx: &Tx, from: Option<&Mark>, to: &Mark) -> Result<bool> {
        let sql = self.fleet_sql();
        let mut held = tx.connection().await?;
        let mut conn: Conn<'_> = held.get()?;
        let micros = |time: Option<Timestamp>| time.map(Timestamp::as_micros);
        let moved = on!(&mut conn, c => {
            let query = sqlx::query(if from.is_some() { sql.move_mark } else { sql.put_mark })
                .bind(to.scope.tenant())
                .bind(to.scope.service())
                .bind(to.scope.kind())
                .bind(&to.name)
                .bind(&to.spec)
                .bind(to.since.as_micros())
                .bind(to.at.as_micros())
                .bind(micros(to.last))
                .bind(micros(to.next));
            let query = match from {
                Some(from) => query.bind(&from.spec).bind(from.at.as_micros()),
                None => query,
            };
            query.execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken)?
        });
        Ok(moved == 1)
    }
}

/// The marks among rows, and the time.
fn marks(rows: Vec<MarkRow>) -> Result<(Vec<Mark>, Timestamp)> {
    let now = rows.iter().map(|row| row.now).max().unwrap_or(0);
    let marks = rows.into_iter().filter_map(|row| row.read().transpose()).collect::<Result<_>>()?;
    Ok((marks, Timestamp::from_micros(now)))
}
