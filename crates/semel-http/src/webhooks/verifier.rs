//! The verifier of one source.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::HeaderMap;

use super::{
    Algorithm, DEFAULT_TOLERANCE, HmacScheme, Mistakes, Refused, Secret,
    format::{self, Format, Sent},
    mac::Mac,
    template::Template,
};

/// Secrets that are copied by hand often lose their padding.
const PADDED_OR_NOT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The facts that a valid signature proves about a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Verified {
    /// The sender's id from its header, if the scheme has one and the delivery has it.
    pub id: Option<String>,
    /// Whether the signature covers the id. An unsigned id can be changed by anyone who re-sends the same bytes, so it
    /// must not be the only key for deduplication.
    pub id_is_signed: bool,
    /// The signed time, in seconds since 1970, if the scheme has one.
    pub timestamp: Option<i64>,
    /// Whether the signature covers only the body. Such a signature never expires: a third party that has seen it can
    /// re-send it for ever.
    pub signs_only_body: bool,
    /// The index of the matching secret, from 0: shows when a rotation is complete.
    pub secret: usize,
}

/// Verifies that a delivery was signed with one of the secrets, within the tolerance.
///
/// Each constructor refuses settings that would accept forged deliveries, and reports all mistakes.
#[derive(Clone)]
pub struct Verifier {
    format: Format,
    template: Template,
    algorithm: Algorithm,
    keys: Vec<Mac>,
    /// In seconds; none if no timestamp is signed.
    tolerance: Option<u64>,
}

impl Verifier {
    /// Stripe's scheme: `Stripe-Signature: t=…,v1=…`, signed over `{timestamp}.{body}`. The key is the whole secret,
    /// including `whsec_`.
    ///
    /// # Errors
    /// No secret, an invalid one, or a tolerance under a second.
    pub fn stripe<S: Into<Secret>>(
        secrets: impl IntoIterator<Item = S>,
        tolerance: Duration,
    ) -> Result<Self, Mistakes> {
        let (format, template, algorithm) = (Format::Stripe, Template::stripe(), Algorithm::Sha256);
        let mut mistakes = Mistakes::default();
        let keys = keys(secrets, algorithm, plain, &mut mistakes);
        let tolerance = Some(seconds(tolerance, &mut mistakes));
        mistakes.none_or_err()?;
        Ok(Self { format, template, algorithm, keys, tolerance })
    }

    /// [Standard Webhooks](https://www.standardwebhooks.com) with shared secrets: `webhook-signature: v1,…`, signed
    /// over `{id}.{timestamp}.{body}`. The key is the base64 text after an optional `whsec_`.
    ///
    /// # Errors
    /// No secret, an invalid one, or a tolerance under a second.
    pub fn standard<S: Into<Secret>>(
        secrets: impl IntoIterator<Item = S>,
        tolerance: Duration,
    ) -> Result<Self, Mistakes> {
        let (format, template, algorithm) = (Format::Standard, Template::standard(), Algorithm::Sha256);
        let mut mistakes = Mistakes::default();
        let keys = keys(secrets, algorithm, from_base64, &mut mistakes);
        let tolerance = Some(seconds(tolerance, &mut mistakes));
        mistakes.none_or_err()?;
        Ok(Self { format, template, algorithm, keys, tolerance })
    }

    /// GitHub's scheme: `X-Hub-Signature-256: sha256=…` over the body. GitHub's SHA-1 signature is ignored.
    ///
    /// # Errors
    /// No secret, or an invalid one.
    pub fn github<S: Into<Secret>>(secrets: impl IntoIterator<Item = S>) -> Result<Self, Mistakes> {
        Self::hmac(&HmacScheme::github(), secrets, DEFAULT_TOLERANCE)
    }

    /// Shopify's scheme: `X-Shopify-Hmac-SHA256` over the body.
    ///
    /// # Errors
    /// No secret, or an invalid one.
    pub fn shopify<S: Into<Secret>>(secrets: impl IntoIterator<Item = S>) -> Result<Self, Mistakes> {
        Self::hmac(&HmacScheme::shopify(), secrets, DEFAULT_TOLERANCE)
    }

    /// A configured scheme. The tolerance applies to a signed timestamp. It is checked in any case, so that a wrong one
    /// is found before a timestamp is added.
    ///
    /// # Errors
    /// The mistakes in the scheme, the secrets and the tolerance.
    pub fn hmac<S: Into<Secret>>(
        scheme: &HmacScheme,
        secrets: impl IntoIterator<Item = S>,
        tolerance: Duration,
    ) -> Result<Self, Mistakes> {
        let algorithm = scheme.algorithm;
        let mut mistakes = Mistakes::default();
        let parts = scheme.parse(&mut mistakes);
        let keys = keys(secrets, algorithm, plain, &mut mistakes);
        let tolerance = seconds(tolerance, &mut mistakes);
        match (parts, mistakes.none_or_err()) {
            (_, Err(mistakes)) => Err(mistakes),
            // Cannot happen: an unreadable scheme is a mistake. If it did, everything would be refused.
            (None, Ok(())) => Err(Mistakes::default()),
            (Some((format, template)), Ok(())) => {
                let tolerance = template.signs_timestamp().then_some(tolerance);
                Ok(Self { format, template, algorithm, keys, tolerance })
            }
        }
    }

