//! Take: claims due operations in one transaction, as many as a worker has free seats for.
//!
//! It finds rows in the order of the backlog's index, and locks them without waiting for others. The state machine
//! decides about each, as for any claim.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use semel::{
    Error, Fence, Operation, Result, Scope, Timestamp, crash_point,
    look::Task,
    machine::{Answer, Request},
    micros,
    prelude::*,
    store::{Applied, Swept, Take, Want},
};
use serde_json::{Value, json};

use crate::{
    Conn, Database,
    apply::{Changes, load_each},
    audit::Audit,
    batch::{self, ByKey},
    connection::{broken, read_failed},
    database::Inner,
    fleet::Paused,
    fronts::Fronts,
    on, postgres,
    project::Tables,
    sql::WorkSql,
    sqlite,
};

/// How many rows of each priority are read beyond those wanted: other nodes may have locked that many.
const MARGIN: u32 = 64;

/// How long to wait for an operation without attempts left: the worker waits with it.
const NOT_LONG: &str = "SET LOCAL lock_timeout = '250ms'";

/// The context of a take's transaction.
struct Taking<'a> {
    sql: &'a Tables,
    work: &'a WorkSql,
    fronts: &'a Fronts,
    take: &'a Take,
    clock: Option<i64>,
}

/// Picked operations that could not be claimed.
#[derive(Default)]
struct Left {
    /// Unreadable operations, with the reason.
    unreadable: Vec<(i64, String)>,
    /// Operations without attempts left that a row of a service follows.
    exhausted: Vec<(i64, Fence)>,
}

/// A picked row: the index of the want, and the operation.
#[derive(Clone, Copy)]
pub(crate) struct Picked {
    pub(crate) want: usize,
    pub(crate) id: i64,
}

/// The running operations of each kind with a limit, by service and kind.
type Running<'a> = HashMap<(&'a str, &'a str), u32>;

/// Taken operations, by the index of their want; and those that could not be claimed.
type Taken = (Vec<(usize, Applied)>, Left);

impl Database {
    pub(crate) async fn take_work(&self, take: &Take) -> Result<Vec<(usize, Applied)>> {
        let mut picked = Vec::new();
        match self.take_once(take, &mut picked).await {
            Err(error) if !error.is_transient() && !picked.is_empty() => self.take_apart(take).await,
            taken => taken,
        }
    }

    /// Takes one by one, after the database refused all of them together, until the offending one is found and set
    /// aside. The next take gets the rest at once: the leases of these are not renewed before they are answered, so
    /// there is little time.
    async fn take_apart(&self, take: &Take) -> Result<Vec<(usize, Applied)>> {
        let shortest = take.wants.iter().map(|want| want.policy.lease).min().unwrap_or_default();
        let (begun, mut taken) = (Instant::now(), Vec::new());
        for (n, want) in take.wants.iter().enumerate() {
            let one = Take { wants: vec![Want { most: 1, since: None, ..want.clone() }], ..take.clone() };
            for _ in 0..want.most.min(MARGIN) {
                if !taken.is_empty() && begun.elapsed() > shortest / 3 {
                    return Ok(taken);
                }
                let mut picked = Vec::new();
                match self.take_once(&one, &mut picked).await {
                    Ok(_) if picked.is_empty() => break,
                    Ok(found) => taken.extend(found.into_iter().map(|(_, applied)| (n, applied))),
                    Err(error) if error.is_transient() || picked.is_empty() => return Err(error),
                    Err(error) => {
                        let refused: Vec<_> = picked.into_iter().map(|id| (id, error.to_string())).collect();
                        self.set_aside(Task::Run, &refused, &mut Swept::default()).await?;
                        if !taken.is_empty() {
                            return Ok(taken);
                        }
                    }
                }
            }
        }
        Ok(taken)
    }

    /// Takes in one transaction; `ids` are those that it found.
    async fn take_once(&self, take: &Take, ids: &mut Vec<i64>) -> Result<Vec<(usize, Applied)>> {
        let (sql, work, fronts) = (self.sql(), self.work_sql(), self.fronts());
        let taking = Taking { sql, work, fronts, take, clock: self.clock() };
        let (taken, left) = match self.inner() {
            Inner::Postgres(db) => db.lane_answered(taking.in_postgres(db, ids)).await?,
            Inner::Sqlite(db) => {
                let mut tx = sqlite::Writer::begin(&db.writer).await?;
                let picked = taking.pick(&mut Conn::Sqlite(tx.connection())).await?;
                if picked.is_empty() {
                    tx.roll_back().await;
                    return Ok(Vec::new());
                }
                ids.extend(picked.iter().map(|picked| picked.id));
                let (now, fences) = db.draw(tx.connection(), picked.len()).await?;
                let taken = taking.claim(&mut Conn::Sqlite(tx.connection()), picked, fences, now).await?;
                crash_point!("store.take.claimed");
                tx.commit().await.map_err(broken)?;
                taken
            }
        };
        // In separate transactions: the take has committed.
        let mut aside = left.unreadable;
        for (id, fence) in left.exhausted {
            match self.take_off_due(id, fence).await {
                Err(error) if !error.is_transient() => aside.push((id, error.to_string())),
                Err(error) => {
                    tracing::debug!(operation = id, %error, "an exhausted operation stays due until the next take");
                }
                Ok(()) => {}
            }
        }
        if let Err(error) = self.set_aside(Task::Run, &aside, &mut Swept::default()).await {
            tracing::warn!(%error, "due operations that cannot run could not be set aside");
        }
        Ok(taken)
    }

