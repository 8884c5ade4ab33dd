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

/// Secrets are copied by hand, and lose their padding on the way.
const PADDED_OR_NOT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What a signature proved about a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Verified {
    /// The sender's id from its header, where the scheme has one and the delivery came with it.
    pub id: Option<String>,
    /// Whether the signature is over the id, too. An id that is not signed can be changed by who sends the same bytes
    /// again, so it must not be the only thing that tells a duplicate.
    pub id_is_signed: bool,
    /// When it was signed, in seconds since 1970, where the scheme says so.
    pub timestamp: Option<i64>,
    /// Whether the signature is over the body alone. Then it never grows old: who has seen it can send it for ever.
    pub signs_only_body: bool,
    /// Which of the secrets it was signed with, counted from 0: when a change of secrets is over shows here.
    pub secret: usize,
}

/// Tells whether a delivery was signed with one of the secrets, and not too long ago.
///
/// Each constructor refuses settings that would let forged deliveries pass, and names all of them.
#[derive(Clone)]
pub struct Verifier {
    format: Format,
    template: Template,
    algorithm: Algorithm,
    keys: Vec<Mac>,
    /// In seconds; nothing where no timestamp is signed.
    tolerance: Option<u64>,
}

impl Verifier {
    /// Stripe's scheme: `Stripe-Signature: t=…,v1=…`, signed over `{timestamp}.{body}`. The whole secret is the key,
    /// with its `whsec_`.
    ///
    /// # Errors
    /// No secret, one that cannot be used, or a tolerance under a second.
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
    /// over `{id}.{timestamp}.{body}`. The key is what the secret says in base64, after its `whsec_` if it has that.
    ///
    /// # Errors
    /// No secret, one that cannot be used, or a tolerance under a second.
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

    /// GitHub's scheme: `X-Hub-Signature-256: sha256=…` over the body. The SHA-1 signature that GitHub sends beside it
    /// does not count.
    ///
    /// # Errors
    /// No secret, or one that cannot be used.
    pub fn github<S: Into<Secret>>(secrets: impl IntoIterator<Item = S>) -> Result<Self, Mistakes> {
        Self::hmac(&HmacScheme::github(), secrets, DEFAULT_TOLERANCE)
    }

    /// Shopify's scheme: `X-Shopify-Hmac-SHA256` over the body.
    ///
    /// # Errors
    /// No secret, or one that cannot be used.
    pub fn shopify<S: Into<Secret>>(secrets: impl IntoIterator<Item = S>) -> Result<Self, Mistakes> {
        Self::hmac(&HmacScheme::shopify(), secrets, DEFAULT_TOLERANCE)
    }

    /// A scheme of one's own. The tolerance is for a timestamp that is signed; it is looked at in any case, so that a
    /// wrong one does not wait until somebody adds the timestamp.
    ///
    /// # Errors
    /// What is wrong with the scheme, the secrets and the tolerance.
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
            // Cannot come: what could not be read is a mistake. If it came, nothing would be let pass.
            (None, Ok(())) => Err(Mistakes::default()),
            (Some((format, template)), Ok(())) => {
                let tolerance = template.signs_timestamp().then_some(tolerance);
                Ok(Self { format, template, algorithm, keys, tolerance })
            }
        }
    }

    /// Whether this delivery is signed. `body` is what came over the wire, before anybody parsed or inflated it.
    ///
    /// The signature is looked at before the time, so that [`Refused::TooOld`] and [`Refused::TooNew`] are never said of
    /// what a stranger made up: they mean a late delivery, one sent again, or a wrong clock.
    ///
    /// # Errors
    /// Why it does not count as signed.
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

    /// The headers of a delivery that is signed with the first secret: for those who send, and for tests.
    ///
    /// An id is left out where the scheme has no header for it.
    ///
    /// # Errors
    /// An id that cannot be sent, or none where it is signed.
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
        // There is a key: a verifier without one cannot be built.
        let mut mac = self.keys.first().ok_or(Refused::Wrong)?.clone();
        self.template.feed(&mut mac, &sent, body);
        self.format.write(&sent, &mac.finish()).ok_or(Refused::Wrong)
    }
}

/// How many secrets, not which.
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

/// The keys that the secrets stand for.
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
        mistakes.add("secrets", "must have one secret at least");
    }
    keys
}

/// The secret's own bytes. White space around them came with the file or the variable that it was read from; every
/// delivery would be refused, and nobody would see why.
fn plain(secret: &str) -> Result<Vec<u8>, &'static str> {
    match secret {
        // What `whsec_${SECRET}` becomes without the variable: a secret that everybody can guess.
        "whsec_" => Ok(Vec::new()),
        _ if secret.trim() != secret => Err("must not begin or end with white space"),
        _ => Ok(secret.into()),
    }
}

fn from_base64(secret: &str) -> Result<Vec<u8>, &'static str> {
    let secret = secret.strip_prefix("whsec_").unwrap_or(secret);
    PADDED_OR_NOT.decode(secret).map_err(|_| "must be base64, with or without whsec_ before it")
}

/// Whole seconds, because that is what senders sign. Other libraries take 0 for "do not look at the time".
fn seconds(tolerance: Duration, mistakes: &mut Mistakes) -> u64 {
    if tolerance.as_secs() == 0 {
        mistakes.add("tolerance", "must be a second at least");
    }
    tolerance.as_secs()
}

/// Seconds since 1970; before it is 0, which no signed timestamp is near.
fn unix(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
