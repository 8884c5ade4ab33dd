//! Renewing leases in the background.
//!
//! One task renews all leases of this process, in one statement a round. It lives on the engine's
//! own threads, so a handler that blocks every thread of the caller's runtime does not starve it.
//! A lease that was not renewed in time is lost by our own clock before it is lost by the
//! database's: its holder is told while it can still stop.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::{Notify, watch};

use crate::{Fence, Policy, Uptime, crash_point, machine::Answer, store::Store};

/// A lease is renewed when a third of it is over: two more rounds can fail before it is lost.
const ROUNDS_PER_LEASE: u32 = 3;

#[derive(Default)]
pub(crate) struct Renewer {
    held: Mutex<HashMap<(i64, Fence), Held>>,
    changed: Notify,
}

struct Held {
    term: Duration,
    due: Uptime,
    /// When the holder must have stopped, by our own clock.
    deadline: OwnDeadline,
    /// The same for the holder to look at; nothing once the lease is lost.
    told: watch::Sender<Option<Uptime>>,
}

/// Keeps a lease alive until it is dropped, and tells when it is lost all the same.
pub(crate) struct Renewal {
    id: i64,
    fence: Fence,
    until: watch::Receiver<Option<Uptime>>,
    renewer: Arc<Renewer>,
}

impl Renewer {
    /// Begins to renew. `deadline` is counted from before the claim was sent.
    pub(crate) fn keep(self: &Arc<Self>, id: i64, fence: Fence, term: Duration, deadline: OwnDeadline) -> Renewal {
        let (told, until) = watch::channel(Some(deadline.at()));
        let due = Uptime::now() + term / ROUNDS_PER_LEASE;
        self.lock().insert((id, fence), Held { term, due, deadline, told });
        self.changed.notify_one();
        Renewal { id, fence, until, renewer: self.clone() }
    }

    /// Renews whatever is due. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        loop {
            let pause = self.until_next();
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.changed.notified() => continue,
            }
            let due = self.due();
            if due.is_empty() {
                continue;
            }
            crash_point!("renew.before");
            let sent = Uptime::now();
            // Never longer than a round of the shortest lease in it: a hung connection must not
            // keep us from noticing that time is up.
            let patience = self.shortest_term(&due) / ROUNDS_PER_LEASE;
            let answers = tokio::time::timeout(patience, store.renew(due.clone())).await;
            crash_point!("renew.after");
            match answers {
                Ok(Ok(answers)) => self.take_note(&due, &answers, sent),
                Ok(Err(error)) => self.retry(&due, &error.to_string()),
                Err(_) => self.retry(&due, "no answer in time"),
            }
        }
    }

    fn until_next(&self) -> Duration {
        let next = self.lock().values().map(|held| held.due.min(held.deadline.at())).min();
        next.map_or(Duration::from_secs(3600), Uptime::remaining)
    }

    /// What is due now, and what will be within a tenth of its term: one statement for both.
    fn due(&self) -> Vec<(i64, Fence)> {
        let now = Uptime::now();
        let mut held = self.lock();
        for lease in held.values_mut().filter(|lease| lease.deadline.at() <= now) {
            lease.told.send_replace(None);
        }
        held.retain(|_, lease| lease.deadline.at() > now);
        held.iter().filter(|(_, lease)| lease.due <= now + lease.term / 10).map(|(id, _)| *id).collect()
    }

    fn shortest_term(&self, due: &[(i64, Fence)]) -> Duration {
        let held = self.lock();
        due.iter().filter_map(|id| held.get(id)).map(|lease| lease.term).min().unwrap_or(Duration::from_secs(1))
    }

    fn take_note(&self, due: &[(i64, Fence)], answers: &[Answer], sent: Uptime) {
        let mut held = self.lock();
        for (id, answer) in due.iter().zip(answers) {
            let Some(lease) = held.get_mut(id) else { continue };
            if let Answer::Renewed { .. } = answer {
                lease.due = sent + lease.term / ROUNDS_PER_LEASE;
                lease.deadline = lease.deadline.renewed(sent);
                lease.told.send_replace(Some(lease.deadline.at()));
            } else {
                lease.told.send_replace(None);
                held.remove(id);
            }
        }
    }

    fn retry(&self, due: &[(i64, Fence)], why: &str) {
        tracing::warn!(leases = due.len(), why, "leases could not be renewed; trying again");
        let mut held = self.lock();
        for id in due {
            if let Some(lease) = held.get_mut(id) {
                lease.due = Uptime::now() + lease.term / 20;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(i64, Fence), Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When a holder must have stopped, by its own clock: before the database says so.
#[derive(Clone, Copy)]
pub(crate) struct OwnDeadline {
    term: Duration,
    at: Uptime,
    /// The end of the longest run, beyond which no renewal extends the lease.
    end: Uptime,
}

impl OwnDeadline {
    /// Of a lease whose claim was sent at that moment.
    pub(crate) fn of_claim(sent: Uptime, policy: &Policy) -> Self {
        let term = policy.lease;
        let end = sent + policy.max_run.saturating_sub(margin(term));
        Self { term, at: end, end }.renewed(sent)
    }

    /// The same lease, renewed by what was sent at that moment.
    pub(crate) fn renewed(self, sent: Uptime) -> Self {
        let at = (sent + self.term.saturating_sub(margin(self.term))).min(self.end);
        Self { at, ..self }
    }

    /// The moment itself.
    pub(crate) fn at(self) -> Uptime {
        self.at
    }
}

/// What is left of a term for the clocks' drift, and for the last write to arrive.
fn margin(term: Duration) -> Duration {
    term / 10
}

impl Renewal {
    /// Done when the lease is lost.
    pub(crate) async fn lost(&self) {
        let mut until = self.until.clone();
        // The sender goes only after it has said so, or when the renewal ends.
        if until.wait_for(Option::is_none).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Until when the lease may be used, by our own clock; nothing once it is lost.
    pub(crate) fn watch(&self) -> watch::Receiver<Option<Uptime>> {
        self.until.clone()
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.renewer.lock().remove(&(self.id, self.fence));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_stops_before_the_database_says_so_and_at_the_longest_run_too() {
        let policy = Policy { lease: Duration::from_secs(30), max_run: Duration::from_secs(40), ..Policy::default() };
        let claimed = Uptime::now();
        let own = OwnDeadline::of_claim(claimed, &policy);
        assert!(own.at() == claimed + Duration::from_secs(27));
        let renewed = own.renewed(claimed + Duration::from_secs(5));
        assert!(renewed.at() == claimed + Duration::from_secs(32));
        // The database cuts this renewal short at 40 s; the holder must know.
        let cut = renewed.renewed(claimed + Duration::from_secs(20));
        assert!(cut.at() == claimed + Duration::from_secs(37));
    }
}
