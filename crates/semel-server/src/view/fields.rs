//! All stored data of one operation, as a table for people.

use semel::{
    Operation, Timestamp,
    look::{SetAside, Unreadable},
};

use super::{
    about::outcome,
    words::{self, plain},
};
use crate::once::outcome::Stored;

/// How much of a payload or an outcome is shown: a screen or two.
const SHOWN: usize = 4_000;

/// Why an operation was set aside.
pub(crate) fn set_aside(aside: &[SetAside]) -> String {
    let one = |aside: &SetAside| format!("\n{}; next try at {}\n", words::set_aside(aside), aside.retry_at);
    aside.iter().map(one).collect()
}

/// The readable columns of an unreadable operation.
pub(crate) fn unreadable(row: &Unreadable) -> String {
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

/// The fields of an operation, then its payload, checkpoint and outcome.
pub(crate) fn whole(op: &Operation) -> String {
    let time = |at: Option<Timestamp>| at.map(|at| at.to_string());
    let some = |n: u32| (n > 0).then(|| n.to_string());
    let labels: Vec<_> = op.labels.0.iter().flatten().map(|label| plain(label)).collect();
    let (about, text) = (crate::services::telling(op.scope.service()).about)(op).unzip();
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
        ("priority", Some(op.priority.get()).filter(|priority| *priority != 0).map(|priority| priority.to_string())),
        ("created", time(Some(op.created_at))),
        ("claimed", time(Some(op.claimed_at).filter(|_| op.was_claimed()))),
        ("settled", time(op.settled_at)),
        ("not before", time(op.not_before)),
        ("kept until", time(op.expires_at)),
        ("archive at", time(op.archive_at)),
        ("archived", op.archived.then(|| "yes".to_owned())),
        ("pinned", op.pinned.then(|| "yes".to_owned())),
        ("lease ends", op.lease.as_ref().map(|lease| lease.deadline.to_string())),
        (about.unwrap_or_default(), text),
        ("outcome", outcome(op)),
    ];
    let mut text = String::new();
    for (name, value) in fields {
        if let Some(value) = value {
            text.push_str(&format!("{name:12} {value}\n"));
        }
    }
    if let Some(payload) = op.payload.as_ref().filter(|_| about != Some("command")) {
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

/// Bytes for people: text line by line, up to a limit.
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
