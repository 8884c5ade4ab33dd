//! Level 3: each entry is sent once.
//!
//! An entry is marked SENDING in a commit of its own before its first byte leaves, and at most as many are marked as
//! there are connections. So a killed node leaves at most that many entries whose mail may or may not have left. The
//! next run settles them first: by asking the transport where it can find out, otherwise by the mailing's policy.
//!
//! One step settles the mails that have ended and marks the next ones: while it commits, the other mails go on.

use std::{collections::VecDeque, pin::pin, sync::Arc, time::Duration};

use semel::{Context, Result, Retry, Unfinished, crash_point, micros};
use semel_store::Database;
use serde_json::json;
use tokio::{sync::OwnedSemaphorePermit, task::JoinSet, time::Instant};

pub(super) use self::{
    compose::{Composer, message_id, rendered},
    connections::Connections,
};
use self::{
    connections::Entered,
    step::{Finish, SettleAndMark},
    verdicts::{Course, Flown, find_out},
};
use super::{
    Service,
    mail::{message::Outgoing, verdict::Sent},
    run::{Halt, Run},
    tables::{
        entries::{self, Entry, Marked, Settled},
        mailings::Mailing,
        rates,
    },
};
use crate::{http::held::Held, unfinished::unfinished};

mod compose;
mod connections;
mod former;
mod step;
mod verdicts;

pub(super) use former::settle_former;

/// How many entries are read ahead.
const AHEAD: i64 = 512;

/// How often due retries are looked for while fresh entries are sent.
const LOOK_FOR_DUE: i64 = 1_000_000;

/// A wait that is longer gives the place back instead.
const SHORT_WAIT: Duration = Duration::from_secs(2);

/// How long a run waits for a connection before it looks whether its turn is over.
const SEAT_PATIENCE: Duration = Duration::from_millis(250);

/// By how much the database's time may seem to go back, in microseconds: a node continues it by its own clock.
const CLOCK_NOISE: i64 = 5_000_000;

/// The pause before a step is repeated.
const STEP_AGAIN: Duration = Duration::from_millis(250);

/// How often a step may fail in a row, and how many steps: the first is for a disk that stalls, the second for a table that
/// refuses the marks.
const MOST_FAILURES: usize = 5;

/// Mails that have ended wait at most this long for others that are settled with them.
const LONGEST_LANDING: Duration = Duration::from_millis(10);

/// Sends what is due. Returns how the run ended.
pub(super) async fn send(run: &Run, mailing: Mailing) -> Result<Result<&'static str, Halt>, Unfinished> {
    let composer = Composer::of(&run.service, &mailing).await.map_err(unfinished)?;
    let composer = composer.map_err(Unfinished::failed_for_good)?;
    let connections = run.service.connections.clone();
    let mut sender = Sender {
        run,
        composer: Arc::new(composer),
        ahead: mailing.last_line,
        course: Course::of(&run.service, &mailing, run.was_away()),
        mailing,
        fresh: VecDeque::new(),
        due: VecDeque::new(),
        look_for_due: 0,
        flights: JoinSet::new(),
        ended: Vec::new(),
        used: Vec::new(),
        stop: None,
        step_took: Duration::ZERO,
        failed_marks: 0,
        looked: Looked::Ahead,
        _entered: connections.enter(),
        connections,
    };
    sender.send_all().await
}

/// A mail that has ended: its mark, and how.
type Ended = (Marked, Flown);

/// Where pending entries were looked for, if there should be some.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Looked {
    /// Ahead of the last line.
    Ahead,
    /// Among the due ones: a person may have made one of them pending.
    Due,
    /// Everywhere.
    Everywhere,
}

/// Why sending stops before all is done.
enum Stop {
    /// The transport refuses us, or too many mails in a row: a person has to look.
    Pause(String),
    /// The transport cannot be reached.
    Away(String),
    /// The mailing was paused or cancelled.
    Stopped,
    /// The turn is over, or the node stops.
    TurnOver,
    /// The database cannot be asked. Mails under way are settled before the run ends.
    Trouble(Unfinished),
}

