//! One mail and its bytes.
//!
//! The bytes are the same on every call, on every node: a repeated attempt sends the same mail, and a receiver that
//! deduplicates by content or by Message-ID sees one. So the Message-ID, the date and the MIME boundary come from the
//! mail itself, never from the clock or from chance.

use std::time::SystemTime;

use lettre::{
    Address, Message,
    message::{
        Mailbox, MultiPart, SinglePart,
        header::{HeaderName, HeaderValue},
    },
};
use sha2::{Digest, Sha256};

use super::{dkim::Dkim, template::Rendered};

/// The longest line of a message, from RFC 5322.
const LONGEST_LINE: usize = 998;

/// A mail that is ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    /// The unique id of the entry. It is a file name of the file transport, so it has letters, digits, `-`, `_` and
    /// `.` only.
    pub(crate) id: String,
    /// The Idempotency-Key, the same on every attempt.
    pub(crate) key: String,
    /// The sender.
    pub(crate) from: Mailbox,
    /// The recipient, from [`address`].
    pub(crate) to: Address,
    /// The Message-ID, without angle brackets.
    pub(crate) message_id: String,
    /// The Date header, to the second.
    pub(crate) date: SystemTime,
    /// Subject and bodies.
    pub(crate) rendered: Rendered,
    /// The address of one-click unsubscription (RFC 8058).
    pub(crate) unsubscribe: Option<String>,
}

impl Outgoing {
    /// The message as it is sent and stored: with CRLF line ends, not dot-stuffed, signed if there is a key.
    ///
    /// # Errors
    /// When a part cannot stand in a message.
    pub(crate) fn bytes(&self, dkim: Option<&Dkim>) -> Result<Vec<u8>, String> {
        let mut builder = Message::builder()
            .from(self.from.clone())
            .to(Mailbox::new(None, self.to.clone()))
            .subject(self.rendered.subject.clone())
            .message_id(Some(format!("<{}>", visible("Message-ID", &self.message_id)?)))
            .date(self.date);
        for (name, value) in self.unsubscribe_headers()? {
            let name = HeaderName::new_from_ascii_str(name);
            // Checked to be visible ASCII. The encoder would fold or encode a long URL, and then no client finds it.
            builder = builder.raw_header(HeaderValue::dangerous_new_pre_encoded(name, value.clone(), value));
        }
        let plain = |text: &String| SinglePart::plain(lines(text));
        let html = |text: &String| SinglePart::html(lines(text));
        let message = match (&self.rendered.text, &self.rendered.html) {
            (Some(text), Some(page)) => {
                let both = MultiPart::alternative().boundary(self.boundary());
                builder.multipart(both.singlepart(plain(text)).singlepart(html(page)))
            }
            (Some(text), None) => builder.singlepart(plain(text)),
            (None, Some(page)) => builder.singlepart(html(page)),
            (None, None) => return Err("the mail has neither text nor HTML".to_owned()),
        };
        let bytes = message.map_err(|error| format!("the message cannot be built: {error}"))?.formatted();
        Ok(match dkim {
            Some(dkim) => dkim.sign(bytes, self.date)?,
            None => bytes,
        })
    }

    /// Name and value of the headers for unsubscription, if the mail has an address for it.
    pub(super) fn unsubscribe_headers(&self) -> Result<Vec<(&'static str, String)>, String> {
        let Some(url) = &self.unsubscribe else { return Ok(Vec::new()) };
        let url = visible("unsubscribe URL", url)?;
        Ok(vec![
            ("List-Unsubscribe", format!("<{url}>")),
            ("List-Unsubscribe-Post", "List-Unsubscribe=One-Click".to_owned()),
        ])
    }

    /// The boundary depends on the bodies, too: a text that quotes another mail's boundary cannot end this one's part.
    fn boundary(&self) -> String {
        let mut hash = Sha256::new();
        for part in [Some(&self.id), self.rendered.text.as_ref(), self.rendered.html.as_ref()].into_iter().flatten() {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let hash = hash.finalize();
        hash.iter().take(20).fold("semel-".to_owned(), |text, byte| text + &format!("{byte:02x}"))
    }
}

/// An email address. An international domain is converted to ASCII, so that only an international local part needs
/// SMTPUTF8, which not every server has.
///
/// # Errors
/// When the text is not an address.
pub(crate) fn address(text: &str) -> Result<Address, String> {
    let wrong = || "is not a valid email address".to_owned();
    let (user, domain) = text.rsplit_once('@').ok_or_else(wrong)?;
    if text.chars().any(|c| c.is_control() || c == '<' || c == '>') {
        return Err(wrong());
    }
    if domain.is_ascii() {
        return Address::new(user, domain).map_err(|_| wrong());
    }
    match url::Host::parse(domain) {
        Ok(url::Host::Domain(domain)) => Address::new(user, domain).map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// Lines end with LF only, which lettre turns into CRLF. A lone CR would reach the server as it is, and servers
/// disagree about whether it ends a line.
fn lines(text: &str) -> String {
    if text.contains('\r') { text.replace("\r\n", "\n").replace('\r', "\n") } else { text.to_owned() }
}

/// A value for a header: visible ASCII without angle brackets, on one line.
fn visible<'a>(what: &str, text: &'a str) -> Result<&'a str, String> {
    let fits = !text.is_empty() && text.len() < LONGEST_LINE - 40;
    if fits && text.bytes().all(|b| b.is_ascii_graphic() && b != b'<' && b != b'>') {
        return Ok(text);
    }
    Err(format!("the {what} is empty, too long or has characters that a header cannot have"))
}
