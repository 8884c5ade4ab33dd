//! Reads the signatures, the timestamp and the id from the headers of a delivery.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::{Algorithm, Encoding, MAX_HEADER_BYTES, MAX_SIGNATURES, Refused, template::Template};

static STRIPE_SIGNATURE: HeaderName = HeaderName::from_static("stripe-signature");
static WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
static WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
static WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// The longest id: the longest key of the ledger.
const MAX_ID_BYTES: usize = semel::Key::MAX_BYTES;

/// The format of the headers.
#[derive(Clone, Debug)]
pub(super) enum Format {
    /// `Stripe-Signature: t=1700000000,v1=…,v1=…`
    Stripe,
    /// `webhook-signature: v1,… v1,…`, with the timestamp and the id in separate headers.
    Standard,
    /// One signature in a header.
    Single(Single),
}

/// A header with one signature, and its companions.
#[derive(Clone, Debug)]
pub(super) struct Single {
    pub(super) header: HeaderName,
    pub(super) prefix: String,
    pub(super) encoding: Encoding,
    pub(super) timestamp_header: Option<HeaderName>,
    pub(super) id_header: Option<HeaderName>,
}

/// The contents of the headers, before verification.
#[derive(Default)]
pub(super) struct Sent<'h> {
    pub(super) signatures: Vec<Vec<u8>>,
    /// The number, and its text.
    pub(super) timestamp: Option<(i64, &'h [u8])>,
    pub(super) id: Option<&'h str>,
}

impl Format {
    /// Reads the headers. All signed parts are present afterwards.
    pub(super) fn read<'h>(
        &self,
        headers: &'h HeaderMap,
        algorithm: Algorithm,
        template: &Template,
    ) -> Result<Sent<'h>, Refused> {
        match self {
            Self::Stripe => stripe(signature(headers, &STRIPE_SIGNATURE)?, algorithm),
            Self::Standard => {
                let listed = signature(headers, &WEBHOOK_SIGNATURE)?;
                // Split as bytes, because a header may contain invalid UTF-8.
                let v1 = listed.split(|byte| *byte == b' ').filter_map(|item| item.strip_prefix(b"v1,"));
                Ok(Sent {
                    signatures: codes(v1, Encoding::Base64, algorithm, &WEBHOOK_SIGNATURE)?,
                    timestamp: Some(timestamp(&WEBHOOK_TIMESTAMP, needed(headers, &WEBHOOK_TIMESTAMP)?)?),
                    id: Some(id(&WEBHOOK_ID, needed(headers, &WEBHOOK_ID)?, template)?),
                })
            }
            Self::Single(single) => single.read(headers, algorithm, template),
        }
    }

    /// The headers that carry this signature.
    pub(super) fn write(&self, sent: &Sent<'_>, code: &[u8]) -> Option<HeaderMap> {
        let written = sent.timestamp.map_or(&b""[..], |(_, written)| written);
        let id = sent.id.map(str::as_bytes);
        let headers = match self {
            Self::Stripe => {
                let signature = format!(",v1={}", Encoding::Hex.write(code));
                vec![(&STRIPE_SIGNATURE, [b"t=", written, signature.as_bytes()].concat())]
            }
            Self::Standard => vec![
                (&WEBHOOK_ID, id?.to_vec()),
                (&WEBHOOK_TIMESTAMP, written.to_vec()),
                (&WEBHOOK_SIGNATURE, format!("v1,{}", Encoding::Base64.write(code)).into_bytes()),
            ],
            Self::Single(single) => {
                let signature = format!("{}{}", single.prefix, single.encoding.write(code));
                let timestamp = single.timestamp_header.iter().map(|header| (header, written.to_vec()));
                let id = single.id_header.iter().zip(id).map(|(header, id)| (header, id.to_vec()));
                [(&single.header, signature.into_bytes())].into_iter().chain(timestamp).chain(id).collect()
            }
        };
        headers.into_iter().map(|(name, value)| Some((name.clone(), HeaderValue::from_bytes(&value).ok()?))).collect()
    }

    /// The header for the id, if the format has one.
    pub(super) fn id_header(&self) -> Option<&HeaderName> {
        match self {
            Self::Stripe => None,
            Self::Standard => Some(&WEBHOOK_ID),
            Self::Single(single) => single.id_header.as_ref(),
        }
    }
}

