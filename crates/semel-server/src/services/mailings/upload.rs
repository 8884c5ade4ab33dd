//! Level 1: an upload becomes one mailing, however often it is sent.
//!
//! The file is stored first, in parts, and belongs to nothing. One transaction then decides whether it is known, and
//! writes the mailing and the message that queues it. If the upload is cut off before, nothing is visible.

use std::pin::pin;

use axum::extract::{Multipart, multipart::Field};
use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _};
use semel::{
    Error, Timestamp, crash_point,
    messaging::{Message as QueueMessage, Topic},
    prelude::*,
};
use semel_store::{Audit, Conn, Tx, codec};
use serde_json::{Value, json};

use super::{
    QUEUE, Service,
    files::{Staged, Stored},
    identity::{Identity, Known, Uploaded, recognise},
    list::{broken::Broken, filename::clean, shape::Shape},
    message::{Given, Message},
    problems::{CONTENT_REUSED, FILE_TOO_LARGE, FILENAME_REUSED, INVALID_FILE, INVALID_UPLOAD, MESSAGE_DIFFERS},
    tables::mailings::{self, Mailing, New},
};
use crate::http::{
    fields::Wrong,
    problem::{BODY_INCOMPLETE, Problem, of_store},
    query,
};

/// How much of a file is looked at before it is stored.
pub(super) const FIRST: usize = 64 << 10;

/// The longest text field: templates.
pub(super) const LONGEST_TEXT: usize = 1 << 20;

/// The most fields of an upload.
const MOST_FIELDS: usize = 32;

/// An upload whose file is stored and whose fields are read.
pub(super) struct Upload {
    pub(super) stored: Stored,
    pub(super) checked: Checked,
}

/// The fields of an upload that were checked.
pub(super) struct Checked {
    pub(super) filename: String,
    pub(super) shape: Shape,
    pub(super) given: Given,
    pub(super) message: Message,
    pub(super) identity: Identity,
    pub(super) policy: &'static str,
    pub(super) send_at: Option<Timestamp>,
    pub(super) dry_run: bool,
}

/// The fields of an upload as they arrive.
#[derive(Default)]
pub(super) struct Texts {
    pub(super) given: Given,
    pub(super) filename: Option<String>,
    pub(super) identity: Option<String>,
    pub(super) policy: Option<String>,
    pub(super) column: Option<String>,
    pub(super) send_at: Option<String>,
    pub(super) dry_run: Option<String>,
}

impl Service {
    /// Reads an upload from a request.
    pub(super) async fn receive(&self, mut parts: Multipart) -> Result<Upload, Problem> {
        let (mut texts, mut wrong, mut file) = (Texts::default(), Wrong::default(), None);
        let read = self.receive_parts(&mut parts, &mut texts, &mut wrong, &mut file).await;
        let (staged, first) = match (read, file) {
            (Ok(()), Some(file)) => file,
            (Ok(()), None) => return Err(without_file(wrong)),
            (Err(problem), file) => {
                if let Some((staged, _)) = file {
                    staged.drop_it().await;
                }
                return Err(problem);
            }
        };
        self.accept(staged, &first, texts, wrong).await
    }

    /// Checks an upload whose file was stored; removes the file if it is refused.
    pub(super) async fn accept(
        &self,
        staged: Staged,
        first: &[u8],
        texts: Texts,
        wrong: Wrong,
    ) -> Result<Upload, Problem> {
        match self.check(first, texts, wrong) {
            Ok(checked) => {
                let stored = staged.finish().await.map_err(of_store)?;
                Ok(Upload { stored, checked })
            }
            Err(problem) => {
                staged.drop_it().await;
                Err(problem)
            }
        }
    }

