//! A slow and simple verifier, as the reference for the real ones.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use semel_http::webhooks::{DEFAULT_TOLERANCE, Verifier};
use sha2::Sha256;

use crate::webhooks::T;

const SECRET: &str = "geheim";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sender {
    Stripe,
    Standard,
    Github,
    Shopify,
}

impl Sender {
    pub(crate) const ALL: [Self; 4] = [Self::Stripe, Self::Standard, Self::Github, Self::Shopify];

    pub(crate) fn verifier(self) -> Verifier {
        match self {
            Self::Stripe => Verifier::stripe([SECRET], DEFAULT_TOLERANCE),
            Self::Standard => Verifier::standard([STANDARD.encode(SECRET)], DEFAULT_TOLERANCE),
            Self::Github => Verifier::github([SECRET]),
            Self::Shopify => Verifier::shopify([SECRET]),
        }
        .unwrap()
    }

    /// Its headers, in this order: the signature, the timestamp (if it has its own header), the id.
    pub(crate) fn headers(self) -> &'static [&'static str] {
        match self {
            Self::Stripe => &["stripe-signature"],
            Self::Standard => &["webhook-signature", "webhook-timestamp", "webhook-id"],
            Self::Github => &["x-hub-signature-256", "x-github-delivery"],
            Self::Shopify => &["x-shopify-hmac-sha256", "x-shopify-webhook-id"],
        }
    }

    /// The header values of a correctly signed delivery. The time and the id need not be valid.
    pub(crate) fn sign(self, time: &[u8], id: &[u8], body: &[u8]) -> Vec<Vec<u8>> {
        let signed_body = code(&[body]);
        match self {
            Self::Stripe => {
                let code = hex(&code(&[time, b".", body]));
                vec![[b"t=", time, b",v1=", code.as_bytes()].concat()]
            }
            Self::Standard => {
                let code = STANDARD.encode(code(&[id, b".", time, b".", body]));
                vec![[b"v1,", code.as_bytes()].concat(), time.to_vec(), id.to_vec()]
            }
            Self::Github => vec![format!("sha256={}", hex(&signed_body)).into_bytes(), id.to_vec()],
            Self::Shopify => vec![STANDARD.encode(signed_body).into_bytes(), id.to_vec()],
        }
    }

    /// Whether a delivery with these values, in the order of [`headers`](Self::headers), is to be accepted at `T`.
    pub(crate) fn accepts(self, values: &[Vec<u8>], body: &[u8]) -> bool {
        // One character per byte, so that no byte is lost.
        let values: Vec<String> =
            values.iter().map(|value| value.iter().map(|byte| char::from(*byte)).collect()).collect();
        let signature = values[0].as_str();
        let id_is_fine =
            |id: &str| (1..=255).contains(&id.chars().count()) && id.chars().all(|c| ('!'..='~').contains(&c));
        if signature.chars().count() > 8192 {
            return false;
        }
        match self {
            Self::Stripe => {
                let pairs: Vec<&str> = signature.split(',').map(|pair| pair.trim_matches([' ', '\t'])).collect();
                let values = |name: &str| -> Vec<String> {
                    let named = pairs.iter().filter(|pair| pair.starts_with(name));
                    named.map(|pair| pair[name.len()..].to_owned()).collect()
                };
                let (times, codes) = (values("t="), values("v1="));
                let [time] = &times[..] else { return false };
                let right = hex(&code(&[time.as_bytes(), b".", body]));
                in_time(time) && codes.len() <= 32 && codes.iter().any(|code| code.to_ascii_lowercase() == right)
            }
            Self::Standard => {
                let (time, id) = (&values[1], &values[2]);
                let right = STANDARD.encode(code(&[id.as_bytes(), b".", time.as_bytes(), b".", body]));
                let codes: Vec<&str> = signature.split(' ').filter(|item| item.starts_with("v1,")).collect();
                let found = codes.len() <= 32 && codes.iter().any(|item| item[3..] == right);
                found && in_time(time) && id_is_fine(id) && !id.contains('.')
            }
            Self::Github => {
                let right = hex(&code(&[body]));
                signature.len() == 71
                    && signature.starts_with("sha256=")
                    && signature[7..].to_ascii_lowercase() == right
                    && id_is_fine(&values[1])
            }
            Self::Shopify => signature == STANDARD.encode(code(&[body])) && id_is_fine(&values[1]),
        }
    }
}

/// Parsed and printed again, a number has no sign and no leading zeros.
fn in_time(text: &str) -> bool {
    text.parse::<u32>().is_ok_and(|time| time.to_string() == text && u64::from(time).abs_diff(T) <= 300)
}

fn code(pieces: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).unwrap();
    mac.update(&pieces.concat());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
