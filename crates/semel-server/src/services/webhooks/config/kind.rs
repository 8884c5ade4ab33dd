//! The kinds of sources.

use super::hmac::Hmac;
use crate::config::{Reader, Value};

/// The signature scheme of a source, and the form of its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// Stripe: `Stripe-Signature`, and an event object as the body.
    Stripe,
    /// Standard Webhooks: `webhook-id`, `webhook-timestamp`, `webhook-signature`.
    Standard,
    /// GitHub: `X-Hub-Signature-256` over the body.
    Github,
    /// Shopify: `X-Shopify-Hmac-SHA256` over the body.
    Shopify,
    /// Any other sender that signs with an HMAC.
    Hmac(Hmac),
}

impl SourceKind {
    /// Its name in the configuration.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Stripe => "stripe",
            Self::Standard => "standard",
            Self::Github => "github",
            Self::Shopify => "shopify",
            Self::Hmac(_) => "hmac",
        }
    }
}

/// The name of a kind, before its fields are read; empty if unset.
struct Word(&'static str);

const WORDS: [&str; 5] = ["stripe", "standard", "github", "shopify", "hmac"];

impl Value for Word {
    const EXAMPLE: &'static str = "stripe";

    fn parse(text: &str) -> Result<Self, String> {
        let known = WORDS.into_iter().find(|word| *word == text);
        known.map(Self).ok_or_else(|| format!("must be one of {}, not \"{text}\"", WORDS.join(", ")))
    }

    fn to_toml(&self) -> toml::Value {
        self.0.into()
    }
}

/// Reads the kind and its fields; the fields of other kinds are unknown.
pub(super) fn read(reader: &mut Reader<'_>, at: &impl Fn(&str) -> String) -> Option<SourceKind> {
    let before = reader.mistakes();
    let Word(word) = reader.field(at("kind"), || Word(""));
    match word {
        "stripe" => Some(SourceKind::Stripe),
        "standard" => Some(SourceKind::Standard),
        "github" => Some(SourceKind::Github),
        "shopify" => Some(SourceKind::Shopify),
        "hmac" => Some(SourceKind::Hmac(Hmac::read(reader, at))),
        _ => {
            // An unknown kind was reported already.
            if reader.mistakes() == before {
                reader.mistake(&at("kind"), format!("is required: one of {}", WORDS.join(", ")));
            }
            None
        }
    }
}