    async fn receive_parts(
        &self,
        parts: &mut Multipart,
        texts: &mut Texts,
        wrong: &mut Wrong,
        file: &mut Option<(Staged, Vec<u8>)>,
    ) -> Result<(), Problem> {
        let mut count = 0;
        while let Some(field) = parts.next_field().await.map_err(|error| cut_off(&error))? {
            count += 1;
            if count > MOST_FIELDS {
                wrong.note("…", "are too many fields");
                break;
            }
            let name = field.name().unwrap_or_default().to_owned();
            if name == "file" {
                if file.is_some() {
                    wrong.note("file", "is given twice");
                    continue;
                }
                texts.filename = Some(field.file_name().unwrap_or_default().to_owned());
                *file = Some(self.store(field.map_err(|error| cut_off(&error))).await?);
                continue;
            }
            let slot = match name.as_str() {
                "subject" => &mut texts.given.subject,
                "from" => &mut texts.given.from,
                "body" => &mut texts.given.text,
                "html" => &mut texts.given.html,
                "identity" => &mut texts.identity,
                "policy" => &mut texts.policy,
                "column" => &mut texts.column,
                "sendAt" => &mut texts.send_at,
                "dryRun" => &mut texts.dry_run,
                _ => {
                    wrong.note(&name, "is not a field of an upload");
                    continue;
                }
            };
            if slot.is_some() {
                wrong.note(&name, "is given twice");
            }
            match text(field).await? {
                Ok(text) => *slot = Some(text),
                Err(message) => wrong.note(&name, message),
            }
        }
        Ok(())
    }

    /// Stores the file as it arrives. What its beginning shows ends the upload early.
    pub(super) async fn store(
        &self,
        parts: impl Stream<Item = Result<Bytes, Problem>>,
    ) -> Result<(Staged, Vec<u8>), Problem> {
        let mut parts = pin!(parts);
        let mut staged = self.files.stage().await.map_err(of_store)?;
        let (mut first, mut bytes, mut looked) = (Vec::new(), 0, false);
        let stored = async {
            while let Some(part) = parts.try_next().await? {
                bytes += part.len() as u64;
                if bytes > self.config.max_file.0 {
                    return Err(Problem::new(&FILE_TOO_LARGE));
                }
                let more = FIRST.saturating_sub(first.len()).min(part.len());
                first.extend_from_slice(&part[..more]);
                if first.len() >= FIRST && !looked {
                    looked = true;
                    // The column may be named by a later field.
                    if let Err(broken) = Shape::look(&first, false, None)
                        && !broken.code.contains("column")
                    {
                        return Err(invalid_file(&broken));
                    }
                }
                staged.write(&part).await.map_err(of_store)?;
            }
            Ok(())
        };
        match stored.await {
            Ok(()) => Ok((staged, first)),
            Err(problem) => {
                staged.drop_it().await;
                Err(problem)
            }
        }
    }

    fn check(&self, first: &[u8], texts: Texts, mut wrong: Wrong) -> Result<Checked, Problem> {
        let filename = texts.filename.as_deref().and_then(clean);
        if filename.is_none() {
            wrong.note("file", "has no usable file name");
        }
        let filename = filename.unwrap_or_default();
        let identity = texts.identity.as_deref().map(Identity::parse).transpose();
        let identity = identity.map_err(|message| wrong.note("identity", message)).ok().flatten().unwrap_or_default();
        let policy = match texts.policy.as_deref() {
            None | Some("never-twice") => "never-twice",
            Some("never-miss") => "never-miss",
            Some(_) => {
                wrong.note("policy", "must be never-twice or never-miss");
                "never-twice"
            }
        };
        let send_at = texts.send_at.as_deref().map(query::time).transpose();
        let send_at = send_at.map_err(|message| wrong.note("sendAt", message)).ok().flatten();
        let dry_run = match texts.dry_run.as_deref() {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => {
                wrong.note("dryRun", "must be true or false");
                false
            }
        };
        let message = texts.given.complete(&self.config, &filename, self.transport.kind() == "file", &mut wrong);
        if let Err(why) = message.from.parse::<lettre::message::Mailbox>()
            && !message.from.is_empty()
        {
            wrong.note("from", format!("is not a sender such as News <news@example.com>: {why}"));
        }
        // Rendered, it would be refused for every entry: better now than after the import.
        if message.subject.chars().any(char::is_control) {
            wrong.note("subject", "must not have a line break or another control character");
        }
        let templates = message.templates();
        if let Err(mistakes) = &templates {
            // A missing body was noted above.
            let is_empty = message.text.is_none() && message.html.is_none();
            let others = mistakes.iter().filter(|(field, _)| !(is_empty && field == "body"));
            others.for_each(|(field, message)| wrong.note(field, message.clone()));
        }
        wrong.check(&INVALID_UPLOAD)?;
        let shape = Shape::look(first, first.len() < FIRST, texts.column.as_deref());
        let shape = shape.map_err(|broken| invalid_file(&broken))?;
        let mut wrong = Wrong::default();
        if let Ok(templates) = templates {
            for (field, name) in templates.missing(&shape.columns) {
                let columns = shape.columns.join(", ");
                wrong.note(field, format!("uses {{{{ {name} }}}}, but the file has only the columns {columns}"));
            }
        }
        wrong.check(&INVALID_UPLOAD)?;
        Ok(Checked { filename, shape, given: texts.given, message, identity, policy, send_at, dry_run })
    }

