//! Taking: what is due is claimed in one transaction, for as many as a worker has free hands for.
//!
//! Rows are found in the order of the index of what waits, and locked without waiting for others. What becomes of each is
//! decided as for any claim, by the machine.

use std::collections::{HashMap, HashSet};

use semel::{
    Error, Fence, Operation, Result, Store as _, Timestamp, crash_point,
    look::{Due, Task},
    machine::{Answer, Request},
    micros,
    store::{Applied, LeaseWrite, Swept, Take, Want},
};
use serde_json::{Value, json};

use crate::{
    Conn, Database,
    apply::{Changes, load_each},
    audit::Audit,
    batch::{self, ByKey},
    connection::{broken, read_failed},
    database::Inner,
    look::IN_ORDER,
    messaging::News,
    on, postgres,
    sql::Sql,
    sqlite,
};

/// How many rows of each priority are looked at beyond those that are wanted: other nodes may hold that many.
const MARGIN: u32 = 64;

/// What a transaction that takes needs of its database.
struct Taking<'a> {
    sql: &'a Sql,
    take: &'a Take,
    clock: Option<i64>,
}

/// A row that was picked: the number of the want, and the operation.
struct Picked {
    want: usize,
    id: i64,
}

impl Database {
    pub(crate) async fn take_work(&self, take: &Take) -> Result<Vec<(usize, Applied)>> {
        let taking = Taking { sql: self.sql(), take, clock: self.clock() };
        let (taken, unreadable) = match self.inner() {
            Inner::Postgres(db) => {
                let take = async {
                    let mut seat = db.lane_take().await?;
                    sqlx::raw_sql(IN_ORDER).execute(&mut *seat).await.map_err(broken)?;
                    let picked = taking.pick(&mut Conn::Postgres(&mut seat)).await?;
                    // Drawn under the locks: fences from before them may be lower than what the rows have by now.
                    let (now, fences) = db.draw(&mut seat, picked.len()).await?;
                    let taken = taking.claim(&mut Conn::Postgres(&mut seat), picked, fences, now).await?;
                    postgres::commit(&mut seat).await?;
                    seat.leave();
                    Ok(taken)
                };
                db.lane_answered(take).await?
            }
            Inner::Sqlite(db) => {
                let mut tx = sqlite::Writer::begin(&db.writer).await?;
                let picked = taking.pick(&mut Conn::Sqlite(tx.connection())).await?;
                if picked.is_empty() {
                    tx.roll_back().await;
                    return Ok(Vec::new());
                }
                let (now, fences) = db.draw(tx.connection(), picked.len()).await?;
                let taken = taking.claim(&mut Conn::Sqlite(tx.connection()), picked, fences, now).await?;
                tx.commit().await.map_err(broken)?;
                taken
            }
        };
        // In a transaction of its own: what was taken is taken.
        if let Err(error) = self.set_aside(Task::Run, &unreadable, &mut Swept::default()).await {
            tracing::warn!(%error, "what is due and cannot be read could not be set aside");
        }
        Ok(taken)
    }

