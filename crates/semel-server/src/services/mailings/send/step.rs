//! The steps of sending: what the run writes, each time in one commit.

use semel::{Result, crash_point};
use semel_store::Conn;
use serde_json::json;

use crate::services::mailings::{
    run::Change,
    tables::{
        entries::{self, Marked, Settled, Turn},
        mailings::Mailing,
    },
};

/// Settles mails that have ended, and marks the next ones. It may be repeated after a commit whose result is unknown.
#[derive(Clone)]
pub(super) struct SettleAndMark {
    pub(super) settled: Vec<Settled>,
    /// Whether those mails are of an earlier run, which was lost.
    pub(super) are_former: bool,
    pub(super) lines: Vec<i64>,
    /// The name of the transport, which its ids belong to; and what it is recognised by.
    pub(super) transport: String,
    pub(super) recognised_by: String,
}

impl Change for SettleAndMark {
    fn is_progress(&self) -> bool {
        // A mail that is to be sent again brings the run no further: it may be what kills the node. Neither does one that
        // is in doubt because the node was lost: a node that dies after each mark would use up the list.
        let brings_further = |status| status != "PENDING" && !(self.are_former && status == "IN_DOUBT");
        self.settled.iter().any(|settled| brings_further(settled.status))
    }

    /// The entries that are marked.
    type Out = Vec<Marked>;

    async fn make(mut self, conn: &mut Conn<'_>, mailing: &mut Mailing, now: i64) -> Result<Vec<Marked>> {
        let number = mailing.number;
        let ids: Vec<(i64, &str)> =
            self.settled.iter().filter_map(|s| Some((s.line, s.external_id.as_deref()?))).collect();
        let taken = entries::claim_ids(conn, &self.transport, number, &ids).await?;
        for settled in self.settled.iter_mut().filter(|settled| taken.contains(&settled.line)) {
            let id = settled.external_id.take().unwrap_or_default();
            settled.error = Some(format!("the transport gave the id {id} to another mail before"));
        }
        let mut in_flight: Vec<i64> = serde_json::from_str(&mailing.in_flight).unwrap_or_default();
        in_flight.retain(|line| !self.settled.iter().any(|settled| settled.line == *line));
        let mut all_marked = Vec::new();
        // Marked by this very step, if its first commit was not answered: their mails have not begun.
        let (marked, fresh) = self.lines.iter().partition::<Vec<i64>, _>(|line| in_flight.contains(line));
        if !marked.is_empty() {
            let found = entries::sending(conn, number, &json!(marked).to_string()).await?;
            all_marked.extend(found.into_iter().map(Marked::again));
        }
        self.lines = fresh;
        if mailing.is_stopped() || mailing.task.is_some() {
            self.lines.clear();
        }
        if !self.lines.is_empty() {
            mailing.in_flight_by = self.recognised_by.clone();
        }
        let turn = Turn {
            mailing: number,
            tenant: &mailing.tenant,
            by: &self.recognised_by,
            now,
            settled: &self.settled,
            lines: &self.lines,
        };
        let (settled, marked) = turn.take(conn).await?;
        self.count(mailing, &settled, &marked);
        if self.settled.iter().any(|settled| settled.status == "SENT") {
            mailing.error = None;
        }
        all_marked.extend(marked);
        let sending = all_marked.iter().filter(|marked| marked.status == "SENDING");
        in_flight.extend(sending.map(|marked| marked.line));
        in_flight.sort_unstable();
        in_flight.dedup();
        mailing.in_flight = json!(in_flight).to_string();
        // Lines are marked in their order, so no fresh one before the last was left out.
        mailing.last_line = self.lines.iter().copied().max().unwrap_or(0).max(mailing.last_line);
        Ok(all_marked)
    }
}

impl SettleAndMark {
    /// Counts what has changed.
    fn count(&self, mailing: &mut Mailing, settled: &[i64], marked: &[Marked]) {
        for settled in self.settled.iter().filter(|ended| settled.contains(&ended.line)) {
            mailing.sending -= 1;
            match settled.status {
                "SENT" => mailing.sent += 1,
                "FAILED" => mailing.failed += 1,
                "INVALID" => mailing.invalid += 1,
                "IN_DOUBT" => mailing.in_doubt += 1,
                _ => {}
            }
        }
        for marked in marked {
            match marked.status.as_str() {
                "SENDING" => mailing.sending += 1,
                "IN_DOUBT" => mailing.in_doubt += 1,
                _ => mailing.suppressed += 1,
            }
        }
    }
}

/// Ends the run if nothing is pending: then the mailing is completed, or only waits for decisions.
pub(super) struct Finish;

impl Change for Finish {
    type Out = Option<&'static str>;

    async fn make(self, _: &mut Conn<'_>, mailing: &mut Mailing, _: i64) -> Result<Self::Out> {
        if mailing.pending() > 0 || mailing.sending > 0 || mailing.task.is_some() {
            return Ok(None);
        }
        mailing.active = false;
        if mailing.in_doubt > 0 {
            return Ok(Some("waiting for decisions"));
        }
        if !mailing.is_stopped() {
            mailing.status = "COMPLETED".to_owned();
        }
        crash_point!("mailing.finishing");
        Ok(Some("completed"))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::ended, *};

    #[test]
    fn mails_that_are_in_doubt_with_their_node_are_no_progress() {
        let step = |status, are_former| SettleAndMark {
            settled: vec![ended(2, "PENDING"), ended(3, status)],
            are_former,
            lines: vec![4],
            transport: String::new(),
            recognised_by: String::new(),
        };
        assert!(step("SENT", true).is_progress() && step("SENT", false).is_progress());
        assert!(step("IN_DOUBT", false).is_progress(), "its answer was lost, and not the node");
        assert!(!step("IN_DOUBT", true).is_progress() && !step("PENDING", false).is_progress());
    }
}
