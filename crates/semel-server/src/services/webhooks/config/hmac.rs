//! The fields that only a source of `kind = "hmac"` has.

use semel_http::webhooks::{Algorithm, Encoding, HmacScheme};

use crate::config::{Reader, Value};

/// Another sender: its signature scheme, and where its events have their fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hmac {
    /// The signature scheme, and the header with the id.
    pub scheme: HmacScheme,
    /// The event's id in the body, if it is not in a header.
    pub id: Option<Pointer>,
    /// The event's type.
    pub kind: Option<Pointer>,
    /// The event's creation time, in seconds since 1970 or as RFC 3339.
    pub created: Option<Pointer>,
}

/// A JSON pointer (RFC 6901) to a part of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pointer(String);

impl Pointer {
    /// A pointer, if the text is a valid one.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let escaped = |text: &str| text.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
        (text.starts_with('/') && escaped(text)).then(|| Self(text.to_owned()))
    }

    /// The pointer as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Hmac {
    /// Reads the fields; the verifier reports mistakes of the scheme.
    pub(super) fn read(reader: &mut Reader<'_>, at: &impl Fn(&str) -> String) -> Self {
        let default = HmacScheme::default();
        let named = |name: Text| Some(name.0).filter(|name| !name.is_empty());
        let scheme = HmacScheme {
            header: reader.field(at("header"), Text::default).0,
            algorithm: reader.field(at("algorithm"), || default.algorithm),
            encoding: reader.field(at("encoding"), || default.encoding),
            prefix: reader.field(at("prefix"), Text::default).0,
            signed: reader.field(at("signed"), || Text(default.signed)).0,
            timestamp_header: named(reader.field(at("timestamp_header"), Text::default)),
            id_header: named(reader.field(at("id_header"), Text::default)),
        };
        Self {
            scheme,
            id: reader.field(at("id_pointer"), || None),
            kind: reader.field(at("type_pointer"), || None),
            created: reader.field(at("created_pointer"), || None),
        }
    }
}

impl Value for Algorithm {
    const EXAMPLE: &'static str = "sha256";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn to_toml(&self) -> toml::Value {
        self.to_string().into()
    }
}

impl Value for Encoding {
    const EXAMPLE: &'static str = "hex";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn to_toml(&self) -> toml::Value {
        self.to_string().into()
    }
}

/// Any text.
#[derive(Default)]
struct Text(String);

impl Value for Text {
    const EXAMPLE: &'static str = "{timestamp}.{body}";

    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }

    fn to_toml(&self) -> toml::Value {
        self.0.as_str().into()
    }
}

impl Value for Option<Pointer> {
    const EXAMPLE: &'static str = "/event/id";

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("must be a JSON pointer such as /event/id, not \"{text}\"");
        if text.is_empty() { Ok(None) } else { Pointer::new(text).map(Some).ok_or_else(wrong) }
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map_or("", Pointer::as_str).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_leads_to_a_part_of_the_body() {
        let read = |text| <Option<Pointer>>::parse(text).map(|pointer| pointer.map(|pointer| pointer.0));
        assert_eq!(read("/a~1b/0"), Ok(Some("/a~1b/0".to_owned())));
        assert_eq!(read(""), Ok(None));
        for text in ["a", "a/b", "/a~2", "/a~"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