    /// Lets no node begin work of a kind, of any tenant, until it is resumed. What runs goes on.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn pause_kind(&self, service: &str, kind: &str, actor: &str, reason: &str) -> Result<()> {
        let now = self.now().await?.as_micros();
        self.change_pause(self.sql().pause, (service, kind), (actor, reason), now, "work.pause").await
    }

    /// Lets nodes begin work of a kind again.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn resume_kind(&self, service: &str, kind: &str, actor: &str, reason: &str) -> Result<()> {
        let now = self.now().await?.as_micros();
        self.change_pause(self.sql().resume_kind, (service, kind), (actor, reason), now, "work.resume").await?;
        self.tell_due();
        Ok(())
    }

    async fn change_pause(
        &self,
        text: &'static str,
        (service, kind): (&str, &str),
        (actor, reason): (&str, &str),
        now: i64,
        action: &'static str,
    ) -> Result<()> {
        let subject = format!("{service}/{kind}");
        let audit = || Audit { tenant: "*", actor, action, subject: &subject, reason };
        let change = async |conn: &mut Conn<'_>| -> Result<()> {
            let actor = actor.replace(char::is_control, " ");
            on!(conn, c => sqlx::query(text)
                .bind(service).bind(kind).bind(now).bind(actor).bind(reason)
                .execute(&mut **c).await.map(drop).map_err(broken)?);
            audit().write(conn, self.sql(), None, None, Some(now)).await
        };
        match self.inner() {
            Inner::Postgres(db) => {
                let mut seat = db.lane_seat().await?;
                change(&mut Conn::Postgres(&mut seat)).await?;
                postgres::commit(&mut seat).await?;
                seat.leave();
            }
            Inner::Sqlite(db) => {
                let mut tx = sqlite::Writer::begin(&db.writer).await?;
                change(&mut Conn::Sqlite(tx.connection())).await?;
                tx.commit().await.map_err(broken)?;
            }
        }
        Ok(())
    }

    /// Wakes workers of this process, if something was enqueued.
    pub(crate) fn tell_enqueued(&self, requests: &[std::sync::Arc<Request>]) {
        if requests.iter().any(|request| request.later.is_some()) {
            self.tell_due();
        }
    }

    /// Wakes workers of this process, if something may run again.
    pub(crate) fn tell_put_back(&self, writes: &[LeaseWrite]) {
        use semel::machine::Write;
        let runs_again =
            |write: &LeaseWrite| matches!(write.write, Write::Fail(_) | Write::Release { .. } | Write::Withdraw);
        if writes.iter().any(runs_again) {
            self.tell_due();
        }
    }

    /// Wakes workers of this process.
    pub(crate) fn tell_due(&self) {
        self.messages().wakes.tell(News::Due);
    }
}