impl Single {
    fn read<'h>(&self, headers: &'h HeaderMap, algorithm: Algorithm, of: &Template) -> Result<Sent<'h>, Refused> {
        let malformed = |why| Refused::Malformed { header: self.header.clone(), why };
        let signature = signature(headers, &self.header)?;
        let Some(text) = signature.strip_prefix(self.prefix.as_bytes()) else {
            return Err(malformed("it does not begin with the prefix of the scheme"));
        };
        let code = self.encoding.read(text, algorithm).ok_or_else(|| malformed("it has a wrong length or encoding"))?;
        let mut sent = Sent { signatures: vec![code], ..Sent::default() };
        if let Some(header) = &self.timestamp_header {
            sent.timestamp = Some(timestamp(header, needed(headers, header)?)?);
        }
        if let Some(header) = &self.id_header {
            let value = if of.signs_id() { Some(needed(headers, header)?) } else { single(headers, header)? };
            sent.id = value.map(|value| id(header, value, of)).transpose()?;
        }
        Ok(sent)
    }
}

/// Pairs such as `v1=…`. Spaces around a pair and empty pairs are ignored, because proxies write `, ` between items.
/// Pairs other than `t` and `v1` belong to other versions of the scheme, and are ignored.
fn stripe(header: &[u8], algorithm: Algorithm) -> Result<Sent<'_>, Refused> {
    let malformed = |why| Refused::Malformed { header: STRIPE_SIGNATURE.clone(), why };
    let pairs = || header.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    let mut times = pairs().filter_map(|pair| pair.strip_prefix(b"t="));
    let time = times.next().ok_or_else(|| malformed("it has no timestamp"))?;
    if times.next().is_some() {
        return Err(malformed("it has two timestamps"));
    }
    let v1 = pairs().filter_map(|pair| pair.strip_prefix(b"v1="));
    Ok(Sent {
        timestamp: Some(timestamp(&STRIPE_SIGNATURE, time)?),
        signatures: codes(v1, Encoding::Hex, algorithm, &STRIPE_SIGNATURE)?,
        id: None,
    })
}

/// The signatures of the accepted scheme. An unreadable one is skipped, because another may match.
fn codes<'h>(
    texts: impl Iterator<Item = &'h [u8]> + Clone,
    encoding: Encoding,
    algorithm: Algorithm,
    header: &HeaderName,
) -> Result<Vec<Vec<u8>>, Refused> {
    match texts.clone().take(MAX_SIGNATURES + 1).count() {
        0 => Err(Refused::Unsupported { header: header.clone() }),
        1..=MAX_SIGNATURES => Ok(texts.filter_map(|text| encoding.read(text, algorithm)).collect()),
        _ => Err(Refused::TooMany),
    }
}

/// The signature header, if it is present once and not too long.
fn signature<'h>(headers: &'h HeaderMap, header: &HeaderName) -> Result<&'h [u8], Refused> {
    let value = needed(headers, header)?;
    if value.len() > MAX_HEADER_BYTES { Err(Refused::TooLong { header: header.clone() }) } else { Ok(value) }
}

fn needed<'h>(headers: &'h HeaderMap, header: &HeaderName) -> Result<&'h [u8], Refused> {
    single(headers, header)?.ok_or_else(|| Refused::Missing { header: header.clone() })
}

/// A header that may be present once.
fn single<'h>(headers: &'h HeaderMap, header: &HeaderName) -> Result<Option<&'h [u8]>, Refused> {
    let mut lines = headers.get_all(header).iter();
    match (lines.next(), lines.next()) {
        (_, Some(_)) => Err(Refused::Repeated { header: header.clone() }),
        (line, None) => Ok(line.map(HeaderValue::as_bytes)),
    }
}

/// Seconds since 1970 in their only spelling: digits without sign, leading zero or space. Two spellings of one time
/// would allow two signatures of one delivery.
fn timestamp<'h>(header: &HeaderName, written: &'h [u8]) -> Result<(i64, &'h [u8]), Refused> {
    let malformed = |why| Refused::Malformed { header: header.clone(), why };
    if !written.iter().all(u8::is_ascii_digit) || written.is_empty() || written[0] == b'0' {
        return Err(malformed("its timestamp is not a plain number of seconds"));
    }
    let number = std::str::from_utf8(written).ok().and_then(|text| text.parse().ok());
    number.map(|number| (number, written)).ok_or_else(|| malformed("its timestamp is too large"))
}

/// An id that can be a key: visible ASCII, neither empty nor too long, and without the separator that follows it in the
/// signed text.
pub(super) fn id<'h>(header: &HeaderName, value: &'h [u8], template: &Template) -> Result<&'h str, Refused> {
    let malformed = |why| Refused::Malformed { header: header.clone(), why };
    if !(1..=MAX_ID_BYTES).contains(&value.len()) {
        return Err(malformed("its id is empty or longer than 255 bytes"));
    }
    match std::str::from_utf8(value) {
        Ok(id) if !id.bytes().all(|byte| byte.is_ascii_graphic()) => Err(malformed("its id is not visible ASCII")),
        Ok(id) if !template.admits(id) => Err(malformed("its id contains the separator of the signed text")),
        Ok(id) => Ok(id),
        Err(_) => Err(malformed("its id is not visible ASCII")),
    }
}
