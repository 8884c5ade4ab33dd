//! Events that wait until a program asks for them: `pull = true` in a rule. `POST /v1/operations/next` hands them out as
//! operations called `webhook.SOURCE.TYPE`; complete and fail decide about the event.
//!
//! Such an event is stored like any other, and its policy says that it is due by its type
//! ([`Runner::ByLabel`](semel::Runner)): so it takes effect once, whatever its rule is when it comes again.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::{Ledger, Operation, Outcome, Result, Runner, Scope, Timestamp, prelude::*};
use semel_store::{Conn, Database, broken, on};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    SERVICE,
    config::{Deed, Webhooks},
    source::{Source, pulled_type, source_of},
};
use crate::sql::statements;

/// The beginning of the names of such operations.
pub(crate) const PREFIX: &str = "webhook.";

/// How often a node stores that a program has asked.
const NOTED_EVERY: Duration = Duration::from_secs(10);

/// How long the time of the last request is kept.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

/// The scope in which the events of an operation name are due: `webhook.SOURCE.TYPE`, or `webhook.SOURCE/FUNCTION/TYPE`
/// if events take effect once per function.
pub(crate) fn scope(tenant: &str, name: &str) -> Option<Scope> {
    let rest = name.strip_prefix(PREFIX)?;
    let (source, more) = rest.split_once(['.', '/'])?;
    let kind = match rest.as_bytes()[source.len()] {
        b'/' => more.split_once('/').map(|(function, of)| format!("{source}.{function}:{of}"))?,
        _ => format!("{source}:{more}"),
    };
    Scope::new(tenant, SERVICE, &kind).ok()
}

/// The operation name of events that are due under this kind.
fn name_of(listed: &str) -> Option<String> {
    let (kind, of) = listed.split_once(':')?;
    Some(match kind.split_once('.') {
        Some((source, function)) => format!("{PREFIX}{source}/{function}/{of}"),
        None => format!("{PREFIX}{kind}.{of}"),
    })
}

/// The operation name of an event that programs ask for.
pub(crate) fn name(operation: &Operation) -> Option<String> {
    name_of(&operation.listed_kind()).filter(|_| is_asked_for(operation))
}

/// Whether an operation is an event that programs ask for.
pub(crate) fn is_asked_for(operation: &Operation) -> bool {
    let by_label = |own: &semel::Policy| own.runner == Runner::ByLabel;
    operation.scope.service() == SERVICE && operation.terms.as_ref().is_some_and(by_label)
}

/// The stored result of an event that a program has completed.
#[derive(Deserialize)]
struct Pulled {
    value: Box<RawValue>,
}

