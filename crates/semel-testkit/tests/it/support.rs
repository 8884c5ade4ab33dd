//! A database, a bank beside it, and worker processes on both.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use semel::{Claim, Ledger, Operation, Options, Policy, State, Store as _, look};
use semel_store::{Database, Settings};
use semel_testkit::{
    Kind, Lab,
    faults::{Bank, Process, Told, make_effect_table, states, strays},
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
    /// A fresh one, by the real clock.
    pub(crate) async fn new(kind: Kind) -> Self {
        let lab = Lab::in_real_time(kind).await;
        let site = Self::at(&lab.url).await;
        Self { _lab: Some(lab), ..site }
    }

    /// On a database that somebody else looks after.
    pub(crate) async fn at(url: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("semel-bank-").tempdir().unwrap();
        let bank_path = folder.path().join("effects");
        let db = Database::open(url, Settings::default()).await.unwrap();
        make_effect_table(&db).await;
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

    /// What those are answered who bring these keys again: an outcome, if all is well.
    pub(crate) async fn replay(&self, keys: impl Iterator<Item = &String>) -> BTreeMap<String, String> {
        // A node of its own: connections end with the ledger that opened them.
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

    /// The counters must say what counting the rows says, and so must the list of what nobody runs.
    pub(crate) async fn check_counters(&self) {
        let mut counts = self.counts().await;
        let rows = loop {
            let (rows, again) = (states(&self.db).await, self.counts().await);
            // A server still carries out what a killed process has sent.
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
        assert_eq!(strays(&self.db).await, BTreeMap::new(), "what nobody runs and somebody should");
    }

    /// What the counters say.
    pub(crate) async fn counts(&self) -> Vec<look::Count> {
        self.db.counts(scope().tenant(), 0).await.unwrap()
    }
}

/// How it ended, of a single telling.
pub(crate) fn how(told: &[Told]) -> &str {
    match told.iter().rfind(|told| !matches!(told, Told::Begun { .. })) {
        Some(Told::Ended { how, .. }) => how,
        other => panic!("{other:?}"),
    }
}

/// The errors among what was told.
pub(crate) fn errors(told: &[Told]) -> Vec<&Told> {
    told.iter().filter(|told| matches!(told, Told::Broke { .. })).collect()
}

/// The keys of which somebody was told that the store was away for a moment, as on a disk that stalls. There may be no
/// other error.
pub(crate) fn troubled<'a>(told: impl IntoIterator<Item = &'a Told>, what: &str) -> BTreeSet<String> {
    let trouble = |told: &'a Told| match told {
        Told::Broke { key, transient: true, .. } => Some(key.clone()),
        Told::Broke { .. } => panic!("{what}: {told:?}"),
        _ => None,
    };
    told.into_iter().filter_map(trouble).collect()
}

/// The keys of which somebody was told that the lease was lost.
pub(crate) fn lost_leases<'a>(told: impl IntoIterator<Item = &'a Told>) -> BTreeSet<String> {
    let lost = |told: &'a Told| match told {
        Told::Ended { key, how, .. } if how == "lease_lost" => Some(key.clone()),
        _ => None,
    };
    told.into_iter().filter_map(lost).collect()
}

/// The outcomes that were acknowledged, by key. One that changes afterwards is the worst of all.
pub(crate) fn acknowledged<'a>(told: impl IntoIterator<Item = &'a Told>) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    for told in told {
        if let Told::Ended { key, outcome: Some(outcome), .. } = told {
            let first = all.entry(key.clone()).or_insert_with(|| outcome.clone());
            assert_eq!(first, outcome, "the outcome of {key} has changed");
        }
    }
    all
}
