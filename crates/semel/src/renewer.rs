//! Renewing leases in the background.
//!
//! One task asks for all leases of this process that are due, in one statement. It lives on the engine's own threads,
//! so a handler that blocks every thread of the caller's runtime does not starve it. A lease that was not renewed in
//! time is lost by our own clock before it is lost by the database's: its holder is told while it can still stop.
//!
//! No lease waits for another. A late answer is waited for by the leases that have the time; the others are asked for
//! again meanwhile, in a request of their own. A lease whose row is locked by another transaction is left out by the
//! store, and asked for again soon. What was renewed is told to its run before anything about it goes to the journal.

mod agenda;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

use self::agenda::{Agenda, Held, LeaseId};
use crate::{Fence, Policy, Result, Uptime, crash_point, machine::Answer, store::Store};

/// A lease is renewed when a third of it is over: two more rounds can fail before it is lost.
const ROUNDS_PER_LEASE: u32 = 3;

/// Requests that may wait for their answers at the same time. One is usual; a second one goes when leases of the first
/// cannot wait any longer. More than a few only means that the store answers nothing.
const AT_ONCE: usize = 4;

/// How often the clock is looked at while no further request may be sent.
const CROWDED: Duration = Duration::from_millis(10);

/// How long to wait before the journal is tried again.
const STORY_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Renewer {
    agenda: Mutex<Agenda>,
    changed: Notify,
}

/// How a lease stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// Until when it may be used; nothing once it is lost.
    pub(crate) until: Option<Uptime>,
    /// Whether somebody has asked for the run to stop.
    pub(crate) cancelled: bool,
}

/// Keeps a lease alive until it is dropped, and tells when it is lost all the same.
pub(crate) struct Renewal {
    id: LeaseId,
    standing: watch::Receiver<Standing>,
    renewer: Arc<Renewer>,
}

/// A request that was answered, or given up.
struct Answered {
    asked: Vec<LeaseId>,
    sent: Uptime,
    answers: Result<Vec<Answer>>,
}

impl Renewer {
    /// Begins to renew. `deadline` is counted from before the claim was sent.
    pub(crate) fn keep(self: &Arc<Self>, id: i64, fence: Fence, term: Duration, deadline: OwnDeadline) -> Renewal {
        self.keep_from(Uptime::now() + term / ROUNDS_PER_LEASE, (id, fence), term, deadline)
    }

    fn keep_from(self: &Arc<Self>, due: Uptime, id: LeaseId, term: Duration, deadline: OwnDeadline) -> Renewal {
        let (told, standing) = watch::channel(Standing { until: Some(deadline.at()), cancelled: false });
        // The task is woken only if it would sleep for too long.
        if self.lock().add(id, Held { term, due, deadline, told }) {
            self.changed.notify_one();
        }
        Renewal { id, standing, renewer: self.clone() }
    }

    /// Tells the run of an operation, if it is here, that somebody asks for it to stop.
    pub(crate) fn cancel(&self, operation: i64) {
        self.lock().cancel(operation);
    }

    /// Renews whatever is due. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        let stories = store.clone();
        let renew = move |asked| {
            let store = store.clone();
            async move { store.renew(asked).await }
        };
        let tell = move || {
            let store = stories.clone();
            async move { store.tell_renewals().await }
        };
        self.serve(renew, tell).await;
    }

    async fn serve<R, Renewed, T, Telling>(&self, renew: R, tell: T)
    where
        R: Fn(Vec<LeaseId>) -> Renewed,
        Renewed: Future<Output = Result<Vec<Answer>>> + Send + 'static,
        T: Fn() -> Telling + Clone + Send + 'static,
        Telling: Future<Output = Result<()>> + Send + 'static,
    {
        let (mut requests, mut stories) = (JoinSet::new(), JoinSet::new());
        loop {
            let crowded = requests.len() >= AT_ONCE;
            let pause = self.until_next().max(if crowded { CROWDED } else { Duration::ZERO });
            tokio::select! {
                Some(answered) = requests.join_next() => {
                    // A request that panicked is sent again when its leases are due again.
                    answered.map_or_else(|error| tracing::error!(%error, "a renewal ended early"), |a| self.take_note(a));
                    if stories.is_empty() {
                        stories.spawn(until_told(tell.clone()));
                    }
                    continue;
                }
                Some(_) = stories.join_next() => continue,
                () = self.changed.notified() => continue,
                () = tokio::time::sleep(pause) => {}
            }
            if crowded {
                self.lock().end_overdue(Uptime::now());
                continue;
            }
            let sent = Uptime::now();
            let (asked, patience) = {
                let mut agenda = self.lock();
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
        self.lock().next().map_or(Duration::from_secs(3600), Uptime::remaining)
    }

    fn take_note(&self, Answered { asked, sent, answers }: Answered) {
        let mut agenda = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, Agenda> {
        self.agenda.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Writes what renewals left to tell. They do not wait for it.
async fn until_told<T: Fn() -> Telling, Telling: Future<Output = Result<()>>>(tell: T) {
    while let Err(error) = tell().await {
        tracing::warn!(%error, "renewals could not be noted in the journal; trying again");
        tokio::time::sleep(STORY_PAUSE).await;
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
        self.stands(|standing| standing.until.is_none()).await;
    }

    /// Done when somebody has asked for the run to stop.
    pub(crate) async fn cancelled(&self) {
        self.stands(|standing| standing.cancelled).await;
    }

    async fn stands(&self, so: impl FnMut(&Standing) -> bool) {
        // The sender goes only after it has said so, or when the renewal ends.
        if self.standing.clone().wait_for(so).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// How the lease stands, by our own clock.
    pub(crate) fn watch(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.renewer.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests;