/// The sending of one run.
struct Sender<'a> {
    run: &'a Run,
    mailing: Mailing,
    composer: Arc<Composer>,
    connections: Arc<Connections>,
    _entered: Entered,
    course: Course,
    /// The last line that was read ahead.
    ahead: i64,
    fresh: VecDeque<Entry>,
    due: VecDeque<Entry>,
    /// When to look for due retries again.
    look_for_due: i64,
    flights: JoinSet<(Ended, OwnedSemaphorePermit)>,
    ended: Vec<Ended>,
    /// The connections of `ended`. They are held until their entries are settled: a node never has more entries in the
    /// state SENDING than connections, whatever mailings they belong to.
    used: Vec<OwnedSemaphorePermit>,
    stop: Option<Stop>,
    /// How long the last step took.
    step_took: Duration,
    /// How many steps in a row have failed to mark entries.
    failed_marks: usize,
    looked: Looked,
}

impl Sender<'_> {
    async fn send_all(&mut self) -> Result<Result<&'static str, Halt>, Unfinished> {
        let mut now = self.run.now().await?;
        loop {
            let mut permits = self.permits().await;
            if self.stop.is_none() && self.run.context.turn_is_over() {
                self.stop = Some(Stop::TurnOver);
            }
            match self.run.now().await {
                Ok(time) => now = time,
                Err(trouble) => self.trouble(trouble),
            }
            let asked = Instant::now();
            // First: they may show that nothing else should begin.
            let settled = self.verdicts(now);
            if let Err(error) = self.tell_wait().await {
                self.trouble(unfinished(error));
            }
            let chosen = match self.choose(permits.len(), now).await {
                Ok(chosen) => chosen,
                Err(error) => {
                    self.trouble(unfinished(error));
                    Vec::new()
                }
            };
            if chosen.is_empty() && settled.is_empty() {
                drop(permits);
                if self.flights.is_empty() {
                    match self.idle(now).await? {
                        Some(end) => return Ok(end),
                        None => continue,
                    }
                }
                self.land(now).await;
                continue;
            }
            let lines: Vec<i64> = chosen.iter().map(|entry| entry.line).collect();
            let stepped = match self.step(settled, lines, &mut permits).await? {
                Ok(stepped) => stepped,
                Err(halt) => return Ok(Err(halt)),
            };
            self.used.clear();
            crash_point!("mailing.marked");
            match stepped {
                // The step may have waited for long.
                Some(marked) => self.fly(chosen, marked, permits, now.saturating_add(micros(asked.elapsed()))),
                // They were not marked, and come next.
                None => chosen.into_iter().rev().for_each(|entry| self.due.push_front(entry)),
            }
            if !self.flights.is_empty() {
                self.land(now).await;
            }
        }
    }

    fn trouble(&mut self, trouble: Unfinished) {
        self.stop.get_or_insert(Stop::Trouble(trouble));
    }

    /// Connections for the next mails, within the share of this run: those of mails that have ended first. If none of its
    /// mails is under way, the run waits for one until its turn is over.
    async fn permits(&mut self) -> Vec<OwnedSemaphorePermit> {
        let room = self.connections.share().min(self.course.room).saturating_sub(self.flights.len());
        if self.stop.is_some() || room == 0 {
            return Vec::new();
        }
        let mut permits = self.used.split_off(self.used.len().saturating_sub(room));
        let seats = &self.connections.seats;
        while permits.len() < room {
            match seats.clone().try_acquire_owned() {
                Ok(permit) => permits.push(permit),
                Err(_) => break,
            }
        }
        while permits.is_empty() && self.flights.is_empty() && self.ended.is_empty() {
            if self.run.context.turn_is_over() {
                break;
            }
            let seat = tokio::time::timeout(SEAT_PATIENCE, seats.clone().acquire_owned()).await;
            permits.extend(seat.into_iter().flatten());
        }
        permits
    }

    /// The next entries: due retries first, then fresh ones by line; the other way round while the transport is tried.
    async fn choose(&mut self, most: usize, now: i64) -> Result<Vec<Entry>> {
        if most == 0 || self.stop.is_some() || self.course.wait_until > now {
            return Ok(Vec::new());
        }
        let (database, number) = (&self.run.service.database, self.mailing.number);
        if self.look_for_due <= now {
            self.look_for_due = now + LOOK_FOR_DUE;
            let transport = self.run.service.transport.name();
            if let Some((until, why)) = database.read(async |conn| rates::held(conn, transport, now).await).await? {
                self.course.wait_for(until, why);
                return Ok(Vec::new());
            }
            if self.due.is_empty() {
                self.due = database.read(async |conn| entries::due(conn, number, now, AHEAD).await).await?.into();
            }
        }
        let tries_fresh = self.course.tries_fresh();
        if (tries_fresh || self.due.len() < most) && self.fresh.len() < most && self.ahead < i64::MAX {
            let after = self.ahead;
            let more = database.read(async |conn| entries::fresh(conn, number, after, AHEAD).await).await?;
            self.ahead = more.last().map_or(i64::MAX, |last| last.line);
            self.fresh.extend(more);
        }
        let most = self.within_rate(most.min(self.due.len() + self.fresh.len()), now).await?;
        let (first, then) = match tries_fresh {
            true => (&mut self.fresh, &mut self.due),
            false => (&mut self.due, &mut self.fresh),
        };
        let mut chosen: Vec<Entry> = first.drain(..most.min(first.len())).collect();
        let rest = (most - chosen.len()).min(then.len());
        chosen.extend(then.drain(..rest));
        Ok(chosen)
    }

    /// Tells the other runs of all nodes how long the transport has asked to wait.
    async fn tell_wait(&mut self) -> Result<()> {
        let (service, until) = (&self.run.service, self.course.wait_until);
        let Some(why) = self.course.wait_why.clone().filter(|_| std::mem::take(&mut self.course.is_new_wait)) else {
            return Ok(());
        };
        let transport = service.transport.name().to_owned();
        match service.is_postgres {
            true => service.database.read(async |c| rates::hold(c, &transport, until, &why).await).await,
            false => {
                let hold = service.ledger.transact(move |tx| async move {
                    rates::hold(&mut tx.connection().await?.get()?, &transport, until, &why).await
                });
                hold.await
            }
        }
    }

    /// How many of so many mails the rate of the transport allows now. Its row is locked for one statement only: a node
    /// that froze in a transaction would hold up every mailing.
    async fn within_rate(&mut self, most: usize, now: i64) -> Result<usize> {
        let service = &self.run.service;
        let Some(every) = service.config.rate.map(super::config::Rate::every).filter(|_| most > 0) else {
            return Ok(most);
        };
        let transport = service.transport.name().to_owned();
        let asked = i64::try_from(most).unwrap_or(i64::MAX);
        let (granted, free_at) = match service.is_postgres {
            true => service.database.read(async |c| rates::reserve(c, &transport, every, asked, now).await).await?,
            false => {
                let reserve = service.ledger.transact(move |tx| async move {
                    rates::reserve(&mut tx.connection().await?.get()?, &transport, every, asked, now).await
                });
                reserve.await?
            }
        };
        self.course.wait_until = self.course.wait_until.max(free_at);
        Ok(usize::try_from(granted).unwrap_or(0).min(most))
    }

    /// Waits for a mail to end, then for others as long as the last step took: one step settles all of them. If the
    /// rate allows another mail before one ends, that one begins.
    async fn land(&mut self, now: i64) {
        let is_kept = self.stop.is_none() && self.course.wait_until > now;
        let mut next = match is_kept && !(self.fresh.is_empty() && self.due.is_empty()) {
            false => self.flights.join_next().await,
            true => {
                let kept = Duration::from_micros(u64::try_from(self.course.wait_until - now).unwrap_or(0));
                tokio::time::timeout(kept, self.flights.join_next()).await.unwrap_or_default()
            }
        };
        let until = Instant::now() + self.step_took;
        while let Some(landed) = next {
            match landed {
                Ok((ended, permit)) => {
                    self.ended.push(ended);
                    self.used.push(permit);
                }
                // It stays SENDING, and is settled before the run ends.
                Err(error) => tracing::error!(mailing = self.mailing.id, %error, "sending a mail panicked"),
            }
            next = match self.flights.try_join_next() {
                Some(landed) => Some(landed),
                None => tokio::time::timeout_at(until, self.flights.join_next()).await.unwrap_or_default(),
            };
        }
    }

    /// What the mails that ended mean for their entries.
    fn verdicts(&mut self, now: i64) -> Vec<Settled> {
        let all = std::mem::take(&mut self.ended);
        let answered = all.iter().filter(|(_, flown)| !matches!(flown, Flown::Sent(Sent::Away { .. }))).count();
        let others = self.flights.len() + answered;
        let settled = all.into_iter().map(|(marked, flown)| self.course.verdict(&marked, flown, now, others));
        let settled = settled.collect();
        if let Some(stop) = self.course.stop.take() {
            let is_final = matches!(self.stop, Some(Stop::Pause(_)));
            if !is_final {
                self.stop = Some(stop);
            }
        }
        settled
    }

    /// Settles mails and marks others, in one commit. `None` if it has marked nothing, because the commit had to be
    /// repeated: another transaction may hold the mailing's row for long, and the connections for other mailings are free
    /// meanwhile. The first of `permits` may belong to mails that have ended; those are kept.
    async fn step(
        &mut self,
        settled: Vec<Settled>,
        lines: Vec<i64>,
        permits: &mut Vec<OwnedSemaphorePermit>,
    ) -> Result<Result<Option<Vec<Marked>>, Halt>, Unfinished> {
        let transport = &self.run.service.transport;
        let (reused, mut is_marking) = (settled.len().saturating_sub(self.used.len()), true);
        let mut change = SettleAndMark {
            settled,
            are_former: false,
            lines,
            transport: transport.name().to_owned(),
            recognised_by: transport.recognised_by().to_owned(),
        };
        // The answers of mails that were sent are not lost with the database's connection, nor with a disk that stalls
        // for longer than a transaction may be open: the step is repeated while the lease lasts. It has no effect twice.
        let (begun, mut failures) = (Instant::now(), 0);
        let stepped = loop {
            let stepped = self.run.step(change.clone()).await;
            let is_undone = match &stepped {
                // With a reason, nothing was committed. Without one, the commit may have marked the lines.
                Err(Unfinished::Released { why, .. }) => why.is_some(),
                Err(Unfinished::Failed(failure)) if failure.retry == Retry::Backoff && failures < MOST_FAILURES => {
                    failures += 1;
                    if is_marking {
                        self.failed_marks += 1;
                    }
                    if self.failed_marks >= MOST_FAILURES {
                        self.trouble(Unfinished::Failed(failure.clone()));
                    }
                    true
                }
                _ => break stepped?,
            };
            if self.run.context.is_lost() {
                break stepped?;
            }
            if is_undone && is_marking && !change.lines.is_empty() {
                is_marking = false;
                change.lines.clear();
                permits.truncate(reused);
            }
            tokio::time::sleep(STEP_AGAIN).await;
        };
        if is_marking {
            self.failed_marks = 0;
        }
        let (marked, mailing) = match stepped {
            Ok(done) => done,
            Err(halt) => return Ok(Err(halt)),
        };
        (self.mailing, self.step_took) = (mailing, begun.elapsed().min(LONGEST_LANDING));
        if (self.mailing.is_stopped() || self.mailing.task.is_some()) && self.stop.is_none() {
            self.stop = Some(Stop::Stopped);
        }
        Ok(Ok(is_marking.then_some(marked)))
    }

    /// Begins the mails that were marked. An entry that was not was changed by a person.
    fn fly(&mut self, chosen: Vec<Entry>, marked: Vec<Marked>, mut permits: Vec<OwnedSemaphorePermit>, now: i64) {
        for entry in chosen {
            let mark = marked.iter().find(|marked| marked.line == entry.line && marked.status == "SENDING");
            let Some(marked) = mark.cloned() else { continue };
            let Some(permit) = permits.pop() else { continue };
            if let Some(why) = self.course.must_not_repeat(&marked, now) {
                self.ended.push((marked, Flown::MustNotRepeat(why)));
                self.used.push(permit);
                continue;
            }
            let (service, composer, context) =
                (self.run.service.clone(), self.composer.clone(), self.run.context.clone());
            let (date, age, begun) = (marked.mail_date, age(Some(marked.mail_date), now), Instant::now());
            self.flights.spawn(async move {
                let flown = match composer.compose(&entry, date) {
                    Err(why) => Flown::NotComposed(why),
                    // Only under the fence that marked it, and not after a stop: the next run begins it.
                    Ok(_) if context.turn_is_over() => Flown::NotBegun,
                    Ok(mail) => match sent_unless_stopped(&service, &mail, &context).await {
                        None => Flown::NotBegun,
                        Some(sent) => {
                            crash_point!("mailing.sent");
                            find_out(&service, &mail.id, age.saturating_add(begun.elapsed()), sent).await
                        }
                    },
                };
                ((marked, flown), permit)
            });
        }
    }

    /// Nothing is under way and nothing can begin: ends the run, or waits a moment.
    async fn idle(&mut self, now: i64) -> Result<Option<Result<&'static str, Halt>>, Unfinished> {
        let run = self.run;
        match self.stop.take() {
            Some(Stop::Pause(why)) => return run.pause(why).await.map(Some),
            Some(Stop::Stopped) => {
                // A cancel that arrived during the run is carried out by the next one.
                return match self.mailing.task {
                    Some(_) => Err(Unfinished::TurnOver),
                    None => run.end("stopped").await.map(Some),
                };
            }
            Some(Stop::TurnOver) => return Err(Unfinished::TurnOver),
            Some(Stop::Trouble(trouble)) => return Err(trouble),
            Some(Stop::Away(why)) => return run.wait(run.service.config.away(), Some(why), None).await.map(Some),
            None => {}
        }
        let number = self.mailing.number;
        let seen =
            run.service.database.read(async |conn| entries::next(conn, number).await).await.map_err(unfinished)?;
        // Entries that were read and not sent yet come before a retry that is due later.
        let is_ready = !self.fresh.is_empty() || !self.due.is_empty() || self.ahead < i64::MAX;
        let next = if is_ready { Some(now) } else { seen };
        if let Some(next) = next.map(|next| next.max(self.course.wait_until)) {
            let wait = Duration::from_micros(u64::try_from(next - now).unwrap_or(0));
            if wait > SHORT_WAIT {
                let why = self.course.wait_why.take().filter(|_| self.course.wait_until > now);
                return run.wait(wait, why, Some(seen.unwrap_or(i64::MAX))).await.map(Some);
            }
            (self.look_for_due, self.looked) = (0, Looked::Ahead);
            tokio::time::sleep(wait.max(Duration::from_millis(1))).await;
            return Ok(None);
        }
        match run.step(Finish).await? {
            Err(halt) => Ok(Some(Err(halt))),
            Ok((Some(outcome), mailing)) => {
                let counts = json!({ "sent": mailing.sent, "failed": mailing.failed, "invalid": mailing.invalid,
                                     "suppressed": mailing.suppressed, "inDoubt": mailing.in_doubt });
                tracing::info!(mailing = mailing.id, outcome, %counts, "a run of a mailing has ended");
                Ok(Some(Ok(outcome)))
            }
            // A person has asked for something at the last moment: the next run does it.
            Ok((None, mailing)) if mailing.task.is_some() => Err(Unfinished::TurnOver),
            // A mail whose sending panicked.
            Ok((None, mailing)) if mailing.sending > 0 => Ok(match settle_former(run, &mailing).await? {
                Ok(mailing) => {
                    (self.mailing, self.look_for_due) = (mailing, 0);
                    None
                }
                Err(halt) => Some(Err(halt)),
            }),
            // An entry became pending meanwhile: it is found by its next attempt, or by reading all lines once more.
            Ok((None, mailing)) => {
                (self.look_for_due, self.mailing) = (0, mailing);
                self.looked = match self.looked {
                    Looked::Ahead => Looked::Due,
                    Looked::Due => {
                        self.ahead = 0;
                        Looked::Everywhere
                    }
                    Looked::Everywhere => return Err(Unfinished::failed("pending entries were not found")),
                };
                Ok(None)
            }
        }
    }
}

