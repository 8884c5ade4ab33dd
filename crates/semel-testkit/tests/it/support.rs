//! A database, a bank beside it, and worker processes on both.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use semel::{Claim, Ledger, Operation, Options, Policy, State, look, prelude::*};
use semel_store::{Database, Settings};
use semel_testkit::{
    Kind, Lab,
    faults::{Bank, Process, Report, disagreements, make_effect_table, make_followers, states, strays},
    key, scope, work,
};
use tokio::task::JoinSet;

/// The path of the worker's program.
const WORKER: &str = env!("CARGO_BIN_EXE_semel-worker");

/// Makes two tests of a function of a [`Kind`].
macro_rules! on_both_databases {
    ($($test:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(semel_testkit::Kind::Sqlite).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(semel_testkit::Kind::Postgres).await;
            })+
        }
    };
}

pub(crate) use on_both_databases;

/// A database, and where its operations take effect.
pub(crate) struct Site {
    pub(crate) url: String,
    pub(crate) db: Database,
    pub(crate) bank: Bank,
    bank_path: PathBuf,
    _folder: tempfile::TempDir,
    _lab: Option<Lab>,
}

impl Site {
    /// A fresh one, with the real clock.
    pub(crate) async fn new(kind: Kind) -> Self {
        let lab = Lab::in_real_time(kind).await;
        let site = Self::at(&lab.url).await;
        Self { _lab: Some(lab), ..site }
    }

    /// On a database that the caller manages.
    pub(crate) async fn at(url: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("semel-bank-").tempdir().unwrap();
        let bank_path = folder.path().join("effects");
        let db = Database::open(url, Settings::default()).await.unwrap();
        make_effect_table(&db).await;
        make_followers(&db).await;
        Self { url: url.to_owned(), db, bank: Bank::open(&bank_path), bank_path, _folder: folder, _lab: None }
    }

    /// One more worker process.
    pub(crate) async fn worker(&self) -> Process {
        self.worker_with(&[]).await
    }

    /// One more worker process, with these environment variables.
    pub(crate) async fn worker_with(&self, env: &[(&str, &str)]) -> Process {
        Process::start(WORKER, &self.url, &self.bank_path, env).await
    }

    /// An operation.
    pub(crate) async fn operation(&self, text: &str) -> Operation {
        self.db.by_key(&scope(), &key(text)).await.unwrap().unwrap_or_else(|| panic!("{text} is not in the ledger"))
    }

    /// Some operations.
    pub(crate) async fn all(&self, keys: impl Iterator<Item = String>) -> Vec<Operation> {
        let mut all = Vec::new();
        for key in keys {
            all.push(self.operation(&key).await);
        }
        all
    }

    /// All operations, by key.
    pub(crate) async fn operations(&self) -> BTreeMap<String, Operation> {
        let (mut all, mut after) = (BTreeMap::new(), None);
        loop {
            let page = look::Page { after, limit: 500 };
            let listing = self.db.list(&look::Filter::scope(&scope()), page).await.unwrap();
            all.extend(listing.items.into_iter().map(|op| (op.key.as_str().to_owned(), op)));
            after = listing.next;
            if after.is_none() {
                return all;
            }
        }
    }

    /// The answers to repeated claims of these keys: an outcome each.
    pub(crate) async fn replay(&self, keys: impl Iterator<Item = &String>) -> BTreeMap<String, String> {
        // A separate node: connections end with the ledger that opened them.
        let db = Database::open(&self.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(db, Options::default()).unwrap();
        let mut asked = JoinSet::new();
        for text in keys.cloned() {
            let ledger = ledger.clone();
            asked.spawn(async move {
                let answer = match ledger.claim(work(&text, Policy::default())).await.unwrap() {
                    Claim::Replay(replay) => String::from_utf8(replay.outcome.body.to_vec()).unwrap(),
                    other => format!("({})", other.word()),
                };
                (text, answer)
            });
        }
        asked.join_all().await.into_iter().collect()
    }

    /// The counters and the backlog must agree with the rows.
    pub(crate) async fn check_counters(&self) {
        let mut counts = self.counts().await;
        let rows = loop {
            let (rows, again) = (states(&self.db).await, self.counts().await);
            // A server may still execute what a killed process has sent.
            if again == counts {
                break rows;
            }
            counts = again;
        };
        for state in State::ALL {
            let counted = look::in_state(&counts, state);
            assert_eq!(
                counted,
                rows.get(state.as_str()).copied().unwrap_or(0),
                "counted as {state}; the rows: {rows:?}"
            );
        }
        assert_eq!(disagreements(&self.db).await, BTreeMap::new(), "rows that disagree with their operations");
        assert_eq!(strays(&self.db).await, BTreeMap::new(), "backlog rows that disagree with their operations");
    }

    /// The values of the counters.
    pub(crate) async fn counts(&self) -> Vec<look::Count> {
        self.db.counts(scope().tenant(), 0).await.unwrap()
    }
}

/// The end in a single report.
pub(crate) fn how(reports: &[Report]) -> &str {
    match reports.iter().rfind(|reports| !matches!(reports, Report::Begun { .. })) {
        Some(Report::Ended { how, .. }) => how,
        other => panic!("{other:?}"),
    }
}

/// The errors among reports.
pub(crate) fn errors(reports: &[Report]) -> Vec<&Report> {
    reports.iter().filter(|reports| matches!(reports, Report::Broke { .. })).collect()
}

/// The keys with a transient error, as on a disk that stalls. There may be no other error.
pub(crate) fn troubled<'a>(reports: impl IntoIterator<Item = &'a Report>, what: &str) -> BTreeSet<String> {
    let trouble = |reports: &'a Report| match reports {
        Report::Broke { key, transient: true, .. } => Some(key.clone()),
        Report::Broke { .. } => panic!("{what}: {reports:?}"),
        _ => None,
    };
    reports.into_iter().filter_map(trouble).collect()
}

/// The keys with a lost lease.
pub(crate) fn lost_leases<'a>(reports: impl IntoIterator<Item = &'a Report>) -> BTreeSet<String> {
    let lost = |reports: &'a Report| match reports {
        Report::Ended { key, how, .. } if how == "lease_lost" => Some(key.clone()),
        _ => None,
    };
    reports.into_iter().filter_map(lost).collect()
}

/// The acknowledged outcomes, by key. None may change afterwards.
pub(crate) fn acknowledged<'a>(reports: impl IntoIterator<Item = &'a Report>) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    for reports in reports {
        if let Report::Ended { key, outcome: Some(outcome), .. } = reports {
            let first = all.entry(key.clone()).or_insert_with(|| outcome.clone());
            assert_eq!(first, outcome, "the outcome of {key} has changed");
        }
    }
    all
}
