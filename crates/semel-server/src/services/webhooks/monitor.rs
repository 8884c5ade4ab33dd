//! `GET /webhooks/{source}/monitor` and `GET /functions/v1/stripe-events-monitor`: whether all is well, at a glance.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use axum::{extract::State as Server, response::Response};
use semel::{
    Operation, Result, State, Store as _, Timestamp,
    look::{DayTally, Filter, Page, Tallied, Tally, TallyBy, TallyFilter, answered, appeared, runs},
};
use serde::Serialize;

use super::{
    REFUSALS, Receiver, SERVICE, conflicts,
    conflicts::Conflict,
    events::{filter, given, label},
    health::{FAILING, Failing, Health, Stuck, Vitals},
    monitor_count::{Line, MOST_OPEN, Open, Rates, Stand, Times, body_kinds, by_day, by_label, hour, kinds, retries},
    named::functions,
    process::STORED,
    record::{Listed, Other, is_at_limit, is_parked, waits_for_a_person},
    source::Source,
};
use crate::http::{
    answers::{patiently, shown},
    path::Id,
    principal::Principal,
    problem::Problem,
    query::{Query, number},
};

/// The source that the path of the source document is about.
const STRIPE: &str = "stripe";

/// Days that are looked at unless asked otherwise, and at most.
const DAYS: i64 = 7;
const MOST_DAYS: i64 = 366;

/// How many events, and how many conflicts, a list has.
const MOST_LISTED: usize = 50;

/// How many of the latest events are looked at for one that completed.
const MOST_LATEST: u32 = 200;

/// How many conflicts are looked at.
const MOST_CONFLICTS: usize = 500;

/// What a conflict's age must be below to be news.
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
    let looked = patiently(Looked::at(&receiver, &source, &asked)).await?;
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

/// What is asked for.
#[derive(Serialize)]
struct Asked {
    #[serde(skip)]
    days: i64,
    event_type: Option<String>,
    webhook_function: Option<String>,
}

impl Asked {
    fn read(mut query: Query) -> Result<Self, Problem> {
        // Unlike a filter, an empty number is a slip: the answer would be about another period than was meant.
        let days = query.take("days", |text| {
            number(text).filter(|days| (1..=MOST_DAYS).contains(days)).ok_or("must be a number from 1 to 366")
        });
        let event_type = given(&mut query, "event_type", label);
        let webhook_function = given(&mut query, "webhook_function", label);
        query.finish()?;
        Ok(Self { days: days.unwrap_or(DAYS), event_type, webhook_function })
    }

    /// Whether all events of the source are meant.
    fn is_all(&self) -> bool {
        self.event_type.is_none() && self.webhook_function.is_none()
    }

    /// The counters of a source since an hour.
    fn counters(&self, source: &Source, kinds: Vec<String>, since_hour: i64) -> TallyFilter {
        TallyFilter {
            tenant: source.config.tenant.clone(),
            service: SERVICE.to_owned(),
            kinds,
            label1: self.event_type.clone(),
            label2: self.webhook_function.clone(),
            since_hour,
            ..TallyFilter::default()
        }
    }
}

/// What a look at the database found.
struct Looked {
    now: Timestamp,
    open: Open,
    /// When those that have waited for long last began anew.
    anew: HashMap<i64, Timestamp>,
    /// Each by one thing only: types times functions times durations may be more than can be told.
    types: Tallied<Tally>,
    functions: Tallied<Tally>,
    durations: Tallied<Tally>,
    days: Tallied<DayTally>,
    /// Bodies that came under another id.
    bodies: i64,
    /// Of this hour and the one before.
    recent: Vec<DayTally>,
    conflicts: Vec<Conflict>,
    /// The events that came last, in whatever state they are.
    latest: Vec<Operation>,
    /// Messages that do not go out.
    stuck: Vec<Stuck>,
}

