//! `POST /v1/operations/next`: hands out due operations, at once or as soon as some are due.

use std::{collections::BTreeSet, sync::atomic::Ordering::Relaxed, time::Duration};

use axum::{extract::State as Server, response::Response};
use semel::{Fence, Operation, Policy, Runner, Scope, State, Token, Uptime, prelude::*, store::Limits, store::Want};
use serde::Serialize;

use super::{
    Api, SERVICE,
    ask::{given, name, scope, seconds, uuid},
    config::LEASES,
    listed,
    record::{Answered, Lease, Record},
    scope_of,
};
use crate::http::{
    answers::{patiently, shown},
    fields::{Fields, integer},
    principal::Actor,
    problem::{Problem, of_store},
};

/// The most operations, and names, of a request.
const MOST: i64 = 100;
const MOST_NAMES: usize = 100;

/// The longest wait: proxies close idle connections after a minute.
const WAIT: (Duration, Duration) = (Duration::ZERO, Duration::from_secs(30));

/// What a request asks for.
struct Asked {
    scopes: Vec<Scope>,
    most: u32,
    lease: Option<Duration>,
    wait: Duration,
    token: Option<Token>,
}

impl Asked {
    fn read(mut fields: Fields, tenant: &str) -> Result<Self, Problem> {
        let names = fields.must("operationNames", names).unwrap_or_default();
        let most = given(&mut fields, "max", |raw| match integer(raw)? {
            most @ 1..=MOST => Ok(u32::try_from(most).unwrap_or(1)),
            _ => Err("must be 1 to 100"),
        });
        let lease = given(&mut fields, "leaseSeconds", |raw| seconds(raw, LEASES));
        let wait = given(&mut fields, "wait", |raw| seconds(raw, WAIT));
        let token = given(&mut fields, "claimToken", uuid);
        let service = given(&mut fields, "scope", scope);
        fields.finish()?;
        let service = service.as_deref().unwrap_or(SERVICE);
        let scopes = names.iter().map(|name| scope_of(tenant, service, name)).collect::<Result<_, _>>();
        Ok(Self {
            scopes: scopes.map_err(of_store)?,
            most: most.unwrap_or(1),
            lease,
            wait: wait.unwrap_or_default(),
            token: token.map(|token| Token::kept(&[tenant, &token.to_string()])),
        })
    }
}

/// Reads the names of operations.
fn names(raw: &str) -> Result<Vec<String>, String> {
    let raw: Vec<Box<serde_json::value::RawValue>> =
        serde_json::from_str(raw).map_err(|_| "must be a list of texts".to_owned())?;
    if raw.is_empty() || raw.len() > MOST_NAMES {
        return Err(format!("must have 1 to {MOST_NAMES} names"));
    }
    let mut names = raw.iter().map(|raw| name(raw.get())).collect::<Result<Vec<_>, _>>()?;
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// `POST /v1/operations/next`
pub(super) async fn next(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    fields: Fields,
) -> Result<Response, Problem> {
    let asked = Asked::read(fields, &principal.tenant)?;
    api.asked.note(&api.ledger, &api.webhooks, &asked.scopes).await;
    let until = Uptime::now() + asked.wait;
    loop {
        // Before the look, so that a commit between the two is heard.
        let place = api.polls.join(&asked.scopes);
        let found = api.take(&asked).await?;
        if !found.is_empty() {
            // A wake that it has got meanwhile may be for another scope: it is passed on.
            drop(place);
            // Where one was due, there may be more.
            let scopes: BTreeSet<_> = found.iter().flat_map(listed).collect();
            scopes.iter().for_each(|scope| api.polls.wake(scope));
            return handed(&api, found).await;
        }
        let woken = tokio::select! {
            () = place.woken() => true,
            () = tokio::time::sleep(until.remaining()) => false,
            () = api.polls.closed() => false,
        };
        place.looks();
        if !woken {
            return handed(&api, Vec::new()).await;
        }
    }
}

impl Api {
    /// The operations that this token holds already, or as many due ones as asked for.
    async fn take(&self, asked: &Asked) -> Result<Vec<Operation>, Problem> {
        // Repeats of a request follow one another: the second one finds what the first has taken.
        let own = asked.token.map(|token| self.repeats.of(token));
        let _own = match &own {
            Some(own) => Some(own.lock().await),
            None => None,
        };
        let Ok(_turn) = self.takes.acquire().await else { return Ok(Vec::new()) };
        if let Some(token) = asked.token {
            let held = self.held_under(asked, token).await?;
            if !held.is_empty() {
                return Ok(held);
            }
        }
        let wants = self.wants(asked);
        let taken = self.ledger.take_up_to(asked.most, wants, asked.token).await.map_err(of_store)?;
        if let (Some(token), false) = (asked.token, taken.is_empty()) {
            // Another node may have answered the same request meanwhile: the client gets the leases of both, more than it
            // asked for, because it would not know of the others.
            return self.held_under(asked, token).await;
        }
        // Dropping the leases here does not end them: their holder is the client, who names the fence.
        Ok(taken.into_iter().map(|(_, lease)| lease.operation().clone()).collect())
    }

    /// The operations that a request with this token has got before, if its answer was lost.
    async fn held_under(&self, asked: &Asked, token: Token) -> Result<Vec<Operation>, Problem> {
        let store = self.store();
        let mut held = Vec::new();
        for (id, fence) in patiently(store.taken_under(token)).await? {
            held.extend(self.held(&asked.scopes, id, fence).await?);
        }
        Ok(held)
    }

    async fn held(&self, scopes: &[Scope], id: i64, fence: Fence) -> Result<Option<Operation>, Problem> {
        let Some(tenant) = scopes.first().map(Scope::tenant) else { return Ok(None) };
        let found = patiently(self.store().by_id(tenant, id)).await?;
        let is_asked = |op: &Operation| listed(op).is_ok_and(|scope| scopes.contains(&scope));
        Ok(found.filter(|op| op.fence == fence && op.state == State::Processing && is_asked(op)))
    }

    /// One want per name. Each request begins with another name: the first ones could use up its places.
    fn wants(&self, asked: &Asked) -> Vec<Want> {
        let turn = self.turn.fetch_add(asked.most, Relaxed);
        let policy = Policy { runner: Runner::Worker, ..self.config.policy() };
        let policy = Policy { lease: asked.lease.unwrap_or(policy.lease), ..policy };
        let policy = Policy { max_run: policy.max_run.max(policy.lease), ..policy };
        let want = |scope: &Scope| Want {
            scope: scope.clone(),
            most: asked.most,
            since: Some(turn % Want::OLDEST_OF),
            policy: policy.clone(),
            lease: asked.lease,
            limits: Limits::default(),
        };
        let mut wants: Vec<_> = asked.scopes.iter().map(want).collect();
        // Counted apart from what is taken: requests for two at a time would always begin with the same one of two names.
        let first = self.request.fetch_add(1, Relaxed) as usize % wants.len().max(1);
        wants.rotate_left(first);
        wants
    }
}

/// The answer.
#[derive(Serialize)]
struct Handed {
    operations: Vec<Answered>,
}

/// The answer with these operations.
async fn handed(api: &Api, found: Vec<Operation>) -> Result<Response, Problem> {
    let mut operations = Vec::with_capacity(found.len());
    for op in &found {
        api.granted.remember(op);
        let operation = Record::of(api.store(), op, op.claimed_at).await;
        operations.push(Answered { claim: None, lease: Some(Lease::of(op)), operation });
    }
    Ok(shown(&Handed { operations }))
}
