//! `GET /webhooks/{source}/monitor` and `GET /functions/v1/stripe-events-monitor`. The names are those of the source
//! document; the numbers come from [`crate::monitor`] and from the deliveries.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use axum::{extract::State as Server, response::Response};
use semel::{
    Operation, Result, State, Timestamp,
    look::{DayTally, answered, appeared},
    prelude::*,
};
use semel_store::Conn;
use serde::Serialize;

use super::{
    REFUSALS, Receiver, SERVICE, conflicts,
    conflicts::Conflict,
    events::{filter, given, label},
    health,
    named::functions,
    process::STORED,
    pull::Waiting,
    record::{Listed, Other, TELLING, is_at_limit, is_parked},
    source::Source,
};
use crate::{
    http::{
        answers::{patiently, shown},
        path::Id,
        principal::Principal,
        problem::Problem,
        query::{Query, number},
    },
    monitor::{GivenUp, Health, Line, Looked, Period, Rates, Report, Retries, Rules, Stand, Stuck, Subject, Times},
};

/// The source of the source document's path.
const STRIPE: &str = "stripe";

/// The default and the largest number of days.
const DAYS: i64 = 7;
const MOST_DAYS: i64 = 366;

/// The most events and the most conflicts of a list.
const MOST_LISTED: usize = 50;

/// How many conflicts are read.
const MOST_CONFLICTS: usize = 500;

/// The age up to which a conflict is reported.
const NEWS: Duration = Duration::from_secs(24 * 3600);

/// `GET /webhooks/{source}/monitor`
pub(super) async fn of_source(
    Server(receiver): Server<Receiver>,
    principal: Principal,
    Id(name): Id,
    query: Query,
) -> Result<Response, Problem> {
    let asked = Asked::read(query)?;
    let source = receiver.source_of(&principal.tenant, &name)?;
    let looked = patiently(Seen::at(&receiver, &source, &asked)).await?;
    Ok(shown(&looked.tell(&source, &asked)))
}

/// `GET /functions/v1/stripe-events-monitor`
pub(super) async fn of_stripe(
    receiver: Server<Receiver>,
    principal: Principal,
    query: Query,
) -> Result<Response, Problem> {
    of_source(receiver, principal, Id(STRIPE.to_owned()), query).await
}

/// The request.
#[derive(Serialize)]
struct Asked {
    #[serde(skip)]
    days: i64,
    event_type: Option<String>,
    webhook_function: Option<String>,
}

impl Asked {
    fn read(mut query: Query) -> Result<Self, Problem> {
        // An empty number is a mistake: the answer would be about another period than was meant.
        let days = query.take("days", |text| {
            number(text).filter(|days| (1..=MOST_DAYS).contains(days)).ok_or("must be a number from 1 to 366")
        });
        let event_type = given(&mut query, "event_type", label);
        let webhook_function = given(&mut query, "webhook_function", label);
        query.finish()?;
        Ok(Self { days: days.unwrap_or(DAYS), event_type, webhook_function })
    }

    /// Whether all events of the source are selected.
    fn is_all(&self) -> bool {
        self.event_type.is_none() && self.webhook_function.is_none()
    }
}

/// The data that was read from the database.
struct Seen {
    looked: Looked,
    /// Bodies that arrived under another id.
    bodies: i64,
    conflicts: Vec<Conflict>,
    /// Messages that need a person.
    stuck: Vec<Stuck>,
    /// Events that programs ask for.
    pulled: Option<Waiting>,
}

/// Recent deliveries.
#[derive(Clone, Debug, Default)]
pub(super) struct Deliveries {
    /// Deliveries of this hour and the one before.
    pub(super) let_in: i64,
    pub(super) refused: i64,
    /// Undecided conflicts of the last 24 hours.
    pub(super) conflicts: usize,
    /// Whether there were more conflicts in that time than were read.
    pub(super) more_conflicts: bool,
}

