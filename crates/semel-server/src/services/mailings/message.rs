//! The message of a mailing: what its mails say.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{config::Mailings, mail::template::Templates};
use crate::http::fields::Wrong;

/// The message, as it is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) subject: String,
    pub(super) from: String,
    pub(super) text: Option<String>,
    pub(super) html: Option<String>,
    /// Kept with the message: a resend has the same bytes, even after a change of the configuration.
    pub(super) message_domain: String,
    pub(super) public_url: Option<String>,
}

/// The message as an upload gives it; what is left out comes from the configuration.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) subject: Option<String>,
    pub(super) from: Option<String>,
    pub(super) text: Option<String>,
    pub(super) html: Option<String>,
}

/// The sender and text of mailings to files that have none: a newcomer sees a mail before writing one.
const SAMPLE_FROM: &str = "Semel <semel@localhost>";
const SAMPLE_TEXT: &str = "This mail for {{ email }} has no text yet: upload the list with -F body='Hello!'\n";

impl Given {
    /// Tells a repeated upload from one with another message. Only the given fields count: a changed default does not
    /// make a retry another message.
    pub(super) fn hash(&self) -> String {
        let mut hash = Sha256::new();
        for part in [&self.subject, &self.from, &self.text, &self.html] {
            match part {
                None => hash.update([0]),
                Some(part) => {
                    hash.update([1]);
                    hash.update((part.len() as u64).to_be_bytes());
                    hash.update(part);
                }
            }
        }
        hex::encode(hash.finalize())
    }

    /// The whole message, with the defaults. `to_files`: mails are only written to files.
    pub(super) fn complete(&self, config: &Mailings, filename: &str, to_files: bool, wrong: &mut Wrong) -> Message {
        let given = |own: &Option<String>, default: &str| {
            own.clone().or_else(|| Some(default.to_owned()).filter(|text| !text.is_empty()))
        };
        let (mut text, html) = match (&self.text, &self.html) {
            (None, None) => (given(&None, &config.body), given(&None, &config.html)),
            own => (own.0.clone(), own.1.clone()),
        };
        if text.is_none() && html.is_none() {
            match to_files {
                true => text = Some(SAMPLE_TEXT.to_owned()),
                false => wrong.note("body", "is missing, and there is no default in mailings.body: give body or html"),
            }
        }
        let from = given(&self.from, &config.from).or_else(|| to_files.then(|| SAMPLE_FROM.to_owned()));
        let from = from.unwrap_or_else(|| {
            wrong.note("from", "is missing, and there is no default in mailings.from");
            String::new()
        });
        let subject = given(&self.subject, &config.subject).or_else(|| to_files.then(|| filename.to_owned()));
        let subject = subject.unwrap_or_else(|| {
            wrong.note("subject", "is missing, and there is no default in mailings.subject");
            String::new()
        });
        let public_url = config.public_url.as_ref().map(|url| url.0.clone());
        Message { subject, from, text, html, message_domain: config.message_domain.clone(), public_url }
    }
}

impl Message {
    /// A link to unsubscribe as long as the real ones, and of nobody.
    pub(super) fn sample_link(&self) -> Option<String> {
        self.public_url.as_ref().map(|url| format!("{url}/u/0000000000-0000000000-{}", "0".repeat(32)))
    }

    /// Its templates.
    pub(super) fn templates(&self) -> Result<Templates, Vec<(String, String)>> {
        Templates::parse(&self.subject, self.text.as_deref(), self.html.as_deref())
            .map_err(|mistakes| mistakes.into_iter().map(|wrong| (wrong.field.to_owned(), wrong.message)).collect())
    }
}
