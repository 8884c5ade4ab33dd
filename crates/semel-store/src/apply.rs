//! The general path: load, step, save.
//!
//! Every event but the two hottest takes this path, on both databases: it loads (and locks) rows, [`step`] decides, and
//! the result is saved in the same transaction. The store itself decides nothing.

use std::collections::{BTreeMap, HashMap};

use semel::{
    Operation, Result, State, Timestamp,
    journal::{self, Note},
    look::{Group, Unreadable, bucket},
    machine::{Answer, Event, Next, Step, Write, due, step},
    store::Applied,
};
use serde_json::{Value, json};

use crate::{
    Conn,
    connection::read_failed,
    project::{Followed, PURGED, Tables, is_news},
    rows::{self, OperationRow, Read},
    sql::Sql,
};

/// Counts of changes, by group, hour, states and duration.
#[derive(Default)]
pub(crate) struct Tally(BTreeMap<(Group, i64, &'static str, &'static str, i32), i64>);

impl Tally {
    /// Counts one change; `ended` is the state of a run that newer data replaced at once, so that the operation was
    /// never stored in it.
    pub(crate) fn add(
        &mut self,
        old: Option<&Operation>,
        new: Option<&Operation>,
        ended: Option<State>,
        now: Timestamp,
    ) {
        let Some(op) = new.or(old) else { return };
        let word = |op: Option<&Operation>| op.map_or("", |op| op.state.as_str());
        let took = match old {
            Some(old) if old.lease.is_some() => bucket(now.since(old.claimed_at)),
            _ => 0,
        };
        let mut count = |from, to, took| *self.0.entry((Group::of(op), now.hour(), from, to, took)).or_default() += 1;
        let fence = |op: Option<&Operation>| op.map(|op| op.fence);
        if let (Some(ended), "processing", "pending") = (ended, word(old), word(new)) {
            count("processing", ended.as_str(), took);
            return count(ended.as_str(), "pending", 0);
        }
        match (word(old), word(new)) {
            // Taken over before the sweep has ended the expired lease: that run counts as ended, too.
            ("processing", "processing") if fence(old) != fence(new) => {
                count("processing", "timed_out", took);
                count("timed_out", "processing", 0);
            }
            (from, to) if from == to => {}
            (from, to) => count(from, to, took),
        }
    }

    /// Counts a plain completion, of which only these columns are known.
    pub(crate) fn completed(&mut self, group: Group, claimed_at: Timestamp, now: Timestamp) {
        let took = bucket(now.since(claimed_at));
        *self.0.entry((group, now.hour(), "processing", "completed", took)).or_default() += 1;
    }

    /// Counts a removed operation, of which only these columns were read.
    pub(crate) fn gone(&mut self, group: Group, state: State, now: Timestamp) {
        *self.0.entry((group, now.hour(), state.as_str(), "", 0)).or_default() += 1;
    }

    pub(crate) fn rows(&self) -> Vec<Value> {
        let row = |((group, hour, from, to, bucket), n): (&(Group, i64, &str, &str, i32), &i64)| {
            rows::delta(group, *hour, from, to, "", *bucket, *n)
        };
        self.0.iter().map(row).collect()
    }
}

/// The rows of a transaction, each as loaded and as changed.
#[derive(Default)]
pub(crate) struct Changes {
    touched: HashMap<i64, Touched>,
    notes: Vec<(i64, Note)>,
    tally: Tally,
    /// The operations that a person has purged.
    purged: Vec<Operation>,
}

struct Touched {
    loaded: Option<Operation>,
    now: Option<Operation>,
    /// Its row of the backlog, if that changes.
    listed: Option<Value>,
    archive: Option<Value>,
}

impl Changes {
    /// Makes one step and records its changes.
    pub(crate) fn step(&mut self, stored: Option<&Operation>, event: &Event<'_>, now: Timestamp) -> Applied {
        let Step { next, answer, notes } = step(stored, event, now);
        let result = match (&next, stored) {
            (Next::Put(op) | Next::Anew(op), _) => Some((**op).clone()),
            (Next::Same | Next::Gone, stored) => stored.cloned(),
        };
        let id = result.as_ref().map_or(0, |op| op.id);
        let ended = superseded(event, &notes);
        self.notes.extend(notes.into_iter().map(|note| (id, note)));
        match next {
            Next::Same => {}
            Next::Put(op) => {
                let archive = stored.filter(|_| answer == Answer::Archived).and_then(|old| rows::archived(old, now));
                self.put(stored, Some(*op), archive, ended, now);
            }
            Next::Anew(op) => {
                if let Some(expired) = stored {
                    self.put(Some(expired), None, None, None, now);
                }
                self.put(None, Some(*op), None, None, now);
            }
            Next::Gone => {
                self.purged.extend(stored.filter(|_| answer == Answer::Purged).and_then(|op| withdrawn(op, now)));
                self.put(stored, None, None, None, now);
            }
        }
        Applied { answer, operation: result, now }
    }

