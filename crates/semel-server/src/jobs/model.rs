//! A job, and what its kind must be able to do.

use std::fmt;

use semel::{Result, Timestamp};
use semel_http::BoxFuture;
use semel_store::Tx;
use serde::{Serialize, Serializer};
use serde_json::Value;
use uuid::Uuid;

/// A job's name: a UUID of version 7, so that later jobs have higher ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(Uuid);

impl JobId {
    pub(super) fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// Reads an id, only as we write it: another spelling would be another row.
    pub(super) fn parse(text: &str) -> Option<Self> {
        Uuid::parse_str(text).ok().map(Self).filter(|id| id.to_string() == text)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It goes on, or waits for a node to go on with it.
    Running,
    /// It came to its end.
    Done,
    /// It cannot go on. What its steps did before stays done.
    Failed,
}

impl JobState {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    pub(super) fn parse(word: &str) -> Option<Self> {
        [Self::Running, Self::Done, Self::Failed].into_iter().find(|state| state.as_str() == word)
    }
}

/// A job to be made.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// Whose it is.
    pub tenant: String,
    /// What kind of job, by the name of a [`JobKind`].
    pub kind: &'static str,
    /// What that kind needs to know.
    pub params: Value,
    /// Who asked for it.
    pub actor: String,
}

/// A job.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Job {
    /// Its name.
    #[serde(rename = "jobId")]
    pub id: JobId,
    /// Whose it is.
    #[serde(skip)]
    pub tenant: String,
    /// What kind of job.
    pub kind: String,
    /// What that kind needs to know.
    pub params: Value,
    /// Who asked for it.
    pub actor: String,
    /// Where it stands.
    pub state: JobState,
    /// How much is done.
    pub done: i64,
    /// Of how much; `None` while, or because, nobody knows.
    pub total: Option<i64>,
    /// Where the next step begins.
    #[serde(skip)]
    pub cursor: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
    /// When it was asked for.
    #[serde(serialize_with = "time")]
    pub created_at: Timestamp,
    /// When it last got on.
    #[serde(serialize_with = "time")]
    pub updated_at: Timestamp,
    /// When it ended.
    #[serde(serialize_with = "time_if_any")]
    pub ended_at: Option<Timestamp>,
}

fn time<S: Serializer>(at: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(at)
}

fn time_if_any<S: Serializer>(at: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(|at| at.to_string()).serialize(serializer)
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// How much it added to what is done.
    pub done: u64,
    /// Where the next one begins.
    pub cursor: Option<String>,
    /// Whether there is a next one.
    pub more: bool,
}

/// A kind of job: what one step of it does.
pub trait JobKind: Send + Sync + 'static {
    /// Its name, in the table, in answers and in the ledger's scope.
    fn name(&self) -> &'static str;

    /// How much there is to do, if that can be told cheaply. Asked once, before the first step.
    fn count<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<Option<u64>>>;

    /// Does one bounded step from the job's cursor on, inside a transaction that also moves the job on. It must use
    /// nothing but that transaction, and be short: on SQLite it holds the only writer.
    ///
    /// # Errors
    /// One that is transient costs nothing, and the step is tried again. [`semel::Error::Invalid`] and
    /// [`semel::Error::Corrupt`] end the job as failed; any other does so when it has come too often.
    fn step<'a>(&'a self, job: &'a Job, tx: &'a Tx) -> BoxFuture<'a, Result<Step>>;
}
