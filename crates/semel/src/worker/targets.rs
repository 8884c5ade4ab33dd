//! Targets: what handlers call, and which of them are unreachable.
//!
//! A handler reports an unreachable target by name. The run had no effect, so no attempt is counted; but without a
//! pause every operation of the target would be tried over and over. While a target is paused, its operations are
//! released without a run; after the pause one of them runs as a probe.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;

use crate::{Operation, Uptime};

/// The first and the longest pause.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How many unreachable targets are remembered. Further ones are not paused.
const MOST: usize = 10_000;

/// How long a run may take to report on its target. After that it may be lost, and another operation probes.
const PROBE: Duration = Duration::from_secs(120);

/// How long after its pause a target is remembered, if no run reports on it.
const FORGET: Duration = Duration::from_secs(600);

/// The longest wait of an operation whose target is unreachable, at any age.
const LONGEST_AWAY: Duration = Duration::from_secs(3600);

/// The least time between two operations of one unreachable target that become due again. Without it, a million of them
/// would be claimed and released thousands of times per second. In a long queue they wait longer than their policy says.
const APART: Duration = Duration::from_millis(2);

/// Unreachable targets.
#[derive(Default)]
pub(crate) struct Targets(Mutex<HashMap<String, Pause>>);

struct Pause {
    /// How many times in a row it was unreachable.
    times: u32,
    until: Uptime,
    /// An operation probes it: until when its report is awaited.
    probe: Option<Uptime>,
    /// When the last of its operations that were put off becomes due again.
    last: Uptime,
}

impl Targets {
    /// How long to wait before an operation of this target may run: `None` if it may run now.
    pub(super) fn wait(&self, target: &str) -> Option<Duration> {
        let mut all = self.0.lock();
        let pause = all.get_mut(target)?;
        if !pause.until.has_passed() {
            return Some(pause.until.remaining());
        }
        // One probe at a time: if the target takes long to refuse, more of them would fill all seats.
        if pause.probe.is_some_and(|report| !report.has_passed()) {
            return Some(PAUSES.0);
        }
        pause.probe = Some(Uptime::now() + PROBE);
        None
    }

    /// How long an operation of a paused target is put off: see [`patience`], and [`APART`] from the others.
    pub(super) fn put_off(&self, target: &str, pause: Duration, operation: &Operation) -> Duration {
        patience(pause, operation).max(self.next_place(target, pause))
    }

    /// How long until the next operation of a paused target may become due.
    fn next_place(&self, target: &str, pause: Duration) -> Duration {
        let mut all = self.0.lock();
        let Some(paused) = all.get_mut(target) else { return pause };
        paused.last = paused.last.max(Uptime::now() + pause) + APART;
        paused.last.remaining().min(LONGEST_AWAY)
    }

    /// Notes that a target is unreachable; returns the pause. Several runs may report it; the first starts the pause.
    pub(crate) fn is_away(&self, target: &str, why: &str) -> Duration {
        let mut all = self.0.lock();
        // A pause that has long passed says nothing of today: a target without another failure is reachable.
        all.retain(|_, pause| !(pause.until + FORGET).has_passed());
        if all.len() >= MOST && !all.contains_key(target) {
            return PAUSES.1;
        }
        let (first, longest) = PAUSES;
        let now = Uptime::now();
        let pause = all.entry(target.to_owned()).or_insert(Pause { times: 0, until: now, probe: None, last: now });
        if pause.until.has_passed() {
            let wait = (first * (1 << pause.times.min(8))).min(longest);
            *pause = Pause { times: pause.times.saturating_add(1), until: now + wait, probe: None, ..*pause };
            tracing::warn!(target, error = why, pause = ?wait, "target unreachable; paused without counting attempts");
        }
        pause.until.remaining()
    }

    /// Notes that a run of a target ended without saying whether it is reachable: if it was the probe, another operation
    /// may probe.
    pub(super) fn is_unknown(&self, target: &str) {
        if let Some(pause) = self.0.lock().get_mut(target) {
            pause.probe = None;
        }
    }

    /// Notes that a target answered.
    pub(super) fn is_there(&self, target: &str) {
        if self.0.lock().remove(target).is_some() {
            tracing::info!(target, "target reachable again");
        }
    }
}

/// How long an operation waits while its target is paused: at least the pause. One that has been tried for longer waits
/// for half that time, up to the longest backoff of its policy: otherwise all operations of a target that is unreachable
/// for days would be tried over and over.
pub(crate) fn patience(pause: Duration, operation: &Operation) -> Duration {
    let longest = operation.lease.as_ref().map_or(LONGEST_AWAY, |lease| lease.terms.backoff.cap.min(LONGEST_AWAY));
    pause.max((operation.tried_for() / 2).min(longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_target_pauses_and_one_run_probes_it() {
        let targets = Targets::default();
        assert_eq!(targets.wait("a"), None);
        let pause = targets.is_away("a", "no route");
        assert!(pause <= PAUSES.0 && !pause.is_zero());
        assert!(targets.wait("a").is_some() && targets.wait("b").is_none(), "the others go on");
        targets.0.lock().get_mut("a").unwrap().until = Uptime::now();
        assert_eq!(targets.wait("a"), None, "one operation probes");
        assert!(targets.wait("a").is_some(), "no second probe");
        assert!(targets.is_away("a", "no route") > PAUSES.0, "the next pause is longer");
        targets.is_there("a");
        assert_eq!(targets.wait("a"), None);
    }

    #[test]
    fn operations_of_a_long_queue_become_due_one_after_the_other() {
        let (targets, second) = (Targets::default(), Duration::from_secs(1));
        targets.is_away("a", "no route");
        targets.is_away("b", "no route");
        let waits: Vec<_> = (0..1000).map(|_| targets.next_place("a", second)).collect();
        let slow = Duration::from_millis(500);
        assert!(waits[0] <= second + APART && waits[999] > waits[0] + 999 * APART - slow, "{:?}", waits.last());
        assert!(targets.next_place("b", second) <= second + APART, "those of other targets do not count");
        // A queue that takes longer than this to come back comes back together.
        for _ in 0..LONGEST_AWAY.as_millis() {
            targets.next_place("a", second);
        }
        assert_eq!(targets.next_place("a", second), LONGEST_AWAY);
        targets.is_there("a");
        assert_eq!(targets.next_place("a", second), second);
    }

    #[test]
    fn an_unreachable_target_is_probed_again_after_each_pause() {
        let targets = Targets::default();
        let pass = || targets.0.lock().get_mut("a").unwrap().until = Uptime::now();
        targets.is_away("a", "no route");
        for _ in 0..3 {
            pass();
            assert_eq!(targets.wait("a"), None, "one operation probes");
            assert!(targets.wait("a").is_some(), "the others wait");
            targets.is_away("a", "no route");
        }
        pass();
        assert_eq!(targets.wait("a"), None);
        for _ in 0..3 {
            pass();
            assert!(targets.wait("a").is_some(), "one probe at a time, however long it takes");
        }
        targets.0.lock().get_mut("a").unwrap().probe = Some(Uptime::now());
        assert_eq!(targets.wait("a"), None, "the probing run is lost");
        assert!(targets.wait("a").is_some());
        targets.is_unknown("a");
        assert_eq!(targets.wait("a"), None, "the probing run was released without a report");
    }
}
