//! `semel operations resolve` and `semel operations purge`: a person's decisions, with a name and a reason.

use std::process::ExitCode;

use semel::{
    Operation, Outcome, Verdict,
    look::Unreadable,
    machine::{Answer, NotNow},
    store::{Applied, Decision},
};
use serde_json::json;

use crate::{
    cli::{
        arguments::reason,
        ledger::{LedgerFlags, Opened, actor},
        target::{Target, changed},
    },
    view::{
        json,
        words::{hint, plain},
    },
};

/// Decide an operation that does not run: it took effect, it failed, or it may run again
#[derive(clap::Args)]
pub(in crate::cli) struct Resolve {
    #[command(flatten)]
    target: Target,
    /// completed: it took effect; failed: it did not, and does not run again; retry: it did not, and may run again
    #[arg(long = "as", value_name = "HOW")]
    verdict: As,
    /// The outcome for replays, with --as completed
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    outcome: String,
    /// The reason, for the journal and the audit
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    /// Print the operation as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum As {
    Completed,
    Failed,
    Retry,
}

/// Delete an operation and free its key: the next claim runs it as a new one
#[derive(clap::Args)]
pub(in crate::cli) struct Purge {
    #[command(flatten)]
    target: Target,
    /// The reason, for the audit
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    /// Print the purged operation as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Resolve {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        anyhow::ensure!(
            self.outcome.is_empty() || self.verdict == As::Completed,
            "only a completed operation has an outcome: leave out --outcome, or use --as completed"
        );
        self.ledger.print(async |opened| self.carry_out(opened).await).await
    }

    async fn carry_out(&self, opened: &Opened) -> anyhow::Result<String> {
        let operation = self.target.find(opened).await?;
        let (verdict, then) = match self.verdict {
            As::Completed => {
                (Verdict::Completed(Outcome::kept(self.outcome.clone())), "it is completed, and is replayed")
            }
            As::Failed => (Verdict::Failed, "it is failed, and does not run again"),
            As::Retry => (Verdict::Retry, "it runs at the next claim"),
        };
        let decision = Decision::Resolve { verdict, expected: None };
        let after = decide(opened, &operation, decision, &self.reason).await?;
        Ok(changed(self.json, &after, then))
    }
}

impl Purge {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.ledger.print(async |opened| self.carry_out(opened).await).await
    }

    async fn carry_out(&self, opened: &Opened) -> anyhow::Result<String> {
        const THEN: &str = "it is deleted, and its key is free";
        let error = match self.target.find(opened).await {
            Ok(operation) => {
                let before = decide(opened, &operation, Decision::Purge, &self.reason).await?;
                return Ok(changed(self.json, &before, THEN));
            }
            Err(error) => error,
        };
        let Some(row) = self.target.unreadable(opened, &error).await? else { return Err(error) };
        purge_unreadable(opened, &row, &self.reason).await?;
        Ok(match self.json {
            true => format!("{:#}\n", json!({ "operation": json::unreadable(&row) })),
            false => format!("{} in {}/{}/{}: {THEN}\n", plain(&row.key), row.tenant, row.service, row.kind),
        })
    }
}

async fn decide(opened: &Opened, operation: &Operation, decision: Decision, reason: &str) -> anyhow::Result<Operation> {
    let Applied { answer, operation: after, .. } =
        opened.ledger.decide(operation.id, decision, &actor(), reason).await?;
    let why = match answer {
        Answer::Resolved | Answer::Purged => return Ok(after.unwrap_or_else(|| operation.clone())),
        Answer::NotNow(NotNow::Absent) => "it does not exist: it was purged, or its retention has ended".to_owned(),
        Answer::NotNow(NotNow::Running) => {
            format!("{} is running it; end that process, or wait for it", plain(&operation.owner))
        }
        Answer::NotNow(NotNow::Completed) => {
            let purge = hint("semel operations purge", "--reason '…'", &operation.scope, &operation.key, &opened.flags);
            format!("it has taken effect, and cannot be decided again; to free the key: {purge}")
        }
        Answer::NotNow(NotNow::Pinned) => {
            let until = operation.expires_at.map_or("for ever".to_owned(), |end| format!("until {end}"));
            format!("it has taken effect and is pinned: it cannot be changed {until}")
        }
        Answer::NotNow(NotNow::MovedOn) => "it has changed meanwhile; look again".to_owned(),
        other => format!("the ledger answered {other:?}"),
    };
    anyhow::bail!("nothing was changed: {why}")
}

async fn purge_unreadable(opened: &Opened, row: &Unreadable, reason: &str) -> anyhow::Result<()> {
    match opened.ledger.decide(row.id, Decision::Purge, &actor(), reason).await?.answer {
        Answer::Purged => Ok(()),
        Answer::NotNow(NotNow::Absent) => anyhow::bail!("nothing was changed: it does not exist"),
        Answer::NotNow(NotNow::Running) => anyhow::bail!("nothing was changed: its lease has not expired"),
        Answer::NotNow(NotNow::Pinned) => anyhow::bail!("nothing was changed: it has taken effect and is pinned"),
        other => anyhow::bail!("nothing was changed: the ledger answered {other:?}"),
    }
}
