//! How the repeats of an operation are written down: short, because those of every key that came again are read and
//! written once a second.
//!
//! `4|1700000000000000=replay,1204,88|-3=in_flight:9f86…`: the count, the first ones, the last ones. A time is told as
//! the microseconds since the one before it, an answer only where it differs from the one before it.

use std::{borrow::Cow, collections::HashSet, fmt::Write as _};

use semel::{
    Error, Result, Timestamp,
    journal::{Repeats, Sighting},
};

use crate::{
    Conn,
    connection::broken,
    postgres::{HOLD, THERE},
};

/// Keeps other nodes from adding repeats of these operations until the commit: two that both add to what they have read
/// would lose one addition. A row that is not there yet cannot be locked: so PostgreSQL takes a lock by number. Differs
/// because SQLite has one writer anyway.
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

/// Operations to which repeats are to be added.
pub(crate) struct Held {
    /// These stay until the commit. A transaction that removes one waits for it, and then removes what was added, too.
    pub(crate) here: HashSet<i64>,
    /// Another transaction has these locked, and may be about to remove them. They are not waited for: a caller's
    /// transaction stays open for long.
    pub(crate) locked: HashSet<i64>,
}

/// Keeps operations from being removed until the commit: a row that is added meanwhile would be left behind. Differs
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
        fn what_is_written_is_read(count in any::<i64>(), first in sightings(), last in sightings()) {
            let repeats = Repeats { count, first, last };
            prop_assert_eq!(decode(&encode(&repeats)).unwrap(), repeats);
        }

        #[test]
        fn what_is_no_such_text_is_told(text in ".*") {
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
