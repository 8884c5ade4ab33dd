//! Email addresses and their normal form.

use std::borrow::Cow;
use std::fmt;

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};
use unicode_normalization::{UnicodeNormalization, is_nfc};

use super::text::{is_bidi, is_zero_width};

/// The limit of SMTP for the part before the `@` (RFC 5321, 4.5.3.1.1).
const MAX_LOCAL: usize = 64;
/// The limit of SMTP for a path is 256 octets, of which two are its angle brackets.
const MAX_TOTAL: usize = 254;
/// The limit of DNS for a label.
const MAX_LABEL: usize = 63;

/// A valid address. Two addresses are the same recipient when their normal forms are equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Email {
    /// Lower case, NFC, the domain in ASCII (punycode). By the standard, the case of the local part could matter; no
    /// provider of note lets it, and a person who is listed twice with different case would get two messages.
    pub(crate) normal: String,
    /// As the client wrote it, in NFC, without the spaces around it and without invisible characters.
    pub(crate) original: String,
}

impl Email {
    /// Reads one address. Anything around it, such as a display name, is refused rather than guessed at.
    pub(crate) fn parse(text: &str) -> Result<Email, BadAddress> {
        let original = clean(text);
        let (local, domain) = split(&original)?;
        check_local(local)?;
        let mut normal = String::with_capacity(original.len());
        if local.is_ascii() {
            normal.push_str(local);
            normal.make_ascii_lowercase();
        } else {
            // Lower-casing can produce a letter with a separate mark, hence NFC again.
            normal.extend(local.to_lowercase().nfc());
        }
        if normal.len() > MAX_LOCAL {
            return Err(BadAddress::LocalTooLong);
        }
        normal.push('@');
        push_domain(&mut normal, domain)?;
        if normal.len() > MAX_TOTAL {
            return Err(BadAddress::TooLong);
        }
        Ok(Email { normal, original: original.into_owned() })
    }
}

/// Spaces, also no-break ones, are dropped around the address and refused inside it: there, a space may stand for a
/// dot or for nothing. Invisible characters are dropped everywhere. Overrides of the writing direction remain, and are
/// refused later: with them the address that a person sees is not the one that we would use.
fn clean(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text.trim());
    }
    let is_override = |c: char| matches!(c, '\u{202d}' | '\u{202e}');
    let is_dropped = |c: char| is_zero_width(c) || (is_bidi(c) && !is_override(c));
    let text = text.trim_matches(|c: char| c.is_whitespace() || is_dropped(c));
    if !text.contains(is_dropped) && is_nfc(text) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().filter(|&c| !is_dropped(c)).nfc().collect())
}

/// Splits at the `@`. The checks go from the mistake that says most to the one that says least.
fn split(text: &str) -> Result<(&str, &str), BadAddress> {
    if text.is_empty() {
        return Err(BadAddress::Empty);
    }
    // Also CR and LF, with which an address could add a header to the message.
    if text.contains(|c: char| c.is_control() || is_bidi(c)) {
        return Err(BadAddress::ControlCharacter);
    }
    if text.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("mailto:")) {
        return Err(BadAddress::Mailto);
    }
    if text.contains(['<', '>']) {
        return Err(BadAddress::DisplayName);
    }
    if text.contains('"') {
        return Err(BadAddress::QuotedLocal);
    }
    if text.contains(['(', ')']) {
        return Err(BadAddress::Comment);
    }
    let has_space = text.contains(char::is_whitespace);
    let (local, domain) = text.split_once('@').ok_or(BadAddress::NoAtSign)?;
    if domain.contains('@') {
        let is_list = has_space || text.contains([',', ';', '|']);
        return Err(if is_list { BadAddress::SeveralAddresses } else { BadAddress::SeveralAtSigns });
    }
    if has_space {
        return Err(BadAddress::Space);
    }
    Ok((local, domain))
}

fn check_local(local: &str) -> Result<(), BadAddress> {
    if local.is_empty() {
        return Err(BadAddress::EmptyLocal);
    }
    if local.starts_with('.') || local.ends_with('.') || local.contains("..") {
        return Err(BadAddress::MisplacedDot);
    }
    // The atoms of RFC 5322, and by RFC 6531 everything beyond ASCII.
    let fits = |c: char| !c.is_ascii() || c.is_ascii_alphanumeric() || "!#$%&'*+-/=?^_`{|}~.".contains(c);
    if local.chars().all(fits) { Ok(()) } else { Err(BadAddress::LocalCharacter) }
}

