//! `semel mailing`: uploads lists, watches mailings and acts on them, directly on the ledger's database.

mod act;
mod upload;
mod watch;

use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use semel::Scope;
use serde_json::Value;

use super::ledger::{LedgerFlags, Opened};
use crate::{
    http::problem::{NOT_FOUND, Problem},
    log,
    services::mailings::{Service, command},
    view::words::{plain, quoted},
};

/// The log of these commands. A refused request names no cause, to hide it from clients; a person at the server needs it.
pub(super) const LOG: &str = "error,semel_server::http::problem=warn";

/// Upload lists, watch mailings and act on them
#[derive(clap::Subcommand)]
pub(super) enum MailingCommand {
    Upload(upload::Upload),
    Watch(watch::Watch),
    List(act::List),
    Show(act::Show),
    /// Pause a mailing: mails in flight are finished, no other is begun
    Pause(act::Action),
    /// Resume a paused mailing
    Resume(act::Action),
    /// Try failed and invalid entries again, or a failed mailing
    Retry(act::Action),
    /// Cancel all mails of a mailing that are not sent
    Cancel(act::Action),
    /// Delete a mailing that does not run; its file can then be uploaded again
    Delete(act::Action),
    Resolve(act::Resolve),
    Test(act::Test),
}

impl MailingCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start(LOG);
        super::runtime()?.block_on(async {
            match self {
                Self::Upload(command) => command.run().await,
                Self::Watch(command) => command.run().await,
                Self::List(command) => command.run().await,
                Self::Show(command) => command.run().await,
                Self::Pause(command) => command.run(command::Act::Pause).await,
                Self::Resume(command) => command.run(command::Act::Resume).await,
                Self::Retry(command) => command.run(command::Act::Retry).await,
                Self::Cancel(command) => command.run(command::Act::Cancel).await,
                Self::Delete(command) => command.run(command::Act::Delete).await,
                Self::Resolve(command) => command.run().await,
                Self::Test(command) => command.run().await,
            }
        })
    }
}

/// The tenant, and the flags that locate the ledger.
#[derive(clap::Args)]
pub(super) struct Where {
    /// The tenant
    #[arg(long, default_value = Scope::DEFAULT_TENANT, value_parser = command::tenant)]
    pub(super) tenant: String,
    #[command(flatten)]
    pub(super) ledger: LedgerFlags,
}

impl Where {
    /// Opens the service for a command, and closes the ledger after it.
    pub(super) async fn with<T>(&self, command: impl AsyncFnOnce(&Desk<'_>) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let (opened, config) = self.ledger.look_with_config().await?;
        let done = match Service::open(&opened.ledger, &config) {
            Ok(service) => command(&Desk { service, opened: &opened, tenant: &self.tenant }).await,
            Err(error) => Err(super::ledger::said(error)),
        };
        opened.close().await;
        done
    }
}

/// The service, as a command uses it.
pub(super) struct Desk<'a> {
    pub(super) service: Service,
    opened: &'a Opened,
    pub(super) tenant: &'a str,
}

impl Desk<'_> {
    /// A command of this program about a mailing, ready to be pasted.
    fn hint(&self, command: &str, id: &str, rest: &str) -> String {
        let tenant = match self.tenant {
            Scope::DEFAULT_TENANT => String::new(),
            tenant => format!("--tenant {}", quoted(tenant)),
        };
        let parts = ["semel mailing", command, id, rest, &tenant, &self.opened.flags];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// The answer that a route would have given about a mailing.
    fn refused(&self, id: &str, problem: Problem) -> anyhow::Error {
        match problem.kind() == &NOT_FOUND {
            true => anyhow::anyhow!(
                "nothing was changed: the tenant {} has no mailing {} in the ledger in {}; {} lists all",
                quoted(self.tenant),
                quoted(id),
                self.opened.place,
                self.hint("list", "", "")
            ),
            false => refused(problem),
        }
    }
}

/// The answer that a route would have given: its detail, every wrong field, and the remedy.
pub(super) fn refused(problem: Problem) -> anyhow::Error {
    let (kind, said) = (problem.kind(), plain(problem.said()));
    let told: Value = serde_json::from_slice(problem.into_http().body()).unwrap_or_default();
    let member = |name: &str| told[name].as_str().map(|text| format!(" ({name} {})", plain(text))).unwrap_or_default();
    let members: String = ["mailingId", "mailingStatus", "entryStatus"].into_iter().map(member).collect();
    match told["errors"].as_array() {
        Some(errors) => {
            let line = |error: &Value| {
                let [field, message] = ["field", "message"].map(|name| plain(error[name].as_str().unwrap_or_default()));
                format!("\n  {}: {message}", flag(&field))
            };
            anyhow::anyhow!("nothing was changed: {}{}", kind.title, errors.iter().map(line).collect::<String>())
        }
        None => anyhow::anyhow!("{}", format!("nothing was changed: {said}{members} {}", kind.remedy).trim_end()),
    }
}

/// The flag that sets a field of an upload.
fn flag(field: &str) -> String {
    match field {
        "file" => "FILE or --name".to_owned(),
        "body" => "--body".to_owned(),
        "html" => "--html-file".to_owned(),
        "sendAt" => "--send-at".to_owned(),
        "subject" | "from" | "identity" | "policy" | "column" => format!("--{field}"),
        other => other.to_owned(),
    }
}

/// The progress bar of a file, on stderr if that is a terminal.
pub(super) fn bar_of_bytes(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Opens a file to be read, and finds its length.
pub(super) async fn open_file(path: &std::path::Path) -> anyhow::Result<(tokio::fs::File, u64)> {
    let cannot = |why: String| anyhow::anyhow!("cannot read {}: {why}", path.display());
    let file = tokio::fs::File::open(path).await.map_err(|error| cannot(error.to_string()))?;
    let data = file.metadata().await.map_err(|error| cannot(error.to_string()))?;
    match data.is_dir() {
        true => Err(cannot("it is a directory".to_owned())),
        false => Ok((file, data.len())),
    }
}