    fn put(
        &mut self,
        old: Option<&Operation>,
        new: Option<Operation>,
        archive: Option<Value>,
        ended: Option<State>,
        now: Timestamp,
    ) {
        self.tally.add(old, new.as_ref(), ended, now);
        let Some(id) = new.as_ref().or(old).map(|op| op.id) else { return };
        let touched = self.touched.entry(id).or_insert_with(|| Touched {
            loaded: old.cloned(),
            now: None,
            listed: None,
            archive: None,
        });
        // Each change that puts it into the backlog again has a new fence, newer enqueued data, or another runner. The
        // sweep only reads, and does not know the terms that the due time came from.
        let callers = Operation::is_left_to_callers;
        let same = |old: &Operation, op: &Operation| {
            old.fence == op.fence && old.order == op.order && callers(old) == callers(op)
        };
        let stays = |op: &Operation| old.is_some_and(|old| in_backlog(old) && same(old, op));
        if !new.as_ref().is_some_and(stays) {
            let terms = old.and_then(|old| old.lease.as_ref()).map(|lease| &lease.terms);
            touched.listed = new.as_ref().filter(|op| in_backlog(op)).map(|op| rows::listed(op, due(op, terms, now)));
        }
        touched.now = new;
        touched.archive = archive.or(touched.archive.take());
    }

    /// Whether a step has removed the operation.
    pub(crate) fn removed(&self, id: i64) -> bool {
        self.touched.get(&id).is_some_and(|touched| touched.now.is_none())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.touched.is_empty() && self.notes.is_empty()
    }

    /// Adds a note that no step returned.
    pub(crate) fn note(&mut self, id: i64, note: Note) {
        self.notes.push((id, note));
    }

    /// Writes all changes in the present transaction of `conn`. False if a row has changed since it was loaded; the
    /// transaction must then be rolled back and the events retried.
    pub(crate) async fn save(&self, conn: &mut Conn<'_>, sql: &Tables) -> Result<bool> {
        let mut ids: Vec<_> = self.touched.iter().collect();
        ids.sort_by_key(|(id, _)| **id);
        let (mut made, mut changed, mut briefly, mut gone) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut leased, mut unleased) = (Vec::new(), Vec::new());
        let (mut waiting, mut listed, mut unlisted) = (Vec::new(), Vec::new(), Vec::new());
        let (mut unwaiting, mut archived, mut followed) = (Vec::new(), Vec::new(), Followed::default());
        for (id, Touched { loaded, now, listed: row, archive }) in ids {
            let old = loaded.as_ref();
            let id = json!({ "id": id, "old_fence": old.map(|op| op.fence.0) });
            match now {
                None if old.is_none() => continue,
                None => gone.push(id.clone()),
                Some(op) => match old {
                    None => made.push(rows::operation(op, op.fence)),
                    Some(old) if rows::is_brief(old, op) => briefly.push(rows::brief(op, old.fence)),
                    Some(old) => changed.push(rows::operation(op, old.fence)),
                },
            }
            let now = now.as_ref();
            match now.and_then(|op| rows::lease(op, sql.projections.follow(&op.scope))) {
                Some(lease) => leased.push(lease),
                None if old.is_some_and(|op| op.lease.is_some()) => unleased.push(id.clone()),
                None => {}
            }
            match now.and_then(rows::successor) {
                Some(successor) => waiting.push(successor),
                None if old.is_some_and(|op| op.successor.is_some()) => unwaiting.push(id.clone()),
                None => {}
            }
            listed.extend(row.clone());
            if old.is_some_and(in_backlog) && !now.is_some_and(in_backlog) {
                unlisted.push(id);
            }
            archived.extend(archive.clone());
            if let Some(op) = now.filter(|op| is_news(old, op)) {
                let due = row.as_ref().map_or(Value::Null, |row| row["due"].clone());
                sql.projections.add(&mut followed, op, due);
            }
        }
        for op in &self.purged {
            sql.projections.add_purged(&mut followed, op);
        }
        // First: an expired row must be deleted before its key is inserted again.
        let mut right = conn.batch(sql.delete_operations, &gone).await? == gone.len() as u64;
        conn.batch(sql.delete_archived, &gone).await?;
        conn.batch(sql.delete_journal, &gone).await?;
        conn.batch(sql.delete_repeats, &gone).await?;
        conn.batch(sql.delete_leases, &unleased).await?;
        right &= conn.batch(sql.update_operations, &changed).await? == changed.len() as u64;
        right &= conn.batch(sql.update_briefly, &briefly).await? == briefly.len() as u64;
        right &= conn.batch(sql.insert_operations, &made).await? == made.len() as u64;
        if !right {
            return Ok(false);
        }
        conn.batch(sql.put_leases, &leased).await?;
        conn.batch(sql.delete_successors, &unwaiting).await?;
        conn.batch(sql.put_successors, &waiting).await?;
        conn.batch(sql.delete_backlog, &unlisted).await?;
        conn.batch(sql.put_backlog, &listed).await?;
        conn.batch(sql.put_archive, &archived).await?;
        let notes: Vec<_> = self.notes.iter().map(|(id, note)| rows::note(*id, note)).collect();
        conn.batch(sql.insert_journal, &notes).await?;
        conn.batch(sql.insert_deltas, &self.tally.rows()).await?;
        // Last: it may wait for a row of the service.
        sql.projections.run(conn, followed).await?;
        self.log_expired_leases();
        Ok(true)
    }

    /// Logs each expired lease. This comes before the commit: if that fails, the lease has expired nevertheless, and is
    /// logged again.
    fn log_expired_leases(&self) {
        for (id, note) in self.notes.iter().filter(|(_, note)| note.is_lapse()) {
            if let Some(Touched { loaded: Some(held), now: Some(now), .. }) = self.touched.get(id) {
                semel::log::lapsed(held, now, &note.detail);
            }
        }
    }
}

