//! `semel mailing list`, `show`, the actions, `resolve` and `test`.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{Where, watch};
use crate::{
    cli::{arguments::reason, ledger::actor, say},
    http::{problem::NOT_FOUND, query::Place},
    services::mailings::command::{Act, By, Email, STATUSES},
    view::words::{plain, table},
};

/// List mailings, newest first
#[derive(clap::Args)]
pub(in crate::cli) struct List {
    /// Only mailings with this status
    #[arg(long, value_parser = STATUSES)]
    status: Option<String>,
    /// How many are listed
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=500))]
    limit: i64,
    /// List them as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

impl List {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.place
            .with(async |desk| {
                let place = Place { after: 0, limit: self.limit };
                let status = self.status.as_deref().unwrap_or_default();
                let page = desk.service.mailings(desk.tenant, status, place).await;
                let (items, next) = page.map_err(super::refused)?;
                say(&match self.json {
                    true => format!("{:#}\n", json!({ "items": items, "next": next })),
                    false => to_table(&items, next.is_some()),
                })?;
                Ok(ExitCode::SUCCESS)
            })
            .await
    }
}

fn to_table(items: &[Value], more: bool) -> String {
    if items.is_empty() {
        return "none\n".to_owned();
    }
    let head = ["ID", "LIST", "STATE", "CREATED", "SEND AT"].map(str::to_owned);
    let row = |mailing: &Value| {
        let text = |name: &str| plain(mailing[name].as_str().unwrap_or_default());
        [text("mailingId"), text("filename"), watch::state(mailing), text("createdAt"), text("sendAt")]
    };
    let more = if more { "there are more: set --limit\n" } else { "" };
    format!("{}{more}", table(std::iter::once(head).chain(items.iter().map(row))))
}

/// Show a mailing
#[derive(clap::Args)]
pub(in crate::cli) struct Show {
    /// The id of the mailing
    id: String,
    /// Show it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

impl Show {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.place
            .with(async |desk| {
                let found = desk.service.mailing(desk.tenant, &self.id).await;
                let mailing = found.map_err(|problem| desk.refused(&self.id, problem))?;
                say(&match self.json {
                    true => format!("{mailing:#}\n"),
                    false => watch::summary(desk, &mailing).await?,
                })?;
                Ok(ExitCode::SUCCESS)
            })
            .await
    }
}

/// A mailing, and the reason of an action on it.
#[derive(clap::Args)]
pub(in crate::cli) struct Action {
    /// The id of the mailing
    id: String,
    #[command(flatten)]
    how: How,
}

#[derive(clap::Args)]
struct How {
    /// The reason, for the audit
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, value_parser = why)]
    reason: String,
    /// Show the mailing afterwards as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

/// As [`reason`]; it can be left out.
fn why(text: &str) -> Result<String, &'static str> {
    if text.is_empty() { Ok(String::new()) } else { reason(text) }
}

impl Action {
    pub(super) async fn run(self, act: Act) -> anyhow::Result<ExitCode> {
        self.how.carry_out(&self.id, act).await
    }
}

impl How {
    async fn carry_out(&self, id: &str, act: Act) -> anyhow::Result<ExitCode> {
        self.place
            .with(async |desk| {
                let actor = actor();
                let by = By { tenant: desk.tenant, actor: &actor, reason: &self.reason };
                let mailing = match desk.service.act_on(id, by, act).await {
                    Ok(mailing) => mailing,
                    Err(problem) => {
                        // The mailing or the entry may be the unknown one.
                        if let Act::Resolve { line, .. } = act
                            && problem.kind() == &NOT_FOUND
                            && desk.service.mailing(desk.tenant, id).await.is_ok()
                        {
                            anyhow::bail!("nothing was changed: the mailing {id} has no entry of line {line}");
                        }
                        return Err(desk.refused(id, problem));
                    }
                };
                say(&match (self.json, act) {
                    (true, _) => format!("{mailing:#}\n"),
                    (false, Act::Delete) => {
                        format!("{} ({id}) is deleted\n", plain(mailing["filename"].as_str().unwrap_or_default()))
                    }
                    (false, _) => watch::summary(desk, &mailing).await?,
                })?;
                Ok(ExitCode::SUCCESS)
            })
            .await
    }
}

/// Decide about an entry in doubt: its mail may or may not have been sent
#[derive(clap::Args)]
pub(in crate::cli) struct Resolve {
    /// The id of the mailing
    id: String,
    /// The line of the entry in the file
    line: i64,
    /// sent: it was sent; resend: send it again
    #[arg(long = "as", value_name = "RESULT", value_parser = ["sent", "resend"])]
    result: String,
    #[command(flatten)]
    how: How,
}

impl Resolve {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let act = Act::Resolve { line: self.line, resend: self.result == "resend" };
        self.how.carry_out(&self.id, act).await
    }
}

/// Send the mail of the first entry to another address, at once; the mailing does not change
#[derive(clap::Args)]
pub(in crate::cli) struct Test {
    /// The id of the mailing
    id: String,
    /// The address that gets the mail
    #[arg(value_parser = Email::parse)]
    email: Email,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

impl Test {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.place
            .with(async |desk| {
                let by = By { tenant: desk.tenant, actor: &actor(), reason: "" };
                let sent = desk.service.test_mail(by, &self.id, self.email.clone()).await;
                let sent = sent.map_err(|problem| desk.refused(&self.id, problem))?;
                let text = |name: &str| plain(sent[name].as_str().unwrap_or_default());
                say(&match self.json {
                    true => format!("{sent:#}\n"),
                    false => format!("a test mail was sent to {} (Message-ID {})\n", text("to"), text("messageId")),
                })?;
                Ok(ExitCode::SUCCESS)
            })
            .await
    }
}
