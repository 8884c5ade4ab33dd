//! Requests that wait for work, and the task that wakes them: one look for all of them, so that a thousand waiting
//! clients cost what one does. They hold no connection.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use semel::{Ledger, Scope, Uptime, look::DueKind, prelude::*, store::DueWake};
use semel_store::Database;
use tokio::sync::{Notify, watch};

/// How often due operations of other nodes are looked for while there are some, and otherwise.
const BUSY: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);

/// How long news is gathered before a look.
const MOMENT: Duration = Duration::from_millis(10);

/// How long after the last due operation the shorter interval is used.
const A_WHILE: Duration = Duration::from_secs(10);

/// The waiting requests of this node.
#[derive(Default)]
pub(super) struct Polls {
    /// By scope, in the order in which they came.
    waiting: Mutex<HashMap<Scope, BTreeMap<u64, Arc<Poll>>>>,
    /// The number of requests so far.
    tickets: AtomicU64,
    joined: Notify,
    closed: watch::Sender<bool>,
}

/// A waiting request.
#[derive(Default)]
struct Poll {
    woken: AtomicBool,
    wake: Notify,
}

/// A request's places in the queues of the operations that it asks for.
pub(super) struct Place<'a> {
    polls: &'a Polls,
    scopes: &'a [Scope],
    ticket: u64,
    poll: Arc<Poll>,
}

impl Polls {
    /// Waits for operations of these scopes, behind the requests that wait already.
    pub(super) fn join<'a>(&'a self, scopes: &'a [Scope]) -> Place<'a> {
        let (poll, ticket) = (Arc::<Poll>::default(), self.tickets.fetch_add(1, SeqCst));
        let mut waiting = self.waiting.lock();
        for scope in scopes {
            waiting.entry(scope.clone()).or_default().insert(ticket, poll.clone());
        }
        drop(waiting);
        self.joined.notify_one();
        Place { polls: self, scopes, ticket, poll }
    }

    /// Wakes the request that has waited longest for operations of this scope. If it gets some, it wakes the next one.
    pub(super) fn wake(&self, scope: &Scope) {
        let mut waiting = self.waiting.lock();
        let Some(queue) = waiting.get_mut(scope) else { return };
        let next = queue.iter().find(|(_, poll)| !poll.woken.load(SeqCst)).map(|(ticket, _)| *ticket);
        if let Some(poll) = next.and_then(|ticket| queue.remove(&ticket)) {
            // Under the lock: a request that goes away now passes the wake on.
            poll.woken.store(true, SeqCst);
            poll.wake.notify_one();
        }
    }

    /// The scopes that requests wait for.
    fn scopes(&self) -> BTreeSet<Scope> {
        self.waiting.lock().keys().cloned().collect()
    }

    /// Completes when requests should no longer wait.
    pub(super) async fn closed(&self) {
        // The sender lives as long as this.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }
}

impl Place<'_> {
    /// Completes when there may be work.
    pub(super) async fn woken(&self) {
        self.poll.wake.notified().await;
    }

    /// The request looks for work itself now: a wake that it has got is used.
    pub(super) fn looks(&self) {
        self.poll.woken.store(false, SeqCst);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.polls.waiting.lock();
        for scope in self.scopes {
            if let Some(queue) = waiting.get_mut(scope) {
                queue.remove(&self.ticket);
                if queue.is_empty() {
                    waiting.remove(scope);
                }
            }
        }
        drop(waiting);
        // A request that went away passes its wake on.
        if self.poll.woken.load(SeqCst) {
            self.scopes.iter().for_each(|scope| self.polls.wake(scope));
        }
    }
}