fn push_domain(normal: &mut String, domain: &str) -> Result<(), BadAddress> {
    if domain.is_empty() {
        return Err(BadAddress::EmptyDomain);
    }
    if domain.starts_with('[') {
        return Err(BadAddress::IpAddress);
    }
    let from = normal.len();
    // Only what is in Unicode or claims to be its encoding needs the tables of IDNA.
    if domain.is_ascii() && !domain.as_bytes().windows(4).any(|four| four.eq_ignore_ascii_case(b"xn--")) {
        normal.push_str(domain);
        normal[from..].make_ascii_lowercase();
    } else {
        // Lengths are checked below, with a code of their own.
        let ascii = Uts46::new()
            .to_ascii(domain.as_bytes(), AsciiDenyList::STD3, Hyphens::CheckFirstLast, DnsLength::Ignore)
            .map_err(|_| BadAddress::Domain)?;
        normal.push_str(&ascii);
    }
    check_domain(&normal[from..])
}

fn check_domain(domain: &str) -> Result<(), BadAddress> {
    let mut labels = 0;
    let mut last = "";
    for label in domain.split('.') {
        if label.is_empty() {
            return Err(BadAddress::MisplacedDot);
        }
        if label.len() > MAX_LABEL {
            return Err(BadAddress::LabelTooLong);
        }
        let fits = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !fits || label.starts_with('-') || label.ends_with('-') {
            return Err(BadAddress::Domain);
        }
        labels += 1;
        last = label;
    }
    if labels < 2 {
        return Err(BadAddress::DomainWithoutDot);
    }
    // No top-level domain is a number, so this is an IPv4 address or a mistake.
    if last.bytes().all(|byte| byte.is_ascii_digit()) { Err(BadAddress::IpAddress) } else { Ok(()) }
}

/// The reason for which a text is not accepted as an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadAddress {
    /// Nothing but spaces.
    Empty,
    /// A control character, a line break or an override of the writing direction.
    ControlCharacter,
    /// `mailto:a@b.c`
    Mailto,
    /// `Ann <a@b.c>`
    DisplayName,
    /// `"ann smith"@b.c`
    QuotedLocal,
    /// `a(work)@b.c`
    Comment,
    /// `a@b.c; d@e.f`
    SeveralAddresses,
    /// `a@b@c`
    SeveralAtSigns,
    /// No `@`.
    NoAtSign,
    /// A space inside.
    Space,
    /// `@b.c`
    EmptyLocal,
    /// `a@`
    EmptyDomain,
    /// A dot at the beginning or end of the local part or of the domain, or two in a row.
    MisplacedDot,
    /// A character that the local part may have in quotes only.
    LocalCharacter,
    /// More than 64 octets before the `@`.
    LocalTooLong,
    /// More than 254 octets.
    TooLong,
    /// More than 63 octets between two dots of the domain.
    LabelTooLong,
    /// `a@localhost`
    DomainWithoutDot,
    /// `a@[192.0.2.1]` and `a@192.0.2.1`
    IpAddress,
    /// A character, hyphen or encoding that a domain cannot have.
    Domain,
}

impl BadAddress {
    /// Stable, in kebab case: clients may depend on it.
    pub(crate) fn code(self) -> &'static str {
        self.words().0
    }

    fn words(self) -> (&'static str, &'static str) {
        match self {
            BadAddress::Empty => ("empty-address", "the address is empty"),
            BadAddress::ControlCharacter => ("control-character", "the address contains a control character"),
            BadAddress::Mailto => ("mailto-not-supported", "the address is a link: remove `mailto:`"),
            BadAddress::DisplayName => {
                ("display-name-not-supported", "display names are not supported: give only the address")
            }
            BadAddress::QuotedLocal => ("quoted-local-part", "quotes in an address are not supported"),
            BadAddress::Comment => ("comment-not-supported", "comments in an address are not supported"),
            BadAddress::SeveralAddresses => ("several-addresses", "the cell contains several addresses"),
            BadAddress::SeveralAtSigns => ("several-at-signs", "the address has more than one `@`"),
            BadAddress::NoAtSign => ("no-at-sign", "the address has no `@`"),
            BadAddress::Space => ("space-inside", "the address contains a space"),
            BadAddress::EmptyLocal => ("empty-local-part", "nothing stands before the `@`"),
            BadAddress::EmptyDomain => ("empty-domain", "nothing stands after the `@`"),
            BadAddress::MisplacedDot => {
                ("misplaced-dot", "a dot stands at the beginning or the end of a part, or next to another dot")
            }
            BadAddress::LocalCharacter => {
                ("bad-local-character", "the part before the `@` contains a character that is not allowed")
            }
            BadAddress::LocalTooLong => ("local-part-too-long", "the part before the `@` has more than 64 octets"),
            BadAddress::TooLong => ("address-too-long", "the address has more than 254 octets"),
            BadAddress::LabelTooLong => ("domain-label-too-long", "a part of the domain has more than 63 octets"),
            BadAddress::DomainWithoutDot => ("domain-without-dot", "the domain has no dot"),
            BadAddress::IpAddress => ("ip-address", "the domain is an IP address or ends in a number"),
            BadAddress::Domain => ("bad-domain", "the domain is not a valid host name"),
        }
    }
}

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words().1)
    }
}

impl std::error::Error for BadAddress {}

#[cfg(test)]
#[path = "address_tests.rs"]
mod tests;
