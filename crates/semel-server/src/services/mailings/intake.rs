//! Lists that are stored as they arrive: how many at a time, and how slowly they may come.

use std::{
    collections::HashMap,
    error::Error as StdError,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{body::Body, extract::Request};
use futures_util::{TryStreamExt as _, stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::{files::LONGEST_UPLOAD, problems::TOO_MANY_UPLOADS};
use crate::http::problem::{BODY_TIMEOUT, Problem};

/// How many lists a node receives at a time, and how many of one tenant: each holds a connection of the database now and
/// then. One tenant must not keep out the others.
const AT_A_TIME: usize = 16;
const OF_A_TENANT: usize = AT_A_TIME / 2;

/// When an upload that found no place should be sent again: a list of a million addresses takes some seconds.
const SOON: Duration = Duration::from_secs(5);

/// How long an upload waits for a place.
const PATIENCE: Duration = Duration::from_secs(3);

/// The places of a node for lists that arrive.
pub(super) struct Intake {
    places: Arc<Places>,
    /// A dry run remembers up to two million addresses, which takes some 60 MB: one at a time.
    dry_runs: Arc<Semaphore>,
}

impl Default for Intake {
    fn default() -> Self {
        Self { places: Arc::default(), dry_runs: Arc::new(Semaphore::new(1)) }
    }
}

#[derive(Default)]
struct Places {
    /// How many each tenant has taken.
    taken: Mutex<HashMap<String, usize>>,
    freed: Notify,
}

/// A place. It is free again when this is dropped.
pub(super) struct Slot {
    places: Arc<Places>,
    tenant: String,
}

impl Intake {
    /// Takes a place; waits for one for a moment, as a burst of short lists needs it.
    pub(super) async fn begin(&self, tenant: &str) -> Result<Slot, Problem> {
        let until = Instant::now() + PATIENCE;
        loop {
            let freed = self.places.freed.notified();
            if let Some(slot) = self.take(tenant) {
                return Ok(slot);
            }
            if tokio::time::timeout_at(until.into(), freed).await.is_err() {
                return Err(Problem::new(&TOO_MANY_UPLOADS).retry_after(SOON));
            }
        }
    }

    /// Takes the place of the dry run; waits a moment for it.
    pub(super) async fn dry_run(&self) -> Result<OwnedSemaphorePermit, Problem> {
        match tokio::time::timeout(PATIENCE, self.dry_runs.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => {
                let detail = "Another dry run is under way on this node. Nothing was stored.";
                Err(Problem::new(&TOO_MANY_UPLOADS).detail(detail).retry_after(SOON))
            }
        }
    }

    fn take(&self, tenant: &str) -> Option<Slot> {
        let mut taken = self.places.taken.lock();
        let own = taken.get(tenant).copied().unwrap_or(0);
        if own >= OF_A_TENANT || taken.values().sum::<usize>() >= AT_A_TIME {
            return None;
        }
        taken.insert(tenant.to_owned(), own + 1);
        Some(Slot { places: self.places.clone(), tenant: tenant.to_owned() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock();
        match taken.get_mut(&self.tenant) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.tenant)),
        }
        drop(taken);
        self.places.freed.notify_waiters();
    }
}

/// How slowly a body may arrive.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// The longest pause.
    idle: Duration,
    /// The time that every body has.
    base: Duration,
    /// The bytes that earn another second. A body that trickles makes no long pause, and is refused by this.
    per_second: u64,
    /// The longest time in all.
    longest: Duration,
}

impl Pace {
    /// The limits of uploaded lists.
    pub(super) const LISTS: Self = Self {
        idle: Duration::from_secs(30),
        base: Duration::from_secs(60),
        per_second: 1024,
        longest: LONGEST_UPLOAD,
    };

