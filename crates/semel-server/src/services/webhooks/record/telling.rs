//! How events are described.

use semel::Scope;

use super::sent::stuck;
use crate::{
    services::webhooks::{again::result_of, process::STORED},
    view::{Meaning, Telling, View, words::quoted},
};

/// An event whose message has reached no consumer, or without a matching rule, has completed without an effect so far.
pub(crate) const TELLING: Telling = Telling {
    noun: ("event", "events"),
    labels: [Some("event_type"), Some("webhook_function"), Some("source"), None],
    about: |_| None,
    completed: |view, ledger| match result_of(&view.operation) {
        Some(STORED) => Some(Meaning {
            verdict: "it was stored, and no rule matched",
            kept: Some(STORED),
            next: format!("To run it through the present rules: {}", rerun(view, ledger)),
        }),
        _ => stuck(view),
    },
};

/// The command that runs a stored event through the present rules.
fn rerun(view: &View, ledger: &str) -> String {
    let op = &view.operation;
    let [_, function, source, _] = op.labels.0.each_ref().map(|label| label.as_deref().unwrap_or_default());
    let mut flags = Vec::new();
    if op.scope.kind() != source {
        flags.push(format!("--function {}", quoted(function)));
    }
    if op.scope.tenant() != Scope::DEFAULT_TENANT {
        flags.push(format!("--tenant {}", quoted(op.scope.tenant())));
    }
    flags.extend(Some(ledger.to_owned()).filter(|flags| !flags.is_empty()));
    flags.push("--reason '…'".to_owned());
    // An id that looks like a flag comes last.
    let (flags, key) = (flags.join(" "), quoted(op.key.as_str()));
    match key.starts_with('-') {
        true => format!("semel webhooks rerun {flags} -- {source} {key}"),
        false => format!("semel webhooks rerun {source} {key} {flags}"),
    }
}
