//! `semel mailing upload`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use serde_json::Value;

use super::{Desk, Where, bar_of_bytes, open_file, watch};
use crate::{
    cli::{ledger::actor, say},
    services::mailings::command::{Asked, By, Outcome},
    view::words::{count, plain},
};

/// Upload a list of addresses; one that is known already is recognised, and nothing is sent again
#[derive(clap::Args)]
pub(in crate::cli) struct Upload {
    /// The list: a CSV file in UTF-8, or one address per line
    file: PathBuf,
    /// The subject, a template such as 'Hello {{ name }}' [default: mailings.subject of the configuration]
    #[arg(long, value_name = "TEXT")]
    subject: Option<String>,
    /// The sender, such as 'News <news@example.com>' [default: mailings.from of the configuration]
    #[arg(long, value_name = "SENDER")]
    from: Option<String>,
    /// The text, a template [default: mailings.body of the configuration]
    #[arg(long, value_name = "TEXT")]
    body: Option<String>,
    /// Read the text from this file
    #[arg(long, value_name = "FILE", conflicts_with = "body")]
    body_file: Option<PathBuf>,
    /// Read the HTML, a template, from this file
    #[arg(long, value_name = "FILE")]
    html_file: Option<PathBuf>,
    /// How a known list is recognised: filename, filename+content or content [default: by both, and half a match is
    /// refused]
    #[arg(long)]
    identity: Option<String>,
    /// What happens to a mail of which it is not known whether it was sent: never-twice (a person decides) or never-miss
    /// (it is sent again) [default: never-twice]
    #[arg(long)]
    policy: Option<String>,
    /// The column of the addresses, by its name or its number from 1
    #[arg(long)]
    column: Option<String>,
    /// Send at this time, such as 2026-12-24T08:00:00Z
    #[arg(long, value_name = "TIME")]
    send_at: Option<String>,
    /// The name of the list instead of the file's own
    #[arg(long)]
    name: Option<String>,
    /// Read the whole file and show what would happen; nothing stays stored
    #[arg(long)]
    dry_run: bool,
    /// Watch the mailing until it ends
    #[arg(long, conflicts_with_all = ["dry_run", "json"])]
    watch: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Where,
}

impl Upload {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let (file, bytes) = open_file(&self.file).await?;
        let asked = self.asked()?;
        self.place
            .with(async |desk| {
                let bar = bar_of_bytes(bytes);
                let by = By { tenant: desk.tenant, actor: &actor(), reason: "" };
                let progress = |read: usize| bar.inc(read as u64);
                let uploaded = desk.service.upload_file(by, file, asked, progress).await;
                bar.finish_and_clear();
                let uploaded = uploaded.map_err(super::refused)?;
                say(&if self.json {
                    format!("{:#}\n", uploaded.to_json())
                } else {
                    to_words(desk, &uploaded, self.watch)
                })?;
                match &uploaded {
                    Outcome::Created { id } | Outcome::Known { id, .. } if self.watch => watch::watch(desk, id).await,
                    _ => Ok(ExitCode::SUCCESS),
                }
            })
            .await
    }

    fn asked(&self) -> anyhow::Result<Asked> {
        let own = || self.file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let body = match (&self.body, &self.body_file) {
            (Some(text), _) => Some(text.clone().into_bytes()),
            (None, path) => path.as_deref().map(read).transpose()?,
        };
        Ok(Asked {
            filename: self.name.clone().unwrap_or_else(own),
            subject: self.subject.clone(),
            from: self.from.clone(),
            body,
            html: self.html_file.as_deref().map(read).transpose()?,
            identity: self.identity.clone(),
            policy: self.policy.clone(),
            column: self.column.clone(),
            send_at: self.send_at.clone(),
            dry_run: self.dry_run,
        })
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn to_words(desk: &Desk<'_>, uploaded: &Outcome, watched: bool) -> String {
    let next = |id: &str| match watched {
        true => String::new(),
        false => format!("to watch it: {}\n", desk.hint("watch", id, "")),
    };
    match uploaded {
        Outcome::DryRun(report) => dry_run(report),
        Outcome::Created { id } => {
            format!("created: mailing {id} is queued; a server with the role worker sends it\n{}", next(id))
        }
        Outcome::Known { id, status, differs } => {
            let why = match differs {
                true => "the name of its list is the same; its content is another, and was not stored",
                false => "its list and its message are the same",
            };
            format!("known: mailing {id} ({status}): {why}; nothing was stored or queued\n{}", next(id))
        }
    }
}

fn dry_run(report: &Value) -> String {
    let number = |name: &str| report[name].as_i64().unwrap_or_default();
    let text = |value: &Value| plain(value.as_str().unwrap_or_default());
    let columns = report["columns"].as_array().map(|all| all.iter().map(text).collect::<Vec<_>>().join(", "));
    // Of a very long list, some duplicates are counted as addresses. If not all of it was read, each number is too low.
    let (most, least) = match (report["exact"] == true, report["complete"] == true) {
        (true, _) => ("", ""),
        (false, true) => ("at most ", " or more"),
        (false, false) => ("not the whole file was read: so far ", ""),
    };
    let mut said = format!(
        "dry run of {}: nothing was stored\n  {most}{} would get a mail\n  {}{least}, {}\n",
        text(&report["filename"]),
        count(number("total") - number("suppressed"), "address", "addresses"),
        count(number("duplicateRows"), "duplicate row", "duplicate rows"),
        count(number("rejectedRows"), "rejected row", "rejected rows"),
    );
    let warning = |name: &str| report["warnings"][name].as_i64().unwrap_or_default();
    for (number, one, several) in [
        (number("suppressed"), "address is suppressed", "addresses are suppressed"),
        (number("blankRows"), "blank row", "blank rows"),
        (
            warning("plusTags"),
            "address has a +tag: the same person may be listed twice",
            "addresses have a +tag: the same people may be listed twice",
        ),
        (warning("mixedScripts"), "address mixes letters that look alike", "addresses mix letters that look alike"),
    ] {
        if number > 0 {
            said.push_str(&format!("  {}\n", count(number, one, several)));
        }
    }
    said.push_str(&format!("  columns: {}\n", columns.unwrap_or_default()));
    for reject in report["rejects"].as_array().into_iter().flatten() {
        said.push_str(&format!("  line {}: {}: {}\n", reject["line"], text(&reject["code"]), text(&reject["value"])));
    }
    let known = &report["wouldBe"];
    let mailing = format!("mailing {} ({})", text(&known["mailingId"]), text(&known["mailingStatus"]));
    said.push_str(&match known["result"].as_str().unwrap_or_default() {
        "created" => "the upload would be a new mailing\n".to_owned(),
        "known" => format!("the upload is known: {mailing}\n"),
        problem => format!("the upload would be refused ({problem}): {mailing}\n"),
    });
    let preview = &report["preview"];
    if preview.is_object() {
        said.push_str(&format!("the first mail, to {}:\n", text(&preview["to"])));
        for (name, part) in [("error", "error"), ("subject", "subject"), ("text", "text"), ("html", "HTML")] {
            // A mail has lines; other control characters are escaped.
            let lines = preview[name].as_str().into_iter().flat_map(str::lines);
            let lines: Vec<_> = lines.map(|line| format!("    {}\n", plain(line))).collect();
            if !lines.is_empty() {
                said.push_str(&format!("  {part}:\n{}", lines.concat()));
            }
        }
    }
    said
}