impl Seen {
    async fn at(receiver: &Receiver, source: &Source, asked: &Asked) -> Result<Self> {
        let store = receiver.ledger().store();
        let several = source.config.dedup_per_function;
        let names = if several { functions(receiver, source).await? } else { Vec::new() };
        let filter = filter(source, asked.event_type.clone(), asked.webhook_function.clone());
        let subject = Subject { filter, kinds: kinds(source, &names) };
        let looked = Looked::at(store, &subject, asked.days).await?;
        let mut bodies = 0;
        if source.config.id_can_be_forged() {
            let subject = Subject { kinds: body_kinds(source, &names), ..subject };
            bodies = answered(&store.tally_days(&subject.counters(looked.since.hour())).await?.lines, "mismatch");
        }
        let (tenant, most) = (&source.config.tenant, i64::try_from(MOST_CONFLICTS).unwrap_or(i64::MAX));
        let meant = (asked.event_type.as_deref(), asked.webhook_function.as_deref());
        let list =
            async |conn: &mut Conn<'_>| conflicts::list(conn, tenant, &source.name, looked.since, meant, most).await;
        let conflicts = store.read(list).await?;
        // Messages have no type to filter by.
        let stuck =
            if asked.is_all() { store.stuck_messages(tenant, SERVICE, &source.name).await? } else { Vec::new() };
        let stuck = stuck.into_iter().map(|(topic, state, messages)| Stuck { topic, state, messages }).collect();
        let pulled = if asked.is_all() { Waiting::read(store, source).await? } else { None };
        Ok(Self { looked, bodies, conflicts, stuck, pulled })
    }

    /// The parts of the answer whose numbers are too low, because there were more sums than are listed.
    fn incomplete(&self) -> Vec<&'static str> {
        const BY_DAY: &[&str] =
            &["totals", "rates", "by_day", "retries", "conflicts", "duplicates_suppressed", "stored", "refused"];
        let parts = [BY_DAY, &["by_event_type"], &["by_webhook_function"], &["processing_time_ms"]];
        let cut = self.looked.is_cut().into_iter().zip(parts).filter(|(cut, _)| *cut);
        cut.flat_map(|(_, names)| names.iter().copied()).collect()
    }

    fn tell<'a>(&'a self, source: &'a Source, asked: &'a Asked) -> Told<'a> {
        let rules = Rules {
            telling: TELLING,
            given_up: Some(GivenUp {
                is_at_limit: &|event| is_at_limit(event, source),
                is_parked: &|event| is_parked(event, source),
            }),
            group: &|event| source.config.handlers.place(event.labels.0[0].as_deref().unwrap_or_default()),
            stuck: self.stuck.clone(),
            wrong: health::reasons(&self.deliveries(asked.is_all())),
        };
        let report = self.looked.report(&rules);
        let [event_type, webhook_function, ..] = TELLING.labels.map(Option::unwrap_or_default);
        let lines = |lines: Vec<Line>, name| lines.into_iter().map(|line| EventLine::of(name, line)).collect();
        let by_day = &self.looked.by_day.lines;
        let Report { health, period, totals, rates, times, retries, truncated, .. } = report;
        Told {
            source: &source.name,
            health,
            period,
            filter: asked,
            totals: totals.into(),
            rates: rates.into(),
            by_day: lines(report.by_day, "day"),
            by_event_type: lines(report.by_label1, event_type),
            by_webhook_function: lines(report.by_label2, webhook_function),
            processing_time_ms: times,
            retries: retries.into(),
            failed_events: self.listed(State::Failed, source),
            timed_out_events: self.listed(State::TimedOut, source),
            conflicts: Conflicts {
                // The counter lags by a second, which is lost if the process is killed; the listed conflicts exist.
                count: report.conflicts.max(self.conflicts.len().try_into().unwrap_or(0)),
                items: self.conflicts.iter().take(MOST_LISTED).cloned().map(Other::of).collect(),
            },
            // A body under another id is a duplicate, too.
            duplicates_suppressed: report.duplicates_suppressed + self.bodies,
            stored: answered(by_day, STORED),
            pulled: self.pulled.as_ref(),
            refused: asked.is_all().then(|| Refused::of(by_day)),
            truncated,
            incomplete: self.incomplete(),
        }
    }

    fn listed(&self, state: State, source: &Source) -> Vec<Listed> {
        let of = |event: &Operation| Listed::of(event, source);
        self.looked.of_period(state).take(MOST_LISTED).map(of).collect()
    }

    fn deliveries(&self, is_all: bool) -> Deliveries {
        let recent = &self.looked.recent;
        let again = ["replay", "in_flight", "exhausted", "mismatch"].map(|word| answered(recent, word));
        let age = |it: &&Conflict| self.looked.now.since(Timestamp::from_micros(it.last_at));
        let news = self.conflicts.iter().filter(|it| age(it) < NEWS);
        let settled = |it: &Conflict| self.conflicts.iter().any(|newer| newer.settles(it));
        Deliveries {
            let_in: appeared(recent) + again.iter().sum::<i64>(),
            refused: if is_all { all_refused(recent) } else { 0 },
            conflicts: news.clone().filter(|it| it.is_undecided() && !settled(it)).count(),
            more_conflicts: news.count() == MOST_CONFLICTS,
        }
    }
}

