//! What people decide: retry, resolve, cancel, delete. Each has a reason, and is audited in the same commit.

use axum::{
    body::Body,
    extract::State as Server,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use semel::{
    Operation, Verdict,
    machine::{Answer, NotNow},
    prelude::*,
    store::{Applied, Decision},
};
use semel_http::problem::IN_DOUBT;
use serde_json::{Value, json};

use super::{
    Api,
    ask::{given, stored},
    held::{not_shown, outcome_of},
    problems::{OPERATION_COMPLETED, OPERATION_RUNNING},
    record::Record,
};
use crate::http::{
    answers::{answer, damaged, missing, patiently, shown},
    fields::{Because, Fields, reason, text},
    path::Id,
    principal::{Actor, Principal},
    problem::Problem,
    query::{Query, number},
};

/// A decision of a person about an operation of its tenant.
struct Deciding {
    api: Api,
    principal: Principal,
    id: i64,
    operation: Operation,
    reason: String,
}

impl Deciding {
    /// Finds the operation first: one of another tenant, or of another service, is not decided here.
    async fn begin(api: Api, principal: Principal, id: &str, reason: String) -> Result<Self, Problem> {
        let id = number(id).ok_or_else(missing)?;
        let (operation, _) = api.find_kept(&principal.tenant, id).await?;
        Ok(Self { api, principal, id, operation, reason })
    }

    async fn decide(&self, decision: Decision) -> Result<Applied, Problem> {
        let decided = self.api.ledger.decide(self.id, decision, &self.principal.subject, &self.reason).await;
        self.judge(decided)
    }

    fn judge(&self, decided: semel::Result<Applied>) -> Result<Applied, Problem> {
        let applied = decided.map_err(|error| damaged(error, self.id, "see semel operations show"))?;
        self.api.granted.forget(self.id);
        match applied.answer {
            Answer::NotNow(NotNow::Absent) => Err(missing()),
            Answer::NotNow(NotNow::Running | NotNow::MovedOn) => Err(Problem::new(&OPERATION_RUNNING)),
            Answer::NotNow(NotNow::Completed | NotNow::Pinned) => Err(Problem::new(&OPERATION_COMPLETED)),
            Answer::NotNow(NotNow::InDoubt) => Err(Problem::new(&IN_DOUBT)
                .detail("It is in doubt, so there is nothing to cancel: decide how it ended, by resolve or retry.")),
            _ => Ok(applied),
        }
    }

    /// The operation after the decision.
    async fn shown(&self, status: StatusCode, applied: &Applied) -> Result<Response, Problem> {
        let store = self.api.store();
        let found = patiently(store.by_id(&self.principal.tenant, self.id)).await.map_err(not_shown)?;
        let op = found.ok_or_else(missing)?;
        Ok(answer(status, &Record::of(store, &op, applied.now).await).map(Body::from))
    }
}

/// `POST /v1/operations/{id}/retry`
pub(super) async fn retry(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    Because(reason): Because,
) -> Result<Response, Problem> {
    let deciding = Deciding::begin(api, principal, &id, reason).await?;
    let applied = deciding.decide(Decision::Resolve { verdict: Verdict::Retry, expected: None }).await?;
    deciding.shown(StatusCode::OK, &applied).await
}

/// `POST /v1/operations/{id}/resolve`
pub(super) async fn resolve(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let completed = fields.must("as", |raw| match &*text(raw)? {
        "completed" => Ok(true),
        "failed" => Ok(false),
        _ => Err("must be completed or failed".to_owned()),
    });
    let result = given(&mut fields, "resultData", stored);
    let why = fields.must("reason", reason);
    if completed == Some(false) && result.is_some() {
        fields.note("resultData", "is only for an operation that completed");
    }
    fields.finish()?;
    let deciding = Deciding::begin(api, principal, &id, why.unwrap_or_default()).await?;
    let verdict = match completed {
        Some(true) => Verdict::Completed(outcome_of(&deciding.operation, result.as_deref())),
        _ => Verdict::Failed,
    };
    let applied = deciding.decide(Decision::Resolve { verdict, expected: None }).await?;
    deciding.shown(StatusCode::OK, &applied).await
}

/// `POST /v1/operations/{id}/cancel`: 202 if it runs, and its worker is asked to stop.
pub(super) async fn cancel(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    Because(reason): Because,
) -> Result<Response, Problem> {
    let deciding = Deciding::begin(api, principal, &id, reason).await?;
    let Deciding { api, principal, id, reason, .. } = &deciding;
    let applied = deciding.judge(api.ledger.cancel(*id, &principal.subject, reason).await)?;
    let status = if applied.answer == Answer::CancelAsked { StatusCode::ACCEPTED } else { StatusCode::OK };
    deciding.shown(status, &applied).await
}

/// `DELETE /v1/operations/{id}`
pub(super) async fn delete(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    Id(id): Id,
    mut query: Query,
    mut fields: Fields,
) -> Result<Response, Problem> {
    // Not every client and proxy sends a body with DELETE.
    let in_query = query.take("reason", |text| {
        reason(&Value::from(text).to_string())
            .map_err(|_| "must say why, in 1 to 1000 bytes without control characters")
    });
    query.finish()?;
    let why = match in_query {
        Some(why) => Some(why),
        None => fields.must("reason", reason),
    };
    fields.finish()?;
    let deciding = Deciding::begin(api, principal, &id, why.unwrap_or_default()).await?;
    deciding.decide(Decision::Purge).await?;
    Ok(shown(&json!({ "deleted": true })).into_response())
}
