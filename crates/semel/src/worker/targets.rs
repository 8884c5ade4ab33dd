//! Targets: what handlers call, and what is away.
//!
//! A handler that finds its target away says so and names it. Nothing was done, so it costs no attempt; but without a pause
//! everything that waits for the target would be tried over and over. While a target pauses, its operations are put back
//! without being run; then one of them is let through to find out.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::Uptime;

/// How long a target pauses that is away: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How many targets are remembered. Beyond that, one more that is away is not waited for.
const MOST: usize = 10_000;

#[derive(Default)]
pub(super) struct Targets(Mutex<HashMap<String, Pause>>);

struct Pause {
    /// How often in a row it was away.
    times: u32,
    until: Uptime,
    /// Whether somebody has been let through to find out.
    probed: bool,
}

impl Targets {
    /// How long to wait before an operation of this target is run: nothing if it may be run now.
    pub(super) fn wait(&self, target: &str) -> Option<Duration> {
        let mut all = self.lock();
        let pause = all.get_mut(target)?;
        if !pause.until.has_passed() {
            return Some(pause.until.remaining());
        }
        if pause.probed {
            // Whoever was let through may be gone: after a while the next one is.
            pause.until = Uptime::now() + PAUSES.0;
            return Some(PAUSES.0);
        }
        pause.probed = true;
        None
    }

    /// Notes that a target is away; how long it pauses. Every run that is under way says so; the first begins the pause.
    pub(super) fn is_away(&self, target: &str, why: &str) -> Duration {
        let mut all = self.lock();
        if all.len() >= MOST && !all.contains_key(target) {
            return PAUSES.1;
        }
        let (first, longest) = PAUSES;
        let now = Uptime::now();
        let pause = all.entry(target.to_owned()).or_insert(Pause { times: 0, until: now, probed: false });
        if pause.until.has_passed() {
            let wait = (first * (1 << pause.times.min(8))).min(longest);
            (pause.until, pause.times, pause.probed) = (now + wait, pause.times + 1, false);
            tracing::warn!(target, error = why, pause = ?wait, "a target is away and pauses; it costs no attempts");
        }
        pause.until.remaining()
    }

    /// Notes that a target is there.
    pub(super) fn is_there(&self, target: &str) {
        if self.lock().remove(target).is_some() {
            tracing::info!(target, "a target that was away is there again");
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pause>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_away_pauses_and_one_run_finds_out() {
        let targets = Targets::default();
        assert_eq!(targets.wait("a"), None);
        let pause = targets.is_away("a", "no route");
        assert!(pause <= PAUSES.0 && !pause.is_zero());
        assert!(targets.wait("a").is_some() && targets.wait("b").is_none(), "the others go on");
        targets.lock().get_mut("a").unwrap().until = Uptime::now();
        assert_eq!(targets.wait("a"), None, "one is let through");
        assert!(targets.wait("a").is_some(), "and no second one meanwhile");
        targets.lock().get_mut("a").unwrap().until = Uptime::now();
        assert!(targets.is_away("a", "no route") > PAUSES.0, "the next pause is longer");
        targets.is_there("a");
        assert_eq!(targets.wait("a"), None);
    }
}
