//! Takes up what nobody runs and is due: what failed and has waited, what was put back, what was lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use semel::{
    Claim, Failure, Operation, Result, Retry, Scope,
    look::{Due, DueKind},
};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    task::JoinSet,
};

use super::{Receiver, SERVICE, deliver::span, event::Event, source::Source};

/// How often to look without being woken.
const POLL: Duration = Duration::from_secs(1);

/// How many sources that nobody has configured are told of.
const STRANGE: usize = 100;

pub(super) async fn work(receiver: Receiver, mut stop: watch::Receiver<bool>) {
    let mut runner = Runner {
        receiver,
        runs: JoinSet::new(),
        line: JoinSet::new(),
        in_line: BTreeSet::new(),
        after: <_>::default(),
        turns: BTreeMap::new(),
        strange: BTreeSet::new(),
    };
    let mut came = None;
    while !*stop.borrow() {
        while runner.runs.try_join_next().is_some() {}
        let wait = runner.round(came.take()).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "what is due could not be taken up; trying again");
            POLL
        });
        tokio::select! {
            () = runner.receiver.0.wake.woken() => {}
            () = tokio::time::sleep(wait) => {}
            Some(Ok((source, seat))) = runner.line.join_next() => {
                runner.in_line.remove(&source);
                came = seat.map(|seat| (source, seat));
            }
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }
    drop(came);
    runner.line.shutdown().await;
    while runner.runs.join_next().await.is_some() {}
}

/// One look after the other. What it has begun is bounded by the seats of the sources.
struct Runner {
    receiver: Receiver,
    runs: JoinSet<()>,
    /// Places in the line for a seat, one of each source that had something due and no seat left. Deliveries stand in the
    /// same line: however many come, what is due has its turn among them.
    line: JoinSet<(String, Option<OwnedSemaphorePermit>)>,
    /// The sources that have a place in it.
    in_line: BTreeSet<String>,
    /// The kind and tenant after which the next look begins: where there are more than one look tells of, it goes on there.
    after: (String, String),
    /// Of each source, the kind that was begun last: the next round begins with the one after it.
    turns: BTreeMap<String, String>,
    /// Sources, by tenant, that are not in the configuration and have events waiting, as far as they were told of.
    strange: BTreeSet<(String, String)>,
}

impl Runner {
    /// Begins what is due, of each source as much as it has seats for; `came` is a seat of the source of this name, which
    /// was waited for. How long there is to wait for the next look.
    async fn round(&mut self, mut came: Option<(String, OwnedSemaphorePermit)>) -> Result<Duration> {
        let kinds = self.receiver.0.ledger.due_kinds(SERVICE, (&self.after.0, &self.after.1)).await?;
        let cut = kinds.len() >= DueKind::MOST as usize;
        let last = kinds.last().filter(|_| cut);
        self.after = last.map(|last| (last.kind.clone(), last.tenant.clone())).unwrap_or_default();
        let mut wait = POLL;
        for (source, kinds) in self.by_source(kinds) {
            let seat = came.take_if(|(name, _)| *name == source.name).map(|(_, seat)| seat);
            match self.round_of(&source, kinds, seat, &mut wait).await {
                // What is wrong with one source keeps no other from running.
                Err(error) if !error.is_transient() => {
                    tracing::warn!(source = source.name, %error, "what is due of a source could not be taken up");
                }
                done => done?,
            }
        }
        Ok(wait)
    }

    /// The kinds of each source that this node knows, of the source's own tenant. Of any other, nothing is read and
    /// nothing changes: with its source in the configuration again, it goes on.
    fn by_source(&mut self, kinds: Vec<DueKind>) -> Vec<(Arc<Source>, Vec<DueKind>)> {
        let mut known = BTreeMap::<_, Vec<_>>::new();
        for kind in kinds.into_iter().filter(|kind| !is_body(&kind.kind)) {
            let name = source_of(&kind.kind);
            if self.receiver.source(name).is_some_and(|source| source.config.tenant == kind.tenant) {
                known.entry(name.to_owned()).or_default().push(kind);
            } else if self.strange.len() < STRANGE && self.strange.insert((name.to_owned(), kind.tenant.clone())) {
                tracing::warn!(source = name, kind.tenant, "events wait whose source is not configured here");
            }
        }
        known.into_iter().filter_map(|(name, kinds)| Some((self.receiver.source(&name)?.clone(), kinds))).collect()
    }

