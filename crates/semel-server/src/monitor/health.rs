//! The health verdict. Every rule that holds for any service is here, with its threshold.

use std::time::Duration;

use semel::messaging::OutboxState;
use serde::Serialize;

/// How many runs must have ended before their rate counts: with fewer, one failure would be an alarm.
const ENOUGH_RUNS: i64 = 10;

/// The least rate of completed runs: if most fail, the service is down.
const DOWN_BELOW: f64 = 0.5;

/// The rate of runs that may fail: a deploy or an occasional lock timeout stays below it.
const FAILING_ABOVE: f64 = 0.05;

/// How long a run may be without a renewal: the limit for orphans in the source document of the webhooks.
const ORPHAN: Duration = Duration::from_secs(10 * 60);

/// How long an operation may wait for its next run: the interval of that document's orphan search. A backoff is at most
/// ten minutes unless configured.
const WAITING: Duration = Duration::from_secs(15 * 60);

/// How long an operation may fail before it is reported: the first retry comes after ten seconds and may succeed.
pub(super) const FAILING: Duration = Duration::from_secs(30);

/// The input of the verdict: this hour and the one before, and all waiting operations, of any age.
#[derive(Clone, Debug, Default)]
pub(super) struct Vitals {
    /// The name of one operation and of several.
    pub(super) noun: (&'static str, &'static str),
    /// Completed runs of the last hours.
    pub(super) completed: i64,
    /// Failed runs.
    pub(super) failed: i64,
    /// Lost runs.
    pub(super) lost: i64,
    /// Operations that failed as often as they may.
    pub(super) at_limit: usize,
    /// Operations whose runs were lost too often, or that were set aside.
    pub(super) parked: usize,
    /// Operations that may or may not have taken effect.
    pub(super) in_doubt: usize,
    /// The age of the oldest renewal among expired leases.
    pub(super) silent: Option<Duration>,
    /// The longest wait among operations that are to run again.
    pub(super) waits: Option<Duration>,
    /// Whether more operations wait than were read.
    pub(super) flooded: bool,
    /// Groups whose operations only fail.
    pub(super) failing: Vec<Failing>,
    /// Messages that need a person.
    pub(super) stuck: Vec<Stuck>,
}

/// Operations of one rule whose runs have all failed since one of them last completed.
#[derive(Clone, Debug)]
pub(super) struct Failing {
    /// How many.
    pub(super) operations: usize,
    /// How long the first of them has waited to take effect.
    pub(super) waits: Duration,
    /// The error of the latest of these runs.
    pub(super) error: String,
}

/// Messages in the outbox.
#[derive(Clone, Debug)]
pub struct Stuck {
    /// Their topic.
    pub topic: String,
    /// Unroutable or parked.
    pub state: OutboxState,
    /// How many.
    pub messages: u64,
}

/// The status of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// There is no problem.
    Ok,
    /// A person should look.
    Degraded,
    /// Operations do not take effect.
    Down,
}

/// The verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Health {
    /// The status.
    pub status: Status,
    /// One sentence each, the worst first.
    pub reasons: Vec<String>,
}

/// A problem: its severity and a sentence.
pub type Reason = (Status, String);

impl Health {
    /// The verdict, with the problems that the service itself found.
    pub(super) fn of(vitals: &Vitals, own: &[Reason]) -> Self {
        let mut found: Vec<_> = RULES.iter().filter_map(|rule| rule(vitals)).chain(own.iter().cloned()).collect();
        found.sort_by_key(|(status, _)| std::cmp::Reverse(*status));
        let status = found.first().map_or(Status::Ok, |(status, _)| *status);
        Self { status, reasons: found.into_iter().map(|(_, reason)| reason).collect() }
    }
}

type Rule = fn(&Vitals) -> Option<Reason>;

/// A service whose database does not answer is down too, but then the only answer is 503.
const RULES: [Rule; 9] = [runs, failing, stuck, at_limit, parked, in_doubt, orphans, waiting, flooded];