/// The kinds of a source's operations. Refusals are counted under its name, for all functions.
fn kinds(source: &Source, functions: &[String]) -> Vec<String> {
    let own = functions.iter().map(|function| source.kind(function));
    [source.name.clone()].into_iter().chain(own).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The kinds of the body claims.
fn body_kinds(source: &Source, functions: &[String]) -> Vec<String> {
    kinds(source, functions).into_iter().map(|kind| format!("{kind}/body")).collect()
}

/// The answer, most important first.
#[derive(Serialize)]
struct Told<'a> {
    source: &'a str,
    health: Health,
    period: Period,
    filter: &'a Asked,
    totals: EventStand,
    rates: EventRates,
    by_day: Vec<EventLine>,
    by_event_type: Vec<EventLine>,
    by_webhook_function: Vec<EventLine>,
    processing_time_ms: Times,
    retries: EventRetries,
    failed_events: Vec<Listed>,
    timed_out_events: Vec<Listed>,
    conflicts: Conflicts,
    duplicates_suppressed: i64,
    /// Events without a matching rule.
    stored: i64,
    /// Events that wait until a program asks for them, if a rule says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pulled: Option<&'a Waiting>,
    /// Refusals have no type, so there are none with a filter.
    refused: Option<Refused>,
    /// Whether there are more types or functions than are listed.
    truncated: bool,
    /// The members whose numbers are too low.
    incomplete: Vec<&'static str>,
}

/// The states of events. In doubt is shown as `timeout`, as everywhere for events.
#[derive(Serialize)]
struct EventStand {
    total: i64,
    processing: i64,
    completed: i64,
    failed: i64,
    timeout: i64,
    pending: i64,
}

impl From<Stand> for EventStand {
    fn from(Stand { total, processing, completed, failed, timed_out, in_doubt, pending }: Stand) -> Self {
        Self { total, processing, completed, failed, timeout: timed_out + in_doubt, pending }
    }
}

#[derive(Serialize)]
struct EventRates {
    success_rate: Option<f64>,
    failure_rate: Option<f64>,
    timeout_rate: Option<f64>,
}

impl From<Rates> for EventRates {
    fn from(Rates { success, failure, timeout }: Rates) -> Self {
        Self { success_rate: success, failure_rate: failure, timeout_rate: timeout }
    }
}

/// The states of the events of one day, type or function.
#[derive(Serialize)]
struct EventLine {
    /// The day, type or function.
    #[serde(flatten)]
    named: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    stand: EventStand,
}

impl EventLine {
    fn of(name: &'static str, line: Line) -> Self {
        Self { named: [(name, line.name)].into(), stand: line.stand.into() }
    }
}

#[derive(Serialize)]
struct EventRetries {
    total: i64,
    at_limit: usize,
    orphans_found: i64,
}

impl From<Retries> for EventRetries {
    fn from(Retries { total, at_limit, orphans_found }: Retries) -> Self {
        Self { total, at_limit, orphans_found }
    }
}

#[derive(Serialize)]
struct Conflicts {
    count: i64,
    items: Vec<Other>,
}

/// Refused deliveries, by reason.
#[derive(Serialize)]
struct Refused {
    total: i64,
    by_reason: BTreeMap<&'static str, i64>,
}

impl Refused {
    fn of(days: &[DayTally]) -> Self {
        let counted = REFUSALS.map(|word| (word.strip_prefix("refused_").unwrap_or(word), answered(days, word)));
        Self { total: all_refused(days), by_reason: counted.into_iter().filter(|(_, n)| *n > 0).collect() }
    }
}

fn all_refused(days: &[DayTally]) -> i64 {
    REFUSALS.into_iter().map(|word| answered(days, word)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::webhooks::{
        Handlers,
        config::{self, Secrets, SourceKind},
    };

    #[test]
    fn the_kinds_of_a_source_are_its_own_and_those_of_its_functions() {
        let mut config = config::Source::new(SourceKind::Stripe, Secrets(vec!["a good secret".into()]));
        let functions = ["connect".to_owned(), "body".to_owned()];
        let source = Source::open("stripe", config.clone(), &Handlers::default()).unwrap();
        assert_eq!(kinds(&source, &functions), ["stripe"], "functions are labels");
        assert_eq!(body_kinds(&source, &[]), ["stripe/body"]);
        config.dedup_per_function = true;
        config.functions.0.extend(functions.clone());
        let source = Source::open("stripe", config, &Handlers::default()).unwrap();
        assert_eq!(kinds(&source, &functions), ["stripe", "stripe.body", "stripe.connect"]);
        assert_eq!(body_kinds(&source, &functions), ["stripe/body", "stripe.body/body", "stripe.connect/body"]);
    }
}
