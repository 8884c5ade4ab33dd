//! What the answer of a transport means for an entry, and for the mailing.

use std::{sync::Arc, time::Duration};

use semel::{micros, prelude::*};

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

/// How long to wait after an answer without a time.
const SOON: Duration = Duration::from_secs(5);

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

/// What the transport can find out about a mail whose answer is missing.
pub(super) async fn find_out(service: &Service, id: &str, date: i64, sent: Sent) -> Flown {
    let Sent::Unknown { why } = sent else { return Flown::Sent(sent) };
    let Ok(now) = service.database.now().await else { return Flown::Sent(Sent::Unknown { why }) };
    match service.transport.settle(id, age(Some(date), now.as_micros())).await {
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
    /// Nothing is begun before this time.
    pub(super) wait_until: i64,
    /// As many connections as the server lets us have.
    pub(super) room: usize,
    /// Why sending must stop.
    pub(super) stop: Option<Stop>,
    /// Mails in a row that were refused, or got no answer.
    refused: usize,
    /// Mails that got an answer since the number of connections was changed.
    answered: usize,
}

impl Course {
    pub(super) fn of(service: &Arc<Service>, mailing: &Mailing) -> Self {
        Self {
            service: service.clone(),
            mailing: mailing.id.clone(),
            never_misses: mailing.policy == "never-miss",
            wait_until: 0,
            room: usize::MAX,
            stop: None,
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
        let again = |next: i64, error: Option<String>, undone: bool| Settled {
            next_attempt: Some(next),
            error,
            undone,
            ..ended(line, "PENDING")
        };
        let sent = match flown {
            Flown::NotBegun => return again(now, None, true),
            Flown::MustNotRepeat(why) => return Settled { undone: true, ..self.unknown(line, attempts, why, now) },
            Flown::NotComposed(why) => return Settled { error: Some(why), ..ended(line, "FAILED") },
            Flown::Again(why) if attempts < self.service.max_attempts() => {
                let next = now + micros(self.backoff(attempts));
                return Settled { maybe_sent: true, ..again(next, Some(why), false) };
            }
            Flown::Again(why) => return self.unknown(line, attempts, why, now),
            Flown::Sent(sent) => sent,
        };
        self.note(&sent, others);
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
            Sent::NotNow { why, after } => self.later(marked, why, after, now),
            Sent::InFlight { after } => {
                Settled { maybe_sent: true, ..again(now + micros(after.unwrap_or(SOON)), None, true) }
            }
            Sent::TooMany { why, after } => {
                self.wait_until = self.wait_until.max(now + micros(after.unwrap_or(SOON)));
                again(self.wait_until, Some(why), true)
            }
            Sent::ServerRefuses { why } => {
                self.stop = Some(Stop::Pause(why.clone()));
                again(now, Some(why), true)
            }
            Sent::Away { why } => again(now + SHORTLY, Some(why), true),
            Sent::Unknown { why } => self.unknown(line, attempts, why, now),
        }
    }

    /// Notes what an answer says about the transport itself.
    fn note(&mut self, sent: &Sent, others: usize) {
        match sent {
            Sent::Away { why } => {
                // Some servers allow fewer connections: while mails get through on others, this one is given up.
                (self.room, self.answered) = (others.max(1), 0);
                if others == 0 && !matches!(self.stop, Some(Stop::Pause(_))) {
                    self.stop = Some(Stop::Away(why.clone()));
                }
                return;
            }
            Sent::Accepted { .. } => self.refused = 0,
            Sent::Refused { why } | Sent::Unknown { why } | Sent::KeyConflict { why } => {
                self.refused += 1;
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

    /// An entry that was refused for now.
    fn later(&self, marked: &Marked, why: String, after: Option<Duration>, now: i64) -> Settled {
        let (line, attempts) = (marked.line, marked.attempts);
        let transport = &self.service.transport;
        // A service that recognises keys may have sent the mail before it failed.
        let maybe_sent = transport.window().is_some();
        if attempts >= self.service.max_attempts() {
            return match maybe_sent {
                true => self.unknown(line, attempts, why, now),
                false => Settled { error: Some(why), ..ended(line, "FAILED") },
            };
        }
        let wait = self.backoff(attempts).max(after.unwrap_or_default()).min(LONGEST_BACKOFF * 24);
        // After the window of the key a repeat would be a second mail.
        if maybe_sent && !transport.may_repeat(age(Some(marked.mail_date), now) + wait) {
            return self.unknown(line, attempts, why, now);
        }
        Settled { next_attempt: Some(now + micros(wait)), error: Some(why), maybe_sent, ..ended(line, "PENDING") }
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