/// A reason for a person to look.
#[must_use]
pub fn degraded(reason: String) -> Option<Reason> {
    Some((Status::Degraded, reason))
}

fn runs(vitals: &Vitals) -> Option<Reason> {
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

/// An unreachable endpoint, a broken handler. Reported after half a minute and until a run completes. Not only at each
/// failure: the backoff grows, and the report would come and go.
fn failing(vitals: &Vitals) -> Option<Reason> {
    let worst = vitals.failing.iter().filter(|it| it.waits > FAILING).max_by_key(|it| it.waits)?;
    let runs = if worst.operations == 1 { "It runs again by itself" } else { "They run again by themselves" };
    let have = number(vitals, worst.operations, ("has", "have"));
    let (waits, error) = (humantime::format_duration(Duration::from_secs(worst.waits.as_secs())), &worst.error);
    degraded(format!(
        "{have} not taken effect for up to {waits}, and no run by the same rule has completed meanwhile; the last error: \
         {error}. {runs}"
    ))
}

/// A published message that reaches no consumer has not taken effect, in any status of its operation.
fn stuck(vitals: &Vitals) -> Option<Reason> {
    let told = vitals.stuck.iter().map(|Stuck { topic, state, messages }| {
        let are = if *messages == 1 { "1 message is".to_owned() } else { format!("{messages} messages are") };
        match state {
            OutboxState::Parked => format!(
                "{are} parked, because the broker refused the topic {topic}: see GET /outbox?state=parked, then redrive or skip"
            ),
            _ => format!(
                "{are} unroutable: no queue is bound to the topic {topic}. They are published once one is \
                 bound; see GET /outbox?state=unroutable"
            ),
        }
    });
    let told: Vec<_> = told.collect();
    (!told.is_empty()).then(|| told.join("; ")).and_then(degraded)
}

fn at_limit(vitals: &Vitals) -> Option<Reason> {
    let run = if vitals.at_limit == 1 { "runs" } else { "run" };
    let have = number(vitals, vitals.at_limit, ("has", "have"));
    (vitals.at_limit > 0)
        .then(|| format!("{have} failed as often as allowed, and {run} again only if a person decides so"))
        .and_then(degraded)
}

fn parked(vitals: &Vitals) -> Option<Reason> {
    let are = number(vitals, vitals.parked, ("is", "are"));
    (vitals.parked > 0).then(|| format!("{are} parked until a person decides")).and_then(degraded)
}

fn in_doubt(vitals: &Vitals) -> Option<Reason> {
    let are = number(vitals, vitals.in_doubt, ("is", "are"));
    (vitals.in_doubt > 0).then(|| format!("{are} in doubt: a person must decide")).and_then(degraded)
}

fn orphans(vitals: &Vitals) -> Option<Reason> {
    let silent = vitals.silent.filter(|silent| *silent > ORPHAN)?;
    degraded(format!(
        "a lease was last renewed {} ago and has expired, and no node has taken over: does a worker or a sweeper run?",
        minutes(silent)
    ))
}

fn waiting(vitals: &Vitals) -> Option<Reason> {
    let waits = vitals.waits.filter(|waits| *waits > WAITING)?;
    let noun = vitals.noun.0;
    let article = if noun.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    degraded(format!("{article} {noun} has waited for {} to take effect: does a worker run?", minutes(waits)))
}

fn flooded(vitals: &Vitals) -> Option<Reason> {
    vitals.flooded.then(|| format!("more {} wait than this monitor reads", vitals.noun.1)).and_then(degraded)
}

/// A part of a total, if the total is not 0.
pub(super) fn share(part: i64, whole: i64) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a count of operations fits")]
    let share = |part: i64, whole: i64| part as f64 / whole as f64;
    (whole > 0).then(|| share(part, whole))
}

