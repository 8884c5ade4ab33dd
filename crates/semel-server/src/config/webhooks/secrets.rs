//! Secrets, which are never shown.

use semel_http::webhooks::Secret;

use super::super::value::Value;

/// Secrets of which any will do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets(pub Vec<Secret>);

impl Value for Secrets {
    const EXAMPLE: &'static str = "${STRIPE_SECRET}";

    /// As a variable has them: one, or several with commas between. One with a comma in it needs a list in the file. An
    /// empty one stays, to be told of: a secret that should be there is not.
    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(text.split(',').map(str::trim).map(Secret::from).collect()))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        // No message may repeat what is there.
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
    fn an_empty_secret_is_not_passed_over() {
        for (text, all) in [("a,", 2), ("a,,b", 3), ("", 1), (" , ", 2)] {
            let secrets = Secrets::parse(text).unwrap();
            assert_eq!(secrets.0.len(), all, "{text:?}");
            assert!(secrets.0.iter().any(|secret| secret.expose().is_empty()), "{text:?}");
        }
    }

    #[test]
    fn a_secret_in_a_list_may_have_a_comma_in_it() {
        let one = Secrets::from_toml(&vec!["a,b"].into()).unwrap();
        let two = Secrets::from_toml(&"a,b".into()).unwrap();
        assert_eq!((one.0.len(), two.0.len()), (1, 2));
    }
}
