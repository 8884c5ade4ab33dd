//! Secrets, which are never shown.

use semel_http::webhooks::Secret;

use super::SourceKind;
use crate::config::Value;

/// Secrets, any of which is accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets(pub Vec<Secret>);

/// Shorter secrets can be guessed by brute force. Senders generate 20 bytes and more.
const SHORTEST: usize = 8;

impl Secrets {
    /// All mistakes of valid-looking secrets, each once. No message repeats a secret.
    pub(super) fn mistakes(&self, kind: &SourceKind) -> Vec<String> {
        let mut all: Vec<_> = self.0.iter().filter_map(|secret| mistake(secret.expose(), kind)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

fn mistake(secret: &str, kind: &SourceKind) -> Option<String> {
    let own = secret.strip_prefix("whsec_").unwrap_or(secret);
    // The verifier reports these.
    if own.is_empty() || secret.trim() != secret {
        return None;
    }
    if own.chars().any(is_invisible) {
        return Some("must not contain invisible characters".to_owned());
    }
    if is_variable(own) {
        return Some("must not be the name of a variable: in the file, write ${NAME} for its value".to_owned());
    }
    let bytes = match kind {
        SourceKind::Standard => own.trim_end_matches('=').len() * 3 / 4,
        _ => own.len(),
    };
    (bytes < SHORTEST).then(|| format!("must have {SHORTEST} bytes or more, without whsec_"))
}

/// Whether a character is invisible: it was copied by accident, and every delivery would be refused.
fn is_invisible(c: char) -> bool {
    let of_no_width = ['\u{ad}'..='\u{ad}', '\u{200b}'..='\u{200f}', '\u{2060}'..='\u{206f}', '\u{feff}'..='\u{feff}'];
    c.is_control() || of_no_width.iter().any(|range| range.contains(&c))
}

/// Whether a text is `$NAME` or `${NAME}`: the value of a variable was meant, and this text is easy to guess.
fn is_variable(text: &str) -> bool {
    let Some(name) = text.strip_prefix('$') else { return false };
    let name = name.strip_prefix('{').and_then(|name| name.strip_suffix('}')).unwrap_or(name);
    let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

impl Value for Secrets {
    const EXAMPLE: &'static str = "${STRIPE_SECRET}";

    /// The form of a variable: one secret, or several separated by commas. A secret with a comma needs a list in the
    /// file. An empty one is kept so that it is reported: a secret is missing.
    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(text.split(',').map(str::trim).map(Secret::from).collect()))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        // No message may repeat the value.
        let wrong = || format!("must be a list of strings such as [\"{}\"]", Self::EXAMPLE);
        match value {
            toml::Value::Array(items) => {
                let texts = items.iter().map(|item| item.as_str().map(Secret::from).ok_or_else(wrong));
                texts.collect::<Result<_, _>>().map(Self)
            }
            toml::Value::String(text) => Self::parse(text),
            _ => Err(wrong()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.iter().map(|_| "***").collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_shown() {
        let secrets = Secrets::parse("geheim, s3cret").unwrap();
        assert_eq!(secrets.0.iter().map(Secret::expose).collect::<Vec<_>>(), ["geheim", "s3cret"]);
        let shown = format!("{secrets:?} {}", secrets.to_toml());
        assert!(!shown.contains("geheim") && !shown.contains("s3cret"), "{shown}");
        let wrong = Secrets::from_toml(&toml::Value::Array(vec![toml::Value::Integer(1234)])).unwrap_err();
        assert!(!wrong.contains("1234"), "{wrong}");
    }

    #[test]
    fn an_empty_secret_is_reported() {
        for (text, all) in [("a,", 2), ("a,,b", 3), ("", 1), (" , ", 2)] {
            let secrets = Secrets::parse(text).unwrap();
            assert_eq!(secrets.0.len(), all, "{text:?}");
            assert!(secrets.0.iter().any(|secret| secret.expose().is_empty()), "{text:?}");
        }
    }

    #[test]
    fn a_secret_that_is_easy_to_guess_or_invisible_is_refused() {
        let mistake = |secret: &str| Secrets(vec![secret.into()]).mistakes(&SourceKind::Github).pop();
        for right in ["12345678", "whsec_12345678", "p$ssword", "$1234567", "$a-secret", "ünïcödé"] {
            assert_eq!(mistake(right), None, "{right}");
        }
        for (wrong, told) in [
            ("1234567", "8 bytes"),
            ("whsec_1234567", "8 bytes"),
            ("\u{200b}\u{200b}\u{200b}", "invisible"),
            ("a good secret\u{feff}", "invisible"),
            ("a\tgood\tsecret", "invisible"),
            ("$STRIPE_SECRET", "variable"),
            ("${STRIPE_SECRET}", "variable"),
            ("whsec_$SECRET", "variable"),
        ] {
            let said = mistake(wrong).unwrap();
            assert!(said.contains(told) && !said.contains(wrong), "{wrong:?}: {said}");
        }
        let standard = |secret: &str| Secrets(vec![secret.into()]).mistakes(&SourceKind::Standard).pop();
        assert!(standard("whsec_c2VjcmV0").is_some(), "six bytes");
        assert_eq!(standard("whsec_ZWlnaHQgYnk="), None, "eight bytes");
    }

    #[test]
    fn a_secret_in_a_list_may_have_a_comma_in_it() {
        let one = Secrets::from_toml(&vec!["a,b"].into()).unwrap();
        let two = Secrets::from_toml(&"a,b".into()).unwrap();
        assert_eq!((one.0.len(), two.0.len()), (1, 2));
    }
}
