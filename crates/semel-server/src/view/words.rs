//! Times, durations and texts for people.

use std::{borrow::Cow, time::Duration};

use semel::{Key, Scope, journal::Note, look::SetAside};
use semel_store::Paused;

use crate::{http::fields::is_hidden, once::DEFAULT_SCOPE};

/// A duration: to the millisecond below a second, to the second above a minute.
pub(crate) fn span(time: Duration) -> String {
    match time.as_millis() {
        0 => "less than 1 ms".to_owned(),
        millis @ 1..1_000 => format!("{millis} ms"),
        millis @ 1_000..60_000 => format!("{}.{} s", millis / 1000, millis % 1000 / 100),
        _ => humantime::format_duration(Duration::from_secs(time.as_secs())).to_string(),
    }
}

/// A number and its noun.
pub(crate) fn count(n: impl Into<i64>, one: &str, many: &str) -> String {
    match n.into() {
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    }
}

/// The longest cell of a table, in characters.
const LONGEST_CELL: usize = 200;

/// Rows under one another, each column as wide as its widest cell.
pub(crate) fn table<const N: usize>(rows: impl Iterator<Item = [String; N]>) -> String {
    let cut = |cell: String| match cell.char_indices().nth(LONGEST_CELL) {
        Some((end, _)) => format!("{}…", &cell[..end]),
        None => cell,
    };
    let rows: Vec<_> = rows.map(|row| row.map(cut)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// An external text for a terminal: without control characters, which could move the cursor or forge a line.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if is_hidden(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// Why an operation was set aside.
pub(crate) fn set_aside(aside: &SetAside) -> String {
    format!("set aside since {}: cannot {}: {}", aside.since, aside.what.in_words(), plain(&aside.reason))
}

/// An argument quoted for a shell.
pub(crate) fn quoted(text: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match text {
        text if !text.is_empty() && text.chars().all(bare) => text.to_owned(),
        text => format!("'{}'", plain(text).replace('\'', "'\\''")),
    }
}

/// The text of a note. The runs tell since when an expired lease was held.
pub(super) fn told(note: &Note) -> Cow<'_, str> {
    match note.lapsed_lease() {
        Some((lease, _)) => format!("{lease} expired").into(),
        None => note.detail.as_str().into(),
    }
}

/// A command about an operation, ready to be pasted; `ledger` has the flags with which it finds the ledger.
pub(crate) fn hint(command: &str, flags: &str, scope: &Scope, key: &Key, ledger: &str) -> String {
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

/// The command for every state that waits for a person.
pub(crate) fn resolve(scope: &Scope, key: &Key, ledger: &str) -> String {
    hint("semel operations resolve", "--as completed|failed|retry --reason '…'", scope, key, ledger)
}

/// Since when a kind is paused, by whom and why.
pub(crate) fn paused(service: &str, kind: &str, Paused { at, actor, reason }: &Paused) -> String {
    let kind = plain(&format!("{service}/{kind}"));
    format!("{kind} is paused since {at} by {}, because: {}", plain(actor), plain(reason))
}

/// How often, in words.
pub(crate) fn times(n: impl Into<i64>) -> String {
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
    fn durations_are_shown_in_readable_units() {
        for (millis, text) in
            [(0, "less than 1 ms"), (1, "1 ms"), (999, "999 ms"), (1_000, "1.0 s"), (59_999, "59.9 s"), (60_000, "1m")]
        {
            assert_eq!(span(Duration::from_millis(millis)), text);
        }
        assert_eq!(span(Duration::from_millis(3_723_500)), "1h 2m 3s");
    }

    #[test]
    fn a_quoted_text_is_read_back_by_a_shell() {
        for (text, shown) in [("a-b", "a-b"), ("a b", "'a b'"), ("", "''"), ("it's", "'it'\\''s'"), ("$x", "'$x'")] {
            assert_eq!(quoted(text), shown);
        }
    }

    #[test]
    fn a_hint_can_be_pasted_into_a_shell() {
        let hint =
            |scope, key| hint("why", "-x", &Scope::parse(scope).unwrap(), &Key::new(key).unwrap(), "--data-dir d");
        assert_eq!(hint("cli/once", "a b"), "why 'a b' --data-dir d -x");
        assert_eq!(hint("cli/other", "k"), "why k --scope default/cli/other --data-dir d -x");
        assert_eq!(hint("cli/other", "-k"), "why --scope default/cli/other --data-dir d -x -- -k");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(plain("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
    }
}
