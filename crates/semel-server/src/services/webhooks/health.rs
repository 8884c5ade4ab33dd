//! Whether all is well with a source, or why not. Every rule is here, with its number.

use std::time::Duration;

use semel::messaging::OutboxState;
use serde::Serialize;

/// How many runs must have ended before their share says anything: below it, one failure would be an alarm.
const ENOUGH_RUNS: i64 = 10;

/// The share of runs that must have completed: where most fail, the source is of no use.
const DOWN_BELOW: f64 = 0.5;

/// The share of runs that may fail: a deploy or a lock time-out now and then stays below it.
const FAILING_ABOVE: f64 = 0.05;

/// How long an event may be without a sign of its run: what the source document gives orphans.
const ORPHAN: Duration = Duration::from_secs(10 * 60);

/// How long an event may wait for its next run: the source document's round of orphans takes as long, and a backoff is
/// at most ten minutes unless set.
pub(super) const WAITING: Duration = Duration::from_secs(15 * 60);

/// How long an event may go on failing before it is told: the first retry comes after ten seconds, and what that mends is
/// no reason.
pub(super) const FAILING: Duration = Duration::from_secs(30);

/// How many refusals say nothing: the internet tries every door now and then.
const KNOCKS: i64 = 10;

/// What the verdict is about: what was asked for, in this hour and the one before, and what waits whatever its age.
#[derive(Clone, Debug, Default)]
pub(super) struct Vitals {
    /// Runs of the last hours, by how they ended.
    pub(super) completed: i64,
    pub(super) failed: i64,
    pub(super) lost: i64,
    /// Deliveries of the last hours.
    pub(super) let_in: i64,
    pub(super) refused: i64,
    /// Events that failed as often as they may.
    pub(super) at_limit: usize,
    /// Events whose runs were lost too often, or that were set aside.
    pub(super) parked: usize,
    /// The age of the last renewal of the run that was silent for longest, among those whose lease is over.
    pub(super) silent: Option<Duration>,
    /// How long ago the data came, or a person last spoke, of the event that has waited for longest, among those that
    /// are to run again.
    pub(super) waits: Option<Duration>,
    /// Other data under known ids, in the last 24 hours, of which it cannot be told whether it is the right one.
    pub(super) conflicts: usize,
    /// Whether more conflicts came in that time than were looked at.
    pub(super) more_conflicts: bool,
    /// Whether more is waiting than was looked at.
    pub(super) flooded: bool,
    /// Rules whose events do not take effect.
    pub(super) failing: Vec<Failing>,
    /// Messages of events that do not go out by themselves.
    pub(super) stuck: Vec<Stuck>,
}

/// Events that go by one rule, and whose runs have all failed since one of them last completed.
#[derive(Clone, Debug)]
pub(super) struct Failing {
    /// How many.
    pub(super) events: usize,
    /// How long the first of them has waited to take effect.
    pub(super) waits: Duration,
    /// What the latest of these runs said.
    pub(super) error: String,
}

/// Messages in the outbox.
#[derive(Clone, Debug)]
pub(super) struct Stuck {
    pub(super) topic: String,
    pub(super) state: OutboxState,
    pub(super) messages: u64,
}

/// How well a source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    /// Nothing is wrong.
    Ok,
    /// A person should look.
    Degraded,
    /// Events do not take effect.
    Down,
}

/// The verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Health {
    status: Status,
    /// A sentence each, the worst first.
    reasons: Vec<String>,
}

impl Health {
    pub(super) fn of(vitals: &Vitals) -> Self {
        let mut found: Vec<_> = RULES.iter().filter_map(|rule| rule(vitals)).collect();
        found.sort_by_key(|(status, _)| std::cmp::Reverse(*status));
        let status = found.first().map_or(Status::Ok, |(status, _)| *status);
        Self { status, reasons: found.into_iter().map(|(_, reason)| reason).collect() }
    }
}

type Rule = fn(&Vitals) -> Option<(Status, String)>;

/// A source whose database does not answer is down, too: then there is no answer but 503.
const RULES: [Rule; 10] = [runs, failing, stuck, at_limit, parked, orphans, waiting, flooded, conflicts, refusals];

fn degraded(reason: String) -> Option<(Status, String)> {
    Some((Status::Degraded, reason))
}

fn runs(vitals: &Vitals) -> Option<(Status, String)> {
    let ended = vitals.completed + vitals.failed + vitals.lost;
    if ended < ENOUGH_RUNS {
        return None;
    }
    let (completed, failed) = (share(vitals.completed, ended)?, share(vitals.failed + vitals.lost, ended)?);
    let told = format!("{} of {ended} runs in this hour and the last failed or were lost", vitals.failed + vitals.lost);
    match () {
        () if completed < DOWN_BELOW => Some((Status::Down, told)),
        () if failed > FAILING_ABOVE => degraded(told),
        () => None,
    }
}

