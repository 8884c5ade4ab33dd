//! Describes an operation by the data that is stored with it.

use semel::Operation;
use semel_http::OTHER_METHOD;

use super::words::{count, plain, quoted};
use crate::once::outcome::Stored;

/// The command line that `semel once` stores with an operation.
pub(crate) fn command(operation: &Operation) -> Option<(&'static str, String)> {
    Some(("command", command_line(operation)?))
}

/// As [`command`], without its name.
pub(crate) fn command_line(operation: &Operation) -> Option<String> {
    let payload: serde_json::Value = serde_json::from_slice(operation.payload.as_ref()?).ok()?;
    let arguments = payload.get("command")?.as_array()?;
    Some(arguments.iter().filter_map(|argument| argument.as_str()).map(quoted).collect::<Vec<_>>().join(" "))
}

/// The names of the labels that the HTTP layer sets.
pub(crate) const REQUEST_LABELS: [Option<&str>; 4] = [Some("method"), None, None, Some("path")];

/// The method and path of a request, from the labels of the HTTP layer.
pub(crate) fn request(operation: &Operation) -> Option<(&'static str, String)> {
    let [method, .., path] = &operation.labels.0;
    // Older operations have no method label.
    let method = match method.as_deref() {
        Some(OTHER_METHOD) => "(an uncommon method) ".to_owned(),
        Some(method) => format!("{} ", plain(method)),
        None => String::new(),
    };
    let path = match path.as_deref()? {
        path if path.starts_with('/') || path == "*" => plain(path),
        // Too long for a label.
        hash => format!("(a long path, whose hash is {})", plain(hash)),
    };
    Some(("request", format!("{method}{path}")))
}

/// The outcome of an operation in a few words.
pub(crate) fn outcome(operation: &Operation) -> Option<String> {
    let outcome = operation.outcome.as_ref()?;
    let size = |n: u64| count(i64::try_from(n).unwrap_or(i64::MAX), "byte", "bytes");
    Some(match Stored::read(&outcome.body) {
        Some(Stored { exit_code, printed }) if printed.is_cut() => format!(
            "exit code {exit_code}; of {} printed, the first {} are kept",
            size(printed.total),
            size(printed.kept.len() as u64)
        ),
        Some(Stored { exit_code, printed }) => format!("exit code {exit_code}; {} printed", size(printed.total)),
        None if outcome.kept => format!("{} of outcome", size(outcome.body.len() as u64)),
        None => "the outcome itself is not kept".to_owned(),
    })
}
