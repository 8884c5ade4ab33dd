//! `semel webhooks`: stored events, run again through the present rules. A server with the role `worker` runs them.

use std::process::ExitCode;

use anyhow::Context as _;
use semel::{Key, Operation, Scope, Store as _};
use serde_json::json;

use super::{
    ledger::{LedgerFlags, Opened, actor},
    say,
};
use crate::{
    http::query::time,
    jobs::{Job, Jobs, NewJob},
    log,
    services::webhooks::{
        SERVICE,
        again::{self, Again},
        process::{RESULTS, STORED},
        reprocess::{Asked, NAME},
    },
};

/// Run events of webhooks again that were stored because no rule took them
#[derive(clap::Subcommand)]
pub(super) enum WebhooksCommand {
    Rerun(Rerun),
    Reprocess(Reprocess),
}

impl WebhooksCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start("error");
        super::runtime()?.block_on(async {
            match self {
                Self::Rerun(command) => command.run().await,
                Self::Reprocess(command) => command.run().await,
            }
        })
    }
}

/// Run one event again
#[derive(clap::Args)]
pub(super) struct Rerun {
    /// The source that it came from
    source: String,
    /// The sender's id of the event
    event: String,
    /// The function whose event is meant, where events take effect once per function
    #[arg(long)]
    function: Option<String>,
    /// How it was processed: stored, or another result by its name to have the effect happen once more
    #[arg(long, default_value = STORED, value_parser = RESULTS)]
    result: String,
    /// Why, for the journal and the audit
    #[arg(long, value_name = "TEXT", value_parser = said)]
    reason: String,
    /// Of this tenant
    #[arg(long, default_value = Scope::DEFAULT_TENANT)]
    tenant: String,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Rerun {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let opened = self.ledger.look().await?;
        let operation = self.find(&opened).await?;
        let by = actor();
        match again::rerun(&opened.ledger, &operation, &self.result, (&by, &self.reason)).await? {
            Again::Yes => {
                say(&format!("{} of {} runs again, at the next look of a worker\n", self.event, self.source))?
            }
            Again::Otherwise(_) if operation.state != semel::State::Completed => anyhow::bail!(
                "nothing was changed: it is {}; to have that run again: semel operations resolve --as retry",
                operation.state
            ),
            Again::Otherwise(was) => anyhow::bail!(
                "nothing was changed: it was {was}, and took effect; to have that happen once more, say --result {was}"
            ),
            Again::Gone => anyhow::bail!("nothing was changed: it is gone"),
            Again::MovedOn => anyhow::bail!("nothing was changed: it runs, or has moved on meanwhile; look again"),
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn find(&self, opened: &Opened) -> anyhow::Result<Operation> {
        let key = Key::new(&self.event)?;
        let function = self.function.as_ref().map(|function| format!("{}.{function}", self.source));
        for kind in function.iter().chain([&self.source]) {
            let scope = Scope::new(&self.tenant, SERVICE, kind)?;
            if let Some(found) = opened.ledger.store().by_key(&scope, &key).await? {
                return Ok(found);
            }
        }
        anyhow::bail!("there is no event {} of {} in {}", self.event, self.source, opened.place)
    }
}

/// Run all events again that a type, a function or a time says, as a job with progress
#[derive(clap::Args)]
pub(super) struct Reprocess {
    /// The source that they came from
    source: String,
    /// Of this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Of this function
    #[arg(long)]
    function: Option<String>,
    /// First came at this time or later, such as 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<String>,
    /// First came before this time
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<String>,
    /// All of the source's
    #[arg(long, conflicts_with_all = ["kind", "function", "since", "until"])]
    all: bool,
    /// How they were processed: stored, or another result by its name to have the effects happen once more
    #[arg(long, default_value = STORED, value_parser = RESULTS)]
    result: String,
    /// Why, for the journal and the audit
    #[arg(long, value_name = "TEXT", value_parser = said)]
    reason: String,
    /// Of this tenant
    #[arg(long, default_value = Scope::DEFAULT_TENANT)]
    tenant: String,
    /// Show the job as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Reprocess {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let filters = [&self.kind, &self.function, &self.since, &self.until];
        anyhow::ensure!(
            self.all || filters.iter().any(|filter| filter.is_some()),
            "which events? Say --type, --function, --since or --until, or --all"
        );
        let opened = self.ledger.look().await?;
        let asked = Asked {
            source: self.source,
            result: self.result,
            kind: self.kind,
            function: self.function,
            since: self.since,
            until: self.until,
            reason: self.reason,
        };
        let job = create(&opened, &self.tenant, &asked).await.context("the job could not be made")?;
        let text = match self.json {
            true => format!("{:#}\n", json!(job)),
            false => {
                format!("job {} runs on a node with the role worker; its progress: GET /jobs/{}\n", job.id, job.id)
            }
        };
        say(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}

async fn create(opened: &Opened, tenant: &str, asked: &Asked) -> anyhow::Result<Job> {
    let jobs = Jobs::open(&opened.ledger, Vec::new()).await?;
    let new = NewJob { tenant: tenant.to_owned(), kind: NAME, params: asked.to_params(), actor: actor() };
    let made = opened.ledger.transact(move |tx| async move {
        let made = jobs.create_in(&tx, new).await;
        if made.is_ok() { Ok(made) } else { Err(made) }
    });
    Ok(made.await??)
}

fn said(text: &str) -> Result<String, &'static str> {
    match text.trim() {
        "" => Err("must say something"),
        said => Ok(said.to_owned()),
    }
}

fn moment(text: &str) -> Result<String, &'static str> {
    time(text).map(|at| at.to_string()).ok_or("must be a time such as 2026-01-31T12:00:00Z")
}
