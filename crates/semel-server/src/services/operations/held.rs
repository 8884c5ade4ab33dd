//! The calls of a lease's holder: renew, complete, fail, doubt, release. Each names the fence.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::State as Server,
    response::{IntoResponse as _, Response},
};
use semel::{
    Failure, Fence, Operation, Outcome, Renewed, Retry,
    machine::{Answer, Event, Next, Write, step},
    prelude::*,
    store::Applied,
};
use semel_http::problem::{IN_FLIGHT, LEASE_LOST, OUTCOME_UNKNOWN};
use serde_json::json;

use super::{
    Api,
    ask::{given, stored},
    record::Record,
};
use crate::http::{
    answers::{damaged, missing, patiently, shown},
    fields::{Fields, integer},
    path::Id,
    principal::{Actor, Principal},
    problem::Problem,
    query::number,
};
use crate::services::webhooks::pull;

/// A reference to a lease.
struct Held {
    api: Api,
    tenant: String,
    id: i64,
    fence: Fence,
}

impl Held {
    /// Reads the fence, the last field of a body.
    fn read(api: Api, principal: Principal, id: &str, mut fields: Fields) -> Result<Self, Problem> {
        let fence = fields.must("fence", integer);
        fields.finish()?;
        let id = number(id).ok_or_else(missing)?;
        Ok(Self { api, tenant: principal.tenant, id, fence: Fence(fence.unwrap_or_default()) })
    }

    /// The operation as this node has granted it, or as it is stored.
    async fn operation(&self) -> Result<Arc<Operation>, Problem> {
        match self.api.granted.find(&self.tenant, self.id, self.fence) {
            Some(held) => Ok(held),
            None => self.api.find_kept(&self.tenant, self.id).await.map(|(op, _)| Arc::new(op)),
        }
    }

    /// Ends the run, and shows the operation.
    async fn settle(self, write: Write) -> Result<Response, Problem> {
        let held = match self.operation().await {
            // A first run that was released before has left no record.
            Err(gone) if *gone.kind() == *missing().kind() && matches!(write, Write::Release { .. }) => {
                let stored = patiently(self.api.store().by_id(&self.tenant, self.id)).await?;
                return if stored.is_none() && self.fence.0 == self.id && self.id > 0 {
                    Ok(released())
                } else {
                    Err(gone)
                };
            }
            found => found?,
        };
        let applied = self.api.ledger.write_as(&held, self.fence, write.clone()).await;
        let applied = applied.map_err(|error| damaged(error, self.id, "see semel operations show"))?;
        match applied.answer {
            Answer::Settled { .. } => {
                self.api.granted.forget(self.id);
                self.settled(&held, write, applied).await
            }
            Answer::Lost => self.lost().await,
            _ => Err(Problem::new(&IN_FLIGHT)),
        }
    }

    /// The operation after the settle. A completion that was made just now is computed by the state machine: it is what
    /// was stored. One that was made before, at another node, say, had another time; its answer has the operation.
    async fn settled(&self, held: &Operation, write: Write, applied: Applied) -> Result<Response, Problem> {
        let is_new = applied.operation.is_none() && held.fence == self.fence && held.lease.is_some();
        if matches!(write, Write::Complete(_)) && is_new {
            let event = Event::Write { fence: self.fence, write };
            if let Next::Put(op) = step(Some(held), &event, applied.now).next {
                return Ok(shown(&Record::of(self.api.store(), &op, applied.now).await));
            }
        }
        let store = self.api.store();
        match patiently(store.by_id(&self.tenant, self.id)).await.map_err(not_shown)? {
            // As above: its caller has the input.
            Some(op) => {
                let op = Operation { payload: None, ..op };
                Ok(shown(&Record::of(store, &op, applied.now).await))
            }
            None => Ok(released()),
        }
    }

    /// The problem of a lease that another call has ended.
    async fn lost(&self) -> Result<Response, Problem> {
        let problem = Problem::new(&LEASE_LOST);
        let store = self.api.store();
        let now = patiently(store.now()).await?;
        Ok(match patiently(store.by_id(&self.tenant, self.id)).await? {
            Some(op) => {
                let record = serde_json::to_value(Record::brief(&op, now)).unwrap_or_default();
                problem.with("operation", record).into_response()
            }
            None => problem.into_response(),
        })
    }
}

/// The problem of an operation that was changed and cannot be read: the same call again shows it.
pub(super) fn not_shown(_: Problem) -> Problem {
    Problem::new(&OUTCOME_UNKNOWN).retry_after(Duration::from_secs(1))
}

/// The answer to a release that left no record.
fn released() -> Response {
    shown(&json!({ "released": true }))
}

/// `POST /v1/operations/{id}/renew`
pub(super) async fn renew(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    let held = Held::read(api, principal, &id, fields)?;
    held.operation().await?;
    let renewed = held.api.ledger.renew_as(held.id, held.fence).await;
    match renewed.map_err(|error| damaged(error, held.id, "see semel operations show"))? {
        Renewed::Until { deadline, cancelled } => {
            let lease = json!({ "fence": held.fence.0, "leaseExpiresAt": deadline.to_string() });
            Ok(shown(&json!({ "lease": lease, "cancelRequested": cancelled })))
        }
        Renewed::LeaseLost => held.lost().await,
    }
}

/// `POST /v1/operations/{id}/complete`
pub(super) async fn complete(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let result = given(&mut fields, "resultData", stored);
    let held = Held::read(api, principal, &id, fields)?;
    let op = held.operation().await?;
    held.settle(Write::Complete(outcome_of(&op, result.as_deref()))).await
}

/// `POST /v1/operations/{id}/fail`
pub(super) async fn fail(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let error = fields.must("errorMessage", message);
    let retryable = given(&mut fields, "retryable", |raw| raw.parse::<bool>().map_err(|_| "must be true or false"));
    let held = Held::read(api, principal, &id, fields)?;
    let retry = if retryable.unwrap_or(true) { Retry::Backoff } else { Retry::Never };
    held.settle(Write::Fail(Failure { error: error.unwrap_or_default(), retry })).await
}

/// `POST /v1/operations/{id}/doubt`
pub(super) async fn doubt(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let reason = fields.must("reason", message);
    let held = Held::read(api, principal, &id, fields)?;
    held.settle(Write::Doubt { reason: reason.unwrap_or_default() }).await
}

/// `POST /v1/operations/{id}/release`
pub(super) async fn release(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    fields: Fields,
) -> Result<Response, Problem> {
    let held = Held::read(api, principal, &id, fields)?;
    held.settle(Write::Release { delay: Duration::ZERO, why: None }).await
}

/// The outcome of an operation that completes with this result.
pub(super) fn outcome_of(op: &Operation, result: Option<&str>) -> Outcome {
    let result = result.unwrap_or_default();
    if pull::is_asked_for(op) { pull::outcome(result) } else { Outcome::kept(result.to_owned()) }
}

/// Reads the text of an error or a reason. It may have lines, as traces do.
fn message(raw: &str) -> Result<String, String> {
    let text: String = serde_json::from_str(raw).map_err(|_| "must be a text")?;
    let text = text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), " ");
    if text.trim().is_empty() { Err("must not be empty".to_owned()) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_may_have_lines_but_no_other_control_characters() {
        assert_eq!(message(r#""a\n\tb\u0000\u001bc""#), Ok("a\n\tb  c".to_owned()));
        assert!(message(r#"" ""#).is_err() && message("7").is_err());
    }
}
