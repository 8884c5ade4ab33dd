//! `POST /webhooks/{source}/events/reprocess`: the job that runs stored events through the present rules.

use std::{sync::Arc, time::Duration};

use axum::{Router, extract::State as Server, response::Response, routing::post};
use semel::{Error, OnLost, Policy, Result, Timestamp, machine::Answer};
use semel_http::{BoxFuture, Idempotency, Route, Transaction};
use semel_store::{Database, Passed, Tx};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Receiver, SERVICE,
    events::{label, show_reprocess},
    process::{Done, RESULTS, STORED},
    source::Source,
};
use crate::{
    http::{
        fields::{Fields, Wrong, moment, only_true, reason, text},
        path::Id,
        principal::Actor,
        problem::{INVALID_FIELDS, Problem, of_store},
        query::time,
    },
    jobs::{Job, JobKind, Jobs, NewJob, Step, accepted},
};

/// The job's name.
pub(crate) const NAME: &str = "reprocess-webhook-events";

/// How many events a step reads, and how many of them it runs again at most: a short transaction.
const PASSED: u32 = 500;
const AT_ONCE: usize = 100;

/// By how much one clock of the database may be behind another: SQLite's has a resolution of milliseconds.
const GRAIN: Duration = Duration::from_millis(1);

/// The longest body of a request.
const BODY_LIMIT: usize = 16 << 10;

/// The selected events and the reason, as the job stores them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Asked {
    pub(crate) source: String,
    /// Their result; `stored` by default.
    pub(crate) result: String,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none", default)]
    pub(crate) kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) function: Option<String>,
    /// RFC 3339 times of an event's first delivery.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) until: Option<String>,
    pub(crate) reason: String,
}

impl Asked {
    pub(crate) fn to_params(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// The same, with parsed times. Events after the job's creation are not selected: the rules of that time applied to
/// them.
struct Meant {
    asked: Asked,
    since: Option<Timestamp>,
    until: Timestamp,
}

impl Meant {
    fn of(job: &Job) -> Result<Self> {
        let asked: Asked = serde_json::from_value(job.params.clone())
            .map_err(|_| Error::Invalid("params: do not say which events are meant".into()))?;
        let read = |said: &Option<String>| {
            let read = |said: &String| time(said).map_err(|_| Error::Invalid("params: have no time".into()));
            said.as_ref().map(read).transpose()
        };
        let asked_at = job.created_at + GRAIN;
        let until = read(&asked.until)?.map_or(asked_at, |until| asked_at.min(until));
        Ok(Self { since: read(&asked.since)?, until, asked })
    }

    /// Whether an event is selected. One without a matching rule stays as it is.
    fn has(&self, event: &Passed, source: &Source) -> bool {
        let is = |asked: &Option<String>, label: &Option<String>| asked.is_none() || asked == label;
        let result = event.outcome.as_ref().and_then(Done::read).map(|done| done.word());
        event.service == SERVICE
            && result == Some(&*self.asked.result)
            && is(&self.asked.kind, &event.label1)
            && is(&self.asked.function, &event.label2)
            && self.since.is_none_or(|since| event.created_at >= since)
            && event.created_at < self.until
            && !source.stores(event.label1.as_deref().unwrap_or_default())
    }
}

/// The job. Each step runs a bounded number of events again in the transaction that stores the job's progress: a node
/// that dies has done whole steps only, and each event runs once.
pub(super) struct Reprocess(pub(super) Receiver);

impl Reprocess {
    async fn step(&self, job: &Job, tx: &Tx) -> Result<Step> {
        let meant = Meant::of(job)?;
        let source = self.0.source(&meant.asked.source).filter(|source| source.config.tenant == job.tenant);
        let source = source.ok_or_else(|| Error::Invalid("params: this node has no source of this name".into()))?;
        let after = job.progress.cursor.as_deref().map(str::parse).transpose();
        let after = after.map_err(|_| Error::Invalid("cursor: is no id of an event".into()))?;
        let store = self.0.ledger().store();
        let page = store.passed_in(tx, (&job.tenant, &source.name), after, PASSED).await?;
        let (mut done, mut last) = (0, None);
        for event in &page {
            if done == AT_ONCE {
                break;
            }
            last = Some(event);
            if meant.has(event, source) {
                let by = (job.actor.as_str(), meant.asked.reason.as_str());
                let applied = store.rerun_in(tx, event.id, event.fence, by).await?;
                done += usize::from(applied.answer == Answer::Resolved);
            }
        }
        let is_past = last.is_some_and(|last| meant.since.is_some_and(|since| last.created_at < since));
        let more = (done == AT_ONCE || page.len() >= PASSED as usize) && !is_past;
        let cursor = last.map(|last| last.id.to_string()).or_else(|| job.progress.cursor.clone());
        Ok(Step { done: done as u64, cursor, more })
    }
}

impl JobKind for Reprocess {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Only reading all events would tell.
    fn count<'a>(&'a self, _: &'a Job) -> BoxFuture<'a, Result<Option<u64>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    fn step<'a>(&'a self, job: &'a Job, tx: &'a Tx) -> BoxFuture<'a, Result<Step>> {
        Box::pin(self.step(job, tx))
    }
}