    /// Removes an operation without attempts left from the due ones, if it still has this fence.
    async fn take_off_due(&self, id: i64, fence: Fence) -> Result<()> {
        match self.inner() {
            Inner::Postgres(db) => {
                let take_off = async {
                    let mut seat = db.lane_seat().await?;
                    sqlx::raw_sql(NOT_LONG).execute(&mut *seat).await.map_err(broken)?;
                    // A transaction that lets it run again locks these; so the row under this lock is final.
                    postgres::lock(&mut seat, &[id]).await?;
                    self.give_up(&mut Conn::Postgres(&mut seat), id, fence).await?;
                    postgres::commit(&mut seat).await?;
                    seat.leave();
                    Ok(())
                };
                db.lane_answered(take_off).await?;
            }
            Inner::Sqlite(db) => {
                let mut tx = sqlite::Writer::begin(&db.writer).await?;
                self.give_up(&mut Conn::Sqlite(tx.connection()), id, fence).await?;
                tx.commit().await.map_err(broken)?;
            }
        }
        Ok(())
    }

    /// Moves the next start of a kind back by starts that were not used. It may be moved too far only if it is moved
    /// twice: a caller that gets an error does not know, and gives nothing back.
    pub(crate) async fn give_back(&self, service: &str, kind: &str, starts: u32, every: Duration) -> Result<bool> {
        let unused = i64::from(starts).saturating_mul(micros(every));
        self.in_short(async |conn| {
            on!(conn, c => sqlx::query(self.work_sql().give_back).bind(service).bind(kind).bind(unused)
                .execute(&mut **c).await.map(|done| done.rows_affected() > 0).map_err(broken))
        })
        .await
    }

    /// Pauses a kind, of all tenants, until it is resumed: no node starts it, and schedules enqueue no runs of it.
    /// Running operations continue, and a node that is taking at this moment may still start what it takes. Returns the
    /// pause of a kind that is paused already: it keeps its person and its reason.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn pause_kind(&self, service: &str, kind: &str, actor: &str, reason: &str) -> Result<Option<Paused>> {
        loop {
            if self.change_pause(self.work_sql().pause, (service, kind), (actor, reason), "work.pause").await? {
                return Ok(None);
            }
            // It may have been resumed meanwhile.
            if let Some(earlier) = self.pause_of(service, kind).await? {
                return Ok(Some(earlier));
            }
        }
    }

    /// Resumes a kind. False if it was not paused.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn resume_kind(&self, service: &str, kind: &str, actor: &str, reason: &str) -> Result<bool> {
        let resumed =
            self.change_pause(self.work_sql().resume_kind, (service, kind), (actor, reason), "work.resume").await?;
        self.tell_due();
        Ok(resumed)
    }

    /// Whether anything was changed. A change is audited.
    async fn change_pause(
        &self,
        text: &'static str,
        (service, kind): (&str, &str),
        (actor, reason): (&str, &str),
        action: &'static str,
    ) -> Result<bool> {
        let (now, subject) = (self.now().await?.as_micros(), format!("{service}/{kind}"));
        // PostgreSQL cannot store this character.
        let reason = reason.replace('\0', "\u{fffd}");
        self.in_short(async |conn| {
            let actor = actor.replace(char::is_control, " ");
            let changed = on!(conn, c => sqlx::query(text)
                .bind(service).bind(kind).bind(now).bind(&actor).bind(&reason)
                .execute(&mut **c).await.map(|done| done.rows_affected() > 0).map_err(broken)?);
            if changed {
                let audit = Audit { tenant: "*", actor: &actor, action, subject: &subject, reason: &reason };
                audit.write(conn, self.sql(), None, None, Some(now)).await?;
            }
            Ok(changed)
        })
        .await
    }
}