/// The outcome of an event with a program's result, which is JSON or empty.
pub(crate) fn outcome(result: &str) -> Outcome {
    let value = if result.is_empty() { "null" } else { result };
    Outcome::kept(format!(r#"{{"result":"pulled","value":{value}}}"#))
}

/// A program's result in an outcome.
pub(crate) fn value(outcome: &Outcome) -> Option<Box<RawValue>> {
    serde_json::from_slice::<Pulled>(&outcome.body).ok().map(|pulled| pulled.value)
}

/// Notes that programs ask for events, for the monitor.
#[derive(Default)]
pub(crate) struct Asked(Mutex<BTreeMap<Scope, Instant>>);

impl Asked {
    /// Notes a request for these kinds, if a rule leaves their events to programs. At most once in a while: requests of
    /// a busy program must not write a row each. An error is no reason to refuse the request.
    pub(crate) async fn note(&self, ledger: &Ledger<Database>, config: &Webhooks, scopes: &[Scope]) {
        let pulled = |scope: &&Scope| {
            let source = config.sources.get(source_of(scope.kind()));
            let source = source.filter(|source| scope.service() == SERVICE && source.tenant == scope.tenant());
            source.zip(pulled_type(scope.kind())).is_some_and(|(source, kind)| *source.handlers.of(kind) == Deed::Pull)
        };
        let now = Instant::now();
        let due: Vec<Scope> = {
            let mut noted = self.0.lock();
            noted.retain(|_, at| now.duration_since(*at) < NOTED_EVERY);
            let due = scopes.iter().filter(pulled).filter(|scope| !noted.contains_key(*scope)).cloned().collect();
            noted.extend(Vec::clone(&due).into_iter().map(|scope| (scope, now)));
            due
        };
        if !due.is_empty()
            && let Err(error) = store(ledger, due).await
        {
            tracing::debug!(%error, "the time of a request for events could not be stored");
        }
    }
}

async fn store(ledger: &Ledger<Database>, scopes: Vec<Scope>) -> Result<()> {
    let now = ledger.store().now().await?;
    let stored = ledger.transact(move |tx| async move {
        let mut held = tx.connection().await?;
        let conn = &mut held.get()?;
        let old = now.as_micros().saturating_sub(semel::micros(KEPT));
        on!(conn, c => sqlx::query(FORGET).bind(old).execute(&mut **c).await.map(drop).map_err(broken)?);
        for scope in scopes {
            on!(conn, c => sqlx::query(NOTE).bind(scope.tenant()).bind(scope.kind()).bind(now.as_micros())
                .execute(&mut **c).await.map(drop).map_err(broken)?);
        }
        Ok::<_, semel::Error>(())
    });
    stored.await
}

const NOTE: &str = "
    INSERT INTO semel_webhook_pulls (tenant, kind, asked_at) VALUES ($1, $2, $3)
    ON CONFLICT (tenant, kind) DO UPDATE SET asked_at = excluded.asked_at
    WHERE semel_webhook_pulls.asked_at < excluded.asked_at";

const FORGET: &str = "DELETE FROM semel_webhook_pulls WHERE asked_at < $1";

const ASKED: &str = "
    SELECT kind, asked_at FROM semel_webhook_pulls WHERE tenant = $1 ORDER BY kind LIMIT 1000";

statements!(NOTE, FORGET, ASKED);

/// The events of a source that programs ask for, by type.
#[derive(Serialize)]
pub(super) struct Waiting {
    /// How many wait, of each type up to 10,000.
    waiting: u64,
    /// When a program last asked for some.
    last_asked_at: Option<String>,
    by_event_type: Vec<OfType>,
}

/// Those of one type.
#[derive(Serialize)]
struct OfType {
    event_type: String,
    operation_name: String,
    waiting: u64,
    due: u64,
    last_asked_at: Option<String>,
}

impl Waiting {
    /// Reads them; none if no rule of the source leaves events to programs and none waits.
    pub(super) async fn read(store: &Database, source: &Source) -> Result<Option<Self>> {
        let tenant = &source.config.tenant;
        let list = async |conn: &mut Conn<'_>| {
            let asked: Vec<(String, i64)> =
                on!(conn, c => sqlx::query_as(ASKED).bind(tenant).fetch_all(&mut **c).await.map_err(broken)?);
            Ok(asked)
        };
        let mut kinds: BTreeMap<String, (u64, u64, Option<i64>)> = BTreeMap::new();
        for (kind, at) in store.read(list).await? {
            kinds.entry(kind).or_default().2 = Some(at);
        }
        for kind in store.kinds_of_work().await?.into_iter().filter(|kind| kind.service == SERVICE) {
            let of = kinds.entry(kind.kind).or_default();
            (of.0, of.1) = (kind.waiting, kind.due);
        }
        kinds.retain(|kind, _| source_of(kind) == source.name && pulled_type(kind).is_some());
        if kinds.is_empty() && !source.config.handlers.0.iter().any(|rule| rule.deed == Deed::Pull) {
            return Ok(None);
        }
        let time = |at: Option<i64>| at.map(|at| Timestamp::from_micros(at).to_string());
        let by_event_type = kinds.iter().filter_map(|(kind, (waiting, due, asked))| {
            Some(OfType {
                event_type: pulled_type(kind)?.to_owned(),
                operation_name: name_of(kind)?,
                waiting: *waiting,
                due: *due,
                last_asked_at: time(*asked),
            })
        });
        Ok(Some(Self {
            by_event_type: by_event_type.collect(),
            waiting: kinds.values().map(|(waiting, ..)| waiting).sum(),
            last_asked_at: time(kinds.values().filter_map(|(.., asked)| *asked).max()),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_source_and_the_type_of_events() {
        let kind = |name| scope("acme", name).map(|scope| (scope.service().to_owned(), scope.kind().to_owned()));
        let of = |kind: &str| Some((SERVICE.to_owned(), kind.to_owned()));
        assert_eq!(kind("webhook.stripe.invoice.paid"), of("stripe:invoice.paid"));
        assert_eq!(kind("webhook.stripe/a.b/invoice.paid"), of("stripe.a.b:invoice.paid"));
        for name in ["webhook.stripe.invoice.paid", "webhook.stripe/a.b/invoice.paid"] {
            assert_eq!(name_of(scope("acme", name).unwrap().kind()).as_deref(), Some(name));
        }
        assert_eq!((kind("webhook.stripe"), kind("webhook.stripe/a"), kind("submit_claim")), (None, None, None));
    }

    #[test]
    fn the_result_of_a_program_is_kept_as_it_was_written() {
        let kept = outcome(r#"{"n":1.0,"big":12345678901234567890}"#);
        assert_eq!(value(&kept).unwrap().get(), r#"{"n":1.0,"big":12345678901234567890}"#);
        assert_eq!(value(&outcome("")).unwrap().get(), "null");
    }
}