#[derive(Clone)]
struct Door {
    receiver: Receiver,
    jobs: Jobs,
}

impl Receiver {
    /// The kinds of jobs of this service.
    #[must_use]
    pub fn job_kinds(&self) -> Vec<Arc<dyn JobKind>> {
        vec![Arc::new(Reprocess(self.clone()))]
    }

    /// The route that creates a job: for people, as [`routes_for_people`](Self::routes_for_people).
    pub fn job_routes(&self, jobs: &Jobs) -> Router {
        // With a key, a repeated request gets the job of the first one.
        let keyed = Route::atomic()
            .service("webhook-jobs")
            .kind("reprocess")
            .policy(Policy { on_lost: OnLost::Rerun, ..Policy::default() })
            .verdict(semel_http::Verdict::only_success)
            .request_limit(BODY_LIMIT);
        let door = Door { receiver: self.clone(), jobs: jobs.clone() };
        let reprocess = post(reprocess).route_layer(Idempotency::new(self.ledger().clone()).layer(keyed));
        let events = Router::new()
            .route("/webhooks/{source}/events/reprocess", axum::routing::get(show_reprocess))
            .with_state(self.clone());
        let jobs = Router::new().route("/webhooks/{source}/events/reprocess", reprocess).with_state(door);
        events.merge(jobs)
    }
}

/// `POST /webhooks/{source}/events/reprocess`
async fn reprocess(
    Server(Door { receiver, jobs }): Server<Door>,
    Id(name): Id,
    Transaction(tx): Transaction<Database>,
    Actor(principal): Actor,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let source = receiver.source_of(&principal.tenant, &name)?;
    let why = fields.must("reason", reason);
    let all = fields.may("all", only_true);
    let asked = Asked {
        source: source.name.clone(),
        result: fields.may("result", result).unwrap_or_else(|| STORED.to_owned()),
        kind: fields.may("type", word),
        function: fields.may("function", word),
        since: fields.may("since", moment).map(|at| at.to_string()),
        until: fields.may("until", moment).map(|at| at.to_string()),
        reason: why.unwrap_or_default(),
    };
    fields.finish()?;
    check(&asked, all.is_some(), &source)?;
    let new = NewJob { tenant: principal.tenant, kind: NAME, params: asked.to_params(), actor: principal.subject };
    let job = jobs.create_in(&tx, new).await.map_err(of_store)?;
    Ok(accepted(&job))
}

/// Refuses a request that would run nothing, or everything because a filter was lost on the way.
pub(crate) fn check(asked: &Asked, all: bool, source: &Source) -> Result<(), Problem> {
    let mut wrong = Wrong::default();
    let filters = [&asked.kind, &asked.function, &asked.since, &asked.until].iter().any(|filter| filter.is_some());
    if all == filters {
        let message = "must be true if every event is meant; otherwise there must be a filter by type, function, since or \
                       until; not both";
        wrong.note("all", message);
    }
    if asked.kind.as_ref().is_some_and(|kind| source.stores(kind)) {
        wrong.note("type", "matches no rule: add one to the source's handlers first");
    }
    wrong.check(&INVALID_FIELDS)
}

fn word(raw: &str) -> Result<String, String> {
    label(&text(raw)?).map_err(str::to_owned)
}

/// Reads a result by its name.
pub(super) fn result(raw: &str) -> Result<String, String> {
    let named = text(raw)?;
    if RESULTS.contains(&&*named) { Ok(named) } else { Err(format!("must be one of {}", RESULTS.join(", "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_of_a_job_is_stored_unchanged() {
        let asked = Asked {
            source: "stripe".into(),
            result: STORED.into(),
            kind: Some("invoice.paid".into()),
            since: Some("2026-01-31T12:00:00Z".into()),
            reason: "a rule was added".into(),
            ..Asked::default()
        };
        assert_eq!(serde_json::from_value::<Asked>(asked.to_params()).unwrap(), asked);
        assert!(serde_json::from_value::<Asked>(serde_json::json!({ "source": "a", "sincee": "x" })).is_err());
    }

    #[test]
    fn every_result_has_a_name_and_other_words_are_refused() {
        for done in [Done::Stored, Done::Forwarded { status: 200 }, Done::Duplicate { of: "a".into() }] {
            assert_eq!(result(&format!("{:?}", done.word())), Ok(done.word().to_owned()));
        }
        assert!(result("\"completed\"").is_err() && result("1").is_err());
    }
}