/// An endpoint that is away, a handler that is broken. It is told after half a minute, not at the first failure, and until
/// a run completes: the pauses between the runs grow, and a verdict that waited for the next one would come and go.
fn failing(vitals: &Vitals) -> Option<(Status, String)> {
    let worst = vitals.failing.iter().filter(|it| it.waits > FAILING).max_by_key(|it| it.waits)?;
    let (have, runs) = match worst.events {
        1 => ("1 event has".to_owned(), "It runs again by itself"),
        n => (format!("{n} events have"), "They run again by themselves"),
    };
    let (waits, error) = (humantime::format_duration(Duration::from_secs(worst.waits.as_secs())), &worst.error);
    degraded(format!(
        "{have} not taken effect for up to {waits}, and no run by the same rule has completed meanwhile; the last said: \
         {error}. {runs}"
    ))
}

/// What is published and reaches nobody has not taken effect, whatever its event's status is.
fn stuck(vitals: &Vitals) -> Option<(Status, String)> {
    let told = vitals.stuck.iter().map(|Stuck { topic, state, messages }| {
        let are = if *messages == 1 { "1 message is".to_owned() } else { format!("{messages} messages are") };
        match state {
            OutboxState::Parked => format!(
                "{are} refused by the broker on the topic {topic}: see GET /outbox?state=parked, then redrive or skip"
            ),
            _ => format!(
                "{are} unroutable: no queue takes the topic {topic}. Once a program listens there, what waits goes out by \
                 itself; see GET /outbox?state=unroutable"
            ),
        }
    });
    let told: Vec<_> = told.collect();
    (!told.is_empty()).then(|| told.join("; ")).and_then(degraded)
}

fn at_limit(vitals: &Vitals) -> Option<(Status, String)> {
    (vitals.at_limit > 0)
        .then(|| match vitals.at_limit {
            1 => "1 event has failed as often as allowed, and runs again only when a person says so".to_owned(),
            n => format!("{n} events have failed as often as allowed, and run again only when a person says so"),
        })
        .and_then(degraded)
}

fn parked(vitals: &Vitals) -> Option<(Status, String)> {
    (vitals.parked > 0)
        .then(|| format!("{} parked, to be run again only when a person says so", are(vitals.parked)))
        .and_then(degraded)
}

fn orphans(vitals: &Vitals) -> Option<(Status, String)> {
    let silent = vitals.silent.filter(|silent| *silent > ORPHAN)?;
    degraded(format!(
        "a run was last heard of {} ago, and no node has taken over: does a sweeper run?",
        minutes(silent)
    ))
}

fn waiting(vitals: &Vitals) -> Option<(Status, String)> {
    let waits = vitals.waits.filter(|waits| *waits > WAITING)?;
    degraded(format!("an event has waited for {} to take effect: does a worker run?", minutes(waits)))
}

fn flooded(vitals: &Vitals) -> Option<(Status, String)> {
    vitals.flooded.then(|| "more events are waiting than are looked at here".to_owned()).and_then(degraded)
}

/// What was newer has taken the place of the older, in whatever order they came: nothing is wrong about that. Of two
/// that are of the same age, one was not processed, and it may be the right one.
fn conflicts(vitals: &Vitals) -> Option<(Status, String)> {
    let came = match vitals.conflicts {
        0 if vitals.more_conflicts => "other data came under the ids of known events more often than is looked at here",
        0 => return None,
        1 => "other data, no newer and no older, came under the id of a known event",
        n => &format!("other data, no newer and no older, came under the ids of known events {n} times"),
    };
    degraded(format!("{came} in the last 24 hours"))
}

/// More refusals than deliveries: a changed secret or a wrong clock looks like this. So does a stranger with patience,
/// which is why it is no more than a reason to look.
fn refusals(vitals: &Vitals) -> Option<(Status, String)> {
    if vitals.refused <= KNOCKS || vitals.refused <= vitals.let_in {
        return None;
    }
    let (refused, let_in) = (vitals.refused, vitals.let_in);
    degraded(format!("{refused} deliveries were refused and {let_in} let in: has a secret changed?"))
}

/// A part of a whole, if there is one.
pub(super) fn share(part: i64, whole: i64) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a count of events fits")]
    let share = |part: i64, whole: i64| part as f64 / whole as f64;
    (whole > 0).then(|| share(part, whole))
}

fn are(n: usize) -> String {
    if n == 1 { "1 event is".to_owned() } else { format!("{n} events are") }
}

