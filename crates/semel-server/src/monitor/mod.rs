//! A monitor of a service's operations: states, rates, durations, and health with reasons.
//!
//! It takes any scope and labels, and costs the same for ten operations and ten million: it reads sums of counters, and
//! bounded lists of the operations that have not completed.
//!
//! - [`Subject`]: the operations; [`Rules`]: the service's knowledge about them
//! - [`Looked`]: the data that was read; [`Report`]: the result
//! - `count`: pure sums; `health`: the verdict, rule by rule

mod count;
mod health;

use std::collections::{BTreeMap, HashMap, HashSet};

use semel::{
    Operation, Result, Scope, State, Timestamp,
    look::{DayTally, Filter, Page, Tallied, Tally, TallyBy, TallyFilter, answered, runs},
    prelude::*,
};
use semel_store::Database;
use serde::Serialize;

pub use self::{
    count::{Line, Rates, Stand, Times},
    health::{Health, Reason, Status, Stuck, degraded},
};
use self::{
    count::{MOST_OPEN, Open, by_day, by_label, hour, retries},
    health::{Failing, Vitals},
};
use crate::view::{Telling, is_cancelled};

/// How many of the latest operations are searched for a completed one.
const MOST_LATEST: u32 = 200;

/// The answers to claims of known keys: completed, in flight, or exhausted.
const DUPLICATES: [&str; 3] = ["replay", "in_flight", "exhausted"];

/// The operations to monitor.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The operations. The service must be set.
    pub filter: Filter,
    /// The kinds whose counters are added up; all of the service's if empty.
    pub kinds: Vec<String>,
}

impl Subject {
    /// All operations of a tenant's service.
    #[must_use]
    pub fn service(tenant: &str, service: &str) -> Self {
        let filter = Filter { service: Some(service.to_owned()), ..Filter::tenant(tenant) };
        Self { filter, kinds: Vec::new() }
    }

    /// All operations of a scope.
    #[must_use]
    pub fn scope(scope: &Scope) -> Self {
        Self { filter: Filter::scope(scope), kinds: vec![scope.kind().to_owned()] }
    }

    /// The counters of these operations since an hour. They have the first two labels.
    #[must_use]
    pub fn counters(&self, since_hour: i64) -> TallyFilter {
        let [label1, label2, ..] = self.filter.labels.0.clone();
        TallyFilter {
            tenant: self.filter.tenant.clone(),
            service: self.filter.service.clone().unwrap_or_default(),
            kinds: self.kinds.clone(),
            label1,
            label2,
            since_hour,
            ..TallyFilter::default()
        }
    }
}

/// The rules of a service about its operations. The default uses only their rows.
pub struct Rules<'a> {
    /// How operations are described.
    pub telling: Telling,
    /// Which operations wait for a person; `None`: those that no worker runs, by the backlog.
    pub given_up: Option<GivenUp<'a>>,
    /// The group of an operation: if one of a group completes, its target is not down.
    pub group: &'a dyn Fn(&Operation) -> Option<usize>,
    /// Messages that need a person.
    pub stuck: Vec<Stuck>,
    /// Problems that the service itself found.
    pub wrong: Vec<Reason>,
}

/// How a service that knows its own limits tells which operations wait for a person.
pub struct GivenUp<'a> {
    /// Whether an operation failed as often as allowed.
    pub is_at_limit: &'a dyn Fn(&Operation) -> bool,
    /// Whether an operation is parked for another reason.
    pub is_parked: &'a dyn Fn(&Operation) -> bool,
}

impl Rules<'_> {
    /// The rules of a service that adds none.
    #[must_use]
    pub fn plain(telling: Telling) -> Self {
        Self { telling, given_up: None, group: &|_| None, stuck: Vec::new(), wrong: Vec::new() }
    }
}

/// The data that was read from the database.
pub struct Looked {
    /// The database's time.
    pub now: Timestamp,
    /// When the period began.
    pub since: Timestamp,
    /// How many days it has.
    pub days: i64,
    /// The operations that have not completed, up to a limit.
    open: Open,
    /// When operations with a long wait last began anew.
    anew: HashMap<i64, Timestamp>,
    /// Waiting operations that no worker runs. Their rows do not tell it: they do not have the worker's policy.
    never_due: HashSet<i64>,
    /// Sums by the first label, and by the second. Each by one dimension: the product of labels and durations may be
    /// too large.
    labels: [Tallied<Tally>; 2],
    durations: Tallied<Tally>,
    /// Sums by day.
    pub by_day: Tallied<DayTally>,
    /// Sums of this hour and the one before.
    pub recent: Vec<DayTally>,
    /// The latest operations, in any state.
    latest: Vec<Operation>,
}

