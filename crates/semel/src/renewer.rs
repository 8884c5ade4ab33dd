//! Renews leases in the background.
//!
//! One task renews all leases of this process that are due, in one statement. It runs on the engine's own threads, so a
//! handler that blocks every thread of the caller's runtime does not starve it. A lease that was not renewed in time
//! expires by the node's clock before it expires by the database's: the run is cancelled while it can still stop.
//!
//! No lease waits for another. Leases that have the time wait for a late answer; the others are requested again
//! meanwhile, in a separate request. The store skips a lease whose row is locked, and it is requested again soon. A run
//! gets its answer before anything is written to the journal.

mod agenda;

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

use self::agenda::{Agenda, Held, LeaseId};
use crate::{Fence, Policy, Result, Uptime, crash_point, machine::Answer, store::Store};

/// A lease is renewed when a third of it is over: two more rounds can fail before it is lost.
const ROUNDS_PER_LEASE: u32 = 3;

/// The most concurrent requests. One is usual; a second one is sent if leases of the first cannot wait any longer. More
/// than a few only means that the store does not answer.
const AT_ONCE: usize = 4;

/// How often to check the clock while no further request may be sent.
const CROWDED: Duration = Duration::from_millis(10);

/// How long to wait before the journal is written again.
const JOURNAL_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Renewer {
    agenda: Mutex<Agenda>,
    changed: Notify,
}

/// The state of a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// Until when it may be used; `None` once it is lost.
    pub(crate) until: Option<Uptime>,
    /// Whether the run was asked to stop.
    pub(crate) cancelled: bool,
}

/// Renews a lease until it is dropped, and signals its loss.
pub(crate) struct Renewal {
    id: LeaseId,
    standing: watch::Receiver<Standing>,
    renewer: Arc<Renewer>,
}

/// A request that was answered or given up.
struct Answered {
    asked: Vec<LeaseId>,
    sent: Uptime,
    answers: Result<Vec<Answer>>,
}

impl Renewer {
    /// Starts to renew. `deadline` is counted from before the claim was sent.
    pub(crate) fn keep(self: &Arc<Self>, id: i64, fence: Fence, term: Duration, deadline: OwnDeadline) -> Renewal {
        self.keep_from(Uptime::now() + term / ROUNDS_PER_LEASE, (id, fence), term, deadline)
    }

    fn keep_from(self: &Arc<Self>, due: Uptime, id: LeaseId, term: Duration, deadline: OwnDeadline) -> Renewal {
        let (signal, standing) = watch::channel(Standing { until: Some(deadline.at()), cancelled: false });
        // The task is woken only if it would sleep for too long.
        if self.agenda.lock().add(id, Held { term, due, deadline, signal }) {
            self.changed.notify_one();
        }
        Renewal { id, standing, renewer: self.clone() }
    }

    /// Asks a run to stop, if it is still running here. A later run of the same operation has another fence.
    pub(crate) fn cancel(&self, operation: i64, fence: Fence) {
        self.agenda.lock().cancel((operation, fence));
    }

