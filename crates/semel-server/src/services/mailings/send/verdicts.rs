//! What the answer of a transport means for an entry, and for the mailing.

use std::{collections::HashSet, sync::Arc, time::Duration};

use semel::micros;

use super::{Stop, age, ended};
use crate::services::mailings::{
    Service,
    config::LONGEST_BACKOFF,
    mail::verdict::{Sent, Settle, without_addresses},
    tables::{
        entries::{Marked, Settled},
        mailings::Mailing,
    },
};

/// How long to wait after an answer without a time, and at least after one with a time: a service that asks for zero
/// seconds would be asked without end.
const SOON: Duration = Duration::from_secs(5);
const AT_LEAST: Duration = Duration::from_secs(1);

/// If the transport fails for so many entries without a success in between, it is at fault and not they: it is left alone,
/// and their attempts do not count. A longer outage would use up the attempts of a whole list.
const FAILS_FOR: usize = 8;

/// How long, counted from the first attempt of a mail, attempts do not count while the transport fails. Without a limit
/// a mailing would never end if it has only mails left that the transport cannot bear.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// A mail that could not be given to the transport, while others could, is tried again after this time.
const SHORTLY: i64 = 1_000_000;

/// So many mails in a row without a success pause the mailing: a list is not burned by a server that has changed its
/// mind about us.
const IN_A_ROW: usize = 50;

/// After so many mails, one more connection is tried.
const MORE_AFTER: usize = 64;

/// How a mail ended.
pub(super) enum Flown {
    /// By this answer.
    Sent(Sent),
    /// It did not begin: the node stops, or the lease is lost.
    NotBegun,
    /// It did not begin: an earlier attempt may have sent it, and a repeat would be another mail.
    MustNotRepeat(String),
    /// It cannot be made.
    NotComposed(String),
    /// It may have been sent, and sending it again is harmless.
    Again(String),
}

/// What the transport can find out about a mail whose answer is missing, so long after its first attempt began. The
/// database is not asked: it may be away just now.
pub(super) async fn find_out(service: &Service, id: &str, age: Duration, sent: Sent) -> Flown {
    let Sent::Unknown { why } = sent else { return Flown::Sent(sent) };
    match service.transport.settle(id, age).await {
        Settle::Sent { external_id } => Flown::Sent(Sent::Accepted { external_id }),
        Settle::Resend => Flown::Again(why),
        Settle::Unknown => Flown::Sent(Sent::Unknown { why }),
    }
}

/// How sending goes: the answers so far, and what follows from them.
pub(super) struct Course {
    service: Arc<Service>,
    mailing: String,
    never_misses: bool,
    /// Nothing is begun before this time, and the reason, if the transport has given one.
    pub(super) wait_until: i64,
    pub(super) wait_why: Option<String>,
    /// Whether that has to be told to the other runs.
    pub(super) is_new_wait: bool,
    /// As many connections as the server lets us have.
    pub(super) room: usize,
    /// Why sending must stop.
    pub(super) stop: Option<Stop>,
    /// Whether the transport has not taken a mail since it could not be reached: one connection tries it.
    is_cautious: bool,
    /// Whether more entries are left than the last few, which may be what the transport cannot bear.
    has_many: bool,
    /// The entries for which the transport has failed since its last success.
    failing: HashSet<i64>,
    /// Whether it has accepted a mail in this run.
    has_accepted: bool,
    /// Mails in a row that were refused, or got no answer.
    refused: usize,
    /// Mails that got an answer since the number of connections was changed.
    answered: usize,
}

impl Course {
    /// `is_cautious` after a run that could not reach the transport.
    pub(super) fn of(service: &Arc<Service>, mailing: &Mailing, is_cautious: bool) -> Self {
        Self {
            service: service.clone(),
            mailing: mailing.id.clone(),
            never_misses: mailing.policy == "never-miss",
            wait_until: 0,
            wait_why: None,
            is_new_wait: false,
            room: if is_cautious { 1 } else { usize::MAX },
            stop: None,
            is_cautious,
            has_many: usize::try_from(mailing.pending()).is_ok_and(|left| left >= FAILS_FOR),
            failing: HashSet::new(),
            has_accepted: false,
            refused: 0,
            answered: 0,
        }
    }

    /// Why a marked mail must not be sent: an earlier attempt may have sent it, and the transport would not recognise
    /// it now.
    pub(super) fn must_not_repeat(&self, marked: &Marked, now: i64) -> Option<String> {
        let by = marked.maybe_sent_by.as_ref().filter(|_| !self.never_misses)?;
        let transport = &self.service.transport;
        if by == transport.recognised_by() && transport.may_repeat(age(Some(marked.mail_date), now)) {
            return None;
        }
        Some("an earlier attempt may have sent this mail, and the transport would not recognise a repeat now".into())
    }

