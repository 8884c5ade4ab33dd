//! `semel webhooks`: makes stored events run through the present rules, on a server with the role `worker`.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use semel::Scope;
use serde_json::json;

use super::{
    ledger::{LedgerFlags, Opened, actor},
    say,
};
use crate::{
    http::{
        problem::{NOT_FOUND, Problem},
        query::time,
    },
    jobs::{Job, Jobs, NewJob},
    log,
    services::webhooks::config::Webhooks,
    services::webhooks::{
        Handlers, Receiver, Source, again,
        events::label,
        named::Named,
        process::{RESULTS, STORED},
        reprocess::{Asked, NAME, check},
    },
    view::words::quoted,
};

/// The exit code for wrong flags, the same as clap's.
const WRONG_FLAGS: u8 = 2;

/// Run webhook events again: stored ones through the present rules, or failed ones
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
    /// The source of the event
    source: String,
    /// The event's id
    event: String,
    /// The function of the event, if events take effect once per function
    #[arg(long)]
    function: Option<String>,
    /// The event's present result, if it has completed; with another result than stored, the effect is repeated
    #[arg(long, default_value = STORED, value_parser = RESULTS)]
    result: String,
    /// The reason, for the journal and the audit
    #[arg(long, value_name = "TEXT", value_parser = said)]
    reason: String,
    /// The tenant of the source
    #[arg(long, default_value = Scope::DEFAULT_TENANT)]
    tenant: String,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Rerun {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let desk = Desk::open(&self.ledger).await?;
        let done = self.rerun(&desk).await;
        desk.opened.close().await;
        done?;
        say(&format!("{} of {} runs again, at the next poll of a worker\n", self.event, self.source))?;
        Ok(ExitCode::SUCCESS)
    }

    async fn rerun(&self, desk: &Desk) -> anyhow::Result<()> {
        desk.source(&self.tenant, &self.source)?;
        let (receiver, by) = (&desk.receiver, actor());
        let event = (self.source.as_str(), self.event.as_str());
        let named = Named::find(receiver, &self.tenant, event, self.function.as_deref()).await.map_err(refused)?;
        again::retry(receiver, &named, Some(&self.result), (&by, &self.reason)).await.map_err(refused)?;
        Ok(())
    }
}

/// Run all events of a type, function or period again, as a job with progress
#[derive(clap::Args)]
pub(super) struct Reprocess {
    /// The source of the events
    source: String,
    /// Select events of this type
    #[arg(long = "type", value_name = "TYPE", value_parser = label)]
    kind: Option<String>,
    /// Select events of this function
    #[arg(long, value_parser = label)]
    function: Option<String>,
    /// Select events first delivered at this time or later, such as 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<String>,
    /// Select events first delivered before this time
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<String>,
    /// Select all events of the source
    #[arg(long, conflicts_with_all = ["kind", "function", "since", "until"])]
    all: bool,
    /// Select events with this result; with another result than stored, the effects are repeated
    #[arg(long, default_value = STORED, value_parser = RESULTS)]
    result: String,
    /// The reason, for the journal and the audit
    #[arg(long, value_name = "TEXT", value_parser = said)]
    reason: String,
    /// The tenant of the source
    #[arg(long, default_value = Scope::DEFAULT_TENANT)]
    tenant: String,
    /// Print the job as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Reprocess {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let filters = [&self.kind, &self.function, &self.since, &self.until];
        if !self.all && filters.iter().all(|filter| filter.is_none()) {
            super::complain(format_args!("which events? Set --type, --function, --since or --until, or --all"));
            return Ok(WRONG_FLAGS.into());
        }
        let desk = Desk::open(&self.ledger).await?;
        let asked = Asked {
            source: self.source,
            result: self.result,
            kind: self.kind,
            function: self.function,
            since: self.since,
            until: self.until,
            reason: self.reason,
        };
        let made = desk.reprocess(&self.tenant, &asked, self.all).await;
        desk.opened.close().await;
        let job = made?;
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

/// The ledger, and the configured sources: the commands make the same checks as the routes.
struct Desk {
    opened: Opened,
    receiver: Receiver,
}

impl Desk {
    async fn open(flags: &LedgerFlags) -> anyhow::Result<Self> {
        let (opened, config) = flags.look_with_config().await?;
        let receiver = Receiver::open(&opened.ledger, config.services.get::<Webhooks>(), &Handlers::default()).await?;
        Ok(Self { opened, receiver })
    }

    fn source(&self, tenant: &str, name: &str) -> anyhow::Result<Arc<Source>> {
        self.receiver.source_of(tenant, name).map_err(|problem| {
            let dev = match name == Webhooks::TRYING {
                true => "; the source of a server with --dev is in no configuration, so add a section for it first",
                false => "",
            };
            anyhow::anyhow!(
                "{} The configuration that this command reads has no source {} of the tenant {}: use the server's, by \
                 --config or by the variables SEMEL_WEBHOOKS_…{dev}",
                refused(problem),
                quoted(name),
                quoted(tenant)
            )
        })
    }

    async fn reprocess(&self, tenant: &str, asked: &Asked, all: bool) -> anyhow::Result<Job> {
        let source = self.source(tenant, &asked.source)?;
        check(asked, all, &source).map_err(refused)?;
        let jobs = Jobs::open(&self.opened.ledger).await?;
        let new = NewJob { tenant: tenant.to_owned(), kind: NAME, params: asked.to_params(), actor: actor() };
        let made = self.opened.ledger.transact(move |tx| async move { jobs.create_in(&tx, new).await });
        made.await.context("the job could not be created")
    }
}

/// The answer that a route would have given.
fn refused(problem: Problem) -> anyhow::Error {
    // The remedy for an unknown id is about paths.
    let remedy = if problem.kind() == &NOT_FOUND { "" } else { problem.kind().remedy };
    anyhow::anyhow!("{}", format!("nothing was changed: {} {remedy}", problem.said()).trim_end())
}

fn said(text: &str) -> Result<String, &'static str> {
    match text.trim() {
        "" => Err("must not be empty"),
        said => Ok(said.to_owned()),
    }
}

fn moment(text: &str) -> Result<String, &'static str> {
    Ok(time(text)?.to_string())
}