impl Looked {
    /// Counters, and lists that are bounded: the same work for ten events and ten million.
    async fn at(receiver: &Receiver, source: &Source, asked: &Asked) -> Result<Self> {
        let store = receiver.ledger().store();
        let now = store.now().await?;
        let since_hour = now.hour() - 24 * asked.days;
        let since = hour(since_hour);
        let several = source.config.dedup_per_function;
        let names = if several { functions(receiver, source).await? } else { Vec::new() };
        let period = asked.counters(source, kinds(source, &names), since_hour);
        let by = |by| TallyFilter { by, ..period.clone() };
        let types = store.tally(&by(TallyBy::Label1)).await?;
        let functions = store.tally(&by(TallyBy::Label2)).await?;
        let durations = store.tally(&by(TallyBy::Duration)).await?;
        let days = store.tally_days(&period).await?;
        let recent = store.tally_days(&TallyFilter { since_hour: now.hour() - 1, ..period }).await?.lines;
        let mut bodies = 0;
        if source.config.id_can_be_forged() {
            let period = asked.counters(source, body_kinds(source, &names), since_hour);
            bodies = answered(&store.tally_days(&period).await?.lines, "mismatch");
        }
        let mut states = Vec::new();
        for state in Open::STATES {
            let meant = filter(source, asked.event_type.clone(), asked.webhook_function.clone());
            let page = Page { after: None, limit: MOST_OPEN };
            let listing = store.list(&Filter { state: Some(state), ..meant }, page).await?;
            states.push((state, listing.items, listing.next.is_some()));
        }
        let open = Open { states, since };
        let long = open_events(&open).filter(|event| now.since(event.created_at) > FAILING);
        let anew = store.begun_anew(&long.map(|event| event.id).collect::<Vec<_>>()).await?;
        let mut reader = store.reader().await?;
        let (tenant, most) = (&source.config.tenant, i64::try_from(MOST_CONFLICTS).unwrap_or(i64::MAX));
        let meant = (asked.event_type.as_deref(), asked.webhook_function.as_deref());
        let conflicts = conflicts::list(&mut reader.conn(), tenant, &source.name, since, meant, most).await?;
        reader.leave();
        let meant = filter(source, asked.event_type.clone(), asked.webhook_function.clone());
        let latest = store.list(&meant, Page { after: None, limit: MOST_LATEST }).await?.items;
        // A message has no type to be filtered by.
        let stuck =
            if asked.is_all() { store.stuck_messages(tenant, SERVICE, &source.name).await? } else { Vec::new() };
        let stuck = stuck.into_iter().map(|(topic, state, messages)| Stuck { topic, state, messages }).collect();
        Ok(Self { now, open, anew, types, functions, durations, days, bodies, recent, conflicts, latest, stuck })
    }

    /// The parts of the answer whose numbers are too low, because there were more sums than are told.
    fn incomplete(&self) -> Vec<&'static str> {
        let mut parts = Vec::new();
        let mut note = |cut: bool, names: &[&'static str]| parts.extend(names.iter().filter(|_| cut));
        note(
            self.days.cut,
            &["totals", "rates", "by_day", "retries", "conflicts", "duplicates_suppressed", "stored", "refused"],
        );
        note(self.types.cut, &["by_event_type"]);
        note(self.functions.cut, &["by_webhook_function"]);
        note(self.durations.cut, &["processing_time_ms"]);
        parts
    }

    fn tell<'a>(&self, source: &'a Source, asked: &'a Asked) -> Told<'a> {
        let days: Vec<_> = self.days.lines.iter().collect();
        let totals = Stand::of(&days, &self.open, |_| true);
        let (by_event_type, more_types) = by_label(&self.types.lines, &self.open, 0, "event_type");
        let (by_webhook_function, more_functions) = by_label(&self.functions.lines, &self.open, 1, "webhook_function");
        Told {
            source: &source.name,
            health: Health::of(&self.vitals(source, asked.is_all())),
            period: Period { since: self.open.since.to_string(), until: self.now.to_string(), days: asked.days },
            filter: asked,
            rates: totals.rates(),
            totals,
            by_day: by_day(&days, &self.open),
            by_event_type,
            by_webhook_function,
            processing_time_ms: Times::of(&self.durations.lines),
            retries: Retries {
                total: retries(&days),
                at_limit: self.open.of_period(State::Failed).filter(|event| is_at_limit(event, source)).count(),
                orphans_found: runs(days.iter().copied(), State::TimedOut),
            },
            failed_events: self.listed(State::Failed, source),
            timed_out_events: self.listed(State::TimedOut, source),
            conflicts: Conflicts {
                // The counter lags by a second, which a process that is killed takes with it; what is listed was there.
                count: answered(days.iter().copied(), "mismatch").max(self.conflicts.len().try_into().unwrap_or(0)),
                items: self.conflicts.iter().take(MOST_LISTED).cloned().map(Other::of).collect(),
            },
            duplicates_suppressed: self.duplicates(),
            stored: answered(&self.days.lines, STORED),
            refused: asked.is_all().then(|| Refused::of(&self.days.lines)),
            truncated: more_types || more_functions,
            incomplete: self.incomplete(),
        }
    }

    fn listed(&self, state: State, source: &Source) -> Vec<Listed> {
        self.open.of_period(state).take(MOST_LISTED).map(|event| Listed::of(event, source)).collect()
    }

    /// Deliveries of what was known already: done, being done, or not to be done again. The same body under another id
    /// is one of them.
    fn duplicates(&self) -> i64 {
        let same = ["replay", "in_flight", "exhausted"].map(|word| answered(&self.days.lines, word));
        same.iter().sum::<i64>() + self.bodies
    }

    /// Since when an event has waited to take effect: since its present data came, or a person last spoke.
    fn waits_since(&self, event: &Operation) -> Timestamp {
        self.anew.get(&event.id).copied().unwrap_or(event.created_at)
    }

