//! `semel operations resolve` and `semel operations purge`: a person's word, with a name and a reason.

use std::process::ExitCode;

use semel::{
    Operation, Outcome, Verdict,
    look::Unreadable,
    machine::{Answer, NotNow},
    store::{Applied, Decision},
};
use serde_json::json;

use crate::cli::{
    json,
    ledger::{LedgerFlags, Opened, actor},
    say,
    target::Target,
    words::{hint, plain, reason},
};

/// Say how an operation ended that nobody runs, or that it may run again
#[derive(clap::Args)]
pub(in crate::cli) struct Resolve {
    #[command(flatten)]
    target: Target,
    /// What happened: it took effect, it did not and should not, or it did not and may run again
    #[arg(long = "as", value_name = "HOW")]
    verdict: As,
    /// What a replay is to answer, when it took effect
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    outcome: String,
    /// How you know, for the journal
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    /// Show the operation afterwards as JSON
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

/// Forget an operation and free its key: the next claim runs it as if it had never been
#[derive(clap::Args)]
pub(in crate::cli) struct Purge {
    #[command(flatten)]
    target: Target,
    /// Why
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    /// Show the operation that was purged as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Resolve {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        anyhow::ensure!(
            self.outcome.is_empty() || self.verdict == As::Completed,
            "only what took effect has an outcome: leave out --outcome, or say --as completed"
        );
        let opened = self.ledger.look().await?;
        let done = self.carry_out(&opened).await;
        opened.close().await;
        say(&done?)?;
        Ok(ExitCode::SUCCESS)
    }

    async fn carry_out(self, opened: &Opened) -> anyhow::Result<String> {
        let operation = self.target.find(opened).await?;
        let (verdict, then) = match self.verdict {
            As::Completed => {
                (Verdict::Completed(Outcome::kept(self.outcome)), "it counts as completed, and is replayed")
            }
            As::Failed => (Verdict::Failed, "it counts as failed, and does not run again"),
            As::Retry => (Verdict::Retry, "it runs when it is claimed next"),
        };
        let decision = Decision::Resolve { verdict, expected: None };
        let after = decide(opened, &operation, decision, &self.reason).await?;
        Ok(tell(self.json, &after, then))
    }
}

impl Purge {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let opened = self.ledger.look().await?;
        let done = self.carry_out(&opened).await;
        opened.close().await;
        say(&done?)?;
        Ok(ExitCode::SUCCESS)
    }

    async fn carry_out(&self, opened: &Opened) -> anyhow::Result<String> {
        const THEN: &str = "it is forgotten, and its key is free";
        let error = match self.target.find(opened).await {
            Ok(operation) => {
                let before = decide(opened, &operation, Decision::Purge, &self.reason).await?;
                return Ok(tell(self.json, &before, THEN));
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
        Answer::NotNow(NotNow::Absent) => "it is gone: it was purged, or its retention is over".to_owned(),
        Answer::NotNow(NotNow::Running) => {
            format!("{} is running it; end that process, or wait for it", plain(&operation.owner))
        }
        Answer::NotNow(NotNow::Completed) => {
            let purge = hint("semel operations purge", "--reason '…'", &operation.scope, &operation.key, &opened.flags);
            format!("it has taken effect, and that cannot be decided again; to free the key: {purge}")
        }
        Answer::NotNow(NotNow::Pinned) => {
            let until = operation.expires_at.map_or("for ever".to_owned(), |end| format!("until {end}"));
            format!("it has taken effect and is pinned: it stays as it is {until}")
        }
        Answer::NotNow(NotNow::MovedOn) => "it has moved on meanwhile; look again".to_owned(),
        other => format!("the ledger answered {other:?}"),
    };
    anyhow::bail!("nothing was changed: {why}")
}

async fn purge_unreadable(opened: &Opened, row: &Unreadable, reason: &str) -> anyhow::Result<()> {
    match opened.ledger.decide(row.id, Decision::Purge, &actor(), reason).await?.answer {
        Answer::Purged => Ok(()),
        Answer::NotNow(NotNow::Absent) => anyhow::bail!("nothing was changed: it is gone"),
        Answer::NotNow(NotNow::Running) => anyhow::bail!("nothing was changed: its lease has not ended"),
        Answer::NotNow(NotNow::Pinned) => anyhow::bail!("nothing was changed: it has taken effect and is pinned"),
        other => anyhow::bail!("nothing was changed: the ledger answered {other:?}"),
    }
}

fn tell(json: bool, operation: &Operation, then: &str) -> String {
    if json {
        return format!("{:#}\n", json!({ "operation": json::whole(operation) }));
    }
    format!("{} in {}: {then}\n", operation.key.as_str(), operation.scope)
}