    /// What the end of a mail means for its entry. So many `others` of this run are under way, or got an answer just now.
    pub(super) fn verdict(&mut self, marked: &Marked, flown: Flown, now: i64, others: usize) -> Settled {
        let (line, attempts) = (marked.line, marked.attempts);
        let again = |next: i64, error: Option<String>| Settled {
            next_attempt: Some(next),
            error,
            undone: true,
            untried: true,
            ..ended(line, "PENDING")
        };
        let window = self.service.transport.window();
        let sent = match flown {
            Flown::NotBegun => return again(now, None),
            Flown::MustNotRepeat(why) => return Settled { undone: true, ..self.unknown(line, attempts, why, now) },
            Flown::NotComposed(why) => {
                tracing::warn!(mailing = self.mailing, line, "the mail of an entry cannot be made");
                return Settled { error: Some(why), ..ended(line, "FAILED") };
            }
            // The service did not answer, and a repeat is harmless.
            Flown::Again(why) => Sent::Failing { why, after: None },
            Flown::Sent(sent) => sent,
        };
        // One recipient may be on a list of its server; a server that has accepted mails serves us.
        let sent = match sent {
            Sent::RefusedOrUs { why } if self.has_accepted => Sent::Refused { why },
            Sent::RefusedOrUs { why } => Sent::ServerRefuses { why },
            sent => sent,
        };
        self.note(line, &sent, others);
        match sent {
            Sent::Accepted { external_id } => Settled { external_id, ..ended(line, "SENT") },
            Sent::Refused { why } => Settled { error: Some(why), ..ended(line, "INVALID") },
            Sent::KeyConflict { why } => {
                tracing::warn!(
                    mailing = self.mailing,
                    line,
                    "the transport knows the key of a mail with another content"
                );
                Settled { error: Some(why), ..ended(line, "IN_DOUBT") }
            }
            Sent::Failing { why, .. } if self.is_failing() && self.is_patient(marked, now) => {
                Settled { maybe_sent: window.is_some(), untried: false, ..again(now + SHORTLY, Some(why)) }
            }
            Sent::NotNow { why, after } | Sent::Failing { why, after } => self.later(marked, why, after, now),
            // It counts: a service may answer so for another reason, and for ever.
            Sent::InFlight { why, after } => {
                let wait = self.wait(attempts, after);
                match attempts < self.service.max_attempts() && self.may_wait(marked, wait, now) {
                    true => Settled {
                        next_attempt: Some(now + micros(wait)),
                        error: Some(why),
                        maybe_sent: true,
                        ..ended(line, "PENDING")
                    },
                    false => self.unknown(line, attempts, why, now),
                }
            }
            Sent::TooMany { why, after } => {
                self.wait_for(now + micros(after.unwrap_or(SOON).max(AT_LEAST)), why.clone());
                // Without a time it may be about the sender of this mailing.
                self.is_new_wait |= after.is_some();
                again(self.wait_until, Some(why))
            }
            Sent::RefusedOrUs { why } | Sent::ServerRefuses { why } => {
                self.stop = Some(Stop::Pause(why.clone()));
                again(now, Some(why))
            }
            Sent::Strange { why } => {
                self.stop = Some(Stop::Pause(why.clone()));
                self.unknown(line, attempts, why, now)
            }
            Sent::Away { why } => again(now + SHORTLY, Some(why)),
            Sent::Unknown { why } => self.unknown(line, attempts, why, now),
        }
    }

    /// Nothing is begun before then, as the transport has asked.
    pub(super) fn wait_for(&mut self, until: i64, why: String) {
        self.wait_until = self.wait_until.max(until);
        self.wait_why = Some(why);
    }

    /// Whether the transport fails whatever the mail: it did for many, and has accepted none since.
    fn is_failing(&self) -> bool {
        self.failing.len() >= FAILS_FOR || (self.is_cautious && self.has_many)
    }

    /// Whether an attempt of this mail need not count while the transport fails: inside the window of its key, since a
    /// repeat after it would be a second mail, and at most for [`PATIENCE`].
    fn is_patient(&self, marked: &Marked, now: i64) -> bool {
        age(Some(marked.mail_date), now) < PATIENCE && self.may_wait(marked, self.service.config.away(), now)
    }

