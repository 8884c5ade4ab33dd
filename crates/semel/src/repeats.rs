//! Repeated claims, collected for a second and written together.
//!
//! A replay must not cost a write, so repeats are counted in memory and flushed once a second: a killed process loses
//! at most that second of them. The states of operations are never counted here.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    Labels, Operation, Scope, Timestamp, crash_point,
    journal::{Repeat, Repeats, Sighting},
    look::Group,
    machine::Request,
    store::{AnswerCount, SeenAgain, Store},
};

/// How long a repeat may wait for its write.
const EVERY: Duration = Duration::from_secs(1);

/// How many operations may have unwritten repeats before they are written at once.
const MOST: usize = 16_384;

/// The number of shards, each with its own lock: replays from memory are fast enough to contend on a single one.
const PARTS: usize = 8;

#[derive(Default)]
struct Gathered {
    repeats: HashMap<(i64, Repeat), Seen>,
    /// Answers about operations for which there was no room.
    more: HashMap<Counted, i64>,
}

/// The repeats of an operation.
struct Seen {
    repeats: Repeats,
    scope: Scope,
    labels: [Option<String>; 2],
    /// How often each answer was given; there are one or two different ones.
    answers: Vec<(&'static str, i64)>,
}

/// The group of a counter: the scope, the first two labels, and the answer's word. In a form that is cheap to build.
type Counted = (Scope, [Option<String>; 2], &'static str);

#[derive(Default)]
pub(crate) struct Gatherer {
    gathered: [Mutex<Gathered>; PARTS],
    full: Notify,
    /// Held during a flush.
    writing: tokio::sync::Mutex<()>,
}

impl Seen {
    fn of(operation: &Operation) -> Self {
        let (scope, labels) = (operation.scope.clone(), labels_of(operation));
        Self { repeats: Repeats::default(), scope, labels, answers: Vec::with_capacity(1) }
    }

    fn add(&mut self, word: &'static str, n: i64) {
        match self.answers.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += n,
            None => self.answers.push((word, n)),
        }
    }
}

fn labels_of(operation: &Operation) -> [Option<String>; 2] {
    let [label1, label2, ..] = &operation.labels.0;
    [label1.clone(), label2.clone()]
}

impl Gatherer {
    /// Notes that a claim of `operation` was answered `word` instead of getting the lease.
    pub(crate) fn note(&self, operation: &Operation, request: &Request, word: &'static str, at: Timestamp) {
        let repeat =
            if operation.fingerprint.matches(&request.fingerprint) { Repeat::Duplicate } else { Repeat::Conflict };
        // A duplicate has the operation's own fingerprint; only a conflict's is stored.
        let fingerprint = match repeat {
            Repeat::Duplicate => String::new(),
            Repeat::Conflict => request.fingerprint.to_hex(),
        };
        let sighting = Sighting { at, answer: word.into(), fingerprint };
        let part = usize::try_from(operation.id.unsigned_abs()).unwrap_or(0) % PARTS;
        let mut gathered = self.gathered[part].lock();
        let room = gathered.repeats.len() < 2 * MOST / PARTS;
        match gathered.repeats.entry((operation.id, repeat)) {
            Entry::Vacant(_) if !room => {
                // While the store is unavailable for long, further operations are only counted by their answer.
                let counted = (operation.scope.clone(), labels_of(operation), word);
                *gathered.more.entry(counted).or_default() += 1;
            }
            entry => {
                let seen = entry.or_insert_with(|| Seen::of(operation));
                seen.repeats.add(sighting);
                seen.add(word, 1);
            }
        }
        if gathered.repeats.len() >= MOST / PARTS {
            drop(gathered);
            self.full.notify_one();
        }
    }

    /// Flushes every second. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(EVERY) => {}
                () = self.full.notified() => {}
            }
            self.flush(&store).await;
        }
    }

    /// Flushes. Repeats that cannot be written now, for example because another transaction has locked their
    /// operations, are kept for the next flush as long as there is room. It also waits for a flush that is already in
    /// flight, so that nothing is lost if the process ends afterwards.
    pub(crate) async fn flush<S: Store>(&self, store: &S) {
        let _writing = self.writing.lock().await;
        let parts: Vec<Gathered> = (0..PARTS).map(|part| std::mem::take(&mut *self.gathered[part].lock())).collect();
        let seen = parts.iter().flat_map(|part| &part.repeats).map(|((id, repeat), seen)| SeenAgain {
            id: *id,
            repeat: *repeat,
            repeats: seen.repeats.clone(),
        });
        let seen: Vec<_> = seen.collect();
        let mut counts: HashMap<(&Scope, &[Option<String>; 2], &'static str), i64> = HashMap::new();
        for part in &parts {
            for Seen { scope, labels, answers, .. } in part.repeats.values() {
                for (word, n) in answers {
                    *counts.entry((scope, labels, *word)).or_default() += n;
                }
            }
            for ((scope, labels, word), n) in &part.more {
                *counts.entry((scope, labels, *word)).or_default() += n;
            }
        }
        if seen.is_empty() && counts.is_empty() {
            return;
        }
        crash_point!("repeats.before");
        let counts = counts.into_iter().map(|((scope, [label1, label2], answer), n)| {
            let labels = Labels([label1.clone(), label2.clone(), None, None]);
            AnswerCount { group: Group::new(scope, &labels), answer, n }
        });
        match store.note_repeats(seen, counts.collect()).await {
            Ok(left) => {
                crash_point!("repeats.noted");
                self.keep(parts, &left);
            }
            Err(error) => {
                tracing::warn!(%error, "repeats could not be written; trying again");
                parts.into_iter().enumerate().for_each(|(part, gathered)| self.restore(part, gathered));
            }
        }
    }

    /// Keeps repeats that were not written. Their answers have been counted.
    fn keep(&self, parts: Vec<Gathered>, left: &[SeenAgain]) {
        if left.is_empty() {
            return;
        }
        let left: HashSet<_> = left.iter().map(|seen| (seen.id, seen.repeat)).collect();
        for (part, Gathered { mut repeats, .. }) in parts.into_iter().enumerate() {
            repeats.retain(|about, _| left.contains(about));
            repeats.values_mut().for_each(|seen| seen.answers.clear());
            self.restore(part, Gathered { repeats, more: HashMap::new() });
        }
    }

    fn restore(&self, part: usize, earlier: Gathered) {
        let mut now = self.gathered[part].lock();
        for (id, mut seen) in earlier.repeats {
            match now.repeats.remove(&id) {
                Some(later) => {
                    seen.repeats.merge(later.repeats);
                    later.answers.iter().for_each(|(word, n)| seen.add(word, *n));
                }
                None if now.repeats.len() >= MOST / PARTS => {
                    for (word, n) in seen.answers {
                        *now.more.entry((seen.scope.clone(), seen.labels.clone(), word)).or_default() += n;
                    }
                    continue;
                }
                None => {}
            }
            now.repeats.insert(id, seen);
        }
        for (counted, n) in earlier.more {
            *now.more.entry(counted).or_default() += n;
        }
    }
}
