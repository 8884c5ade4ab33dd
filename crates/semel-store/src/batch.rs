//! Applies batches of events to their rows, for both databases.

use std::collections::{HashMap, HashSet};

use semel::{
    Error, Fence, Key, Operation, Result, Scope, Timestamp,
    journal::{self, Note},
    look::Group,
    machine::{Answer, Event, NotNow, Purge, Request, purged_note, read},
    store::{Applied, Decision, LeaseWrite},
};
use serde_json::json;

use crate::{
    Conn,
    apply::{Changes, Tally, load_by_id},
    audit,
    connection::read_failed,
    from_row, on,
    project::Tables,
    rows,
};

/// The order in which a batch touches its rows: by scope and key. Two batches that touch the same rows then lock in the
/// same order, and never deadlock.
pub(crate) fn by_key<R: AsRef<Request>>(requests: &[R]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (requests[*a].as_ref(), requests[*b].as_ref());
        (&a.scope, &a.key).cmp(&(&b.scope, &b.key))
    });
    order
}

/// Splits indices in key order into the first of each key and the rest, so that a batch never conflicts with itself.
pub(crate) fn fold<R: AsRef<Request>>(requests: &[R], order: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let key = |i: usize| (&requests[i].as_ref().scope, &requests[i].as_ref().key);
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for (place, i) in order.iter().enumerate() {
        match place.checked_sub(1).and_then(|before| order.get(before)) {
            Some(before) if key(*before) == key(*i) => rest.push(*i),
            _ => first.push(*i),
        }
    }
    (first, rest)
}

/// The rows of a batch of claims between its steps.
pub(crate) type ByKey = HashMap<(Scope, Key), Operation>;

/// Makes the steps of claims one after the other, each on the row that the previous one left.
pub(crate) fn claim_all<'a>(
    changes: &mut Changes,
    rows: &mut ByKey,
    claims: impl Iterator<Item = (usize, &'a Request, Fence)>,
    now: Timestamp,
) -> Vec<(usize, Applied)> {
    let mut answers = Vec::new();
    for (i, request, fence) in claims {
        let place = (request.scope.clone(), request.key.clone());
        let applied = changes.step(rows.get(&place), &Event::Claim { request, fence }, now);
        if let Some(op) = &applied.operation {
            rows.insert(place, op.clone());
        }
        answers.push((i, applied));
    }
    answers
}

/// Reads the answers of claims from rows that are not locked. If any claim of a key would change its row, all claims of
/// that key are contested: the row must be locked and the claims decided again.
pub(crate) fn read_all<R: AsRef<Request>>(
    requests: &[R],
    rows: &ByKey,
    claims: Vec<usize>,
    now: Timestamp,
) -> (Vec<usize>, Vec<(usize, Answer)>) {
    let place = |i: usize| (requests[i].as_ref().scope.clone(), requests[i].as_ref().key.clone());
    let mut changing = HashSet::new();
    let mut calm = Vec::new();
    for i in &claims {
        match rows.get(&place(*i)).and_then(|row| read(row, requests[*i].as_ref(), now)) {
            Some(answer) => calm.push((*i, answer)),
            None => drop(changing.insert(place(*i))),
        }
    }
    if changing.is_empty() {
        return (Vec::new(), calm);
    }
    calm.retain(|(i, _)| !changing.contains(&place(*i)));
    (claims.into_iter().filter(|i| changing.contains(&place(*i))).collect(), calm)
}

/// Makes the steps of writes under leases one after the other.
pub(crate) fn write_all(
    changes: &mut Changes,
    rows: &mut HashMap<i64, Operation>,
    writes: impl Iterator<Item = (usize, LeaseWrite)>,
    now: Timestamp,
) -> Vec<(usize, Applied)> {
    let mut answers = Vec::new();
    for (i, LeaseWrite { id, fence, write }) in writes {
        let event = Event::Write { fence, write };
        let applied = changes.step(rows.get(&id), &event, now);
        match &applied.operation {
            Some(op) => rows.insert(id, op.clone()),
            None => rows.remove(&id),
        };
        if changes.removed(id) {
            rows.remove(&id);
        }
        answers.push((i, applied));
    }
    answers
}

/// The answer to a first claim that a hot statement has made: the same as that of the state machine for an absent row.
pub(crate) fn first_claim(request: &Request, fence: Fence, now: Timestamp) -> Applied {
    Changes::default().step(None, &Event::Claim { request, fence }, now)
}

