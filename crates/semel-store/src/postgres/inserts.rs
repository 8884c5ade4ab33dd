//! The parameters of the two hot inserts: claims and enqueues of new keys.

use std::{sync::Arc, time::Duration};

use semel::{Runner, Timestamp, machine::Request, micros};
use sqlx::{Postgres, postgres::PgArguments, query::QueryAs};

use super::hot;
use crate::{codec::encode, project::Projections};

/// An inserted row: the index of the request, the fence, and the time.
pub(super) type MadeRow = (i64, i64, i64);

type Insert = QueryAs<'static, Postgres, MadeRow, PgArguments>;

/// Claims of new keys: the `requests` with these indices.
pub(super) fn claims(
    requests: &[Arc<Request>],
    numbers: &[usize],
    clock: Option<i64>,
    projections: &Projections,
) -> Insert {
    let each = Each { requests, numbers };
    let span = |get: &dyn Fn(&Request) -> Option<Duration>| each.get(|r| get(r).map(micros));
    each.named(hot::CLAIM)
        .bind(each.get(|r| r.token.0.to_vec()))
        .bind(span(&|r| Some(r.policy.lease)))
        .bind(span(&|r| Some(r.policy.max_run)))
        .bind(span(&|r| r.policy.retention))
        .bind(span(&|r| r.policy.tombstone))
        .bind(span(&|r| r.policy.first_look()))
        .bind(each.get(|r| r.policy.to_terms()))
        .bind(each.get(|r| r.owner.clone()))
        .bind(each.numbers())
        .bind(each.get(|r| r.policy.pinned))
        .bind(clock)
        .bind(each.get(|r| projections.follow(&r.scope)))
        .bind(each.get(|r| r.policy.runner == Runner::Caller))
}

/// Enqueues of new keys, likewise.
pub(super) fn enqueues(requests: &[Arc<Request>], numbers: &[usize], clock: Option<i64>) -> Insert {
    let each = Each { requests, numbers };
    let terms = |r: &Request| r.later.is_some_and(|later| later.keeps_policy).then(|| r.policy.to_terms());
    each.named(hot::ENQUEUE)
        .bind(each.get(|r| r.policy.first_look().map(micros)))
        .bind(each.get(|r| r.later.unwrap_or_default().not_before.map(Timestamp::as_micros)))
        .bind(each.get(|r| micros(r.later.unwrap_or_default().delay)))
        .bind(each.get(|r| i64::from(r.later.unwrap_or_default().priority.get())))
        .bind(each.get(terms))
        .bind(each.numbers())
        .bind(clock)
        .bind(each.get(|r| r.listed_kind().into_owned()))
}

/// Some requests of a batch. A parameter is an array with one value of each.
struct Each<'a> {
    requests: &'a [Arc<Request>],
    numbers: &'a [usize],
}

impl Each<'_> {
    fn get<T>(&self, get: impl Fn(&Request) -> T) -> Vec<T> {
        self.numbers.iter().map(|i| get(&self.requests[*i])).collect()
    }

    fn numbers(&self) -> Vec<i64> {
        self.numbers.iter().map(|i| i64::try_from(*i).unwrap_or(i64::MAX)).collect()
    }

    /// The first parameters of both inserts: scope, key and data.
    fn named(&self, text: &'static str) -> Insert {
        let label = |slot: usize| self.get(|r| r.labels.0[slot].clone());
        sqlx::query_as(text)
            .bind(self.get(|r| r.scope.tenant().to_owned()))
            .bind(self.get(|r| r.scope.service().to_owned()))
            .bind(self.get(|r| r.scope.kind().to_owned()))
            .bind(self.get(|r| r.key.as_str().to_owned()))
            .bind(self.get(|r| r.fingerprint.as_bytes().to_vec()))
            .bind(self.get(|r| r.order))
            .bind(self.get(|r| r.payload.as_ref().map(|payload| encode(payload))))
            .bind(label(0))
            .bind(label(1))
            .bind(label(2))
            .bind(label(3))
    }
}
