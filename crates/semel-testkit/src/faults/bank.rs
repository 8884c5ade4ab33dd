//! Effects, counted outside of the ledger.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot count fails")]

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use semel::{Fence, prelude::*};
use semel_store::{Conn, Database, Tx, on};

/// One effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The operation's key.
    pub key: String,
    /// The fence it was made under.
    pub fence: i64,
    /// The process.
    pub pid: u32,
    /// The derived key that another service would have got.
    pub derived: String,
    /// When, by the clock that all processes of the host share.
    pub at: Duration,
}

/// Stands for a bank, a mail server, a receiver: a file to which every process appends a line per effect, without any
/// deduplication.
pub struct Bank {
    path: PathBuf,
    file: File,
}

impl Bank {
    /// Opens it, from any number of processes.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        Self { path: path.to_owned(), file }
    }

    /// Makes an effect.
    pub fn take(&self, key: &str, fence: Fence, derived: &str) {
        // One short write with O_APPEND: lines of several processes do not mix, and a process that
        // is killed leaves a whole line or none.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let at = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        let line = format!("{key} {fence} {} {derived} {at}\n", std::process::id());
        (&self.file).write_all(line.as_bytes()).unwrap();
    }

    /// All effects.
    #[must_use]
    pub fn effects(&self) -> Vec<Effect> {
        let text = std::fs::read_to_string(&self.path).unwrap();
        let effect = |line: &str| {
            let [key, fence, pid, derived, at] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line:?}") };
            Effect {
                key: key.to_owned(),
                fence: fence.parse().unwrap(),
                pid: pid.parse().unwrap(),
                derived: derived.to_owned(),
                at: Duration::from_micros(at.parse().unwrap()),
            }
        };
        text.lines().map(effect).collect()
    }

    /// How often each key took effect.
    #[must_use]
    pub fn by_key(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for effect in self.effects() {
            *counts.entry(effect.key).or_default() += 1;
        }
        counts
    }
}

/// Creates the table of atomic runs' effects. It refuses no duplicate: that is the ledger's task.
pub async fn make_effect_table(db: &Database) {
    let tx = db.begin(Duration::from_secs(5)).await.unwrap();
    {
        let mut held = tx.connection().await.unwrap();
        on!(held.get().unwrap(), c =>
            drop(sqlx::raw_sql("CREATE TABLE IF NOT EXISTS effects (key TEXT NOT NULL, fence BIGINT NOT NULL)").execute(&mut *c).await.unwrap()));
    }
    assert!(matches!(db.commit(&tx).await, semel::store::Commit::Done));
}

/// Makes an effect inside a transaction.
///
/// # Errors
/// The database refuses, or the transaction is over.
pub async fn take_in(tx: &Tx, key: &str, fence: Fence) -> Result<(), String> {
    let mut held = tx.connection().await.map_err(|e| e.to_string())?;
    let conn = held.get().map_err(|e| e.to_string())?;
    let text = "INSERT INTO effects (key, fence) VALUES ($1, $2)";
    let done = on!(conn, c => sqlx::query(text).bind(key).bind(fence.0).execute(&mut *c).await.map(drop));
    done.map_err(|e| e.to_string())
}

/// How often each key took effect inside the database.
pub async fn effect_rows(db: &Database) -> BTreeMap<String, i64> {
    counted(db, "SELECT key, count(*) FROM effects GROUP BY key").await
}

/// How many operations are in each state, according to the rows.
pub async fn states(db: &Database) -> BTreeMap<String, i64> {
    counted(db, "SELECT state, count(*) FROM semel_operations GROUP BY state").await
}

/// Operations that are missing in the backlog, or are in it wrongly, or with the wrong time, by state: the backlog and
/// the rows are written in one commit, so there must be none after any kill.
pub async fn strays(db: &Database) -> BTreeMap<String, i64> {
    let sql = "SELECT o.state, count(*) FROM semel_operations AS o LEFT JOIN semel_backlog AS b ON b.operation = o.id
         WHERE (o.state IN ('pending', 'failed', 'timed_out', 'in_doubt')) <> (b.operation IS NOT NULL)
            OR b.state <> o.state OR b.service <> o.service OR b.kind <> o.kind
            OR (b.due IS NOT NULL AND (o.state = 'in_doubt' OR o.parked OR b.due < coalesce(o.not_before, o.settled_at, 1)))
            OR (b.operation IS NOT NULL AND b.due IS NULL AND o.state <> 'in_doubt' AND NOT o.parked AND o.failures = 0)
         GROUP BY o.state";
    counted(db, sql).await
}

pub(super) async fn counted(db: &Database, sql: &'static str) -> BTreeMap<String, i64> {
    let tx = db.begin(Duration::from_secs(5)).await.unwrap();
    let mut held = tx.connection().await.unwrap();
    let rows: Vec<(String, i64)> = match held.get().unwrap() {
        Conn::Postgres(c) => sqlx::query_as(sql).fetch_all(&mut *c).await.unwrap(),
        Conn::Sqlite(c) => sqlx::query_as(sql).fetch_all(&mut *c).await.unwrap(),
    };
    drop(held);
    db.roll_back(&tx).await;
    rows.into_iter().collect()
}
