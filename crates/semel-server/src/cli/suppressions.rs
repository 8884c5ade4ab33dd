//! `semel suppressions`: addresses that get no mail of mailings.

use std::{path::PathBuf, process::ExitCode};

use futures_util::TryStreamExt as _;
use serde_json::{Value, json};

use super::{
    arguments::reason,
    complain,
    ledger::actor,
    mailing::{Desk, Where, bar_of_bytes, open_file, refused},
    say,
};
use crate::{
    http::problem::NOT_FOUND,
    log,
    services::mailings::command::{By, Email, Imported, parts},
    view::words::{count, plain, table},
};

/// List, add and remove addresses that get no mail
#[derive(clap::Subcommand)]
pub(super) enum SuppressionsCommand {
    List(List),
    Add(Add),
    Remove(Remove),
    Import(Import),
}

impl SuppressionsCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start(super::mailing::LOG);
        super::runtime()?.block_on(async {
            match self {
                Self::List(command) => command.run().await,
                Self::Add(command) => command.run().await,
                Self::Remove(command) => command.run().await,
                Self::Import(command) => command.run().await,
            }
        })
    }
}

/// List suppressed addresses, by their names
#[derive(clap::Args)]
pub(super) struct List {
    /// Only addresses after this one
    #[arg(long, value_name = "EMAIL", default_value = "", hide_default_value = true)]
    after: String,
    /// How many are listed
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
    /// List them as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

impl List {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let page = async |desk: &Desk<'_>| {
            desk.service.suppressed(desk.tenant, &self.after, self.limit).await.map_err(refused)
        };
        let (items, more) = self.place.with(page).await?;
        let next = items.last().filter(|_| more).map(|last| last["email"].clone());
        say(&match self.json {
            true => format!("{:#}\n", json!({ "items": items, "next": next })),
            false => to_table(&items, next.as_ref()),
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

fn to_table(items: &[Value], next: Option<&Value>) -> String {
    if items.is_empty() {
        return "none\n".to_owned();
    }
    let text = |value: &Value| plain(value.as_str().unwrap_or_default());
    let head = ["ADDRESS", "SINCE", "REASON"].map(str::to_owned);
    let row = |item: &Value| [text(&item["email"]), text(&item["createdAt"]), text(&item["reason"])];
    let more = next.map(|last| format!("there are more: --after {}\n", text(last))).unwrap_or_default();
    format!("{}{more}", table(std::iter::once(head).chain(items.iter().map(row))))
}

/// Add addresses; known ones stay as they are
#[derive(clap::Args)]
pub(super) struct Add {
    /// The addresses
    #[arg(required = true, value_name = "EMAIL", value_parser = Email::parse)]
    emails: Vec<Email>,
    /// The reason, which is shown with the address
    #[arg(long, value_name = "TEXT", default_value = "added by hand", value_parser = reason)]
    reason: String,
    #[command(flatten)]
    place: Where,
}

impl Add {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let given = self.emails.len();
        let add = async |desk: &Desk<'_>| {
            let by = By { tenant: desk.tenant, actor: &actor(), reason: &self.reason };
            desk.service.add_suppressions(by, self.emails.clone()).await.map_err(refused)
        };
        let added = self.place.with(add).await?;
        say(&format!("{added} added, {} known\n", given - added))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Remove an address: it gets mails again
#[derive(clap::Args)]
pub(super) struct Remove {
    /// The address
    #[arg(value_parser = Email::parse)]
    email: Email,
    /// The reason, for the audit
    #[arg(long, value_name = "TEXT", default_value = "removed by hand", value_parser = reason)]
    reason: String,
    #[command(flatten)]
    place: Where,
}

impl Remove {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let remove = async |desk: &Desk<'_>| {
            let by = By { tenant: desk.tenant, actor: &actor(), reason: &self.reason };
            desk.service.remove_suppression(by, &self.email).await.map_err(|problem| {
                match problem.kind() == &NOT_FOUND {
                    true => anyhow::anyhow!("nothing was changed: {} is not suppressed", plain(&self.email.normal)),
                    false => refused(problem),
                }
            })
        };
        self.place.with(remove).await?;
        say(&format!("{} gets mails again\n", plain(&self.email.normal)))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Add the addresses of a file: a CSV list, or one address per line
#[derive(clap::Args)]
pub(super) struct Import {
    /// The file, in UTF-8
    file: PathBuf,
    /// The column of the addresses, by its name or its number from 1
    #[arg(long)]
    column: Option<String>,
    /// The reason, which is shown with the addresses
    #[arg(long, value_name = "TEXT", default_value = "imported from a file", value_parser = reason)]
    reason: String,
    #[command(flatten)]
    place: Where,
}

impl Import {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let (file, bytes) = open_file(&self.file).await?;
        let mut imported = Imported::default();
        let import = async |desk: &Desk<'_>| {
            let bar = bar_of_bytes(bytes);
            let (progress, column) = (|read: usize| bar.inc(read as u64), self.column.as_deref());
            let by = By { tenant: desk.tenant, actor: &actor(), reason: &self.reason };
            let parts = parts(file).inspect_ok(|part| progress(part.len()));
            let done = desk.service.import_suppressions(by, parts, column, &mut imported).await;
            bar.finish_and_clear();
            Ok(done)
        };
        let done = self.place.with(import).await?;
        for (line, why) in &imported.first {
            complain(format_args!("line {line} is refused: {}", plain(why)));
        }
        let Imported { added, known, refused: wrong, .. } = imported;
        let lines = count(i64::try_from(wrong).unwrap_or(i64::MAX), "line", "lines");
        let counts = format!("{added} added, {known} known, {lines} refused");
        match done {
            Ok(()) => {
                say(&format!("{counts}\n"))?;
                Ok(ExitCode::SUCCESS)
            }
            Err(problem) if added + known == 0 => Err(refused(problem)),
            Err(problem) => anyhow::bail!("the import ended early ({counts}): {}", plain(problem.said())),
        }
    }
}
