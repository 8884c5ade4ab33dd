//! The stored form of an operation's repeats: short, because those of every repeated key are read and written once a
//! second.
//!
//! `4|1700000000000000=replay,1204,88|-3=in_flight:9f86…`: the count, the first ones, the last ones. A time is the
//! number of microseconds since the previous one, and an answer is written only if it differs from the previous one.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    fmt::Write as _,
};

use semel::{
    Error, Result, Timestamp,
    journal::{Repeat, Repeats, Sighting},
    store::{AnswerCount, SeenAgain},
};
use serde_json::json;

use crate::{
    Conn,
    connection::{broken, read_failed},
    on,
    postgres::{HOLD, THERE},
    rows,
    sql::Sql,
};

/// Keeps other nodes from adding repeats of these operations until the commit: otherwise two nodes that read and add
/// would lose one addition. A row that does not exist yet cannot be locked, so PostgreSQL takes an advisory lock.
/// Differs because SQLite has one writer anyway.
pub(crate) async fn lock(conn: &mut Conn<'_>, ids: &[i64]) -> Result<()> {
    if let Conn::Postgres(conn) = conn {
        sqlx::query("SELECT pg_advisory_xact_lock(7305807, (id % 64)::int) FROM (SELECT DISTINCT id % 64 AS id FROM unnest($1::bigint[]) AS r(id) ORDER BY 1) AS slots")
            .bind(ids)
            .execute(&mut **conn)
            .await
            .map_err(broken)?;
    }
    Ok(())
}

/// Operations that get repeats.
pub(crate) struct Held {
    /// Locked until the commit. A transaction that deletes one waits, and then also deletes what was added.
    pub(crate) here: HashSet<i64>,
    /// Locked by another transaction, which may be about to delete them. They are skipped: a caller's transaction may
    /// stay open for long.
    pub(crate) locked: HashSet<i64>,
}

/// Keeps operations from being deleted until the commit: a row that is added meanwhile would be orphaned. Differs
/// because SQLite has one writer.
pub(crate) async fn hold(conn: &mut Conn<'_>, ids: &[i64]) -> Result<Held> {
    let Conn::Postgres(conn) = conn else {
        return Ok(Held { here: ids.iter().copied().collect(), locked: HashSet::new() });
    };
    let here: Vec<i64> = sqlx::query_scalar(HOLD).bind(ids).fetch_all(&mut **conn).await.map_err(broken)?;
    let mut held = Held { here: here.into_iter().collect(), locked: HashSet::new() };
    let missing: Vec<i64> = ids.iter().copied().filter(|id| !held.here.contains(id)).collect();
    if !missing.is_empty() {
        let there: Vec<i64> = sqlx::query_scalar(THERE).bind(missing).fetch_all(&mut **conn).await.map_err(broken)?;
        held.locked.extend(there);
    }
    Ok(held)
}

pub(crate) fn encode(repeats: &Repeats) -> String {
    let mut text = String::with_capacity(256);
    let _ = write!(text, "{}", repeats.count);
    let (mut at, mut answer) = (0, "");
    for list in [&repeats.first, &repeats.last] {
        for (n, seen) in list.iter().enumerate() {
            let _ = write!(text, "{}{}", if n == 0 { '|' } else { ',' }, seen.at.as_micros().wrapping_sub(at));
            if seen.answer != answer {
                let _ = write!(text, "={}", seen.answer);
            }
            if !seen.fingerprint.is_empty() {
                let _ = write!(text, ":{}", seen.fingerprint);
            }
            (at, answer) = (seen.at.as_micros(), &seen.answer);
        }
        if list.is_empty() {
            text.push('|');
        }
    }
    text
}

pub(crate) fn decode(text: &str) -> Result<Repeats> {
    // As JSON until migration 0006.
    let repeats = if text.starts_with('{') { serde_json::from_str(text).ok() } else { read(text) };
    repeats.ok_or(Error::Corrupt("repeats"))
}

fn read(text: &str) -> Option<Repeats> {
    let mut parts = text.split('|');
    let count = parts.next()?.parse().ok()?;
    let (mut at, mut answer) = (0, Cow::Borrowed(""));
    let mut list = || {
        let items = parts.next()?.split(',').filter(|item| !item.is_empty());
        items
            .map(|item| {
                let (item, fingerprint) = item.split_once(':').unwrap_or((item, ""));
                let (since, word) = item.split_once('=').map_or((item, None), |(since, word)| (since, Some(word)));
                at = since.parse::<i64>().ok()?.wrapping_add(at);
                if let Some(word) = word {
                    answer = Cow::Owned(word.to_owned());
                }
                let fingerprint = fingerprint.to_owned();
                Some(Sighting { at: Timestamp::from_micros(at), answer: answer.clone(), fingerprint })
            })
            .collect::<Option<Vec<_>>>()
    };
    let repeats = Repeats { count, first: list()?, last: list()? };
    parts.next().is_none().then_some(repeats)
}