/// A number of operations with their noun and verb.
fn number(vitals: &Vitals, n: usize, (one, many): (&str, &str)) -> String {
    match n {
        1 => format!("1 {} {one}", vitals.noun.0),
        n => format!("{n} {} {many}", vitals.noun.1),
    }
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

    /// Vitals without problems.
    fn well() -> Vitals {
        Vitals { noun: ("event", "events"), ..Vitals::default() }
    }

    fn told(vitals: &Vitals) -> (Status, String) {
        let health = Health::of(vitals, &[]);
        (health.status, health.reasons.join("; "))
    }

    #[test]
    fn a_rule_whose_runs_all_fail_is_reported_after_half_a_minute() {
        let failing = |seconds, operations| {
            let waits = Duration::from_secs(seconds);
            let failing = vec![Failing { operations, waits, error: "the endpoint cannot be reached".into() }];
            told(&Vitals { failing, ..well() })
        };
        assert_eq!(failing(30, 2), (Status::Ok, String::new()), "the first retry may succeed");
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
    fn messages_without_a_consumer_are_reported_with_the_remedy() {
        let stuck = |state| {
            let stuck = vec![Stuck { topic: "webhook.stripe.a".into(), state, messages: 1 }];
            told(&Vitals { stuck, ..well() })
        };
        let (status, reasons) = stuck(OutboxState::Unroutable);
        assert_eq!(status, Status::Degraded);
        assert!(
            reasons.contains("1 message is unroutable: no queue is bound to the topic webhook.stripe.a"),
            "{reasons}"
        );
        assert!(stuck(OutboxState::Parked).1.contains("redrive or skip"));
    }

    #[test]
    fn an_empty_monitor_reports_ok() {
        assert_eq!(told(&well()), (Status::Ok, String::new()));
    }

    #[test]
    fn too_many_failed_runs_are_degraded_or_down() {
        let ran = |completed, failed, lost| told(&Vitals { completed, failed, lost, ..well() }).0;
        assert_eq!(ran(4, 5, 0), Status::Ok, "nine runs are too few");
        assert_eq!(ran(4, 5, 1), Status::Down);
        assert_eq!(ran(5, 5, 0), Status::Degraded, "half of them is not most");
        assert_eq!(ran(95, 5, 0), Status::Ok, "five in a hundred may fail");
        assert_eq!(ran(94, 3, 3), Status::Degraded);
    }

    #[test]
    fn each_health_rule_has_its_threshold() {
        let minute = Duration::from_secs(60);
        let none = [Vitals { silent: Some(10 * minute), ..well() }, Vitals { waits: Some(15 * minute), ..well() }];
        for vitals in none {
            assert_eq!(told(&vitals), (Status::Ok, String::new()), "{vitals:?}");
        }
        let worse = [
            (Vitals { at_limit: 1, ..well() }, "1 event has failed as often as allowed, and runs again only"),
            (Vitals { at_limit: 2, ..well() }, "2 events have failed as often as allowed, and run again only"),
            (Vitals { parked: 1, ..well() }, "1 event is parked"),
            (Vitals { in_doubt: 2, ..well() }, "2 events are in doubt: a person must decide"),
            (Vitals { silent: Some(11 * minute), ..well() }, "11 minutes ago"),
            (Vitals { waits: Some(16 * minute), ..well() }, "for 16 minutes"),
            (Vitals { flooded: true, ..well() }, "more events wait"),
        ];
        for (vitals, reason) in worse {
            let (status, reasons) = told(&vitals);
            assert_eq!(status, Status::Degraded, "{vitals:?}");
            assert!(reasons.contains(reason), "{reasons}");
        }
    }

    #[test]
    fn the_worst_reason_comes_first_and_decides_the_status() {
        let (status, reasons) = told(&Vitals { failed: 10, parked: 2, ..well() });
        assert_eq!(status, Status::Down);
        assert_eq!(
            reasons,
            "10 of 10 runs in this hour and the last failed or were lost; 2 events are parked until a person decides"
        );
    }

    #[test]
    fn a_share_of_zero_is_none() {
        assert_eq!((share(0, 0), share(1, 4)), (None, Some(0.25)));
    }
}