    fn vitals(&self, source: &Source, is_all: bool) -> Vitals {
        let ran = |state| runs(&self.recent, state);
        let again = ["replay", "in_flight", "exhausted", "mismatch"].map(|word| answered(&self.recent, word));
        let set_aside = idle(&self.open).filter(|event| is_parked(event, source) && !is_at_limit(event, source));
        let silent = self.open.all(State::Processing).filter_map(|event| {
            let lease = event.lease.as_ref().filter(|lease| lease.deadline < self.now)?;
            Some(self.now.since(lease.deadline) + lease.terms.lease)
        });
        let news = self.conflicts.iter().filter(|it| self.now.since(Timestamp::from_micros(it.last_at)) < NEWS);
        let settled = |it: &Conflict| self.conflicts.iter().any(|newer| newer.settles(it));
        Vitals {
            completed: ran(State::Completed),
            failed: ran(State::Failed),
            lost: ran(State::TimedOut),
            let_in: appeared(&self.recent) + again.iter().sum::<i64>(),
            refused: if is_all { all_refused(&self.recent) } else { 0 },
            at_limit: self.open.all(State::Failed).filter(|event| is_at_limit(event, source)).count(),
            parked: set_aside.count(),
            silent: silent.max(),
            waits: waiting(&self.open, source).map(|event| self.now.since(self.waits_since(event))).max(),
            conflicts: news.clone().filter(|it| it.is_undecided() && !settled(it)).count(),
            more_conflicts: news.count() == MOST_CONFLICTS,
            flooded: self.open.is_flooded(),
            failing: self.failing(source),
            stuck: self.stuck.clone(),
        }
    }

    /// The rules by which events only fail: of each, those whose last run began after the last one that completed. One that
    /// runs again at this moment, after it failed, counts by how that run ended.
    fn failing(&self, source: &Source) -> Vec<Failing> {
        let rule = |event: &Operation| source.config.handlers.place(event.labels.0[0].as_deref().unwrap_or_default());
        let mut rules: BTreeMap<Option<usize>, Vec<&Operation>> = BTreeMap::new();
        for event in open_events(&self.open) {
            if event.error.is_some() && !waits_for_a_person(event, source) {
                rules.entry(rule(event)).or_default().push(event);
            }
        }
        let completed = |place: Option<usize>| {
            let same = self.latest.iter().filter(move |event| event.state == State::Completed && rule(event) == place);
            same.filter_map(|event| event.settled_at).max()
        };
        let failing = rules.into_iter().filter_map(|(place, mut events)| {
            let since = completed(place);
            events.retain(|event| since.is_none_or(|since| event.claimed_at > since));
            let waits = events.iter().map(|event| self.now.since(self.waits_since(event))).max()?;
            let last = events.iter().max_by_key(|event| event.claimed_at)?;
            Some(Failing { events: events.len(), waits, error: last.error.clone().unwrap_or_default() })
        });
        failing.collect()
    }
}

/// What has not completed.
fn open_events(open: &Open) -> impl Iterator<Item = &Operation> {
    Open::STATES.into_iter().flat_map(|state| open.all(state))
}

/// What nobody runs and has not completed.
fn idle(open: &Open) -> impl Iterator<Item = &Operation> {
    [State::Failed, State::TimedOut, State::Pending].into_iter().flat_map(|state| open.all(state))
}

/// Those of them that run again by themselves.
fn waiting<'a>(open: &'a Open, source: &'a Source) -> impl Iterator<Item = &'a Operation> {
    idle(open).filter(|event| !waits_for_a_person(event, source))
}

/// The answer, what matters most first.
#[derive(Serialize)]
struct Told<'a> {
    source: &'a str,
    health: Health,
    period: Period,
    filter: &'a Asked,
    totals: Stand,
    rates: Rates,
    by_day: Vec<Line>,
    by_event_type: Vec<Line>,
    by_webhook_function: Vec<Line>,
    processing_time_ms: Times,
    retries: Retries,
    failed_events: Vec<Listed>,
    timed_out_events: Vec<Listed>,
    conflicts: Conflicts,
    duplicates_suppressed: i64,
    /// Events that no rule took when they were processed.
    stored: i64,
    /// What was refused has no type, so there is none with a filter.
    refused: Option<Refused>,
    /// Whether there are more types or functions than are told.
    truncated: bool,
    /// The members whose numbers are too low.
    incomplete: Vec<&'static str>,
}

#[derive(Serialize)]
struct Period {
    since: String,
    until: String,
    days: i64,
}

#[derive(Serialize)]
struct Retries {
    total: i64,
    at_limit: usize,
    orphans_found: i64,
}

#[derive(Serialize)]
struct Conflicts {
    count: i64,
    items: Vec<Other>,
}

/// Deliveries that were not let in, by why.
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
