//! `semel mailing watch`: shows the progress of a mailing until it ends, or waits for a person.

use std::{
    io::{IsTerminal as _, stderr},
    process::ExitCode,
    time::{Duration, SystemTime},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use semel::Timestamp;
use serde_json::Value;

use super::{Desk, Where};
use crate::{
    cli::{complain, say},
    http::{problem::STORE_UNAVAILABLE, query::time},
    view::words::{count, plain, span},
};

/// How often the mailing is read.
const POLL: Duration = Duration::from_secs(1);

/// How many entries in doubt are shown.
const SHOWN: i64 = 20;

/// Show the progress of a mailing until it ends; exits with 0 if it is completed, else with 1
///
/// A failed mailing that is tried again has not ended.
#[derive(clap::Args)]
pub(in crate::cli) struct Watch {
    /// The id of the mailing
    id: String,
    #[command(flatten)]
    place: Where,
}

impl Watch {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.place.with(async |desk| watch(desk, &self.id).await).await
    }
}

/// Watches a mailing.
pub(super) async fn watch(desk: &Desk<'_>, id: &str) -> anyhow::Result<ExitCode> {
    let mut shown = Progress::new();
    let mut is_away = false;
    let ended = loop {
        match desk.service.mailing(desk.tenant, id).await {
            Ok(mailing) if has_ended(&mailing) => break mailing,
            Ok(mailing) => {
                is_away = false;
                shown.show(&mailing)?;
            }
            // The mailing goes on when the database is back.
            Err(problem) if problem.kind() == &STORE_UNAVAILABLE => {
                if !std::mem::replace(&mut is_away, true) {
                    shown.pause(|| complain(format_args!("the database does not answer: {}", problem.said())));
                }
            }
            Err(problem) => {
                shown.end();
                return Err(desk.refused(id, problem));
            }
        }
        tokio::time::sleep(POLL).await;
    };
    shown.end();
    say(&summary(desk, &ended).await?)?;
    Ok(if ended["status"] == "COMPLETED" { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn has_ended(mailing: &Value) -> bool {
    let status = mailing["status"].as_str().unwrap_or_default();
    match status {
        "COMPLETED" | "CANCELLED" | "PAUSED" => true,
        "FAILED" => mailing["retryAt"].is_null(),
        _ => mailing["waitingFor"].is_string(),
    }
}

/// A bar on a terminal; elsewhere a line for each change.
enum Progress {
    Bar(ProgressBar),
    Lines(String),
}

impl Progress {
    fn new() -> Self {
        if !stderr().is_terminal() {
            return Self::Lines(String::new());
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:20} {percent}%  {wide_msg}");
        Self::Bar(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    fn show(&mut self, mailing: &Value) -> anyhow::Result<()> {
        match self {
            Self::Bar(bar) => {
                let number = |name: &str| mailing["counts"][name].as_u64().unwrap_or_default();
                let total = number("total");
                bar.set_length(total.max(1));
                // While the file is imported, its total is not known: the part of the file counts.
                match mailing["phase"] == "importing" {
                    true => {
                        let part = mailing["progress"].as_f64().unwrap_or_default() * 1000.0;
                        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1000")]
                        let part = part as u64;
                        bar.set_length(1000);
                        bar.set_position(part);
                    }
                    false => bar.set_position(total.saturating_sub(number("pending") + number("sending"))),
                }
                // A narrow terminal cuts the end of the line.
                let pace = pace(mailing);
                bar.set_message(
                    format!("{}  {}", pace.trim_start_matches(", "), state(mailing)).trim_start().to_owned(),
                );
            }
            Self::Lines(last) => {
                let line = state(mailing);
                if *last != line {
                    say(&format!("{line}{}\n", pace(mailing)))?;
                    *last = line;
                }
            }
        }
        Ok(())
    }

    fn pause(&self, print: impl FnOnce()) {
        match self {
            Self::Bar(bar) => bar.suspend(print),
            Self::Lines(_) => print(),
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// The status and the counts of a mailing, in one line.
pub(super) fn state(mailing: &Value) -> String {
    let status = mailing["status"].as_str().unwrap_or_default();
    let total = mailing["counts"]["total"].as_i64().unwrap_or_default();
    match (status, mailing["phase"].as_str()) {
        ("PENDING" | "QUEUED", _) if total == 0 => format!("{status}: waits for a server with the role worker"),
        ("PROCESSING", Some("importing")) => {
            format!("{status}: {} imported", count(total, "address", "addresses"))
        }
        ("FAILED", _) if mailing["retryAt"].is_string() => {
            let error = plain(mailing["error"].as_str().unwrap_or_default());
            format!("{status}: {}; it is tried again: {error}", counts(mailing))
        }
        _ => format!("{status}: {}", counts(mailing)),
    }
}

/// Sent mails of all, and the other counts that are not zero.
fn counts(mailing: &Value) -> String {
    let number = |name: &str| mailing["counts"][name].as_i64().unwrap_or_default();
    let others = [
        ("pending", "pending"),
        ("sending", "being sent"),
        ("failed", "failed"),
        ("invalid", "invalid"),
        ("suppressed", "suppressed"),
        ("cancelled", "cancelled"),
        ("inDoubt", "in doubt"),
    ];
    let others = others.into_iter().map(|(name, words)| (number(name), words)).filter(|(n, _)| *n > 0);
    let others: String = others.map(|(n, words)| format!(", {n} {words}")).collect();
    format!("{} of {} sent{others}", number("sent"), number("total"))
}

/// The rate and the time that is left.
fn pace(mailing: &Value) -> String {
    let rate = mailing["rate"].as_f64().map(|rate| format!(", {rate}/s")).unwrap_or_default();
    let until = |name: &str| {
        let at = time(mailing[name].as_str()?).ok()?;
        let now = i64::try_from(SystemTime::UNIX_EPOCH.elapsed().ok()?.as_micros()).ok()?;
        let left = at.since(Timestamp::from_micros(now));
        (!left.is_zero()).then(|| span(Duration::from_secs(left.as_secs().max(1))))
    };
    match (until("sendAt"), until("eta")) {
        (Some(wait), _) => format!("{rate}, is sent in {wait}"),
        (None, Some(left)) => format!("{rate}, {left} left"),
        (None, None) => rate,
    }
}

/// How a mailing is, and what a person can do.
pub(super) async fn summary(desk: &Desk<'_>, mailing: &Value) -> anyhow::Result<String> {
    let text = |name: &str| mailing[name].as_str().map(plain);
    let id = text("mailingId").unwrap_or_default();
    let mut said = format!("{} ({id})\n  {}\n", text("filename").unwrap_or_default(), state(mailing));
    let [duplicates, rejected] =
        ["duplicateRows", "rejectedRows"].map(|name| mailing[name].as_i64().unwrap_or_default());
    if duplicates + rejected > 0 {
        let [duplicates, rejected] =
            [count(duplicates, "duplicate row", "duplicate rows"), count(rejected, "rejected row", "rejected rows")];
        said.push_str(&format!("  {duplicates}, {rejected} in the file\n"));
    }
    if let Some(at) = text("sendAt") {
        said.push_str(&format!("  not before {at}\n"));
    }
    if let Some(at) = text("retryAt") {
        said.push_str(&format!("  is tried again at {at}\n"));
    }
    if let Some(error) = text("error") {
        said.push_str(&format!("  {error}\n"));
    }
    if let Some(other) = text("sameListAs") {
        said.push_str(&format!("  the mailing {other} has the same addresses\n"));
    }
    let counted = |name: &str| mailing["counts"][name].as_i64().unwrap_or_default();
    if counted("inDoubt") > 0 {
        let doubted = desk.service.in_doubt(desk.tenant, &id, SHOWN).await;
        for (line, email) in doubted.map_err(|problem| desk.refused(&id, problem))? {
            said.push_str(&format!("  in doubt: line {line}, {}\n", plain(&email)));
        }
        said.push_str(&format!("to decide: {}\n", desk.hint("resolve", &id, "LINE --as sent|resend")));
    }
    let next = match mailing["status"].as_str() {
        Some("PAUSED") => Some(("to resume it", "resume")),
        Some("FAILED") if mailing["retryAt"].is_string() => Some(("to try it now", "retry")),
        Some("FAILED") => Some(("to try it again", "retry")),
        Some("COMPLETED") if counted("failed") + counted("invalid") > 0 => {
            Some(("to try the failed entries again", "retry"))
        }
        _ => None,
    };
    if let Some((why, command)) = next {
        said.push_str(&format!("{why}: {}\n", desk.hint(command, &id, "")));
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_mailing_that_waits_for_a_decision_has_ended_for_its_watcher() {
        assert!(!has_ended(&json!({ "status": "PROCESSING" })));
        assert!(has_ended(&json!({ "status": "PROCESSING", "waitingFor": "decision" })));
        for status in ["COMPLETED", "FAILED", "CANCELLED", "PAUSED"] {
            assert!(has_ended(&json!({ "status": status, "retryAt": null })));
        }
    }

    #[test]
    fn a_failed_mailing_that_is_tried_again_has_not_ended() {
        let counts = json!({ "total": 2, "sent": 1 });
        let mailing =
            json!({ "status": "FAILED", "retryAt": "2026-01-01T00:00:00Z", "counts": counts, "error": "no disk" });
        assert!(!has_ended(&mailing));
        assert_eq!(state(&mailing), "FAILED: 1 of 2 sent; it is tried again: no disk");
    }

    #[test]
    fn only_counts_that_are_not_zero_are_shown() {
        let counts = json!({ "total": 9, "pending": 2, "sending": 1, "sent": 5, "failed": 0, "inDoubt": 1 });
        let mailing = json!({ "status": "PROCESSING", "phase": "sending", "counts": counts, "rate": 12.5 });
        assert_eq!(state(&mailing), "PROCESSING: 5 of 9 sent, 2 pending, 1 being sent, 1 in doubt");
        assert_eq!(pace(&mailing), ", 12.5/s");
    }
}
