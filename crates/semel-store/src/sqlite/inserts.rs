//! The hot path of new keys: one insert for claims, one for enqueues.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use semel::{Fence, Result, Runner, Timestamp, machine::Request, micros, store::Applied};
use serde_json::{Value, json};
use sqlx::SqliteConnection;

use super::hot;
use crate::{
    apply::Tally,
    batch,
    codec::encode,
    connection::{broken, read_failed},
    project::Projections,
};

/// Requests of a batch, by index, with the fence that each may use.
type Numbered = Vec<(usize, Fence)>;

/// Inserts claims and enqueues, and answers those whose key was new.
pub(super) async fn all(
    conn: &mut SqliteConnection,
    requests: &[Arc<Request>],
    projections: &Projections,
    new: impl Iterator<Item = (usize, Fence)>,
    now: Timestamp,
    tally: &mut Tally,
) -> Result<HashMap<usize, Applied>> {
    let (enqueues, claims): (Numbered, Numbered) = new.partition(|(i, _)| requests[*i].later.is_some());
    let mut answers = HashMap::new();
    for (some, made) in [
        (&claims, claim(conn, requests, projections, &claims, now).await?),
        (&enqueues, enqueue(conn, requests, &enqueues, now).await?),
    ] {
        for (i, fence) in some.iter().filter(|(_, fence)| made.contains(&fence.0)) {
            let applied = batch::first_claim(&requests[*i], *fence, now);
            tally.add(None, applied.operation.as_ref(), None, now);
            answers.insert(*i, applied);
        }
    }
    Ok(answers)
}

async fn claim(
    conn: &mut SqliteConnection,
    requests: &[Arc<Request>],
    projections: &Projections,
    claims: &Numbered,
    now: Timestamp,
) -> Result<HashSet<i64>> {
    let (mut operations, mut leases) = (Vec::new(), Vec::new());
    for (i, fence) in claims {
        let r = &requests[*i];
        let policy = &r.policy;
        let own = (policy.runner == Runner::Caller).then(|| policy.to_terms());
        operations.push(row(r, *fence, [json!(r.owner), json!(first_look(r, now)), json!(policy.pinned), json!(own)]));
        leases.push(json!([
            fence.0,
            hex::encode(r.token.0),
            micros(policy.lease),
            micros(policy.max_run),
            policy.retention.map(micros),
            policy.tombstone.map(micros),
            policy.to_terms(),
            projections.follow(&r.scope)
        ]));
    }
    if claims.is_empty() {
        return Ok(HashSet::new());
    }
    let operations = Value::Array(operations).to_string();
    let insert = sqlx::query(hot::CLAIM).bind(&operations).bind(Value::Array(leases).to_string()).bind(now.as_micros());
    let written = insert.execute(&mut *conn).await.map_err(broken)?.rows_affected();
    made(conn, claims, operations, written).await
}

async fn enqueue(
    conn: &mut SqliteConnection,
    requests: &[Arc<Request>],
    enqueues: &Numbered,
    now: Timestamp,
) -> Result<HashSet<i64>> {
    let mut operations = Vec::new();
    for (i, fence) in enqueues {
        let r = &requests[*i];
        let later = r.later.unwrap_or_default();
        operations.push(row(
            r,
            *fence,
            [
                json!(later.from(now).unwrap_or(now).as_micros()),
                json!(first_look(r, now)),
                json!(later.priority.get()),
                json!(later.keeps_policy.then(|| r.policy.to_terms())),
                json!(r.listed_kind()),
            ],
        ));
    }
    if enqueues.is_empty() {
        return Ok(HashSet::new());
    }
    let operations = Value::Array(operations).to_string();
    let insert = sqlx::query(hot::ENQUEUE).bind(&operations).bind(now.as_micros());
    let written = insert.execute(&mut *conn).await.map_err(broken)?.rows_affected();
    made(conn, enqueues, operations, written).await
}

/// The row of a new operation: the common columns of both inserts, and the others.
fn row<const N: usize>(r: &Request, fence: Fence, more: [Value; N]) -> Value {
    let mut row = vec![
        json!(fence.0),
        json!(r.scope.tenant()),
        json!(r.scope.service()),
        json!(r.scope.kind()),
        json!(r.key.as_str()),
        json!(hex::encode(r.fingerprint.as_bytes())),
        json!(r.order),
        json!(r.payload.as_ref().map(|payload| hex::encode(encode(payload)))),
        json!(r.labels.0[0]),
        json!(r.labels.0[1]),
        json!(r.labels.0[2]),
        json!(r.labels.0[3]),
    ];
    row.extend(more);
    Value::Array(row)
}

fn first_look(r: &Request, now: Timestamp) -> Option<i64> {
    r.policy.first_look().map(|kept| (now + kept).as_micros())
}

/// The fences of the inserted rows.
async fn made(conn: &mut SqliteConnection, asked: &Numbered, operations: String, written: u64) -> Result<HashSet<i64>> {
    match usize::try_from(written) {
        // The usual case: all were inserted, each with its lease or backlog row. Returning rows one by one costs more
        // than the insert.
        Ok(n) if n == 2 * asked.len() => Ok(asked.iter().map(|(_, fence)| fence.0).collect()),
        Ok(0) => Ok(HashSet::new()),
        _ => {
            let made: Vec<i64> =
                sqlx::query_scalar(hot::MADE).bind(operations).fetch_all(&mut *conn).await.map_err(read_failed)?;
            Ok(made.into_iter().collect())
        }
    }
}
