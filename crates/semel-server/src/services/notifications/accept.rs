//! Accepts events: requests that wait while a transaction is in flight share the next one.
//!
//! Another transaction may hold a row for long: the key of one event, or the last number of one aggregate. A batch that
//! meets it is halved until only the requests that need the row are left. These go through a separate lane, as do later
//! ones with the same names (`busy`): all others continue.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use semel::{
    Claim, Error, Fingerprint, Ledger, OnMismatch, Policy, Result, Scope, Work, crash_point,
    lane::{Lane, Limits, guarded, lane},
    messaging::{Message, Origin},
    prelude::*,
};
use semel_store::{Database, Tx, is_held};

use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use super::{busy::Busy, reading::NewEvent, tables};
use crate::http::room::Held;

/// The scope of an event's id: its tenant and these.
const SERVICE: &str = "notifications";
const KIND: &str = "event";

/// A transaction takes about two thousand events at most (each weighs 4 KiB plus its data): on SQLite it holds the only
/// writer.
const LIMITS: Limits = Limits { calls: 512, bytes: 8 << 20, queue: 4096, regroup: false, alongside: usize::MAX };

/// How long a request waits for a row that another transaction holds, and how often it checks.
const LONGEST_WAIT: Duration = Duration::from_secs(3);
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// The events of one request: all of them are stored, or none.
pub(super) struct Submission {
    pub(super) tenant: String,
    pub(super) events: Vec<NewEvent>,
    /// The memory that its body and its events take, until they are stored, even if the client has gone.
    #[expect(dead_code, reason = "it is held, not looked at")]
    pub(super) room: (Option<Held>, Option<OwnedSemaphorePermit>),
}

/// The result of a submission.
pub(super) enum Accepted {
    /// All of it is stored; whether each event is new.
    Stored(Vec<bool>),
    /// Nothing is stored: these have the id of an event with another body.
    Mismatch(Vec<usize>),
    /// Nothing is stored: another transaction holds a row that it needs.
    Busy(Error),
    /// It is unknown whether it is stored.
    Failed(Error),
}

/// Accepts events. Cheap to clone.
#[derive(Clone)]
pub(super) struct Acceptor {
    lane: Lane<Arc<Submission>, Accepted>,
    /// For submissions that met a row which another transaction holds.
    aside: Lane<Arc<Submission>, Accepted>,
    busy: Arc<Busy>,
}

impl Acceptor {
    pub(super) fn open(ledger: Ledger<Database>) -> Self {
        let used = ledger.clone();
        let (all, work) = lane(LIMITS, move |batch| guarded(flush(used.clone(), batch)));
        tokio::spawn(work);
        let (aside, work) = lane(LIMITS, move |batch| guarded(flush_patiently(ledger.clone(), batch)));
        tokio::spawn(work);
        Self { lane: all, aside, busy: Arc::default() }
    }

    /// Stores a submission; returns once that is durable. It continues if its caller goes away.
    pub(super) async fn accept(&self, submission: Submission) -> Result<Accepted> {
        let weight = submission.events.iter().map(NewEvent::weight).sum();
        let submission = Arc::new(submission);
        if !self.busy.knows(&submission) {
            match self.lane.call(submission.clone(), weight).await? {
                Accepted::Busy(_) => self.busy.note(&submission),
                Accepted::Failed(error) => return Err(error),
                accepted => return Ok(accepted),
            }
        }
        match self.aside.call(submission, weight).await? {
            Accepted::Busy(error) | Accepted::Failed(error) => Err(error),
            accepted => Ok(accepted),
        }
    }
}

/// The tenant and the id of an event.
type Name<'a> = (&'a str, &'a str);

/// How a transaction ended.
enum Round {
    /// Committed; for each submission whether its events are new.
    Stored(Vec<Vec<bool>>),
    /// Rolled back: these submissions have ids of other events.
    Mismatch(BTreeMap<usize, Vec<usize>>),
}