/// Applies a decision to its locked row, and audits it.
pub(crate) async fn decide(
    conn: &mut Conn<'_>,
    sql: &Tables,
    id: i64,
    decision: Decision,
    by: (&str, &str),
    (now, fence): (Timestamp, Fence),
) -> Result<Applied> {
    let action = audit::action(&decision);
    let rows = match load_by_id(conn, sql, &[id]).await {
        Err(error) if !error.is_transient() && matches!(decision, Decision::Purge) => {
            return purge_unreadable(conn, sql, id, by, now).await;
        }
        loaded => loaded?,
    };
    let (actor, reason) = (by.0.to_owned(), by.1.to_owned());
    let event = match decision {
        Decision::Resolve { verdict, expected } | Decision::Found { verdict, expected } => {
            Event::Resolve { fence, expected, verdict, actor, reason }
        }
        Decision::Cancel => Event::Cancel { fence, actor, reason },
        Decision::Purge => Event::Purge { actor, reason },
    };
    let mut changes = Changes::default();
    let applied = changes.step(rows.get(&id), &event, now);
    saved(changes.save(conn, sql).await?)?;
    if let (Some(action), Some(before)) = (action, rows.get(&id)) {
        audit::decided(conn, sql, action, by, before, &applied).await?;
    }
    Ok(applied)
}

/// Frees the key of an unreadable operation, using its readable columns: a person can do nothing else about it.
async fn purge_unreadable(
    conn: &mut Conn<'_>,
    sql: &Tables,
    id: i64,
    (actor, reason): (&str, &str),
    now: Timestamp,
) -> Result<Applied> {
    let applied = |answer| Applied { answer, operation: None, now };
    let row: Option<BareRow> =
        on!(conn, c => sqlx::query_as(sql.load_bare).bind(id).fetch_optional(&mut **c).await.map_err(read_failed)?);
    let Some(row) = row else { return Ok(applied(Answer::NotNow(NotNow::Absent))) };
    let (state, time) = (row.state.parse()?, |at: Option<i64>| at.map(Timestamp::from_micros));
    let (expires_at, deadline) = (time(row.expires_at), time(row.deadline));
    if let Some(why) = (Purge { state, pinned: row.pinned, expires_at, deadline }).refused(now) {
        return Ok(applied(Answer::NotNow(why)));
    }
    let gone = [json!({ "id": id, "old_fence": row.fence })];
    saved(conn.batch(sql.delete_operations, &gone).await? == 1)?;
    let belongings = [sql.delete_leases, sql.delete_archived, sql.delete_journal, sql.delete_repeats];
    for text in belongings.into_iter().chain([sql.delete_backlog, sql.delete_successors]) {
        conn.batch(text, &gone).await?;
    }
    let mut tally = Tally::default();
    tally.gone(row.group(), state, now);
    conn.batch(sql.insert_journal, &[rows::note(id, &purged_note(Fence(row.fence), actor, reason, now))]).await?;
    conn.batch(sql.insert_deltas, &tally.rows()).await?;
    let scope = format!("{}/{}/{}", row.tenant, row.service, row.kind);
    let before = json!({ "scope": scope, "key": row.key, "state": row.state, "fence": row.fence, "unreadable": true });
    audit::purged_unreadable(conn, sql, (actor, reason), (&row.tenant, id), before, now).await?;
    Ok(applied(Answer::Purged))
}

/// A row of `load_bare`.
struct BareRow {
    fence: i64,
    tenant: String,
    service: String,
    kind: String,
    key: String,
    label1: String,
    label2: String,
    state: String,
    pinned: bool,
    expires_at: Option<i64>,
    deadline: Option<i64>,
}

from_row!(BareRow { fence, tenant, service, kind, key, label1, label2, state, pinned, expires_at, deadline });

impl BareRow {
    fn group(&self) -> Group {
        let Self { tenant, service, kind, label1, label2, .. } = self;
        let [tenant, service, kind, label1, label2] = [tenant, service, kind, label1, label2].map(String::clone);
        Group { tenant, service, kind, label1, label2 }
    }
}

/// A renewal that came after more than half of its lease; `before` is its former deadline. One that was cut short by
/// the longest run does not show when it was renewed.
pub(crate) fn late_renewal(fence: Fence, before: i64, run_until: i64, term: i64, now: i64) -> Option<Note> {
    let gap = now - (before - term);
    (gap > term / 2 && before < run_until).then(|| Note {
        at: Timestamp::from_micros(now),
        event: journal::Event::RenewedLate,
        fence,
        actor: String::new(),
        detail: format!("renewed after {} ms of a lease of {} ms", gap / 1000, term / 1000),
    })
}

/// Answers in the order of the batch.
pub(crate) fn in_order(mut answers: HashMap<usize, Applied>, size: usize) -> Result<Vec<Applied>> {
    (0..size).map(|i| answers.remove(&i).ok_or(Error::Contradiction("an item of a batch got no answer"))).collect()
}

pub(crate) fn saved(as_loaded: bool) -> Result<()> {
    if as_loaded { Ok(()) } else { Err(Error::Unavailable("a row changed between its load and its save".into())) }
}
