//! DKIM signatures (RFC 6376, RFC 8463).
//!
//! lettre can sign, but it puts the current time into the signature, so that each attempt would send other bytes. It
//! also needs the crates `rsa`, which has an open timing advisory, and `ed25519-dalek`. rustls, which is here for TLS,
//! signs with both kinds of keys.

use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls::{
    SignatureScheme,
    pki_types::{PrivateKeyDer, pem::PemObject},
    sign::SigningKey,
};
use sha2::{Digest, Sha256};

/// The headers that are signed if the message has them. The list ones are required by RFC 8058.
const SIGNED: [&str; 10] = [
    "from",
    "to",
    "subject",
    "date",
    "message-id",
    "mime-version",
    "content-type",
    "content-transfer-encoding",
    "list-unsubscribe",
    "list-unsubscribe-post",
];

/// Characters of base64 per line of the header.
const WIDTH: usize = 72;

/// A key that signs mails for a domain.
#[derive(Clone)]
pub(crate) struct Dkim {
    domain: String,
    selector: String,
    key: Arc<dyn SigningKey>,
    scheme: SignatureScheme,
}

impl Dkim {
    /// A key in PEM: RSA (PKCS #1 or PKCS #8, at least 2048 bits) or Ed25519 (PKCS #8).
    ///
    /// # Errors
    /// When the key cannot be read, or a name cannot stand in the header. The key is not repeated.
    pub(crate) fn new(domain: &str, selector: &str, pem: &str) -> Result<Self, String> {
        for (what, name) in [("domain", domain), ("selector", selector)] {
            let fits = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
            if name.is_empty() || !name.bytes().all(fits) {
                return Err(format!("the {what} of the DKIM key is not a name of DNS"));
            }
        }
        let der = PrivateKeyDer::from_pem_slice(pem.as_bytes())
            .map_err(|_| "the DKIM key is not a private key in PEM".to_owned())?;
        let key = rustls::crypto::ring::sign::any_supported_type(&der)
            .map_err(|_| "the DKIM key is neither RSA with at least 2048 bits nor Ed25519".to_owned())?;
        let usable = [SignatureScheme::RSA_PKCS1_SHA256, SignatureScheme::ED25519];
        let scheme = usable.into_iter().find(|&scheme| key.choose_scheme(&[scheme]).is_some());
        let scheme = scheme.ok_or("the DKIM key is neither RSA nor Ed25519")?;
        Ok(Self { domain: domain.to_owned(), selector: selector.to_owned(), key, scheme })
    }

    /// The message with its signature before the other headers. Both algorithms give the same signature each time.
    pub(super) fn sign(&self, message: Vec<u8>, date: SystemTime) -> Result<Vec<u8>, String> {
        let end = message.windows(4).position(|w| w == b"\r\n\r\n").ok_or("the message has no end of headers")?;
        let headers = std::str::from_utf8(&message[..end + 2]).map_err(|_| "a header is not UTF-8")?;
        let body = STANDARD.encode(Sha256::digest(relaxed_body(&message[end + 4..])));

        let present = fields(headers);
        let signed: Vec<_> = SIGNED.iter().filter_map(|name| present.iter().find(|(n, _)| n == name)).collect();
        let names: Vec<&str> = signed.iter().map(|(name, _)| name.as_str()).collect();
        let algorithm = if self.scheme == SignatureScheme::ED25519 { "ed25519" } else { "rsa" };
        let time = date.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let unsigned = format!(
            "v=1; a={algorithm}-sha256; c=relaxed/relaxed; d={};\r\n s={}; t={time};\r\n h={};\r\n bh={body};\r\n b=",
            self.domain,
            self.selector,
            names.join(":\r\n  "),
        );

        let mut input = String::new();
        for (name, value) in signed {
            input.push_str(&format!("{name}:{value}\r\n"));
        }
        // The signature covers its own header, with an empty b= and without the line end.
        input.push_str(&format!("dkim-signature:{}", relaxed(&unsigned)));
        let signature = STANDARD.encode(self.signature(input.as_bytes())?);
        let signature: Vec<_> = signature.as_bytes().chunks(WIDTH).map(String::from_utf8_lossy).collect();

        let mut bytes = format!("DKIM-Signature: {unsigned}{}\r\n", signature.join("\r\n  ")).into_bytes();
        bytes.extend_from_slice(&message);
        Ok(bytes)
    }

    fn signature(&self, input: &[u8]) -> Result<Vec<u8>, String> {
        let signer = self.key.choose_scheme(&[self.scheme]).ok_or("the DKIM key cannot sign")?;
        // RFC 8463: Ed25519 signs the hash. RSA's scheme hashes by itself.
        let signature = match self.scheme {
            SignatureScheme::ED25519 => signer.sign(&Sha256::digest(input)),
            _ => signer.sign(input),
        };
        signature.map_err(|_| "the DKIM key could not sign".to_owned())
    }
}

impl fmt::Debug for Dkim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dkim({}._domainkey.{})", self.selector, self.domain)
    }
}

/// The headers in relaxed form: lower-case names, unfolded values.
fn fields(headers: &str) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    for line in headers.split("\r\n").filter(|line| !line.is_empty()) {
        match (line.starts_with([' ', '\t']), line.split_once(':'), all.last_mut()) {
            (true, _, Some((_, value))) => value.push_str(line),
            (false, Some((name, value)), _) => all.push((name.trim_end().to_ascii_lowercase(), value.to_owned())),
            _ => {}
        }
    }
    all.into_iter().map(|(name, value)| (name, relaxed(&value))).collect()
}

/// A header value in relaxed form: runs of white space are one space, none at the ends.
fn relaxed(value: &str) -> String {
    value.split([' ', '\t', '\r', '\n']).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A body in relaxed form: the same within lines, no white space at their ends, no empty lines at the end.
fn relaxed_body(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len());
    for line in body.split_inclusive(|&b| b == b'\n') {
        let mut space = false;
        for &byte in line.strip_suffix(b"\r\n").unwrap_or(line) {
            if byte == b' ' || byte == b'\t' {
                space = true;
                continue;
            }
            if std::mem::take(&mut space) {
                out.push(b' ');
            }
            out.push(byte);
        }
        out.extend_from_slice(b"\r\n");
    }
    while out.ends_with(b"\r\n\r\n") {
        out.truncate(out.len() - 2);
    }
    if out == b"\r\n" {
        out.clear();
    }
    out
}