/// Stores a batch. Waits, within a limit, for rows that another transaction holds.
async fn flush_patiently(ledger: Ledger<Database>, batch: Vec<Arc<Submission>>) -> Result<Vec<Accepted>> {
    let until = Instant::now() + LONGEST_WAIT;
    let mut answers = flush(ledger.clone(), batch.clone()).await?;
    loop {
        let busy = |i: &usize| matches!(answers[*i], Accepted::Busy(_));
        let again: Vec<usize> = (0..batch.len()).filter(busy).collect();
        if again.is_empty() || Instant::now() >= until {
            return Ok(answers);
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
        match flush(ledger.clone(), again.iter().map(|i| batch[*i].clone()).collect()).await {
            Ok(said) => again.into_iter().zip(said).for_each(|(i, said)| answers[i] = said),
            Err(error) => again.into_iter().for_each(|i| answers[i] = Accepted::Failed(error.clone())),
        }
    }
}

/// Stores a batch of submissions, in one transaction if no two of them disagree and no other transaction holds a row.
async fn flush(ledger: Ledger<Database>, batch: Vec<Arc<Submission>>) -> Result<Vec<Accepted>> {
    let mut answers: Vec<Option<Accepted>> = batch.iter().map(|_| None).collect();
    // A stack: a part that must wait for another lies below it.
    let mut parts: Vec<Vec<usize>> = vec![(0..batch.len()).collect()];
    while let Some(part) = parts.pop() {
        let (mut now, later) = agreeing(&batch, &part);
        parts.extend(Some(later).filter(|later| !later.is_empty()));
        let round = now.iter().map(|i| batch[*i].clone()).collect();
        match transact(&ledger, round).await {
            Ok(Round::Stored(new)) => {
                for (i, new) in now.iter().zip(new) {
                    answers[*i] = Some(Accepted::Stored(new));
                }
            }
            Ok(Round::Mismatch(which)) => {
                for (place, events) in which {
                    answers[now[place]] = Some(Accepted::Mismatch(events));
                }
                now.retain(|i| answers[*i].is_none());
                parts.extend(Some(now).filter(|rest| !rest.is_empty()));
            }
            Err(error) if is_held(&error) && now.len() == 1 => answers[now[0]] = Some(Accepted::Busy(error)),
            Err(error) if is_held(&error) => {
                let second = now.split_off(now.len() / 2);
                parts.extend([second, now]);
            }
            // The lane halves a batch that is refused, but what was answered before is not tried again.
            Err(error) if answers.iter().all(Option::is_none) => return Err(error),
            Err(error) => {
                return Ok(answers.into_iter().map(|a| a.unwrap_or_else(|| Accepted::Failed(error.clone()))).collect());
            }
        }
    }
    Ok(answers.into_iter().flatten().collect())
}

/// One transaction. It waits only briefly for rows that another transaction holds.
async fn transact(ledger: &Ledger<Database>, round: Vec<Arc<Submission>>) -> Result<Round> {
    let used = ledger.clone();
    let done = ledger.transact(move |tx| async move {
        match store(&used, &tx, &round).await? {
            done @ Round::Stored(_) => Ok(done),
            undone @ Round::Mismatch(_) => Err(Undone(Ok(undone))),
        }
    });
    done.await.or_else(|Undone(why)| why)
}

/// Why a transaction was rolled back.
struct Undone(Result<Round>);

impl From<Error> for Undone {
    fn from(error: Error) -> Self {
        Self(Err(error))
    }
}

/// Splits submissions into those that agree about the meaning of each id, and those that wait for the others: if those
/// are stored, the ledger will answer.
fn agreeing(batch: &[Arc<Submission>], waiting: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut meant: BTreeMap<Name<'_>, Fingerprint> = BTreeMap::new();
    waiting.iter().partition(|i| {
        let submission = &batch[**i];
        let named = || submission.events.iter().map(|event| ((submission.tenant.as_str(), event.id.as_str()), event));
        let agrees = named().all(|(name, event)| meant.get(&name).is_none_or(|other| *other == event.fingerprint));
        if agrees {
            meant.extend(named().map(|(name, event)| (name, event.fingerprint)));
        }
        agrees
    })
}

/// Claims, rows and messages, in one transaction.
async fn store(ledger: &Ledger<Database>, tx: &Tx, round: &[Arc<Submission>]) -> Result<Round> {
    {
        let mut held = tx.connection().await?;
        tables::events::wait_briefly(&mut held.get()?).await?;
    }
    let mut firsts: BTreeMap<Name<'_>, &NewEvent> = BTreeMap::new();
    for submission in round {
        for event in &submission.events {
            firsts.entry((&submission.tenant, event.id.as_str())).or_insert(event);
        }
    }
    let work = |((tenant, _), event): (&Name<'_>, &&NewEvent)| {
        let policy = Policy { retention: None, on_mismatch: OnMismatch::Reject, ..Policy::default() };
        Ok(Work::new(Scope::new(tenant, SERVICE, KIND)?, event.id.clone(), event.fingerprint).policy(policy))
    };
    let works = firsts.iter().map(work).collect::<Result<Vec<_>>>()?;
    let claims = ledger.claim_all_inline(tx, works).await?;

    let (mut new, mut others) = (BTreeMap::new(), HashSet::new());
    for ((name, event), claim) in firsts.iter().zip(claims) {
        match claim {
            Claim::Acquired(origin) => drop(new.insert(*name, (*event, origin))),
            Claim::Replay(_) => {}
            Claim::Mismatch(_) => drop(others.insert(*name)),
            // Only a person who settles events by hand could cause this.
            _ => return Err(Error::Unavailable(format!("an event is {}", claim.word()))),
        }
    }
    if !others.is_empty() {
        let mut which: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, submission) in round.iter().enumerate() {
            for (place, event) in submission.events.iter().enumerate() {
                if others.contains(&(submission.tenant.as_str(), event.id.as_str())) {
                    which.entry(i).or_default().push(place);
                }
            }
        }
        return Ok(Round::Mismatch(which));
    }

    insert(ledger.store(), tx, &new).await?;
    crash_point!("events.stored");
    let mut unseen: HashSet<Name<'_>> = new.into_keys().collect();
    let created = round.iter().map(|submission| {
        // The first of a name created it; those after it are duplicates.
        let names = submission.events.iter().map(|event| (submission.tenant.as_str(), event.id.as_str()));
        names.map(|name| unseen.remove(&name)).collect()
    });
    Ok(Round::Stored(created.collect()))
}

async fn insert(database: &Database, tx: &Tx, new: &BTreeMap<Name<'_>, (&NewEvent, Origin)>) -> Result<()> {
    if new.is_empty() {
        return Ok(());
    }
    let rows: Vec<_> = new.iter().map(|((tenant, _), (event, _))| (*tenant, *event)).collect();
    {
        let mut held = tx.connection().await?;
        tables::events::insert(&mut held.get()?, &rows).await?;
    }
    let messages = new.values().flat_map(|(event, origin)| {
        event.messages.iter().map(|(_, message)| Message { origin: Some(*origin), ..message.clone() })
    });
    database.put(tx, messages.collect()).await
}