    /// Renews leases that are due. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        let journal = store.clone();
        let renew = move |asked| {
            let store = store.clone();
            async move { store.renew(asked).await }
        };
        let note = move || {
            let store = journal.clone();
            async move { store.tell_renewals().await }
        };
        self.serve(renew, note).await;
    }

    async fn serve<R, Renewed, T, Noting>(&self, renew: R, note: T)
    where
        R: Fn(Vec<LeaseId>) -> Renewed,
        Renewed: Future<Output = Result<Vec<Answer>>> + Send + 'static,
        T: Fn() -> Noting + Clone + Send + 'static,
        Noting: Future<Output = Result<()>> + Send + 'static,
    {
        let (mut requests, mut notes) = (JoinSet::new(), JoinSet::new());
        loop {
            let crowded = requests.len() >= AT_ONCE;
            let pause = self.until_next().max(if crowded { CROWDED } else { Duration::ZERO });
            tokio::select! {
                Some(answered) = requests.join_next() => {
                    // A request that panicked is sent again when its leases are due again.
                    answered.map_or_else(|error| tracing::error!(%error, "a renewal ended early"), |a| self.take_note(a));
                    if notes.is_empty() {
                        notes.spawn(write_notes(note.clone()));
                    }
                    continue;
                }
                Some(_) = notes.join_next() => continue,
                () = self.changed.notified() => continue,
                () = tokio::time::sleep(pause) => {}
            }
            if crowded {
                self.agenda.lock().end_overdue(Uptime::now());
                continue;
            }
            let sent = Uptime::now();
            let (asked, patience) = {
                let mut agenda = self.agenda.lock();
                let asked = agenda.take_due(sent);
                let patience = agenda.longest_patience(&asked);
                (asked, patience)
            };
            if !asked.is_empty() {
                requests.spawn(ask(renew(asked.clone()), asked, sent, patience));
            }
        }
    }

    fn until_next(&self) -> Duration {
        self.agenda.lock().next().map_or(Duration::from_secs(3600), Uptime::remaining)
    }

    fn take_note(&self, Answered { asked, sent, answers }: Answered) {
        let mut agenda = self.agenda.lock();
        match answers {
            Ok(answers) => {
                asked.iter().zip(&answers).for_each(|(id, answer)| agenda.answered(*id, answer, sent));
            }
            Err(error) => {
                tracing::warn!(leases = asked.len(), %error, "leases could not be renewed; trying again");
                asked.iter().for_each(|id| agenda.ask_soon(*id));
            }
        }
    }
}

/// Sends a request, and waits for its answer as long as any of its leases can.
async fn ask(
    renewed: impl Future<Output = Result<Vec<Answer>>>,
    asked: Vec<LeaseId>,
    sent: Uptime,
    patience: Duration,
) -> Answered {
    crash_point!("renew.before");
    let late = || Err(crate::Error::Unavailable("no answer in time".into()));
    let answers = tokio::time::timeout(patience, renewed).await.unwrap_or_else(|_| late());
    crash_point!("renew.after");
    Answered { asked, sent, answers }
}

/// Writes the journal notes of renewals. Renewals do not wait for it.
async fn write_notes<T: Fn() -> Noting, Noting: Future<Output = Result<()>>>(note: T) {
    while let Err(error) = note().await {
        tracing::warn!(%error, "renewals could not be noted in the journal; trying again");
        tokio::time::sleep(JOURNAL_PAUSE).await;
    }
}

/// When a holder must have stopped, by the node's clock: before the database's deadline.
#[derive(Clone, Copy)]
pub(crate) struct OwnDeadline {
    term: Duration,
    at: Uptime,
    /// The end of the longest run, beyond which no renewal extends the lease.
    end: Uptime,
}

impl OwnDeadline {
    /// The deadline of a lease whose claim was sent at this moment.
    pub(crate) fn of_claim(sent: Uptime, policy: &Policy) -> Self {
        let term = policy.lease;
        let end = sent + policy.max_run.saturating_sub(margin(term));
        Self { term, at: end, end }.renewed(sent)
    }

    /// The deadline of the same lease, renewed by a request that was sent at this moment.
    pub(crate) fn renewed(self, sent: Uptime) -> Self {
        let at = (sent + self.term.saturating_sub(margin(self.term))).min(self.end);
        Self { at, ..self }
    }

    /// The moment itself.
    pub(crate) fn at(self) -> Uptime {
        self.at
    }
}

/// The margin of a term for clock drift, and for the last write to arrive.
fn margin(term: Duration) -> Duration {
    term / 10
}

impl Renewal {
    /// Completes when the lease is lost.
    pub(crate) async fn lost(&self) {
        self.stands(|standing| standing.until.is_none()).await;
    }

    /// Completes when the run was asked to stop.
    pub(crate) async fn cancelled(&self) {
        self.stands(|standing| standing.cancelled).await;
    }

    async fn stands(&self, so: impl FnMut(&Standing) -> bool) {
        // The sender is dropped only after it has sent this, or when the renewal ends.
        if self.standing.clone().wait_for(so).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The state of the lease, by the node's clock.
    pub(crate) fn watch(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.renewer.agenda.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests;
