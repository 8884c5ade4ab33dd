//! `${VAR}` in a text of the file stands for an environment variable; `$${` is a plain `${`.

use super::environment::{Environment, NotText};

/// Expands the variables, or lists every mistake in the text.
///
/// Values are not expanded again: a password may contain `${`.
pub(super) fn expand(text: &str, environment: &Environment) -> Result<String, Vec<String>> {
    let mut expanded = String::with_capacity(text.len());
    let mut mistakes = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if let Some(before) = rest[..at].strip_suffix('$') {
            expanded.push_str(before);
            expanded.push_str("${");
            rest = &rest[at + 2..];
            continue;
        }
        expanded.push_str(&rest[..at]);
        let Some((name, after)) = rest[at + 2..].split_once('}') else {
            mistakes.push("a `${` has no closing `}`; write `$${` for a plain `${`".to_owned());
            rest = "";
            break;
        };
        rest = after;
        if !is_name(name) {
            mistakes.push("there is no variable name between `${` and `}`; write `$${` for a plain `${`".to_owned());
            continue;
        }
        match environment.get(name) {
            Ok(Some(value)) => expanded.push_str(value),
            Ok(None) => mistakes.push(format!(
                "the environment variable {name} is not set: set it where semel is started, or write the value here"
            )),
            Err(NotText) => mistakes.push(format!("the environment variable {name} is not valid UTF-8")),
        }
    }
    expanded.push_str(rest);
    if mistakes.is_empty() { Ok(expanded) } else { Err(mistakes) }
}

/// Escapes a text so that [`expand`] returns it unchanged.
pub(super) fn escape(text: &str) -> String {
    text.replace("${", "$${")
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment() -> Environment {
        [("USER", "ana"), ("EMPTY", ""), ("NESTED", "${USER}")].into_iter().collect()
    }

    #[test]
    fn variables_are_put_in_once_and_not_again() {
        for (text, expected) in [
            ("plain", "plain"),
            ("${USER}", "ana"),
            ("a${USER}b${USER}", "aanabana"),
            ("[${EMPTY}]", "[]"),
            ("${NESTED}", "${USER}"),
            ("$USER $ {USER} 5$", "$USER $ {USER} 5$"),
            ("$${USER}", "${USER}"),
            ("$$${USER}", "$${USER}"),
            ("é${USER}é", "éanaé"),
        ] {
            assert_eq!(expand(text, &environment()).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn every_missing_variable_is_named() {
        let mistakes = expand("${ONE}${TWO}${}${", &environment()).unwrap_err();
        assert_eq!(mistakes.len(), 4);
        assert!(mistakes[0].contains("ONE") && mistakes[1].contains("TWO"), "{mistakes:?}");
    }

    #[test]
    fn an_escaped_text_expands_to_itself() {
        for text in ["${USER}", "$${USER}", "$$", "${", "a$${b}${c}"] {
            assert_eq!(expand(&escape(text), &environment()).as_deref(), Ok(text), "{text}");
        }
    }
}