    /// Whether an entry that was never tried comes first: the mails that were tried may be what the transport cannot
    /// bear. Not where the mail may be sent although the transport fails: the window of each key that is tried begins.
    pub(super) fn tries_fresh(&self) -> bool {
        self.is_cautious && self.service.transport.window().is_none()
    }

    /// Whether a mail can wait so long: its key must still be known then, if an attempt may have sent it.
    fn may_wait(&self, marked: &Marked, wait: Duration, now: i64) -> bool {
        let transport = &self.service.transport;
        transport.window().is_none() || transport.may_repeat(age(Some(marked.mail_date), now).saturating_add(wait))
    }

    /// Notes what an answer says about the transport itself.
    fn note(&mut self, line: i64, sent: &Sent, others: usize) {
        match sent {
            Sent::Failing { why, .. } => {
                self.failing.insert(line);
                if (self.is_failing() || self.is_cautious) && !matches!(self.stop, Some(Stop::Pause(_))) {
                    self.stop = Some(Stop::Away(why.clone()));
                }
                return;
            }
            Sent::Away { why } => {
                // Some servers allow fewer connections: while mails get through on others, this one is given up.
                (self.room, self.answered) = (others.max(1), 0);
                if others == 0 && !matches!(self.stop, Some(Stop::Pause(_))) {
                    self.stop = Some(Stop::Away(why.clone()));
                }
                return;
            }
            Sent::Accepted { .. } => {
                (self.refused, self.has_accepted) = (0, true);
                self.serves();
            }
            Sent::Refused { why } | Sent::Unknown { why } | Sent::KeyConflict { why } => {
                self.refused += 1;
                if matches!(sent, Sent::Refused { .. }) {
                    self.serves();
                }
                if self.refused >= IN_A_ROW && self.stop.is_none() {
                    let why = format!("{} mails in a row were not accepted, the last one because: {why}", self.refused);
                    self.stop = Some(Stop::Pause(why));
                }
            }
            _ => {}
        }
        self.answered += 1;
        if self.answered >= MORE_AFTER && self.room < usize::MAX {
            (self.room, self.answered) = (self.room + 1, 0);
        }
    }

    /// The transport works.
    fn serves(&mut self) {
        self.failing.clear();
        if std::mem::take(&mut self.is_cautious) {
            self.room = usize::MAX;
            tracing::info!(mailing = self.mailing, transport = self.service.transport.name(), "target reachable again");
        }
    }

    /// An entry that was refused for now.
    fn later(&self, marked: &Marked, why: String, after: Option<Duration>, now: i64) -> Settled {
        let (line, attempts) = (marked.line, marked.attempts);
        let transport = &self.service.transport;
        // A service that recognises keys may have sent the mail before it failed.
        let maybe_sent = transport.window().is_some();
        if attempts >= self.service.max_attempts() {
            return match maybe_sent {
                true => self.unknown(line, attempts, why, now),
                false => {
                    let shown = without_addresses(&why);
                    tracing::warn!(
                        mailing = self.mailing,
                        line,
                        why = shown,
                        "a mail is given up after its last attempt"
                    );
                    Settled { error: Some(why), ..ended(line, "FAILED") }
                }
            };
        }
        let wait = self.wait(attempts, after);
        // After the window of the key a repeat would be a second mail.
        if !self.may_wait(marked, wait, now) {
            return self.unknown(line, attempts, why, now);
        }
        Settled { next_attempt: Some(now + micros(wait)), error: Some(why), maybe_sent, ..ended(line, "PENDING") }
    }

    /// The wait before the next attempt, if the transport has asked for one.
    fn wait(&self, attempts: i64, after: Option<Duration>) -> Duration {
        self.backoff(attempts).max(after.unwrap_or_default()).min(LONGEST_BACKOFF * 24)
    }

    fn backoff(&self, attempts: i64) -> Duration {
        let doubled = u32::try_from(attempts.saturating_sub(1)).unwrap_or(0).min(16);
        (self.service.config.backoff * 2_u32.pow(doubled)).min(LONGEST_BACKOFF)
    }

    /// An entry whose mail may or may not have left.
    pub(super) fn unknown(&self, line: i64, attempts: i64, why: String, now: i64) -> Settled {
        if self.never_misses && attempts < self.service.max_attempts() {
            let next_attempt = Some(now + micros(self.backoff(attempts)));
            return Settled { next_attempt, error: Some(why), maybe_sent: true, ..ended(line, "PENDING") };
        }
        let shown = without_addresses(&why);
        tracing::warn!(mailing = self.mailing, line, why = shown, "it is in doubt whether a mail was sent");
        Settled { error: Some(why), ..ended(line, "IN_DOUBT") }
    }
}
