//! `semel operations show`.

use std::process::ExitCode;

use semel::{
    Operation,
    look::{SetAside, Unreadable},
};

use crate::{
    cli::{
        json,
        ledger::{LedgerFlags, Opened},
        say,
        target::Target,
        words::{self, command_line, outcome, plain, request_line},
    },
    once::outcome::Stored,
};

/// How much of a payload or an outcome is shown to people: a screen or two.
const SHOWN: usize = 4_000;

/// Show everything that is stored of one operation
///
/// KEY may also be the operation's number, or the short hash by which log lines name it.
#[derive(clap::Args)]
pub(in crate::cli) struct Show {
    #[command(flatten)]
    target: Target,
    /// Show it as JSON, payload and outcome in full
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Show {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let opened = self.ledger.look().await?;
        let shown = self.show(&opened).await;
        opened.close().await;
        say(&shown?)?;
        Ok(ExitCode::SUCCESS)
    }

    async fn show(&self, opened: &Opened) -> anyhow::Result<String> {
        let (whole, text, id) = match self.target.find_somehow(opened).await {
            Ok(operation) => (json::whole(&operation), to_text(&operation), operation.id),
            Err(error) => {
                let Some(row) = self.target.unreadable(opened, &error).await? else { return Err(error) };
                (json::unreadable(&row), unreadable(&row), row.id)
            }
        };
        let aside = set_aside(opened, id).await?;
        Ok(if self.json { format!("{:#}\n", with_aside(whole, &aside)) } else { text + &asides(&aside) })
    }
}

/// Why an operation was set aside.
pub(in crate::cli) async fn set_aside(opened: &Opened, id: i64) -> anyhow::Result<Vec<SetAside>> {
    Ok(opened.ledger.store().set_aside_of(&[id]).await?.remove(&id).unwrap_or_default())
}

fn with_aside(mut operation: serde_json::Value, aside: &[SetAside]) -> serde_json::Value {
    if !aside.is_empty() {
        operation["setAside"] = json::set_aside(aside);
    }
    operation
}

fn asides(aside: &[SetAside]) -> String {
    aside
        .iter()
        .map(|aside| format!("\n{}; it is tried again at {}\n", words::set_aside(aside), aside.retry_at))
        .collect()
}

/// What can be told of an operation that cannot be read.
pub(in crate::cli) fn unreadable(row: &Unreadable) -> String {
    let scope = format!("{}/{}/{}", row.tenant, row.service, row.kind);
    let fields = [
        ("id", row.id.to_string()),
        ("scope", plain(&scope)),
        ("key", plain(&row.key)),
        ("state", plain(&row.state)),
        ("created", row.created_at.to_string()),
        ("unreadable", plain(&row.why)),
    ];
    fields.iter().map(|(name, value)| format!("{name:12} {value}\n")).collect()
}

pub(super) fn to_text(op: &Operation) -> String {
    let time = |at: Option<semel::Timestamp>| at.map(|at| at.to_string());
    let some = |n: u32| (n > 0).then(|| n.to_string());
    let labels: Vec<_> = op.labels.0.iter().flatten().map(|label| plain(label)).collect();
    let fields = [
        ("id", Some(op.id.to_string())),
        ("scope", Some(op.scope.to_string())),
        ("key", Some(op.key.as_str().to_owned())),
        ("key hash", Some(op.short_hash())),
        ("labels", Some(labels.join(", ")).filter(|labels| !labels.is_empty())),
        ("state", Some(format!("{}{}", op.state, if op.parked { ", parked" } else { "" }))),
        ("failures", some(op.failures)),
        ("crashes", some(op.crashes)),
        ("error", op.error.as_deref().map(plain)),
        ("owner", Some(plain(&op.owner)).filter(|owner| !owner.is_empty())),
        ("fence", Some(op.fence.to_string())),
        ("fingerprint", Some(op.fingerprint.to_string())),
        ("order", op.order.map(|order| order.to_string())),
        ("created", time(Some(op.created_at))),
        ("claimed", time(Some(op.claimed_at))),
        ("settled", time(op.settled_at)),
        ("not before", time(op.not_before)),
        ("kept until", time(op.expires_at)),
        ("archive at", time(op.archive_at)),
        ("archived", op.archived.then(|| "yes".to_owned())),
        ("pinned", op.pinned.then(|| "yes".to_owned())),
        ("lease ends", op.lease.as_ref().map(|lease| lease.deadline.to_string())),
        ("command", command_line(op)),
        ("request", request_line(op)),
        ("outcome", outcome(op)),
    ];
    let mut text = String::new();
    for (name, value) in fields {
        if let Some(value) = value {
            text.push_str(&format!("{name:12} {value}\n"));
        }
    }
    if let Some(payload) = op.payload.as_ref().filter(|_| command_line(op).is_none()) {
        text.push_str(&body("payload", payload));
    }
    if let Some(checkpoint) = &op.checkpoint {
        text.push_str(&body("checkpoint", checkpoint));
    }
    if let Some(outcome) = &op.outcome {
        let stored = Stored::read(&outcome.body).map(|stored| stored.printed.kept);
        text.push_str(&body("outcome", &stored.unwrap_or_else(|| outcome.body.to_vec())));
    }
    text
}

/// Bytes for people: text line by line, and no more of it than one reads.
fn body(name: &str, bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return String::new();
    }
    let shown = &bytes[..bytes.len().min(SHOWN)];
    let text: Vec<_> = String::from_utf8_lossy(shown).lines().map(|line| format!("  {}\n", plain(line))).collect();
    let more = match bytes.len() - shown.len() {
        0 => String::new(),
        more => format!("  … and {more} bytes more: --json shows all\n"),
    };
    format!("\n{name}:\n{}{more}", text.concat())
}