impl Taking<'_> {
    async fn in_postgres(&self, db: &postgres::Postgres, ids: &mut Vec<i64>) -> Result<Taken> {
        let mut seat = db.lane_take().await?;
        begin_take(&mut seat).await?;
        let mut picked = self.pick(&mut Conn::Postgres(&mut seat)).await?;
        ids.extend(picked.iter().map(|picked| picked.id));
        let (mut taken, mut left) = (Vec::new(), Left::default());
        match db.take_first(&mut seat, self.take, self.sql, &picked).await? {
            Some(first) => taken = first,
            // One is unreadable: the general path finds out which.
            None => {
                postgres::roll_back(&mut seat).await?;
                begin_take(&mut seat).await?;
                picked = self.pick(&mut Conn::Postgres(&mut seat)).await?;
            }
        }
        let done: HashSet<i64> = taken.iter().filter_map(|(_, applied)| Some(applied.operation.as_ref()?.id)).collect();
        picked.retain(|picked| !done.contains(&picked.id));
        if !picked.is_empty() {
            // Drawn under the locks: earlier fences may be lower than those of the rows.
            let (now, fences) = db.draw(&mut seat, picked.len()).await?;
            let (more, more_left) = self.claim(&mut Conn::Postgres(&mut seat), picked, fences, now).await?;
            taken.extend(more);
            left = more_left;
        }
        crash_point!("store.take.claimed");
        postgres::commit(&mut seat).await?;
        seat.leave();
        Ok((taken, left))
    }

    /// Finds and locks due operations, for each want within its limits.
    async fn pick(&self, conn: &mut Conn<'_>) -> Result<Vec<Picked>> {
        let (mut picked, mut bytes) = (Vec::<Picked>::new(), 0);
        let mut running = Running::new();
        for (n, want) in self.take.wants.iter().enumerate() {
            let of_kind = |picked: &&Picked| is_of_kind(&self.take.wants[picked.want].scope, &want.scope);
            let already = u32::try_from(picked.iter().filter(of_kind).count()).unwrap_or(u32::MAX);
            let (most, free_at) = self.allowed(conn, want, already, &mut running).await?;
            let all = u32::try_from(picked.len()).unwrap_or(u32::MAX);
            let most = self.take.most.map_or(most, |limit| most.min(limit.saturating_sub(all)));
            let mut here = HashSet::new();
            let oldest = want.oldest(most);
            let places = self.fronts.of(&want.scope);
            for (text, most) in [(self.work.pick_oldest, oldest), (self.work.pick, most)] {
                if most == 0 || here.len() >= most as usize {
                    continue;
                }
                let rows: Vec<(i64, i64)> = on!(conn, c => {
                    let pick = sqlx::query_as(text)
                        .bind(want.scope.service())
                        .bind(want.scope.kind())
                        .bind(want.scope.tenant())
                        .bind(self.clock)
                        .bind(i64::from(most.saturating_add(MARGIN)))
                        .bind(i64::from(most));
                    let pick = places.iter().fold(pick, |pick, (due, id)| pick.bind(due).bind(id));
                    pick.fetch_all(&mut **c).await.map_err(read_failed)?
                });
                for (id, size) in rows {
                    if here.contains(&id) {
                        continue;
                    }
                    // Also of one that does not fit: smaller ones behind it must not overtake it.
                    bytes = usize::try_from(size).map_or(usize::MAX, |size| size.saturating_add(bytes));
                    let fits = picked.is_empty() || bytes <= Take::BYTES;
                    if fits && here.len() < most as usize && here.insert(id) {
                        picked.push(Picked { want: n, id });
                    }
                }
            }
            self.note_started(conn, want, here.len(), free_at).await?;
        }
        Ok(picked)
    }

    /// How many may start within the limits of the fleet, when this take has picked `already` others of the kind; and
    /// from when on the next start is free, by the rate. None may while another node takes work of this kind.
    async fn allowed<'s>(
        &'s self,
        conn: &mut Conn<'_>,
        want: &'s Want,
        already: u32,
        running: &mut Running<'s>,
    ) -> Result<(u32, i64)> {
        if want.limits.is_none() {
            return Ok((want.most, 0));
        }
        let Some(mut free_at) = self.lock_limit(conn, want).await? else { return Ok((0, 0)) };
        let (service, kind) = (want.scope.service(), want.scope.kind());
        let mut most = want.most;
        if let Some(at_once) = want.limits.at_once {
            // Counted once: a run that ends during the take would otherwise free a seat that only later tenants see.
            let running = match running.get(&(service, kind)) {
                Some(counted) => *counted,
                None => {
                    let counted: i64 = on!(conn, c => sqlx::query_scalar(self.work.count_running)
                        .bind(service).bind(kind).bind(self.clock).fetch_one(&mut **c).await.map_err(broken)?);
                    let counted = u32::try_from(counted).unwrap_or(u32::MAX);
                    running.insert((service, kind), counted);
                    counted
                }
            };
            most = most.min(at_once.saturating_sub(running.saturating_add(already)));
        }
        if let Some(every) = want.limits.every {
            let (now, every) = (self.now(conn).await?, micros(every).max(1));
            // The next start is at most this far away, unless the clock was set back or the rate was raised since.
            if free_at > now.saturating_add(every) {
                free_at = now;
            }
            let starts = if free_at > now { 0 } else { (now - free_at.max(now - BURST)) / every + 1 };
            most = most.min(u32::try_from(starts).unwrap_or(u32::MAX));
        }
        Ok((most, free_at))
    }

    /// Locks the limits of a kind until the end of the transaction, without waiting: from when on the next start is free.
    async fn lock_limit(&self, conn: &mut Conn<'_>, want: &Want) -> Result<Option<i64>> {
        for text in [self.work.lock_limit, self.work.make_limit] {
            let found: Option<i64> = on!(conn, c => sqlx::query_scalar(text)
                .bind(want.scope.service()).bind(want.scope.kind()).fetch_optional(&mut **c).await.map_err(broken)?);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Counts starts, for the rate.
    async fn note_started(&self, conn: &mut Conn<'_>, want: &Want, n: usize, free_at: i64) -> Result<()> {
        let (Some(every), true) = (want.limits.every, n > 0) else { return Ok(()) };
        let now = self.now(conn).await?;
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        let next = free_at.max(now - BURST) + n.saturating_mul(micros(every));
        on!(conn, c => sqlx::query(self.work.put_limit).bind(want.scope.service()).bind(want.scope.kind())
            .bind(next).execute(&mut **c).await.map(drop).map_err(broken))
    }

    async fn now(&self, conn: &mut Conn<'_>) -> Result<i64> {
        on!(conn, c => sqlx::query_scalar(self.work.now).bind(self.clock).fetch_one(&mut **c).await.map_err(broken))
    }

    /// Claims the picked operations. Those that could not be claimed are returned separately.
    async fn claim(
        &self,
        conn: &mut Conn<'_>,
        picked: Vec<Picked>,
        fences: Vec<Fence>,
        now: Timestamp,
    ) -> Result<Taken> {
        let ids: Vec<i64> = picked.iter().map(|picked| picked.id).collect();
        let (found, unreadable) = load_each(conn, self.sql, &ids).await?;
        let unreadable = unreadable.into_iter().map(|row| (row.id, row.why)).collect();
        let mut found: HashMap<i64, Operation> = found.into_iter().map(|op| (op.id, op)).collect();
        let mut rows = ByKey::new();
        let mut requests = Vec::new();
        for (Picked { want, id }, fence) in picked.iter().zip(fences) {
            let Some(op) = found.remove(id) else { continue };
            requests.push((*want, self.request(&op, *want)?, fence));
            rows.insert((op.scope.clone(), op.key.clone()), op);
        }
        let mut changes = Changes::default();
        let claims = requests.iter().enumerate().map(|(n, (_, request, fence))| (n, request, *fence));
        let answers = batch::claim_all(&mut changes, &mut rows, claims, now);
        batch::saved(changes.save(conn, self.sql).await?)?;
        let given_up = answers.iter().filter(|(_, applied)| applied.answer == Answer::Exhausted);
        // A row that follows one of them may be locked, or refuse: each has its own transaction.
        let (followed, given_up): (Vec<_>, Vec<_>) = given_up
            .filter_map(|(_, applied)| applied.operation.as_ref())
            .partition(|op| self.sql.projections.follow(&op.scope));
        let given_up: Vec<Value> = given_up.into_iter().map(|op| json!({ "id": op.id })).collect();
        conn.batch(self.work.none_due, &given_up).await?;
        let exhausted = followed.into_iter().map(|op| (op.id, op.fence)).collect();
        let acquired = answers.into_iter().filter(|(_, applied)| applied.answer == Answer::Acquired);
        Ok((acquired.map(|(n, applied)| (requests[n].0, applied)).collect(), Left { unreadable, exhausted }))
    }

    /// The claim of an operation with its stored data.
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
            lease: want.lease,
            token: self.take.token,
            sent_again: false,
            owner: self.take.owner.clone(),
        })
    }
}

/// Begins the transaction of a take on PostgreSQL. The locks of a node that freezes in it are free after 5 s: nodes with
/// fewer seats may see only rows that it has locked, and all nodes wait for the limits of a kind.
async fn begin_take(conn: &mut sqlx::PgConnection) -> Result<()> {
    const BEGIN: &str = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '5s'; SET LOCAL lock_timeout = '250ms'";
    sqlx::raw_sql(BEGIN).execute(conn).await.map(drop).map_err(broken)
}

/// Missed starts are caught up within this time only: a rate is not a budget to save.
const BURST: i64 = 1_000_000;

/// Whether two scopes are of the same service and kind. Their tenants do not count.
fn is_of_kind(scope: &Scope, other: &Scope) -> bool {
    (scope.service(), scope.kind()) == (other.service(), other.kind())
}