/// Adds repeats to the stored ones, and answers to the counters. Returns the repeats of operations that another
/// transaction has locked.
pub(crate) async fn add(
    mut conn: Conn<'_>,
    sql: &Sql,
    mut again: Vec<SeenAgain>,
    answers: Vec<AnswerCount>,
    hour: i64,
) -> Result<Vec<SeenAgain>> {
    // In order of id, so that two nodes lock the same rows in the same order.
    again.sort_by_key(|seen| (seen.id, seen.repeat));
    lock(&mut conn, &again.iter().map(|seen| seen.id).collect::<Vec<_>>()).await?;
    let mut left = Vec::new();
    for part in again.chunks(1000) {
        let ids: Vec<i64> = part.iter().map(|seen| seen.id).collect();
        let mut stored = load(&mut conn, sql, &ids).await?;
        let held = hold(&mut conn, &ids).await?;
        left.extend(part.iter().filter(|seen| held.locked.contains(&seen.id)).cloned());
        let mut rows = Vec::new();
        for seen in part.iter().filter(|seen| held.here.contains(&seen.id)) {
            let mut sum = stored.remove(&(seen.id, seen.repeat)).unwrap_or_default();
            sum.merge(seen.repeats.clone());
            rows.push(json!({ "id": seen.id, "repeat": seen.repeat.as_str(), "repeats": encode(&sum) }));
        }
        conn.batch(sql.put_repeats, &rows).await?;
    }
    let deltas: Vec<_> =
        answers.iter().map(|count| rows::delta(&count.group, hour, "", "", count.answer, 0, count.n)).collect();
    conn.batch(sql.insert_deltas, &deltas).await?;
    Ok(left)
}

/// The stored repeats of operations.
pub(crate) async fn load(conn: &mut Conn<'_>, sql: &Sql, ids: &[i64]) -> Result<HashMap<(i64, Repeat), Repeats>> {
    let rows: Vec<_> = ids.iter().map(|id| json!({ "id": id })).collect();
    let json = serde_json::Value::Array(rows).to_string();
    let found: Vec<(i64, String, String)> =
        on!(conn, c => sqlx::query_as(sql.load_repeats).bind(json).fetch_all(&mut **c).await.map_err(read_failed)?);
    let read = |(id, repeat, text): (i64, String, String)| {
        let repeat = if repeat == Repeat::Conflict.as_str() { Repeat::Conflict } else { Repeat::Duplicate };
        Ok(((id, repeat), decode(&text)?))
    };
    found.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sightings() -> impl Strategy<Value = Vec<Sighting>> {
        let one =
            (any::<i64>(), "replay|in_flight|mismatch", "([0-9a-f]{66})?").prop_map(|(at, answer, fingerprint)| {
                Sighting { at: Timestamp::from_micros(at), answer: answer.into(), fingerprint }
            });
        prop::collection::vec(one, 0..Repeats::KEPT)
    }

    proptest! {
        #[test]
        fn encoded_repeats_decode_to_themselves(count in any::<i64>(), first in sightings(), last in sightings()) {
            let repeats = Repeats { count, first, last };
            prop_assert_eq!(decode(&encode(&repeats)).unwrap(), repeats);
        }

        #[test]
        fn invalid_stored_repeats_are_reported(text in ".*") {
            if let Ok(repeats) = decode(&text) {
                prop_assert_eq!(decode(&encode(&repeats)).unwrap(), repeats);
            }
        }
    }

    #[test]
    fn the_former_text_is_read() {
        let text = r#"{"count":3,"first":[{"at":5,"answer":"replay"}],"last":[{"at":9,"answer":"mismatch","fingerprint":"ab"}]}"#;
        assert_eq!(encode(&decode(text).unwrap()), "3|5=replay|4=mismatch:ab");
    }

    #[test]
    fn twenty_sightings_are_short() {
        let mut repeats = Repeats::default();
        for n in 0..1000 {
            let at = Timestamp::from_micros(1_700_000_000_000_000 + n * 200_000);
            repeats.add(Sighting { at, answer: "replay".into(), fingerprint: String::new() });
        }
        assert!(encode(&repeats).len() < 200, "{}", encode(&repeats));
    }
}