impl Looked {
    /// Reads so many days.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn at(store: &Database, subject: &Subject, days: i64) -> Result<Self> {
        let now = store.now().await?;
        let since_hour = now.hour() - 24 * days;
        let period = subject.counters(since_hour);
        let by = |by| TallyFilter { by, ..period.clone() };
        let labels = [store.tally(&by(TallyBy::Label1)).await?, store.tally(&by(TallyBy::Label2)).await?];
        let durations = store.tally(&by(TallyBy::Duration)).await?;
        let by_day = store.tally_days(&period).await?;
        let recent = store.tally_days(&TallyFilter { since_hour: now.hour() - 1, ..period }).await?.lines;
        let mut states = Vec::new();
        for state in Open::STATES {
            let filter = Filter { state: Some(state), ..subject.filter.clone() };
            let listing = store.list(&filter, Page { after: None, limit: MOST_OPEN }).await?;
            states.push((state, listing.items, listing.next.is_some()));
        }
        let open = Open { states, since: hour(since_hour) };
        let long = open.every().filter(|op| now.since(op.created_at) > health::FAILING);
        let anew = store.begun_anew(&long.map(|op| op.id).collect::<Vec<_>>()).await?;
        let never_due = store.never_due(&open.idle().map(|op| op.id).collect::<Vec<_>>()).await?;
        let latest = store.list(&subject.filter, Page { after: None, limit: MOST_LATEST }).await?.items;
        Ok(Self { now, since: open.since, days, open, anew, never_due, labels, durations, by_day, recent, latest })
    }

    /// The report, by the rules of the service.
    #[must_use]
    pub fn report(&self, rules: &Rules<'_>) -> Report {
        let days: Vec<_> = self.by_day.lines.iter().collect();
        let totals = Stand::of(&days, &self.open, |_| true);
        let (by_label1, more1) = by_label(&self.labels[0].lines, &self.open, 0);
        let (by_label2, more2) = by_label(&self.labels[1].lines, &self.open, 1);
        let failed = self.of_period(State::Failed).filter(|op| self.is_at_limit(rules, op));
        Report {
            health: Health::of(&self.vitals(rules), &rules.wrong),
            period: Period { since: self.since.to_string(), until: self.now.to_string(), days: self.days },
            rates: totals.rates(),
            totals,
            by_day: by_day(&days, &self.open),
            by_label1,
            by_label2,
            times: Times::of(&self.durations.lines),
            retries: Retries {
                total: retries(&days),
                at_limit: failed.count(),
                orphans_found: runs(days.iter().copied(), State::TimedOut),
            },
            duplicates_suppressed: DUPLICATES.iter().map(|word| answered(&self.by_day.lines, word)).sum(),
            conflicts: answered(&self.by_day.lines, "mismatch"),
            truncated: more1 || more2,
        }
    }

    /// Those in a state that arrived in the period, newest first, up to the limit.
    pub fn of_period(&self, state: State) -> impl Iterator<Item = &Operation> {
        self.open.of_period(state)
    }

    /// Whether there were more sums than are listed: by day, by the first label, by the second, of durations.
    #[must_use]
    pub fn is_cut(&self) -> [bool; 4] {
        [self.by_day.cut, self.labels[0].cut, self.labels[1].cut, self.durations.cut]
    }

    /// Whether an operation failed as often as allowed.
    fn is_at_limit(&self, rules: &Rules<'_>, op: &Operation) -> bool {
        match &rules.given_up {
            Some(of_service) => (of_service.is_at_limit)(op),
            None => op.state == State::Failed && !op.parked && self.never_due.contains(&op.id),
        }
    }

    /// Whether an operation is parked for another reason. Without rules of the service, this includes an operation whose
    /// runs were lost as often as allowed.
    fn is_parked(&self, rules: &Rules<'_>, op: &Operation) -> bool {
        match &rules.given_up {
            Some(of_service) => (of_service.is_parked)(op),
            None => op.parked || (op.state != State::Failed && self.never_due.contains(&op.id)),
        }
    }

    fn waits_for_a_person(&self, rules: &Rules<'_>, op: &Operation) -> bool {
        self.is_at_limit(rules, op) || self.is_parked(rules, op)
    }

    /// The input of the verdict.
    fn vitals(&self, rules: &Rules<'_>) -> Vitals {
        let ran = |state| runs(&self.recent, state);
        let all = |state| self.open.all(state);
        // A person has decided about those that were cancelled.
        let set_aside = self.open.idle().filter(|op| !is_cancelled(op));
        let set_aside = set_aside.filter(|op| self.is_parked(rules, op) && !self.is_at_limit(rules, op));
        let silent = all(State::Processing).filter_map(|op| {
            let lease = op.lease.as_ref().filter(|lease| lease.deadline < self.now)?;
            Some(self.now.since(lease.deadline) + lease.terms.lease)
        });
        let waiting = self.open.idle().filter(|op| !self.waits_for_a_person(rules, op));
        Vitals {
            noun: rules.telling.noun,
            completed: ran(State::Completed),
            failed: ran(State::Failed),
            lost: ran(State::TimedOut) + ran(State::InDoubt),
            at_limit: all(State::Failed).filter(|op| self.is_at_limit(rules, op)).count(),
            parked: set_aside.count(),
            in_doubt: all(State::InDoubt).count(),
            silent: silent.max(),
            waits: waiting.map(|op| self.now.since(self.waits_since(op))).max(),
            flooded: self.open.is_flooded(),
            failing: self.failing(rules),
            stuck: rules.stuck.clone(),
        }
    }

    /// Since when an operation has waited to take effect: since its present data arrived or a person last decided; if
    /// it was enqueued for later, since then.
    fn waits_since(&self, op: &Operation) -> Timestamp {
        let since = self.anew.get(&op.id).copied().unwrap_or(op.created_at);
        op.not_before.filter(|_| !op.was_claimed()).map_or(since, |from| from.max(since))
    }

    /// The groups whose operations only fail: of each, those whose last run began after the last one that completed. An
    /// operation that runs again at this moment counts by its last finished run.
    fn failing(&self, rules: &Rules<'_>) -> Vec<Failing> {
        let mut groups: BTreeMap<Option<usize>, Vec<&Operation>> = BTreeMap::new();
        for op in self.open.every() {
            if op.error.is_some() && op.state != State::InDoubt && !self.waits_for_a_person(rules, op) {
                groups.entry((rules.group)(op)).or_default().push(op);
            }
        }
        let completed = |group: Option<usize>| {
            let same = |op: &&Operation| op.state == State::Completed && (rules.group)(op) == group;
            self.latest.iter().filter(same).filter_map(|op| op.settled_at).max()
        };
        let failing = groups.into_iter().filter_map(|(group, mut all)| {
            let since = completed(group);
            all.retain(|op| since.is_none_or(|since| op.claimed_at > since));
            let waits = all.iter().map(|op| self.now.since(self.waits_since(op))).max()?;
            let last = all.iter().max_by_key(|op| op.claimed_at)?;
            Some(Failing { operations: all.len(), waits, error: last.error.clone().unwrap_or_default() })
        });
        failing.collect()
    }
}

