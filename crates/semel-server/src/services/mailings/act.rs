//! What people do with a mailing: pause, resume, retry, cancel, delete, resolve. Each locks the mailing's row, so it and
//! the run's steps come one after the other; each is audited in its own commit.

use semel::{Error, prelude::*};
use semel_store::{Audit, Conn};
use serde_json::json;

use super::{
    Service,
    problems::{ENTRY_NOT_IN_DOUBT, NOT_IN_THIS_STATE},
    tables::{
        entries,
        mailings::{self, Mailing},
    },
    upload::queued,
};
use crate::http::{
    answers::missing,
    problem::{Problem, of_store},
};

/// An action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Pause,
    Resume,
    Retry,
    Cancel,
    Delete,
    /// Decides about the entry of a line in doubt; whether its mail is sent again.
    Resolve {
        line: i64,
        resend: bool,
    },
}

/// Who acts, and why.
pub(super) struct Who<'a> {
    pub(super) tenant: &'a str,
    pub(super) actor: &'a str,
    pub(super) reason: &'a str,
}

/// Why an action was refused. Nothing was changed.
enum Refused {
    Missing,
    State { status: String, possible: &'static str },
    Entry(Option<String>),
    Store(Error),
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

impl Service {
    /// Carries out an action. Returns the mailing afterwards.
    pub(super) async fn act(&self, id: &str, who: &Who<'_>, act: Act) -> std::result::Result<Mailing, Problem> {
        let now = self.database.now().await.map_err(of_store)?.as_micros();
        let store = self.database.clone();
        let [id, tenant, actor, reason] = [id, who.tenant, who.actor, who.reason].map(str::to_owned);
        let done = self.ledger.transact(move |tx| async move {
            let (before, after, run) = {
                let mut held = tx.connection().await?;
                let mut conn = held.get()?;
                let Some(mut mailing) = mailings::lock(&mut conn, &tenant, &id).await? else {
                    return Err(Refused::Missing);
                };
                let before = mailing.clone();
                // A run that is under way sees the change in its next step. One that waits, or has failed, is over for
                // the mailing: if it still begins, it finds another in its place.
                let is_under_way = before.active && !before.waiting && before.status != "FAILED";
                let run = act.change(&mut conn, &mut mailing, now).await? && !is_under_way;
                if run {
                    (mailing.run, mailing.active, mailing.waiting) = (mailing.run + 1, true, false);
                }
                if run || act == Act::Resume {
                    // However long ago its last run was: a person wants it now.
                    mailing.rate_since = None;
                }
                mailings::save(&mut conn, &mailing, now).await?;
                mailing.updated_at = now;
                if act == Act::Delete {
                    mailings::delete(&mut conn, mailing.number, now).await?;
                }
                (before, mailing, run)
            };
            if run {
                store.put(&tx, vec![queued(&tenant, &id)?]).await?;
            }
            let subject = match act {
                Act::Resolve { line, .. } => format!("{id}/{line}"),
                _ => id.clone(),
            };
            let audit =
                Audit { tenant: &tenant, actor: &actor, action: act.name(), subject: &subject, reason: &reason };
            let shown = |mailing: &Mailing| json!({ "status": mailing.status, "run": mailing.run });
            store.audit_in(&tx, audit, Some(shown(&before)), Some(shown(&after))).await?;
            Ok(after)
        });
        done.await.map_err(|refused| match refused {
            Refused::Missing | Refused::Entry(None) => missing(),
            Refused::State { status, possible } => {
                Problem::new(&NOT_IN_THIS_STATE).detail(possible).with("mailingStatus", status)
            }
            Refused::Entry(Some(status)) => Problem::new(&ENTRY_NOT_IN_DOUBT).with("entryStatus", status),
            Refused::Store(error) => of_store(error),
        })
    }
}

impl Act {
    const fn name(self) -> &'static str {
        match self {
            Self::Pause => "mailings.pause",
            Self::Resume => "mailings.resume",
            Self::Retry => "mailings.retry",
            Self::Cancel => "mailings.cancel",
            Self::Delete => "mailings.delete",
            Self::Resolve { .. } => "mailings.resolve",
        }
    }

    /// Changes the mailing; true if a run has to begin for it.
    async fn change(self, conn: &mut Conn<'_>, m: &mut Mailing, now: i64) -> std::result::Result<bool, Refused> {
        let refuse = |possible| Refused::State { status: m.status.clone(), possible };
        match (self, m.status.as_str()) {
            (Self::Pause, "PENDING" | "QUEUED" | "PROCESSING" | "FAILED") => {
                // A failed run waits for its next attempt: a resume does not.
                m.waiting |= m.status == "FAILED";
                m.status = "PAUSED".to_owned();
                Ok(false)
            }
            (Self::Pause, "PAUSED") => Ok(false),
            (Self::Pause, _) => Err(refuse("A mailing can be paused until it is completed or cancelled.")),
            (Self::Resume, "PAUSED") => {
                (m.status, m.error) = ("QUEUED".to_owned(), None);
                // Its time has passed: it is sent now.
                m.send_at = m.send_at.filter(|at| *at > now);
                Ok(true)
            }
            (Self::Resume, "PENDING" | "QUEUED" | "PROCESSING") => Ok(false),
            (Self::Resume, _) => Err(refuse("Only a paused mailing can be resumed. A failed one can be retried.")),
            (Self::Retry, "COMPLETED" | "FAILED" | "PAUSED" | "PROCESSING") => {
                if m.failed + m.invalid > 0 {
                    (m.task, m.task_line) = (Some("reset".to_owned()), 0);
                } else if m.status == "COMPLETED" || m.status == "PROCESSING" {
                    return Err(refuse("No entry is FAILED or INVALID: there is nothing to try again."));
                }
                (m.status, m.error) = ("QUEUED".to_owned(), None);
                Ok(true)
            }
            (Self::Retry, _) => Err(refuse("A mailing can be retried when its run has failed, or entries have.")),
            (Self::Cancel, "CANCELLED") => Ok(false),
            (Self::Cancel, "COMPLETED") => Err(refuse("Every entry of a completed mailing is settled.")),
            (Self::Cancel, _) => {
                (m.status, m.error) = ("CANCELLED".to_owned(), None);
                (m.task, m.task_line) = (Some("cancel".to_owned()), 0);
                Ok(true)
            }
            (Self::Delete, "COMPLETED" | "FAILED") => Ok(false),
            (Self::Delete, "PAUSED" | "CANCELLED") if !m.active || m.waiting => Ok(false),
            (Self::Delete, _) => Err(refuse("A mailing that runs cannot be deleted: cancel it first.")),
            (Self::Resolve { resend: true, .. }, "CANCELLED") => {
                Err(refuse("A cancelled mailing sends nothing more: the entry can only be resolved as sent."))
            }
            (Self::Resolve { line, resend }, _) => {
                let decided = if resend { ("PENDING", Some(now)) } else { ("SENT", None) };
                if !entries::resolve(conn, m.number, line, decided, now).await? {
                    let entry = entries::by_line(conn, m.number, line).await?;
                    return Err(Refused::Entry(entry.map(|entry| entry.status)));
                }
                m.in_doubt -= 1;
                if !resend {
                    m.sent += 1;
                }
                let waits = m.status == "PROCESSING" && (!m.active || m.waiting);
                if !m.active && m.status == "PROCESSING" && m.pending() == 0 && m.in_doubt == 0 {
                    m.status = "COMPLETED".to_owned();
                }
                let begins = resend && (waits || m.status == "COMPLETED");
                if begins {
                    m.status = "QUEUED".to_owned();
                }
                Ok(begins)
            }
        }
    }
}
