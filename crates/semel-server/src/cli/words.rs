//! Times, lengths and texts as people read them.

use std::time::Duration;

use semel::{Key, Operation, Scope, look::SetAside};
use semel_http::OTHER_METHOD;

use crate::{gateway, once::outcome::Stored, services::proposals};

/// Reads a length of time from the command line.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "must be a length of time such as 30s, 5m or 1h 30m".to_owned())
}

/// Reads why a person does something.
pub(super) fn reason(text: &str) -> Result<String, &'static str> {
    match text.trim() {
        "" => Err("must say something"),
        reason => Ok(reason.to_owned()),
    }
}

/// The scope of `semel once`, and of every command that is not told another.
pub(super) const DEFAULT_SCOPE: &str = "cli/once";

/// A length of time: to the millisecond below a second, to the second above a minute.
pub(super) fn span(time: Duration) -> String {
    match time.as_millis() {
        0 => "less than 1 ms".to_owned(),
        millis @ 1..1_000 => format!("{millis} ms"),
        millis @ 1_000..60_000 => format!("{}.{} s", millis / 1000, millis % 1000 / 100),
        _ => humantime::format_duration(Duration::from_secs(time.as_secs())).to_string(),
    }
}

/// A number and what it counts.
pub(super) fn count(n: impl Into<i64>, one: &str, many: &str) -> String {
    match n.into() {
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    }
}

/// A text that came from elsewhere, for a terminal: without the control characters by which it could move the cursor
/// or forge a line.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// Why an operation was set aside.
pub(super) fn set_aside(aside: &SetAside) -> String {
    format!("set aside since {}: cannot {}: {}", aside.since, aside.what.in_words(), plain(&aside.reason))
}

/// An argument as a shell takes it.
pub(super) fn quoted(text: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match text {
        text if !text.is_empty() && text.chars().all(bare) => text.to_owned(),
        text => format!("'{}'", plain(text).replace('\'', "'\\''")),
    }
}

/// The command line that `semel once` keeps with an operation.
pub(super) fn command_line(operation: &Operation) -> Option<String> {
    let payload: serde_json::Value = serde_json::from_slice(operation.payload.as_ref()?).ok()?;
    let arguments = payload.get("command")?.as_array()?;
    Some(arguments.iter().filter_map(|argument| argument.as_str()).map(quoted).collect::<Vec<_>>().join(" "))
}

/// The method and path of a request that came through the gateway or to the proposals, as the layer labels it.
pub(super) fn request_line(operation: &Operation) -> Option<String> {
    let [method, .., path] = &operation.labels.0;
    match (operation.scope.service(), operation.scope.kind()) {
        (gateway::SERVICE, gateway::KIND) | (proposals::SERVICE, _) => {}
        _ => return None,
    }
    // Those from before methods were labelled have none.
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
    Some(format!("{method}{path}"))
}

/// What is kept of an operation that took effect, in a few words.
pub(super) fn outcome(operation: &Operation) -> Option<String> {
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

/// A command about an operation, ready to be pasted; `ledger` is [`Opened::flags`](super::ledger::Opened).
pub(super) fn hint(command: &str, flags: &str, scope: &Scope, key: &Key, ledger: &str) -> String {
    let is_default = Scope::parse(DEFAULT_SCOPE).is_ok_and(|default| default == *scope);
    let scope = if is_default { String::new() } else { format!("--scope {}", quoted(&scope.to_string())) };
    let key = quoted(key.as_str());
    // A key that looks like a flag comes last.
    let parts = match key.starts_with('-') {
        true => [command, &scope, ledger, flags, "--", &key],
        false => [command, &key, &scope, ledger, flags, ""],
    };
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// The way out of every state that waits for a person.
pub(super) fn resolve(scope: &Scope, key: &Key, ledger: &str) -> String {
    hint("semel operations resolve", "--as completed|failed|retry --reason '…'", scope, key, ledger)
}

/// How often, as one says it.
pub(super) fn times(n: impl Into<i64>) -> String {
    match n.into() {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        n => format!("{n} times"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_read_well() {
        for (millis, text) in
            [(0, "less than 1 ms"), (1, "1 ms"), (999, "999 ms"), (1_000, "1.0 s"), (59_999, "59.9 s"), (60_000, "1m")]
        {
            assert_eq!(span(Duration::from_millis(millis)), text);
        }
        assert_eq!(span(Duration::from_millis(3_723_500)), "1h 2m 3s");
    }

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        for (text, shown) in [("a-b", "a-b"), ("a b", "'a b'"), ("", "''"), ("it's", "'it'\\''s'"), ("$x", "'$x'")] {
            assert_eq!(quoted(text), shown);
        }
    }

    #[test]
    fn a_hint_can_be_typed_as_it_is() {
        let hint =
            |scope, key| hint("why", "-x", &Scope::parse(scope).unwrap(), &Key::new(key).unwrap(), "--data-dir d");
        assert_eq!(hint("cli/once", "a b"), "why 'a b' --data-dir d -x");
        assert_eq!(hint("cli/other", "k"), "why k --scope default/cli/other --data-dir d -x");
        assert_eq!(hint("cli/other", "-k"), "why --scope default/cli/other --data-dir d -x -- -k");
    }

    #[test]
    fn no_text_moves_the_cursor() {
        assert_eq!(plain("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
    }
}