/// Sends a mail. `None` if it has not begun: the lease was lost, or the node stops. A server may need longer than the
/// worker's grace until the message itself; a run that is cut off leaves its mails in doubt.
async fn sent_unless_stopped(service: &Service, mail: &Outgoing, context: &Context<Database>) -> Option<Sent> {
    let held = Held::of(context);
    let mut sending = pin!(service.transport.send_while(mail, &held));
    let sent = tokio::select! {
        biased;
        sent = &mut sending => sent,
        () = context.node_stops() => match held.stop() {
            true => return None,
            false => sending.await,
        },
    };
    (!held.has_stopped()).then_some(sent)
}

/// The time since the first attempt of an entry. If the database's clock was set back since, nobody knows it, and it
/// counts as very long.
fn age(first: Option<i64>, now: i64) -> Duration {
    let age = now.saturating_sub(first.unwrap_or(now));
    if age < -CLOCK_NOISE {
        return Duration::MAX;
    }
    Duration::from_micros(u64::try_from(age).unwrap_or(0))
}

fn ended(line: i64, status: &'static str) -> Settled {
    Settled {
        line,
        status,
        next_attempt: None,
        external_id: None,
        error: None,
        undone: false,
        maybe_sent: false,
        untried: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_back_makes_the_first_attempt_very_old() {
        let minute = 60_000_000;
        assert_eq!(age(Some(10 * minute), 12 * minute), Duration::from_secs(120));
        assert_eq!(age(Some(10 * minute), 10 * minute - 1_000_000), Duration::ZERO, "a node's own clock");
        assert_eq!(age(Some(10 * minute), 5 * minute), Duration::MAX);
        assert_eq!(age(None, 5 * minute), Duration::ZERO, "never tried");
    }
}
