//! The mail of an entry.

use std::time::{Duration, SystemTime};

use lettre::message::Mailbox;
use semel::Result;
use semel_store::codec;
use sha2::{Digest as _, Sha256};

use crate::services::mailings::{
    Service,
    list::shape::Shape,
    mail::{
        message::{Outgoing, address},
        template::{Rendered, Templates, variables},
    },
    message::Message,
    tables::{entries::Entry, mailings::Mailing},
};

/// What a run needs to make mails of entries.
pub(in super::super) struct Composer {
    templates: Templates,
    columns: Vec<String>,
    from: Mailbox,
    tenant: String,
    id: String,
    number: i64,
    domain: String,
    public_url: Option<String>,
}

impl Composer {
    /// For the entries of a mailing.
    pub(in super::super) async fn of(service: &Service, mailing: &Mailing) -> Result<Result<Self, String>> {
        let (message, shape) = (service.message_of(mailing).await?, service.shape_of(mailing).await?);
        Ok(Self::new(mailing, &message, shape))
    }

    fn new(mailing: &Mailing, message: &Message, shape: Shape) -> Result<Self, String> {
        let templates = message.templates().map_err(|_| "the templates cannot be read".to_owned())?;
        let from = message.from.parse::<Mailbox>().map_err(|error| error.to_string())?;
        Ok(Self {
            templates,
            columns: shape.columns,
            from,
            tenant: mailing.tenant.clone(),
            id: mailing.id.clone(),
            number: mailing.number,
            domain: message.message_domain.clone(),
            public_url: message.public_url.clone(),
        })
    }

    /// The mail of an entry: the same bytes on every attempt.
    pub(in super::super) fn compose(&self, entry: &Entry, date: i64) -> Result<Outgoing, String> {
        let cells = codec::decode(entry.cells.clone()).map_err(|error| error.to_string())?;
        let values: Vec<String> = serde_json::from_slice(&cells).map_err(|error| error.to_string())?;
        let unsubscribe = self
            .public_url
            .as_ref()
            .map(|url| format!("{url}/u/{}-{}-{}", self.number, entry.line, hex::encode(&entry.token)));
        let rendered = rendered(&self.templates, &self.columns, &values, &entry.email, unsubscribe.as_deref())?;
        Ok(Outgoing {
            id: mail_id(&self.id, entry.line),
            key: idempotency_key(&self.tenant, &self.id, entry.line),
            from: self.from.clone(),
            to: address(&entry.email)?,
            message_id: message_id(&self.id, entry.line, &self.domain),
            // Whole seconds: a Date has no more.
            date: SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(date / 1_000_000).unwrap_or(0)),
            rendered,
            unsubscribe,
        })
    }
}

/// The name of an entry's mail, the same on every attempt.
pub(super) fn mail_id(mailing: &str, line: i64) -> String {
    format!("{mailing}-{line}")
}

/// The Message-ID of an entry without its brackets, the same on every attempt.
pub(in super::super) fn message_id(mailing: &str, line: i64, domain: &str) -> String {
    format!("{mailing}.{line}@{domain}")
}

/// The Idempotency-Key of an entry, the same on every attempt of every run.
fn idempotency_key(tenant: &str, id: &str, line: i64) -> String {
    let mut hash = Sha256::new();
    for part in ["semel-mail", tenant, id, &line.to_string()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

/// Renders the templates for a row.
pub(in super::super) fn rendered(
    templates: &Templates,
    columns: &[String],
    values: &[String],
    email: &str,
    unsubscribe: Option<&str>,
) -> Result<Rendered, String> {
    templates.render(&variables(columns, values, email, unsubscribe))
}