    /// Carries out an upload: a new mailing, a known one, or the report of a dry run.
    pub(super) async fn take(&self, tenant: &str, actor: &str, upload: Upload) -> Result<Outcome, Problem> {
        if upload.checked.dry_run {
            return self.dry_run(tenant, upload).await.map(Outcome::DryRun);
        }
        let (known, id) = self.create(tenant, actor, upload).await.map_err(of_store)?;
        let reused = |kind, mailing: &Mailing| {
            let problem = Problem::new(kind).with("mailingId", mailing.id.clone());
            Err(problem.with("mailingStatus", mailing.status.clone()))
        };
        match known {
            Known::New => Ok(Outcome::Created { id }),
            Known::Same(mailing, differs) => Ok(Outcome::Known { id: mailing.id, status: mailing.status, differs }),
            Known::FilenameReused(mailing) => reused(&FILENAME_REUSED, &mailing),
            Known::ContentReused(mailing) => reused(&CONTENT_REUSED, &mailing),
            Known::MessageDiffers(mailing) => reused(&MESSAGE_DIFFERS, &mailing),
        }
    }

    /// Makes the upload a mailing, or finds the one that it is.
    async fn create(&self, tenant: &str, actor: &str, upload: Upload) -> semel::Result<(Known, String)> {
        let id = uuid::Uuid::now_v7().hyphenated().to_string();
        let ([tenant, actor], store) = ([tenant, actor].map(str::to_owned), self.database.clone());
        let (url, new) = (upload.stored.url.clone(), id.clone());
        let now = store.now().await?.as_micros();
        let made = self.ledger.transact(move |tx| async move {
            let known = decide(&tx, &tenant, &new, &upload, now).await?;
            if matches!(known, Known::New) {
                crash_point!("mailing.stored");
                store.put(&tx, vec![queued(&tenant, &new)?]).await?;
                let audit =
                    Audit { tenant: &tenant, actor: &actor, action: "mailings.create", subject: &new, reason: "" };
                let after = json!({ "status": "QUEUED", "run": 1, "filename": upload.checked.filename });
                store.audit_in(&tx, audit, None, Some(after)).await?;
            }
            Ok::<_, Error>(known)
        });
        let made = made.await;
        crash_point!("mailing.committed");
        // After an error the mailing may exist: the sweep removes a file that belongs to none.
        if matches!(&made, Ok(known) if !matches!(known, Known::New))
            && let Err(error) = self.files.remove(&url).await
        {
            tracing::warn!(%error, "the file of a repeated upload could not be removed yet; a sweep removes it");
        }
        made.map(|known| (known, id))
    }
}

/// What became of an upload that was not refused.
pub(crate) enum Outcome {
    /// What it would do.
    DryRun(Value),
    /// A new mailing.
    Created { id: String },
    /// This mailing; `differs`: its file had another content.
    Known { id: String, status: String, differs: bool },
}

