//! The job that re-drives dead letters to their consumers.

use std::time::Duration;

use semel::{Error, Result, messaging::LetterFilter, prelude::*};
use semel_http::BoxFuture;
use semel_store::{Database, Tx};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    http::query::time,
    jobs::{Job, JobKind, Step},
};

/// The job's name.
pub(super) const NAME: &str = "redrive-dead-letters";

/// How many letters one request may name.
pub(super) const MOST_IDS: usize = 1000;

/// How many letters a step re-drives: a short transaction.
const AT_ONCE: u32 = 500;

/// By how much one clock of the database may be behind another: SQLite's has a resolution of milliseconds.
const GRAIN: Duration = Duration::from_millis(1);

/// The selected letters, as the job stores them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Filter {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) ids: Vec<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) consumer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// A time of RFC 3339, as people read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) before: Option<String>,
}

impl Filter {
    pub(super) fn to_params(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Selects letters that were dead when the job was created. A letter that dies again meanwhile is not selected: with a
/// handler that is still broken, the job would never end.
fn filter(job: &Job) -> Result<LetterFilter> {
    let said: Filter =
        serde_json::from_value(job.params.clone()).map_err(|_| Error::Invalid("params: are no filter".into()))?;
    let read = |said: Option<String>| {
        said.map(|said| time(&said).map_err(|_| Error::Invalid("params: have no time".into()))).transpose()
    };
    let asked = job.created_at + GRAIN;
    let before = read(said.before)?.map_or(asked, |before| asked.min(before));
    Ok(LetterFilter {
        tenant: job.tenant.clone(),
        ids: said.ids,
        consumer: said.consumer,
        queue: said.queue,
        reason: said.reason,
        since: read(said.since)?,
        before: Some(before),
    })
}

pub(super) struct Redrive {
    store: Database,
}

impl Redrive {
    pub(super) fn new(store: Database) -> Self {
        Self { store }
    }

    async fn step(&self, job: &Job, tx: &Tx) -> Result<Step> {
        let after = job.progress.cursor.as_deref().map(str::parse).transpose();
        let after = after.map_err(|_| Error::Invalid("cursor: is no id of a letter".into()))?;
        let round = self.store.redrive_letters_in(tx, &filter(job)?, after, AT_ONCE, &job.actor).await?;
        let cursor = round.last.map(|last| last.to_string()).or_else(|| job.progress.cursor.clone());
        Ok(Step { done: round.moved, cursor, more: round.more })
    }
}

impl JobKind for Redrive {
    fn name(&self) -> &'static str {
        NAME
    }

    fn count<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<Option<u64>>> {
        Box::pin(async {
            let count = self.store.count_letters(&filter(job)?).await?;
            Ok(count.exact.then_some(count.n))
        })
    }

    fn step<'a>(&'a self, job: &'a Job, tx: &'a Tx) -> BoxFuture<'a, Result<Step>> {
        Box::pin(self.step(job, tx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_filter_is_read_back_unchanged() {
        let filter = Filter {
            ids: vec![1],
            consumer: Some("mail".into()),
            since: Some("2026-01-31T12:00:00Z".into()),
            ..Filter::default()
        };
        assert_eq!(serde_json::from_value::<Filter>(filter.to_params()).unwrap(), filter);
        assert!(serde_json::from_value::<Filter>(serde_json::json!({ "quue": "x" })).is_err());
    }
}
