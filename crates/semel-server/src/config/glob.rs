//! Patterns in which `*` stands for any text.

/// Whether a text matches a pattern in which `*` matches any text.
pub(crate) fn glob(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut left) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<_> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        // The earliest match leaves the most text for the parts after it.
        let Some((_, after)) = left.split_once(part) else { return false };
        left = after;
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("A*", "A", true),
            ("A*", "BA", false),
            ("*A", "BAA", true),
            ("A*B*C", "AxBxBxC", true),
            ("A*B*C", "AxCxB", false),
            ("A*A", "A", false),
            ("A", "A", true),
            ("A", "AB", false),
        ] {
            assert_eq!(glob(pattern, text), fits, "{pattern} {text}");
        }
    }
}
