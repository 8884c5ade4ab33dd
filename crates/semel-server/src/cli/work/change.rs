//! `semel work pause`, `resume` and `cancel`: decisions of a person, with a name and a reason.

use std::process::ExitCode;

use semel::{
    Scope,
    machine::{Answer, NotNow},
};

use crate::{
    cli::{
        arguments::reason,
        ledger::{LedgerFlags, Opened, actor},
        target::{Target, changed},
    },
    view::{
        runs,
        words::{self, plain, resolve},
    },
};

/// Stop the starts of a kind on all nodes, for all tenants, until it is resumed; runs continue
#[derive(clap::Args)]
pub(in crate::cli) struct Pause {
    #[command(flatten)]
    change: Change,
}

/// Resume the starts of a paused kind
#[derive(clap::Args)]
pub(in crate::cli) struct Resume {
    #[command(flatten)]
    change: Change,
}

/// Withdraw a pending operation, or ask a running one to stop; its key stays taken
#[derive(clap::Args)]
pub(in crate::cli) struct Cancel {
    #[command(flatten)]
    target: Target,
    /// The reason, for the journal and the audit
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    /// Show the operation afterwards as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

/// A change of a kind of work. It is named as `semel work list` shows it.
#[derive(clap::Args)]
struct Change {
    /// The service
    service: String,
    /// The kind
    kind: String,
    /// The reason, for the audit
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    reason: String,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Change {
    /// Carries it out. Names that no operation can have are refused.
    async fn run(&self, how: impl AsyncFnOnce(&Opened) -> anyhow::Result<String>) -> anyhow::Result<ExitCode> {
        Scope::new(Scope::DEFAULT_TENANT, &self.service, &self.kind)?;
        // A node shows `service/*` if one handler takes several kinds. A pause is for one kind.
        anyhow::ensure!(self.kind != "*", "'*' is not a kind: name one of those in `semel work list`");
        self.ledger.print(how).await
    }

    /// Whether a node has a handler for it, or operations of it wait or run.
    async fn is_known(&self, opened: &Opened) -> anyhow::Result<bool> {
        let store = opened.ledger.store();
        let kinds = store.kinds_of_work().await?;
        let waits =
            kinds.iter().any(|of| of.service == self.service && of.kind == self.kind && of.waiting + of.running > 0);
        Ok(waits || store.nodes().await?.iter().any(|node| runs(node, &self.service, &self.kind)))
    }
}

impl Pause {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.change.run(async |opened| self.carry_out(opened).await).await
    }

    async fn carry_out(&self, opened: &Opened) -> anyhow::Result<String> {
        let Change { service, kind, reason, .. } = &self.change;
        if let Some(earlier) = opened.ledger.store().pause_kind(service, kind, &actor(), reason).await? {
            let paused = words::paused(service, kind, &earlier);
            return Ok(format!("nothing was changed: {paused}; semel work resume ends the pause\n"));
        }
        let unknown = match self.change.is_known(opened).await? {
            true => "",
            false => "; no node runs this kind at present, and nothing of it waits",
        };
        Ok(format!("{service}/{kind} is paused: no worker starts it{unknown}\n"))
    }
}

impl Resume {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.change.run(async |opened| self.carry_out(opened).await).await
    }

    async fn carry_out(&self, opened: &Opened) -> anyhow::Result<String> {
        let (Change { service, kind, reason, .. }, store) = (&self.change, opened.ledger.store());
        if store.resume_kind(service, kind, &actor(), reason).await? {
            return Ok(format!("{service}/{kind} is resumed\n"));
        }
        let kinds = store.kinds_of_work().await?;
        let paused: Vec<_> = kinds.iter().filter(|of| of.paused.is_some()).collect();
        let names: Vec<_> = paused.iter().map(|of| plain(&format!("{} {}", of.service, of.kind))).collect();
        let others = if names.is_empty() { "no kind is".to_owned() } else { format!("paused: {}", names.join(", ")) };
        anyhow::bail!("nothing was changed: {service} {kind} is not paused; {others}")
    }
}

impl Cancel {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.ledger.print(async |opened| self.carry_out(opened).await).await
    }

    async fn carry_out(&self, opened: &Opened) -> anyhow::Result<String> {
        let operation = self.target.find(opened).await?;
        let cancelled = opened.ledger.cancel(operation.id, &actor(), &self.reason).await?;
        let then = match cancelled.answer {
            Answer::Cancelled => "it is cancelled, and does not run any more",
            Answer::CancelAsked => "its run is asked to stop, and stops at its next renewal",
            Answer::NotNow(why) => anyhow::bail!("nothing was changed: {}", not_now(why, &operation, opened)),
            other => anyhow::bail!("nothing was changed: the ledger answered {other:?}"),
        };
        let after = cancelled.operation.as_ref().unwrap_or(&operation);
        Ok(changed(self.json, after, then))
    }
}

fn not_now(why: NotNow, operation: &semel::Operation, opened: &Opened) -> String {
    match why {
        NotNow::Absent => "it is gone: it was purged, or its retention is over".to_owned(),
        NotNow::Completed | NotNow::Pinned => "it is too late: it has taken effect".to_owned(),
        NotNow::InDoubt => {
            let resolve = resolve(&operation.scope, &operation.key, &opened.flags);
            format!("it may have taken effect, and nothing runs; to resolve it: {resolve}")
        }
        NotNow::Running | NotNow::MovedOn => "it has changed meanwhile; look again".to_owned(),
    }
}