/// The state of a period's operations, most important first.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The verdict.
    pub health: Health,
    /// The period.
    pub period: Period,
    /// The states of the operations that arrived in the period.
    pub totals: Stand,
    /// The same as rates.
    pub rates: Rates,
    /// The days with operations, in order.
    pub by_day: Vec<Line>,
    /// By the first label, most frequent first.
    pub by_label1: Vec<Line>,
    /// By the second label.
    pub by_label2: Vec<Line>,
    /// The durations of completed runs, in milliseconds.
    pub times: Times,
    /// Retries.
    pub retries: Retries,
    /// Claims of known keys with the same data.
    pub duplicates_suppressed: i64,
    /// Claims of a known key with other data.
    pub conflicts: i64,
    /// Whether there are more labels than are listed.
    pub truncated: bool,
}

/// The period.
#[derive(Debug, Serialize)]
pub struct Period {
    /// Its start.
    pub since: String,
    /// Its end.
    pub until: String,
    /// Its number of days.
    pub days: i64,
}

/// How often operations ran again, and how many do not.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Retries {
    /// How often a failed or lost operation ran again.
    pub total: i64,
    /// Operations of the period that failed as often as allowed.
    pub at_limit: usize,
    /// Runs whose lease expired.
    pub orphans_found: i64,
}
