//! Configurable HMAC schemes.

use std::{fmt, str::FromStr};

use http::HeaderName;

use super::{
    Mistakes,
    format::{Format, Single},
    template::Template,
};

/// The hash of an HMAC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-1. HMAC is not affected by its known weakness, but prefer another one if the sender offers it.
    Sha1,
    /// SHA-256.
    #[default]
    Sha256,
    /// SHA-512.
    Sha512,
}

/// The encoding of a signature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// Hex digits, upper or lower case.
    #[default]
    Hex,
    /// Base64 in the standard alphabet, with padding.
    Base64,
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sha1" => Ok(Self::Sha1),
            "sha256" => Ok(Self::Sha256),
            "sha512" => Ok(Self::Sha512),
            _ => Err(format!("must be sha1, sha256 or sha512, not {text:?}")),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        })
    }
}

impl FromStr for Encoding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "hex" => Ok(Self::Hex),
            "base64" => Ok(Self::Base64),
            _ => Err(format!("must be hex or base64, not {text:?}")),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hex => "hex",
            Self::Base64 => "base64",
        })
    }
}

/// An HMAC in one header: the most common scheme. [`Default`] is HMAC-SHA256 in hex over the body, in a header that
/// must be named.
///
/// ```
/// use semel_http::webhooks::{DEFAULT_TOLERANCE, HmacScheme, Verifier};
///
/// let chat = HmacScheme {
///     header: "X-Chat-Signature".into(),
///     prefix: "v0=".into(),
///     signed: "v0:{timestamp}:{body}".into(),
///     timestamp_header: Some("X-Chat-Timestamp".into()),
///     ..HmacScheme::default()
/// };
/// assert!(Verifier::hmac(&chat, ["geheim"], DEFAULT_TOLERANCE).is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HmacScheme {
    /// The header with the signature.
    pub header: String,
    /// The hash.
    pub algorithm: Algorithm,
    /// The encoding of the signature.
    pub encoding: Encoding,
    /// The prefix of the signature in its header, such as `sha256=`.
    pub prefix: String,
    /// The signed text: `{body}`, optionally with `{timestamp}` and `{id}`, and punctuation between them. Braces have
    /// no other use.
    pub signed: String,
    /// The header with the timestamp, in seconds since 1970. Only for a signed timestamp: any other proves nothing.
    pub timestamp_header: Option<String>,
    /// The header with the event's id, signed or not.
    pub id_header: Option<String>,
}

impl Default for HmacScheme {
    fn default() -> Self {
        Self {
            header: String::new(),
            algorithm: Algorithm::default(),
            encoding: Encoding::default(),
            prefix: String::new(),
            signed: "{body}".to_owned(),
            timestamp_header: None,
            id_header: None,
        }
    }
}

impl HmacScheme {
    pub(super) fn github() -> Self {
        Self {
            header: "x-hub-signature-256".to_owned(),
            prefix: "sha256=".to_owned(),
            id_header: Some("x-github-delivery".to_owned()),
            ..Self::default()
        }
    }

    pub(super) fn shopify() -> Self {
        Self {
            header: "x-shopify-hmac-sha256".to_owned(),
            encoding: Encoding::Base64,
            // Not the event's id: one event may be sent under several topics, and each delivery must be handled.
            id_header: Some("x-shopify-webhook-id".to_owned()),
            ..Self::default()
        }
    }

    /// The format and the template, if every field is valid.
    pub(super) fn parse(&self, mistakes: &mut Mistakes) -> Option<(Format, Template)> {
        let header = name("header", &self.header, mistakes);
        if !self.prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            mistakes.add("prefix", "must consist of visible ASCII characters");
        }
        let template = Template::parse(&self.signed).map_err(|what| mistakes.add("signed", what)).ok();
        let mut other = |field, text: &Option<String>| text.as_ref().and_then(|text| name(field, text, mistakes));
        let timestamp_header = other("timestamp_header", &self.timestamp_header);
        let id_header = other("id_header", &self.id_header);
        if let Some(template) = &template {
            match (template.signs_timestamp(), &self.timestamp_header) {
                (true, None) => mistakes.add("timestamp_header", "is required: the timestamp is signed"),
                (false, Some(_)) => mistakes.add("timestamp_header", "is useless: {timestamp} is not in signed"),
                _ => {}
            }
            if template.signs_id() && self.id_header.is_none() {
                mistakes.add("id_header", "is required: the id is signed");
            }
        }
        let names = [&header, &timestamp_header, &id_header];
        if (1..3).any(|i| names[i].is_some() && names[..i].contains(&names[i])) {
            mistakes.add("header", "must differ from timestamp_header and id_header, and those from each other");
        }
        let (prefix, encoding) = (self.prefix.clone(), self.encoding);
        Some((Format::Single(Single { header: header?, prefix, encoding, timestamp_header, id_header }), template?))
    }
}

fn name(field: &str, text: &str, mistakes: &mut Mistakes) -> Option<HeaderName> {
    let name = HeaderName::from_str(text).ok();
    if name.is_none() {
        mistakes.add(field, if text.is_empty() { "must not be empty" } else { "must be the name of a header" });
    }
    name
}