/// Wakes waiting requests until `stop` turns true; then none waits any longer.
pub(super) async fn watch(ledger: &Ledger<Database>, polls: &Polls, mut stop: watch::Receiver<bool>) {
    let wake = ledger.store().due_wake();
    let work = async {
        let mut busy_until = Uptime::now();
        let mut next = Duration::ZERO;
        loop {
            if polls.scopes().is_empty() {
                polls.joined.notified().await;
                // The request has looked itself.
                next = BUSY;
            }
            tokio::select! {
                () = wake.woken() => {
                    if !hear(&wake, polls) {
                        continue;
                    }
                    // Releases and failures tell this one by one: one look is enough for those of a moment.
                    tokio::time::sleep(MOMENT).await;
                }
                () = tokio::time::sleep(next) => {}
            }
            let pause = if busy_until.has_passed() { IDLE } else { BUSY };
            next = match look(ledger, polls).await {
                Ok((found, soonest)) => {
                    if found {
                        busy_until = Uptime::now() + A_WHILE;
                    }
                    soonest.unwrap_or(pause).clamp(Duration::from_millis(5), pause)
                }
                Err(error) => {
                    tracing::debug!(%error, "due operations could not be looked for");
                    IDLE
                }
            };
        }
    };
    tokio::select! {
        // A dropped sender counts as a stop request.
        _ = stop.wait_for(|stop| *stop) => {}
        () = work => {}
    }
    polls.closed.send_replace(true);
}

/// Wakes the requests for operations that commits of this process have named. Whether there may be others.
fn hear(wake: &DueWake, polls: &Polls) -> bool {
    let news = wake.hear();
    news.scopes.iter().for_each(|scope| polls.wake(scope));
    news.others
}

/// Wakes a request for each scope with due operations. Whether there is one, and how long until the next is due.
async fn look(ledger: &Ledger<Database>, polls: &Polls) -> semel::Result<(bool, Option<Duration>)> {
    let scopes = polls.scopes();
    let services: BTreeSet<&str> = scopes.iter().map(Scope::service).collect();
    let (mut found, mut soonest) = (false, None::<Duration>);
    for service in services {
        let mut after = (String::new(), String::new());
        loop {
            let due = ledger.due_kinds(service, (&after.0, &after.1)).await?;
            for DueKind { kind, tenant, wait, .. } in &due {
                let Ok(scope) = Scope::new(tenant, service, kind) else { continue };
                if !scopes.contains(&scope) {
                    continue;
                }
                if wait.is_zero() {
                    found = true;
                    polls.wake(&scope);
                } else {
                    soonest = Some(soonest.map_or(*wait, |soonest| soonest.min(*wait)));
                }
            }
            match due.last() {
                Some(last) if due.len() >= DueKind::MOST as usize => after = (last.kind.clone(), last.tenant.clone()),
                _ => break,
            }
        }
    }
    Ok((found, soonest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(kind: &str) -> Scope {
        Scope::new("acme", "operations", kind).unwrap()
    }

    async fn is_woken(place: &Place<'_>) -> bool {
        tokio::time::timeout(Duration::from_millis(20), place.woken()).await.is_ok()
    }

    #[tokio::test]
    async fn the_request_that_has_waited_longest_is_woken() {
        let (polls, scopes) = (Polls::default(), [scope("a"), scope("b")]);
        let (first, second) = (polls.join(&scopes), polls.join(&scopes[1..]));
        polls.wake(&scope("b"));
        assert!(is_woken(&first).await && !is_woken(&second).await);
        polls.wake(&scope("b"));
        assert!(is_woken(&second).await);
        polls.wake(&scope("c"));
    }

    #[tokio::test]
    async fn a_request_that_goes_away_passes_its_wake_on() {
        let (polls, scopes) = (Polls::default(), [scope("a")]);
        let (first, second) = (polls.join(&scopes), polls.join(&scopes));
        polls.wake(&scope("a"));
        drop(first);
        assert!(is_woken(&second).await);
        drop(second);
        assert!(polls.scopes().is_empty());
    }

    #[tokio::test]
    async fn a_request_that_has_looked_passes_no_wake_on() {
        let (polls, scopes) = (Polls::default(), [scope("a")]);
        let (first, second) = (polls.join(&scopes), polls.join(&scopes));
        polls.wake(&scope("a"));
        first.looks();
        drop(first);
        assert!(!is_woken(&second).await);
    }
}
