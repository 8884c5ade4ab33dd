//! A job, and the trait of its kinds.

use std::fmt;

use bytes::Bytes;
use semel::{Error, Operation, Result, State, Timestamp, machine::due};
use semel_http::BoxFuture;
use semel_store::Tx;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};
use uuid::Uuid;

use super::work::policy;

/// A job's id: a UUID of version 7, so that later jobs have higher ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(Uuid);

impl JobId {
    pub(super) fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// Parses an id in its canonical form only: another spelling would be another row.
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

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It runs, or waits to run.
    Running,
    /// It is done.
    Done,
    /// It failed or was cancelled. The effects of its steps stay.
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

/// A new job.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// Its tenant.
    pub tenant: String,
    /// The name of its [`JobKind`].
    pub kind: &'static str,
    /// The parameters of that kind.
    pub params: Value,
    /// The person who created it.
    pub actor: String,
}

/// A job.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Job {
    /// Its id.
    #[serde(rename = "jobId")]
    pub id: JobId,
    /// Its tenant.
    #[serde(skip)]
    pub tenant: String,
    /// The name of its kind.
    pub kind: String,
    /// The parameters of that kind.
    pub params: Value,
    /// The person who created it.
    pub actor: String,
    /// Its state.
    pub state: JobState,
    /// Its progress.
    #[serde(flatten, serialize_with = "counts")]
    pub progress: Progress,
    /// Why it failed.
    pub error: Option<String>,
    /// When it was created.
    #[serde(serialize_with = "time")]
    pub created_at: Timestamp,
    /// When it last made progress.
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

/// The progress of a job: the checkpoint of its operation, and its outcome once it is done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// How much is done.
    pub done: i64,
    /// The total; `None` if it is unknown.
    pub total: Option<i64>,
    /// The start of the next step.
    pub cursor: Option<String>,
    /// The time of the last step, in microseconds.
    pub(super) at: Option<i64>,
    /// Whether that was the final step.
    pub(super) over: bool,
}

impl Progress {
    /// The progress after one more step. Corrects a total that was counted wrongly.
    pub(super) fn after(&self, step: &Step, now: Timestamp) -> Self {
        let done = self.done.saturating_add(i64::try_from(step.done).unwrap_or(i64::MAX));
        let total = if step.more { self.total.map(|total| total.max(done)) } else { Some(done) };
        Self { done, total, cursor: step.cursor.clone(), at: Some(now.as_micros()), over: !step.more }
    }

    pub(super) fn encode(&self) -> String {
        json!(self).to_string()
    }
}

/// The public part of the progress.
fn counts<S: Serializer>(progress: &Progress, serializer: S) -> Result<S::Ok, S::Error> {
    json!({ "done": progress.done, "total": progress.total }).serialize(serializer)
}

/// The payload of a job's operation.
#[derive(Serialize, Deserialize)]
pub(super) struct Stored {
    pub(super) params: Value,
    pub(super) actor: String,
    /// The state from an older version.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) former: Option<Former>,
}

/// The state of a job when it was migrated from the table of an older version. Times are microseconds.
#[derive(Serialize, Deserialize)]
pub(super) struct Former {
    pub(super) created_at: i64,
    pub(super) progress: Progress,
    pub(super) ended_at: Option<i64>,
    pub(super) error: Option<String>,
}

impl Job {
    /// The job of an operation.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it cannot be read.
    pub(super) fn of(op: &Operation) -> Result<Self> {
        let id = JobId::parse(op.key.as_str()).ok_or(Error::Corrupt("a job's id"))?;
        let payload = op.payload.as_deref().ok_or(Error::Corrupt("a job's payload"))?;
        let stored: Stored = serde_json::from_slice(payload).map_err(|_| Error::Corrupt("a job's payload"))?;
        let former = stored.former;
        let decode = |data: &Bytes| serde_json::from_slice::<Progress>(data).ok();
        let mut progress = match &op.checkpoint {
            Some(data) => decode(data).ok_or(Error::Corrupt("a job's checkpoint"))?,
            None => former.as_ref().map(|former| former.progress.clone()).unwrap_or_default(),
        };
        if let Some(outcome) = &op.outcome {
            // A person who resolved it may have stored another outcome.
            progress = decode(&outcome.body).unwrap_or(progress);
        }
        let (mut state, mut ended_at, mut error) = (state(op), op.settled_at, op.error.clone());
        if let Some(Former { ended_at: Some(at), error: why, .. }) = &former {
            state = if why.is_some() { JobState::Failed } else { JobState::Done };
            (ended_at, error) = (Some(Timestamp::from_micros(*at)), why.clone());
        }
        let ended_at = ended_at.filter(|_| state != JobState::Running);
        let created_at = former.map_or(op.created_at, |former| Timestamp::from_micros(former.created_at));
        Ok(Self {
            id,
            tenant: op.scope.tenant().to_owned(),
            kind: op.scope.kind().to_owned(),
            params: stored.params,
            actor: stored.actor,
            state,
            error: error.filter(|_| state == JobState::Failed),
            created_at,
            updated_at: ended_at.or(progress.at.map(Timestamp::from_micros)).unwrap_or(created_at),
            ended_at,
            progress,
        })
    }

    /// An unreadable job: it is shown as failed, and hides no other.
    pub(super) fn unreadable(id: JobId, kind: String, created_at: Timestamp, why: &str) -> Self {
        Self {
            id,
            tenant: String::new(),
            kind,
            params: Value::Null,
            actor: String::new(),
            state: JobState::Failed,
            progress: Progress::default(),
            error: Some(format!("unreadable: {why}")),
            created_at,
            updated_at: created_at,
            ended_at: None,
        }
    }
}

/// The state of an operation's job. One that failed or was lost, and may run again, is running.
fn state(op: &Operation) -> JobState {
    match op.state {
        State::Completed => JobState::Done,
        State::Processing => JobState::Running,
        // Jobs are never in doubt by their own rules; if one is, only a person can continue it.
        State::InDoubt => JobState::Failed,
        State::Pending | State::Failed | State::TimedOut => match due(op, Some(&policy()), op.created_at) {
            Some(_) => JobState::Running,
            None => JobState::Failed,
        },
    }
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The increase of the progress.
    pub done: u64,
    /// The start of the next step.
    pub cursor: Option<String>,
    /// Whether there is a next step.
    pub more: bool,
}

/// A kind of job: what one step of it does.
pub trait JobKind: Send + Sync + 'static {
    /// Its name, in answers and in the scope.
    fn name(&self) -> &'static str;

    /// The total, if it is cheap to count. Called once, before the first step.
    fn count<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<Option<u64>>>;

    /// Runs one bounded step from the job's cursor on, in a transaction that also stores the progress. It must use only
    /// that transaction, and be short: on SQLite it holds the only writer.
    ///
    /// # Errors
    /// After a transient error the step is tried again, without counting an attempt. [`semel::Error::Invalid`] and
    /// [`semel::Error::Corrupt`] fail the job; other errors fail it after too many attempts.
    fn step<'a>(&'a self, job: &'a Job, tx: &'a Tx) -> BoxFuture<'a, Result<Step>>;
}
