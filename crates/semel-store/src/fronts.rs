//! The kinds and tenants with due operations, and where each queue begins.
//!
//! A worker takes operations at the low end of their index. On PostgreSQL the entries of ended ones stay there while an
//! old snapshot is held (a dump, a report), and each take and each look would read over all of them: half a million
//! cost 70 ms. So a look remembers the first row of each priority, and what follows begins there.
//!
//! A row that was committed late, or after the clock was set back, may be before the remembered place. So a place is
//! never later than a moment ago, and is trusted for about a second: then the queue is read from its low end again.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::{Result, Scope, Timestamp, Uptime, look::DueKind, micros};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{Conn, Database, connection::read_failed, database::Inner, on};

/// A due time and an operation: a position in the queue of one priority.
pub(crate) type Place = (i64, i64);

/// The places of all priorities, the highest first.
pub(crate) type Places = [Place; 5];

/// The low end.
const LOW: Places = [(i64::MIN, i64::MIN); 5];

/// Enqueues that are committed within this time are never before a place.
const LATE: Duration = Duration::from_millis(500);

/// How long places are trusted.
const TRUSTED: Duration = Duration::from_secs(1);

/// Places are trusted for at least this many times as long as it took to find them: with millions of dead entries,
/// reading from the low end takes seconds.
const REST: u32 = 8;

/// A look that takes longer, and as much again for each ten kinds, has read over many dead entries.
const SLOW: Duration = Duration::from_millis(5);

/// How many kinds and tenants of a service are remembered. A look begins at the fronts of one page at most.
const MOST: usize = 20_000;

/// The upper end of all kinds.
const LAST: &str = "\u{10ffff}";

/// A kind and tenant.
type Pair = (String, String);

/// Kind, tenant, its first row of each priority, and the time.
type WaitingRow = (String, String, [Option<Place>; 5], i64);

/// The queues as this process has last seen them.
#[derive(Default)]
pub(crate) struct Fronts(Mutex<HashMap<String, Queues>>);

#[derive(Default)]
struct Queues {
    fronts: BTreeMap<Pair, Front>,
    /// Whether the last read from the low end was slow: only then the next looks begin at the fronts.
    slow: bool,
}

#[derive(Clone, Copy)]
struct Front {
    places: Places,
    trusted: Uptime,
}

impl Front {
    fn places(&self) -> Places {
        if self.trusted.has_passed() { LOW } else { self.places }
    }
}

/// A known kind and tenant, and where a look begins to read it.
struct Known {
    pair: Pair,
    places: Places,
}

impl Fronts {
    /// Where a take begins to read.
    pub(crate) fn of(&self, scope: &Scope) -> Places {
        let queues = self.0.lock();
        let pair = (scope.kind().to_owned(), scope.tenant().to_owned());
        queues.get(scope.service()).and_then(|queues| queues.fronts.get(&pair)).map_or(LOW, Front::places)
    }

    /// The known kinds and tenants after one, if the last look from the low end was slow.
    fn known(&self, service: &str, (kind, tenant): (&str, &str)) -> Vec<Known> {
        let queues = self.0.lock();
        let Some(queues) = queues.get(service).filter(|queues| queues.slow) else { return Vec::new() };
        let after = (Bound::Excluded((kind.to_owned(), tenant.to_owned())), Bound::Unbounded);
        let known = queues.fronts.range(after);
        let known: Vec<_> = known.map(|(pair, front)| Known { pair: pair.clone(), places: front.places() }).collect();
        if known.len() < DueKind::MOST as usize { known } else { Vec::new() }
    }

    /// Notes what a look has found, which began `took` ago; `known` are the places where it began to read.
    fn note(&self, service: &str, rows: &[WaitingRow], known: &[Known], took: Duration) {
        let mut all = self.0.lock();
        let queues = all.entry(service.to_owned()).or_default();
        let from_low = known.iter().filter(|known| known.places == LOW).count();
        if known.is_empty() || from_low > 0 {
            let kinds = u32::try_from(rows.len()).unwrap_or(u32::MAX);
            queues.slow = took > SLOW + SLOW * kinds / 10;
        }
        if queues.fronts.len() + rows.len() > MOST {
            queues.fronts.clear();
        }
        let trusted = Uptime::now() + TRUSTED.max(took * REST);
        let began: HashMap<&Pair, Places> = known.iter().map(|known| (&known.pair, known.places)).collect();
        for (kind, tenant, first, now) in rows {
            let late = (now.saturating_sub(micros(took + LATE)), i64::MIN);
            let places = first.map(|first| first.map_or(late, |first| first.min(late)));
            let pair = (kind.clone(), tenant.clone());
            let is_from_low = began.get(&pair).is_none_or(|places| *places == LOW);
            let front = queues.fronts.entry(pair).or_insert(Front { places, trusted });
            front.places = places;
            if is_from_low {
                front.trusted = trusted;
            }
        }
    }
}