/// How a run ended that newer data replaced in the same step.
fn superseded(event: &Event<'_>, notes: &[Note]) -> Option<State> {
    let has = |kind: journal::Event| notes.iter().any(|note| note.event == kind);
    match event {
        _ if !has(journal::Event::Superseded) => None,
        Event::Write { write: Write::Complete(_), .. } => Some(State::Completed),
        Event::Write { write: Write::Fail(_), .. } => Some(State::Failed),
        _ => has(journal::Event::TimedOut).then_some(State::TimedOut),
    }
}

/// A purged operation as the row of a service shows it. One that has taken effect, or may have, stays as it was shown.
fn withdrawn(op: &Operation, now: Timestamp) -> Option<Operation> {
    let error = match op.state {
        State::Completed | State::InDoubt => return None,
        // Its lease has expired.
        State::Processing if op.lease.as_ref().is_none_or(|lease| lease.terms.on_lost.doubts()) => return None,
        // Its row may show it as failed for good.
        State::Failed => op.error.clone(),
        State::Pending | State::Processing | State::TimedOut => Some(PURGED.to_owned()),
    };
    // Its last run is over, if there was one.
    Some(Operation { state: State::Failed, error, settled_at: Some(now), ..op.clone() })
}

fn in_backlog(op: &Operation) -> bool {
    use semel::State::{Completed, Failed, InDoubt, Pending, Processing, TimedOut};
    match op.state {
        Pending | Failed | TimedOut | InDoubt => true,
        Processing | Completed => false,
    }
}

/// Operations by id. An unreadable one is an error for all: for rows that a caller has named.
pub(crate) async fn load_by_id(conn: &mut Conn<'_>, sql: &Sql, ids: &[i64]) -> Result<HashMap<i64, Operation>> {
    let loaded: Vec<OperationRow> = by_id(conn, sql, ids).await?;
    loaded.into_iter().map(|row| row.read().map(|op| (op.id, op))).collect()
}

/// Operations by id, and separately the unreadable ones.
pub(crate) async fn load_each(
    conn: &mut Conn<'_>,
    sql: &Sql,
    ids: &[i64],
) -> Result<(Vec<Operation>, Vec<Unreadable>)> {
    let loaded: Vec<Read> = by_id(conn, sql, ids).await?;
    Ok(Read::sorted(loaded))
}

async fn by_id<R>(conn: &mut Conn<'_>, sql: &Sql, ids: &[i64]) -> Result<Vec<R>>
where
    R: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
    R: Send + Unpin,
{
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    match conn {
        Conn::Postgres(c) => sqlx::query_as(sql.load_by_id).bind(ids).fetch_all(&mut **c).await,
        Conn::Sqlite(c) => {
            let json: Vec<_> = ids.iter().map(|id| json!({ "id": id })).collect();
            sqlx::query_as(sql.load_by_id).bind(Value::Array(json).to_string()).fetch_all(&mut **c).await
        }
    }
    .map_err(read_failed)
}

/// Operations by scope and key.
pub(crate) async fn load_by_key<'a>(
    conn: &mut Conn<'_>,
    sql: &Sql,
    keys: impl Iterator<Item = (&'a semel::Scope, &'a semel::Key)>,
) -> Result<HashMap<(semel::Scope, semel::Key), Operation>> {
    let keys: Vec<_> = keys.collect();
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let loaded: Vec<OperationRow> = match conn {
        Conn::Postgres(c) => {
            let part = |get: &dyn Fn(&semel::Scope) -> &str| keys.iter().map(|(scope, _)| get(scope).to_owned()).collect::<Vec<_>>();
            sqlx::query_as(sql.load_by_key)
                .bind(part(&|scope| scope.tenant()))
                .bind(part(&|scope| scope.service()))
                .bind(part(&|scope| scope.kind()))
                .bind(keys.iter().map(|(_, key)| key.as_str().to_owned()).collect::<Vec<_>>())
                .fetch_all(&mut **c)
                .await
        }
        Conn::Sqlite(c) => {
            let row = |(scope, key): &(&semel::Scope, &semel::Key)| {
                json!({ "tenant": scope.tenant(), "service": scope.service(), "kind": scope.kind(), "key": key.as_str() })
            };
            let json = Value::Array(keys.iter().map(row).collect()).to_string();
            sqlx::query_as(sql.load_by_key).bind(json).fetch_all(&mut **c).await
        }
    }
    .map_err(read_failed)?;
    loaded.into_iter().map(|row| row.read().map(|op| ((op.scope.clone(), op.key.clone()), op))).collect()
}