impl Taking<'_> {
    /// Finds and locks what is due, for each want that may be met.
    async fn pick(&self, conn: &mut Conn<'_>) -> Result<Vec<Picked>> {
        let paused = self.paused(conn).await?;
        let (mut picked, mut bytes) = (Vec::<Picked>::new(), 0);
        for (n, want) in self.take.wants.iter().enumerate() {
            if paused.contains(&(want.scope.service().to_owned(), want.scope.kind().to_owned())) {
                continue;
            }
            let most = self.allowed(conn, want).await?;
            let mut here = HashSet::new();
            let oldest = want.oldest.min(most);
            for (text, most) in [(self.sql.pick_oldest, oldest), (self.sql.pick, most)] {
                if most == 0 || here.len() >= most as usize {
                    continue;
                }
                let rows: Vec<(i64, i64)> = on!(conn, c => sqlx::query_as(text)
                    .bind(want.scope.service())
                    .bind(want.scope.kind())
                    .bind(want.scope.tenant())
                    .bind(self.clock)
                    .bind(i64::from(most.saturating_add(MARGIN)))
                    .bind(i64::from(most))
                    .fetch_all(&mut **c)
                    .await
                    .map_err(read_failed)?);
                for (id, size) in rows {
                    bytes += usize::try_from(size).unwrap_or(usize::MAX);
                    let fits = picked.is_empty() || bytes <= Due::BYTES;
                    if fits && here.len() < most as usize && here.insert(id) {
                        picked.push(Picked { want: n, id });
                    }
                }
            }
            if !want.limits.is_none() {
                self.note_started(conn, want, here.len()).await?;
            }
        }
        Ok(picked)
    }

    /// The kinds that a person has paused.
    async fn paused(&self, conn: &mut Conn<'_>) -> Result<HashSet<(String, String)>> {
        let kinds: Vec<Value> = self
            .take
            .wants
            .iter()
            .map(|want| json!({ "service": want.scope.service(), "kind": want.scope.kind() }))
            .collect();
        let kinds = Value::Array(kinds).to_string();
        let paused: Vec<(String, String)> = on!(conn, c =>
            sqlx::query_as(self.sql.find_paused).bind(kinds).fetch_all(&mut **c).await.map_err(read_failed)?);
        Ok(paused.into_iter().collect())
    }

    /// How many may start, by what the fleet may do.
    async fn allowed(&self, conn: &mut Conn<'_>, want: &Want) -> Result<u32> {
        if want.limits.is_none() {
            return Ok(want.most);
        }
        let (service, kind) = (want.scope.service(), want.scope.kind());
        let free_at: i64 = on!(conn, c =>
            sqlx::query_scalar(self.sql.hold_limit).bind(service).bind(kind).fetch_one(&mut **c).await.map_err(broken)?);
        let mut most = want.most;
        if let Some(at_once) = want.limits.at_once {
            let running: i64 = on!(conn, c => sqlx::query_scalar(self.sql.count_running)
                .bind(service).bind(kind).bind(self.clock).fetch_one(&mut **c).await.map_err(broken)?);
            most = most.min(at_once.saturating_sub(u32::try_from(running).unwrap_or(u32::MAX)));
        }
        if let Some(every) = want.limits.every {
            let now = self.now(conn).await?;
            let starts = if free_at > now { 0 } else { (now - free_at.max(now - BURST)) / micros(every).max(1) + 1 };
            most = most.min(u32::try_from(starts).unwrap_or(u32::MAX));
        }
        Ok(most)
    }

    /// Notes that so many were started, for the rate.
    async fn note_started(&self, conn: &mut Conn<'_>, want: &Want, n: usize) -> Result<()> {
        let (Some(every), true) = (want.limits.every, n > 0) else { return Ok(()) };
        let now = self.now(conn).await?;
        let (service, kind) = (want.scope.service(), want.scope.kind());
        let free_at: i64 = on!(conn, c =>
            sqlx::query_scalar(self.sql.hold_limit).bind(service).bind(kind).fetch_one(&mut **c).await.map_err(broken)?);
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        let next = free_at.max(now - BURST) + n.saturating_mul(micros(every));
        on!(conn, c => sqlx::query(self.sql.put_limit)
            .bind(service).bind(kind).bind(next).execute(&mut **c).await.map(drop).map_err(broken))
    }

    async fn now(&self, conn: &mut Conn<'_>) -> Result<i64> {
        on!(conn, c => sqlx::query_scalar(self.sql.now).bind(self.clock).fetch_one(&mut **c).await.map_err(broken))
    }

    /// Claims what was picked. What cannot be read, and why, comes beside it.
    async fn claim(
        &self,
        conn: &mut Conn<'_>,
        picked: Vec<Picked>,
        fences: Vec<Fence>,
        now: Timestamp,
    ) -> Result<(Vec<(usize, Applied)>, Vec<(i64, String)>)> {
        let ids: Vec<i64> = picked.iter().map(|picked| picked.id).collect();
        let (found, unreadable) = load_each(conn, self.sql, &ids).await?;
        let unreadable = unreadable.into_iter().map(|row| (row.id, row.why)).collect();
        let mut found: HashMap<i64, Operation> = found.into_iter().map(|op| (op.id, op)).collect();
        let mut rows = ByKey::new();
        let mut requests = Vec::new();
        for (Picked { want, id }, fence) in picked.iter().zip(fences) {
            let Some(op) = found.remove(id) else { continue };
            requests.push((*want, *id, self.request(&op, *want)?, fence));
            rows.insert((op.scope.clone(), op.key.clone()), op);
        }
        let mut changes = Changes::default();
        let claims = requests.iter().enumerate().map(|(n, (_, _, request, fence))| (n, request, *fence));
        let answers = batch::claim_all(&mut changes, &mut rows, claims, now);
        batch::saved(changes.save(conn, self.sql).await?)?;
        let given_up = answers.iter().filter(|(_, applied)| applied.answer == Answer::Exhausted);
        let given_up: Vec<Value> = given_up.map(|(n, _)| json!({ "id": requests[*n].1 })).collect();
        conn.batch(self.sql.none_due, &given_up).await?;
        crash_point!("store.take.claimed");
        let acquired = answers.into_iter().filter(|(_, applied)| applied.answer == Answer::Acquired);
        Ok((acquired.map(|(n, applied)| (requests[n].0, applied)).collect(), unreadable))
    }

    /// The claim of what is stored, as it is stored.
    fn request(&self, op: &Operation, want: usize) -> Result<Request> {
        let want = self.take.wants.get(want).ok_or(Error::Contradiction("the number of a want"))?;
        Ok(Request {
            scope: op.scope.clone(),
            key: op.key.clone(),
            fingerprint: op.fingerprint,
            order: op.order,
            payload: op.payload.clone(),
            labels: op.labels.clone(),
            policy: want.policy.clone(),
            at_once: false,
            later: None,
            token: self.take.token,
            owner: self.take.owner.clone(),
        })
    }
}

/// Starts that were not made are made up for within this time, not for ever: a rate is no budget to be saved.
const BURST: i64 = 1_000_000;