impl Database {
    pub(crate) async fn look_due_kinds(&self, service: &str, after: (&str, &str)) -> Result<Vec<DueKind>> {
        let rows = match self.inner() {
            // One round trip: the settings of a lane connection are those of `IN_ORDER`. A worker looks often.
            Inner::Postgres(db) => {
                let looked = async {
                    let mut seat = db.lane_take().await?;
                    let rows = self.look_from_fronts(&mut seat, service, after).await?;
                    seat.leave();
                    Ok(rows)
                };
                db.lane_answered(looked).await?
            }
            Inner::Sqlite(_) => {
                let mut reader = self.reader().await?;
                let rows = self.look_from_low(reader.conn(), service, after).await?;
                reader.leave();
                rows
            }
        };
        let kind = |(kind, tenant, first, now): WaitingRow| {
            let next = Timestamp::from_micros(first.into_iter().flatten().min()?.0);
            Some(DueKind { kind, tenant, next, wait: next.since(Timestamp::from_micros(now)) })
        };
        Ok(rows.into_iter().filter_map(kind).collect())
    }

    /// Reads each queue from its low end.
    async fn look_from_low(&self, conn: Conn<'_>, service: &str, after: (&str, &str)) -> Result<Vec<WaitingRow>> {
        let rows: Vec<FromLow> = on!(conn, c => sqlx::query_as(self.work_sql().find_waiting_kinds)
            .bind(service)
            .bind(after.0)
            .bind(after.1)
            .bind(self.clock())
            .bind(i64::from(DueKind::MOST))
            .fetch_all(&mut *c)
            .await
            .map_err(read_failed)?);
        let read = |(kind, tenant, a, b, c, d, e, now): FromLow| (kind, tenant, [a, b, c, d, e].map(place), now);
        Ok(rows.into_iter().map(read).collect())
    }

    /// Reads each queue from its front, if that is known.
    async fn look_from_fronts(
        &self,
        conn: &mut PgConnection,
        service: &str,
        after: (&str, &str),
    ) -> Result<Vec<WaitingRow>> {
        let (begun, known) = (Instant::now(), self.fronts().known(service, after));
        if !known.is_empty()
            && let Some(rows) = self.look_at_known(conn, service, after, &known).await?
        {
            self.fronts().note(service, &rows, &known, begun.elapsed());
            return Ok(rows);
        }
        let begun = Instant::now();
        let rows = self.look_from_low(Conn::Postgres(conn), service, after).await?;
        self.fronts().note(service, &rows, &[], begun.elapsed());
        Ok(rows)
    }

    /// Reads known queues. `None` if there are others.
    async fn look_at_known(
        &self,
        conn: &mut PgConnection,
        service: &str,
        after: (&str, &str),
        known: &[Known],
    ) -> Result<Option<Vec<WaitingRow>>> {
        let rows: Vec<FromFront> = sqlx::query_as(self.work_sql().find_known_kinds)
            .bind(service)
            .bind(known_rows(after, known).to_string())
            .bind(self.clock())
            .fetch_all(conn)
            .await
            .map_err(read_failed)?;
        let mut found = Vec::with_capacity(rows.len());
        for (n, a, b, c, d, e, others, now) in rows {
            if others {
                return Ok(None);
            }
            let known = usize::try_from(n).ok().and_then(|n| known.get(n.checked_sub(1)?));
            if let Some(Known { pair: (kind, tenant), .. }) = known {
                found.push((kind.clone(), tenant.clone(), [a, b, c, d, e].map(place), now));
            }
        }
        found.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
        Ok(Some(found))
    }
}

/// Kind, tenant, the first row of each priority, and the time.
type FromLow = (String, String, Option<String>, Option<String>, Option<String>, Option<String>, Option<String>, i64);
/// The number of a kind and tenant, the first row of each priority, whether others follow, and the time.
type FromFront = (i64, Option<String>, Option<String>, Option<String>, Option<String>, Option<String>, bool, i64);

/// A place as the statements write it.
fn place(text: Option<String>) -> Option<Place> {
    let text = text?;
    let (due, id) = text.split_once(' ')?;
    Some((due.parse().ok()?, id.parse().ok()?))
}