    /// Watches the body of a request: it breaks off if it is too slow.
    pub(super) fn watch(self, request: Request) -> (Request, Watch) {
        let watch = Watch::default();
        let (begun, slow) = (Instant::now(), watch.0.clone());
        let (head, body) = request.into_parts();
        let parts = stream::try_unfold((body.into_data_stream(), 0_u64), move |(mut parts, read)| {
            let slow = slow.clone();
            async move {
                let allowed = (self.base + Duration::from_secs(read / self.per_second)).min(self.longest);
                let wait = (begun + allowed).saturating_duration_since(Instant::now()).min(self.idle);
                let Ok(part) = tokio::time::timeout(wait, parts.try_next()).await else {
                    slow.store(true, Ordering::Relaxed);
                    return Err(axum::Error::new(TooSlow));
                };
                Ok(part?.map(|part| {
                    let read = read + part.len() as u64;
                    (part, (parts, read))
                }))
            }
        });
        (Request::from_parts(head, Body::from_stream(parts)), watch)
    }
}

/// Whether a body was too slow. Its reader saw only a body that broke off.
#[derive(Default)]
pub(super) struct Watch(Arc<AtomicBool>);

impl Watch {
    /// The problem of a request: the given one, unless its body was too slow.
    pub(super) fn problem(&self, given: Problem) -> Problem {
        if self.0.load(Ordering::Relaxed) { Problem::new(&BODY_TIMEOUT) } else { given }
    }
}

#[derive(Debug)]
struct TooSlow;

impl fmt::Display for TooSlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body is too slow")
    }
}

impl StdError for TooSlow {}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use bytes::Bytes;

    use super::*;
    use crate::http::problem::INTERNAL;

    #[tokio::test]
    async fn a_tenant_gets_half_of_the_places_and_the_node_has_a_limit() {
        let intake = Intake::default();
        let take = |tenant: &str| -> Vec<Slot> { (0..AT_A_TIME).map_while(|_| intake.take(tenant)).collect() };
        let first = take("a");
        assert_eq!(first.len(), OF_A_TENANT);
        let second = take("b");
        assert_eq!(second.len(), AT_A_TIME - OF_A_TENANT);
        let refused = intake.begin("c").await.err().unwrap().into_http();
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"5".parse().unwrap()));
        drop(first);
        assert!(intake.begin("c").await.is_ok());
        drop(second);
        assert!(intake.places.taken.lock().is_empty());
    }

    #[tokio::test]
    async fn one_dry_run_at_a_time_and_others_wait_a_moment() {
        let intake = Intake::default();
        let first = intake.dry_run().await.ok().unwrap();
        let refused = intake.dry_run().await.err().unwrap().into_http();
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (503, &"5".parse().unwrap()));
        let (second, ()) = tokio::join!(intake.dry_run(), async { drop(first) });
        assert!(second.is_ok());
    }

    async fn read(pace: Pace, parts: usize, every: Duration) -> (bool, Watch) {
        let parts = stream::unfold(0, move |n| async move {
            tokio::time::sleep(every).await;
            (n < parts).then(|| (Ok::<_, axum::Error>(Bytes::from_static(b"x")), n + 1))
        });
        let (request, watch) = pace.watch(Request::new(Body::from_stream(parts)));
        (to_bytes(request.into_body(), usize::MAX).await.is_ok(), watch)
    }

    #[tokio::test]
    async fn a_body_that_pauses_or_trickles_breaks_off() {
        let [soon, late] = [Duration::from_millis(1), Duration::from_secs(3600)];
        let pace = Pace { idle: late, base: late, per_second: 1024, longest: late };
        let (whole, watch) = read(pace, 5, soon).await;
        assert!(whole);
        assert_eq!(*watch.problem(Problem::new(&INTERNAL)).kind(), INTERNAL);
        let (whole, watch) = read(Pace { idle: Duration::from_millis(20), ..pace }, 5, late).await;
        assert!(!whole);
        assert_eq!(*watch.problem(Problem::new(&INTERNAL)).kind(), BODY_TIMEOUT);
        for pace in
            [Pace { base: Duration::from_millis(50), ..pace }, Pace { longest: Duration::from_millis(50), ..pace }]
        {
            let (whole, watch) = read(pace, usize::MAX, soon).await;
            assert!(!whole);
            assert_eq!(*watch.problem(Problem::new(&INTERNAL)).kind(), BODY_TIMEOUT);
        }
    }
}