    /// Verifies a delivery. `body` is the raw body, before parsing or decompression.
    ///
    /// The signature is checked before the time, so [`Refused::TooOld`] and [`Refused::TooNew`] are only returned for
    /// deliveries of the sender: late ones, replayed ones, or with a wrong clock.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8], now: SystemTime) -> Result<Verified, Refused> {
        let sent = self.format.read(headers, self.algorithm, &self.template)?;
        let fits = |key: &Mac| {
            let mut mac = key.clone();
            self.template.feed(&mut mac, &sent, body);
            sent.signatures.iter().any(|code| mac.fits(code))
        };
        let secret = self.keys.iter().position(fits).ok_or(Refused::Wrong)?;
        let timestamp = sent.timestamp.map(|(number, _)| number);
        if let (Some(signed), Some(tolerance)) = (timestamp, self.tolerance) {
            let now = unix(now);
            match now.abs_diff(signed) {
                near if near <= tolerance => {}
                age if signed < now => return Err(Refused::TooOld { age, tolerance }),
                ahead => return Err(Refused::TooNew { ahead, tolerance }),
            }
        }
        Ok(Verified {
            id: sent.id.map(str::to_owned),
            id_is_signed: self.template.signs_id(),
            timestamp,
            signs_only_body: !self.template.signs_timestamp() && !self.template.signs_id(),
            secret,
        })
    }

    /// The headers of a delivery, signed with the first secret: for senders and for tests.
    ///
    /// The id is left out if the scheme has no header for it.
    ///
    /// # Errors
    /// An id that cannot be sent, or a missing one that must be signed.
    pub fn sign(&self, id: Option<&str>, at: SystemTime, body: &[u8]) -> Result<HeaderMap, Refused> {
        let at = unix(at);
        let written = at.to_string();
        let mut sent = Sent { timestamp: Some((at, written.as_bytes())), ..Sent::default() };
        if let Some(header) = self.format.id_header() {
            sent.id = id.map(|id| format::id(header, id.as_bytes(), &self.template)).transpose()?;
            if sent.id.is_none() && self.template.signs_id() {
                return Err(Refused::Missing { header: header.clone() });
            }
        }
        // There is a key: a verifier cannot be built without one.
        let mut mac = self.keys.first().ok_or(Refused::Wrong)?.clone();
        self.template.feed(&mut mac, &sent, body);
        self.format.write(&sent, &mac.finish()).ok_or(Refused::Wrong)
    }
}

/// The number of secrets, not the secrets.
impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier")
            .field("format", &self.format)
            .field("template", &self.template)
            .field("algorithm", &self.algorithm)
            .field("secrets", &self.keys.len())
            .field("tolerance", &self.tolerance)
            .finish()
    }
}

/// The keys of the secrets.
fn keys<S: Into<Secret>>(
    secrets: impl IntoIterator<Item = S>,
    algorithm: Algorithm,
    key: fn(&str) -> Result<Vec<u8>, &'static str>,
    mistakes: &mut Mistakes,
) -> Vec<Mac> {
    let mut keys = Vec::new();
    let mut number = 0;
    for secret in secrets {
        match key(secret.into().expose()) {
            Ok(key) if key.is_empty() => mistakes.add(format!("secrets[{number}]"), "must not be empty"),
            Ok(key) => keys.extend(Mac::new(algorithm, &key)),
            Err(what) => mistakes.add(format!("secrets[{number}]"), what),
        }
        number += 1;
    }
    if number == 0 {
        mistakes.add("secrets", "must have at least one secret");
    }
    keys
}

/// The bytes of a secret. White space around it comes from the file or variable that it was read from; with it every
/// delivery would be refused without a visible reason.
fn plain(secret: &str) -> Result<Vec<u8>, &'static str> {
    match secret {
        // The value of `whsec_${SECRET}` without the variable: a secret that anyone can guess.
        "whsec_" => Ok(Vec::new()),
        _ if secret.trim() != secret => Err("must not begin or end with white space"),
        _ => Ok(secret.into()),
    }
}

fn from_base64(secret: &str) -> Result<Vec<u8>, &'static str> {
    let secret = secret.strip_prefix("whsec_").unwrap_or(secret);
    PADDED_OR_NOT.decode(secret).map_err(|_| "must be base64, with or without whsec_ before it")
}

/// Whole seconds, because senders sign whole seconds. Other libraries take 0 for "do not check the time".
fn seconds(tolerance: Duration, mistakes: &mut Mistakes) -> u64 {
    if tolerance.as_secs() == 0 {
        mistakes.add("tolerance", "must be at least a second");
    }
    tolerance.as_secs()
}

/// Seconds since 1970; earlier times are 0, which no signed timestamp is near.
fn unix(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
