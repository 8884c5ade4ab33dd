//! What kind of sender a source is.

use super::{
    super::{reader::Reader, value::Value},
    hmac::Hmac,
};

/// How a source signs, and what its events look like.
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
    /// Anybody else who signs with an HMAC.
    Hmac(Hmac),
}

impl SourceKind {
    /// The word for it in the configuration.
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

/// A kind by its word, before what belongs to it is read; empty when nobody said one.
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

/// Reads the kind and the fields that only this kind has; of another kind those do not exist.
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
            // A wrong word was told about already.
            if reader.mistakes() == before {
                reader.mistake(&at("kind"), format!("must say which kind it is: one of {}", WORDS.join(", ")));
            }
            None
        }
    }
}
