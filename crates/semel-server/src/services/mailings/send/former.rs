//! Mails that were being sent when an earlier run ended: its node was lost.

use semel::{Result, Unfinished};

use super::{age, compose::mail_id, ended, step::SettleAndMark, verdicts::Course};
use crate::{
    services::mailings::{
        mail::verdict::Settle,
        run::{Halt, Run},
        tables::{
            entries::{self, Settled},
            mailings::Mailing,
        },
    },
    unfinished::unfinished,
};

/// A mail that was being sent when its node was lost has so many attempts more: the mail may be what kills the nodes.
const MOST_LOST: i64 = 10;

/// Settles them: by what the transport can find out, otherwise by the mailing's policy. Another transport than the one
/// that they were given to knows nothing of them.
pub(in super::super) async fn settle_former(run: &Run, mailing: &Mailing) -> Result<Result<Mailing, Halt>, Unfinished> {
    let (number, lines) = (mailing.number, mailing.in_flight.clone());
    let (database, transport) = (&run.service.database, &run.service.transport);
    let left = database.read(async |conn| entries::sending(conn, number, &lines).await).await.map_err(unfinished)?;
    tracing::info!(mailing = mailing.id, mails = left.len(), "settling the mails that an earlier run was sending");
    let now = run.now().await?;
    let course = Course::of(&run.service, mailing, false);
    let most = run.service.max_attempts().saturating_add(MOST_LOST);
    let mut settled = Vec::with_capacity(left.len());
    for entry in left {
        let found = match mailing.in_flight_by == transport.recognised_by() {
            true => transport.settle(&mail_id(&mailing.id, entry.line), age(entry.mail_date, now)).await,
            false => Settle::Unknown,
        };
        settled.push(match found {
            Settle::Sent { external_id } => Settled { external_id, ..ended(entry.line, "SENT") },
            Settle::Resend if entry.attempts < most => {
                Settled { next_attempt: Some(now), maybe_sent: true, ..ended(entry.line, "PENDING") }
            }
            Settle::Resend if transport.window().is_none() => {
                let why =
                    format!("it was not sent; the node was lost {} times while it sent this mail", entry.attempts);
                Settled { error: Some(why), ..ended(entry.line, "FAILED") }
            }
            Settle::Resend => {
                let why = format!("the node was lost {} times while it sent this mail", entry.attempts);
                course.unknown(entry.line, i64::MAX, why, now)
            }
            Settle::Unknown => {
                let why = "the node was lost while it sent this mail";
                course.unknown(entry.line, entry.attempts, why.to_owned(), now)
            }
        });
    }
    let change = SettleAndMark {
        settled,
        are_former: true,
        lines: Vec::new(),
        transport: transport.name().to_owned(),
        recognised_by: transport.recognised_by().to_owned(),
    };
    Ok(run.step(change).await?.map(|(_, mailing)| mailing))
}