fn minutes(duration: Duration) -> String {
    match duration.as_secs() / 60 {
        1 => "1 minute".to_owned(),
        n => format!("{n} minutes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(vitals: &Vitals) -> (Status, String) {
        let health = Health::of(vitals);
        (health.status, health.reasons.join("; "))
    }

    #[test]
    fn a_rule_that_only_fails_is_told_after_half_a_minute() {
        let failing = |seconds, events| {
            let waits = Duration::from_secs(seconds);
            let failing = vec![Failing { events, waits, error: "the endpoint cannot be reached".into() }];
            told(&Vitals { failing, ..Vitals::default() })
        };
        assert_eq!(failing(30, 2), (Status::Ok, String::new()), "the first retry may mend it");
        let (status, reasons) = failing(31, 2);
        assert_eq!(status, Status::Degraded);
        assert!(reasons.contains("2 events have not taken effect for up to 31s"), "{reasons}");
        assert!(reasons.contains("the endpoint cannot be reached"), "{reasons}");
        assert!(reasons.ends_with("They run again by themselves"), "{reasons}");
        assert!(
            failing(31, 1).1.starts_with("1 event has not") && failing(31, 1).1.ends_with("It runs again by itself")
        );
    }

    #[test]
    fn messages_that_reach_nobody_are_told_with_the_way_out() {
        let stuck = |state| {
            let stuck = vec![Stuck { topic: "webhook.stripe.a".into(), state, messages: 1 }];
            told(&Vitals { stuck, ..Vitals::default() })
        };
        let (status, reasons) = stuck(OutboxState::Unroutable);
        assert_eq!(status, Status::Degraded);
        assert!(reasons.contains("1 message is unroutable: no queue takes the topic webhook.stripe.a"), "{reasons}");
        assert!(stuck(OutboxState::Parked).1.contains("redrive or skip"));
    }

    #[test]
    fn an_empty_monitor_reports_ok() {
        assert_eq!(told(&Vitals::default()), (Status::Ok, String::new()));
    }

    #[test]
    fn most_runs_must_complete() {
        let ran = |completed, failed, lost| told(&Vitals { completed, failed, lost, ..Vitals::default() }).0;
        assert_eq!(ran(4, 5, 0), Status::Ok, "nine runs say nothing");
        assert_eq!(ran(4, 5, 1), Status::Down);
        assert_eq!(ran(5, 5, 0), Status::Degraded, "half of them is not most");
        assert_eq!(ran(95, 5, 0), Status::Ok, "five in a hundred may fail");
        assert_eq!(ran(94, 3, 3), Status::Degraded);
    }

    #[test]
    fn each_rule_has_its_number() {
        let minute = Duration::from_secs(60);
        let well = [
            Vitals { silent: Some(10 * minute), ..Vitals::default() },
            Vitals { waits: Some(15 * minute), ..Vitals::default() },
            Vitals { refused: 10, ..Vitals::default() },
            Vitals { refused: 11, let_in: 11, ..Vitals::default() },
        ];
        for vitals in well {
            assert_eq!(told(&vitals), (Status::Ok, String::new()), "{vitals:?}");
        }
        let worse = [
            (
                Vitals { at_limit: 1, ..Vitals::default() },
                "1 event has failed as often as allowed, and runs again only",
            ),
            (
                Vitals { at_limit: 2, ..Vitals::default() },
                "2 events have failed as often as allowed, and run again only",
            ),
            (Vitals { parked: 1, ..Vitals::default() }, "1 event is parked"),
            (Vitals { silent: Some(11 * minute), ..Vitals::default() }, "11 minutes ago"),
            (Vitals { waits: Some(16 * minute), ..Vitals::default() }, "for 16 minutes"),
            (Vitals { conflicts: 1, ..Vitals::default() }, "of a known event in the last"),
            (Vitals { conflicts: 3, ..Vitals::default() }, "3 times"),
            (Vitals { more_conflicts: true, ..Vitals::default() }, "more often than is looked at here"),
            (Vitals { refused: 11, let_in: 10, ..Vitals::default() }, "11 deliveries were refused and 10 let in"),
            (Vitals { flooded: true, ..Vitals::default() }, "more events are waiting"),
        ];
        for (vitals, reason) in worse {
            let (status, reasons) = told(&vitals);
            assert_eq!(status, Status::Degraded, "{vitals:?}");
            assert!(reasons.contains(reason), "{reasons}");
        }
    }

    #[test]
    fn the_worst_comes_first_and_counts() {
        let (status, reasons) = told(&Vitals { failed: 10, parked: 2, ..Vitals::default() });
        assert_eq!(status, Status::Down);
        assert_eq!(
            reasons,
            "10 of 10 runs in this hour and the last failed or were lost; 2 events are parked, to be run again only when a person says so"
        );
    }

    #[test]
    fn a_part_of_nothing_is_nothing() {
        assert_eq!((share(0, 0), share(1, 4)), (None, Some(0.25)));
    }
}