    /// Begins what is due of one source: of each kind its share of the seats that are free, so that a function with much
    /// to do leaves some for the others; and whose turn comes first goes round, for where there is but one seat.
    async fn round_of(
        &mut self,
        source: &Arc<Source>,
        mut kinds: Vec<DueKind>,
        mut came: Option<OwnedSemaphorePermit>,
        wait: &mut Duration,
    ) -> Result<()> {
        if let Some(last) = self.turns.get(&source.name) {
            let first = kinds.partition_point(|kind| kind.kind <= *last);
            kinds.rotate_left(first);
        }
        let (now, later): (Vec<_>, Vec<_>) = kinds.into_iter().partition(|kind| kind.wait.is_zero());
        *wait = later.iter().map(|kind| kind.wait).fold(*wait, Duration::min);
        for (i, kind) in now.iter().enumerate() {
            let free = usize::from(came.is_some()) + source.seats.available_permits();
            let share = free.div_ceil(now.len() - i);
            if share == 0 {
                self.stand_in_line(source);
                break;
            }
            let limit = u32::try_from(share).unwrap_or(Due::MOST);
            let scope = Scope::new(&kind.tenant, SERVICE, &kind.kind)?;
            let due = self.receiver.0.ledger.due(&scope, limit).await?;
            // Where nothing was found, what is due has expired, and asking at once would be for nothing.
            let next = due.wait.filter(|next| !next.is_zero() || !due.operations.is_empty());
            *wait = next.unwrap_or(POLL).min(*wait);
            for operation in due.operations {
                let Some(seat) = came.take().or_else(|| source.seats.clone().try_acquire_owned().ok()) else {
                    self.stand_in_line(source);
                    break;
                };
                self.begin(source, &operation, seat).await?;
                self.turns.insert(source.name.clone(), kind.kind.clone());
            }
        }
        Ok(())
    }

    /// Waits for a seat of a source, without keeping the others waiting.
    fn stand_in_line(&mut self, source: &Source) {
        if self.in_line.insert(source.name.clone()) {
            let (name, seats) = (source.name.clone(), source.seats.clone());
            self.line.spawn(async move { (name, seats.acquire_owned().await.ok()) });
        }
    }

    /// Begins one event, if nobody else has. Whatever the claim says, it is not due any more as it was.
    async fn begin(&mut self, source: &Arc<Source>, operation: &Operation, seat: OwnedSemaphorePermit) -> Result<()> {
        let policy = source.policy((self.receiver.0.clock)());
        let Claim::Acquired(lease) = self.receiver.0.ledger.claim_due(operation, policy).await? else { return Ok(()) };
        let Some(event) = Event::of(lease.operation(), source) else {
            let error = "the event's data is not there any more".to_owned();
            return lease.fail(Failure { error, retry: Retry::Never }).await.map(drop);
        };
        let (receiver, source) = (self.receiver.clone(), source.clone());
        self.runs.spawn(async move {
            let span = span(&source, &event);
            // How a run ended is logged by the ledger.
            if let Err(error) = receiver.process(lease, source, event, seat).await {
                tracing::warn!(parent: span, %error, "an event was not processed; it is tried again");
            }
        });
        Ok(())
    }
}

/// The source whose events are of a kind: all of it, or what is before the function.
fn source_of(kind: &str) -> &str {
    kind.split_once('.').map_or(kind, |(source, _)| source)
}

/// Whether a kind is that of second keys, which are not events.
fn is_body(kind: &str) -> bool {
    kind.contains('/')
}