/// The known kinds and tenants as rows of a statement, each with the next one; the first is the pair after which the look
/// begins, without rows of its own.
fn known_rows(after: (&str, &str), known: &[Known]) -> Value {
    let none = [(i64::MAX, i64::MAX); 5];
    let pairs = known.iter().map(|known| ((&*known.pair.0, &*known.pair.1), known.places));
    let pairs: Vec<_> = std::iter::once((after, none)).chain(pairs).collect();
    let next = pairs.iter().skip(1).map(|(pair, _)| *pair).chain([(LAST, "")]);
    let rows = pairs.iter().zip(next).enumerate().map(|(n, (((kind, tenant), places), next))| {
        let mut row = json!({ "n": n, "kind": kind, "tenant": tenant, "next_kind": next.0, "next_tenant": next.1 });
        for (n, (due, id)) in (1..).zip(places) {
            row[format!("due{n}")] = json!(due);
            row[format!("id{n}")] = json!(id);
        }
        row
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use semel::Token;
    use semel_testkit::{Kind, Lab};
    use sqlx::{AssertSqlSafe, Connection as _};

    use super::*;
    use crate::{
        Settings,
        sql::{Dialect, WorkSql},
    };

    const NOW: i64 = 1_000_000_000_000_000;

    fn scope(tenant: &str) -> Scope {
        Scope::new(tenant, "bank", "k").unwrap()
    }

    fn row(tenant: &str, first: Option<Place>) -> WaitingRow {
        ("k".to_owned(), tenant.to_owned(), [None, None, first, None, None], NOW)
    }

    #[test]
    fn a_queue_begins_where_the_last_look_has_found_its_first_row() {
        let fronts = Fronts::default();
        assert_eq!(fronts.of(&scope("a")), LOW);
        let soon = (NOW + 1, 3);
        fronts.note("bank", &[row("a", Some((7, 1))), row("b", Some(soon)), row("c", None)], &[], Duration::ZERO);
        assert_eq!(fronts.of(&scope("a"))[2], (7, 1));
        let late = (NOW - micros(LATE), i64::MIN);
        assert_eq!(fronts.of(&scope("a"))[0], late, "others of this priority may be committed in a moment");
        assert_eq!((fronts.of(&scope("b"))[2], fronts.of(&scope("c"))[2]), (late, late));
        fronts.note("bank", &[row("a", Some((9, 4)))], &[], Duration::ZERO);
        assert_eq!(fronts.of(&scope("a"))[2], (9, 4));
        assert_eq!(fronts.of(&scope("d")), LOW);
    }

    #[test]
    fn a_look_from_the_fronts_does_not_prolong_their_trust() {
        let fronts = Fronts::default();
        let pair = ("k".to_owned(), "a".to_owned());
        fronts.note("bank", &[row("a", Some((7, 1)))], &[], Duration::ZERO);
        let trusted = fronts.0.lock()["bank"].fronts[&pair].trusted;
        let known = [Known { pair: pair.clone(), places: fronts.of(&scope("a")) }];
        fronts.note("bank", &[row("a", Some((8, 1)))], &known, Duration::ZERO);
        assert_eq!(fronts.0.lock()["bank"].fronts[&pair].trusted, trusted);
        fronts.0.lock().get_mut("bank").unwrap().fronts.get_mut(&pair).unwrap().trusted = Uptime::now();
        assert_eq!(fronts.of(&scope("a")), LOW, "it is read from its low end again");
        let known = [Known { pair: pair.clone(), places: LOW }];
        fronts.note("bank", &[row("a", Some((8, 1)))], &known, Duration::ZERO);
        assert!(fronts.0.lock()["bank"].fronts[&pair].trusted > trusted);
    }

    #[test]
    fn only_slow_looks_make_the_next_ones_begin_at_the_fronts() {
        let fronts = Fronts::default();
        let rows = [row("a", Some((7, 1)))];
        fronts.note("bank", &rows, &[], Duration::from_millis(1));
        assert!(fronts.known("bank", ("", "")).is_empty());
        fronts.note("bank", &rows, &[], Duration::from_millis(100));
        assert_eq!(fronts.known("bank", ("", "")).len(), 1);
        assert!(fronts.known("bank", ("k", "a")).is_empty() && fronts.known("post", ("", "")).is_empty());
    }

    /// How many pages of the database a statement reads.
    async fn pages(conn: &mut PgConnection, text: &str, arguments: &str) -> u64 {
        let name = hex::encode(&Token::random().unwrap().0[..4]);
        sqlx::raw_sql(AssertSqlSafe(format!("PREPARE p{name} AS {text}"))).execute(&mut *conn).await.unwrap();
        let explain = AssertSqlSafe(format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) EXECUTE p{name}({arguments})"));
        let plan: Vec<(String,)> = sqlx::query_as(explain).fetch_all(conn).await.unwrap();
        let first = plan.iter().find_map(|(line,)| line.trim().strip_prefix("Buffers: shared ")).unwrap();
        first.split([' ', '=']).filter_map(|word| word.parse::<u64>().ok()).sum()
    }

    #[tokio::test]
    async fn entries_of_ended_operations_are_not_read_again_while_a_snapshot_is_held() {
        let lab = Lab::new(Kind::Postgres).await;
        drop(lab.open().await);
        let db = Database::open(&lab.url, Settings::default()).await.unwrap();
        let (mut held, mut conn) =
            (PgConnection::connect(&lab.url).await.unwrap(), PgConnection::connect(&lab.url).await.unwrap());
        sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM semel_backlog")
            .execute(&mut held)
            .await
            .unwrap();
        let fill = "INSERT INTO semel_backlog (operation, tenant, state, service, kind, due)
                    SELECT i, 't', 'pending', 'bank', 'k', 7 FROM generate_series(1, 20000) AS i;
                    DELETE FROM semel_backlog WHERE operation <= 19900";
        for text in [fill, postgres_settings()] {
            sqlx::raw_sql(text).execute(&mut conn).await.unwrap();
        }
        let look = async || db.look_due_kinds("bank", ("", "")).await.unwrap();
        assert_eq!(look().await.len(), 1);
        // However slow this machine is.
        let keep = || {
            let mut all = db.fronts().0.lock();
            let queues = all.get_mut("bank").unwrap();
            queues.slow = true;
            queues.fronts.values_mut().for_each(|front| front.trusted = Uptime::now() + Duration::from_secs(600));
        };
        keep();
        let places = db.fronts().of(&Scope::new("t", "bank", "k").unwrap());
        assert_eq!(places[2], (7, 19901));
        let sql = WorkSql::new(Dialect::Postgres);
        for pick in [sql.pick, sql.pick_oldest] {
            let with = |places: Places| {
                let places: Vec<_> = places.iter().map(|(due, id)| format!("'{due}', '{id}'")).collect();
                format!("'bank', 'k', 't', NULL, 5, 1, {}", places.join(", "))
            };
            let (all, few) = (pages(&mut conn, pick, &with(LOW)).await, pages(&mut conn, pick, &with(places)).await);
            assert!(10 * few < all, "{few} instead of {all}");
        }
        // A look begins there, too, and finds other tenants nevertheless.
        let known = db.fronts().known("bank", ("", ""));
        assert_eq!((known.len(), known[0].places), (1, places));
        assert_eq!(look().await, [DueKind { next: Timestamp::from_micros(7), ..look().await.remove(0) }]);
        sqlx::raw_sql(
            "DELETE FROM semel_backlog WHERE operation <= 19950;
             INSERT INTO semel_backlog (operation, tenant, state, service, kind, due) VALUES (30000, 'u', 'pending', 'bank', 'k', 8)",
        )
        .execute(&mut conn)
        .await
        .unwrap();
        keep();
        let tenants: Vec<_> = look().await.into_iter().map(|due| due.tenant).collect();
        assert_eq!(tenants, ["t", "u"]);
        assert_eq!(db.fronts().of(&Scope::new("t", "bank", "k").unwrap())[2], (7, 19951));
    }

    #[tokio::test]
    async fn a_look_at_known_queues_costs_the_same_however_many_operations_wait() {
        let lab = Lab::new(Kind::Postgres).await;
        drop(lab.open().await);
        let mut conn = PgConnection::connect(&lab.url).await.unwrap();
        let fill = "INSERT INTO semel_backlog (operation, tenant, state, service, kind, due)
                    SELECT i, 't', 'pending', 'bank', 'k', 7 FROM generate_series(1, 20000) AS i";
        for text in [fill, postgres_settings()] {
            sqlx::raw_sql(text).execute(&mut conn).await.unwrap();
        }
        let sql = WorkSql::new(Dialect::Postgres);
        let from_low = pages(&mut conn, sql.find_waiting_kinds, "'bank', '', '', NULL, 1000").await;
        let known = [Known { pair: ("k".to_owned(), "t".to_owned()), places: LOW }];
        let rows = known_rows(("", ""), &known).to_string();
        let known = pages(&mut conn, sql.find_known_kinds, &format!("'bank', '{rows}', NULL")).await;
        assert!(known < 4 * from_low, "{known} pages, and {from_low} from the low end");
    }

    fn postgres_settings() -> &'static str {
        "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; SET plan_cache_mode = force_generic_plan"
    }
}