impl Outcome {
    pub(crate) fn to_json(&self) -> Value {
        match self {
            Self::DryRun(report) => report.clone(),
            Self::Created { id } => json!({ "mailingId": id, "status": "QUEUED", "created": true }),
            Self::Known { id, status, differs } => {
                let mut known = json!({ "mailingId": id, "status": status, "created": false });
                if *differs {
                    known["contentDiffers"] = true.into();
                }
                known
            }
        }
    }
}

/// Decides under the tenant's lock, and inserts a new mailing.
async fn decide(tx: &Tx, tenant: &str, id: &str, upload: &Upload, now: i64) -> semel::Result<Known> {
    let mut held = tx.connection().await?;
    let mut conn = held.get()?;
    mailings::one_at_a_time(&mut conn, tenant).await?;
    let known = upload.recognise(&mut conn, tenant).await?;
    if matches!(known, Known::New) {
        let Checked { filename, shape, message, policy, send_at, .. } = &upload.checked;
        let json = |value: serde_json::Result<String>| value.map_err(|error| Error::Invalid(error.to_string()));
        let new = New {
            tenant,
            id,
            filename,
            content_hash: &upload.stored.hash,
            content_bytes: i64::try_from(upload.stored.bytes).unwrap_or(i64::MAX),
            storage_url: &upload.stored.url,
            message: codec::encode(json(serde_json::to_string(message))?.as_bytes()),
            message_hash: &upload.checked.given.hash(),
            policy,
            shape: &json(serde_json::to_string(shape))?,
            send_at: send_at.map(Timestamp::as_micros),
        };
        new.insert(&mut conn, now).await?;
    }
    Ok(known)
}

impl Upload {
    /// What the upload is.
    pub(super) async fn recognise(&self, conn: &mut Conn<'_>, tenant: &str) -> semel::Result<Known> {
        let Checked { filename, given, identity, .. } = &self.checked;
        let alike = mailings::alike(conn, tenant, filename, &self.stored.hash).await?;
        let uploaded = Uploaded { content_hash: &self.stored.hash, message_hash: &given.hash() };
        Ok(recognise(*identity, &uploaded, alike))
    }
}

/// The message that queues a mailing.
pub(super) fn queued(tenant: &str, id: &str) -> semel::Result<QueueMessage> {
    let body = json!({ "mailingId": id }).to_string();
    Ok(QueueMessage::new(tenant, Topic::new(QUEUE)?, "mailing", body))
}

impl Service {
    /// The message of a stored mailing.
    pub(super) async fn message_of(&self, mailing: &Mailing) -> semel::Result<Message> {
        let number = mailing.number;
        let stored = self.database.read(async |conn| mailings::message(conn, number).await).await?;
        serde_json::from_slice(&codec::decode(stored)?).map_err(|_| Error::Corrupt("the message of a mailing"))
    }
}

/// A text field, or what is wrong with it.
async fn text(mut field: Field<'_>) -> Result<Result<String, String>, Problem> {
    let mut bytes = Vec::new();
    while let Some(part) = field.chunk().await.map_err(|error| cut_off(&error))? {
        if bytes.len() + part.len() > LONGEST_TEXT {
            return Ok(Err("must have at most 1 MiB".to_owned()));
        }
        bytes.extend_from_slice(&part);
    }
    let text = String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned());
    Ok(text.and_then(|text| match text.contains('\0') {
        true => Err("must not have a NUL character".to_owned()),
        false => Ok(text),
    }))
}

/// The problem of an upload without a file.
pub(super) fn without_file(mut wrong: Wrong) -> Problem {
    wrong.note("file", "is missing: the list, as multipart/form-data");
    wrong.problem(&INVALID_UPLOAD)
}

/// The problem of a file that is no list.
pub(super) fn invalid_file(broken: &Broken) -> Problem {
    let problem = Problem::new(&INVALID_FILE).detail(format!("{broken}")).with("code", broken.code);
    match broken.line {
        Some(line) => problem.with("line", line),
        None => problem,
    }
}

fn cut_off(error: &axum::extract::multipart::MultipartError) -> Problem {
    Problem::new(&BODY_INCOMPLETE)
        .detail(format!("The upload cannot be read: {}. Nothing was stored.", error.body_text()))
}
