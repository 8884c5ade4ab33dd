//! Requests to mail services in their dialects. The same mail gives the same bytes each time: services compare them.

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{message::Outgoing, transport_url::Preset};

/// The body of a request.
///
/// # Errors
/// When a part of the mail cannot be sent.
pub(super) fn body(preset: Preset, mail: &Outgoing) -> Result<Vec<u8>, String> {
    let mut headers: BTreeMap<&str, String> = mail.unsubscribe_headers()?.into_iter().collect();
    let (from, to) = (mail.from.to_string(), mail.to.to_string());
    let rendered = &mail.rendered;
    let (subject, text, html) = (rendered.subject.as_str(), rendered.text.as_deref(), rendered.html.as_deref());
    let encoded = match preset {
        Preset::Generic => {
            let message_id = format!("<{}>", mail.message_id);
            serde_json::to_vec(&Generic { from, to, subject, text, html, message_id, headers })
        }
        Preset::Resend => serde_json::to_vec(&Resend { from, to: [to], subject, text, html, headers }),
        Preset::Brevo => {
            // Brevo documents the key as a header of the mail, not of the request, and as a UUID.
            headers.insert("idempotencyKey", uuid_of(&mail.key));
            let sender = Person { name: mail.from.name.as_deref(), email: mail.from.email.to_string() };
            let to = [Person { name: None, email: to }];
            serde_json::to_vec(&Brevo { sender, to, subject, text_content: text, html_content: html, headers })
        }
    };
    encoded.map_err(|error| error.to_string())
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Generic<'a> {
    from: String,
    to: String,
    subject: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    html: Option<&'a str>,
    message_id: String,
    headers: BTreeMap<&'a str, String>,
}

#[derive(Serialize)]
struct Resend<'a> {
    from: String,
    to: [String; 1],
    subject: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    html: Option<&'a str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<&'a str, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Brevo<'a> {
    sender: Person<'a>,
    to: [Person<'a>; 1],
    subject: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    text_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    html_content: Option<&'a str>,
    headers: BTreeMap<&'a str, String>,
}

#[derive(Serialize)]
struct Person<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    email: String,
}

/// A UUID (version 8) that stands for a key.
fn uuid_of(key: &str) -> String {
    let mut bytes = Sha256::digest(key);
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (i, byte) in bytes.iter().take(16).enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
