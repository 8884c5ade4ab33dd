//! Level 1: an upload becomes one mailing, however often it is sent.
//!
//! The file is stored first, in parts, and belongs to nothing. One transaction then decides whether it is known, and
//! writes the mailing and the message that queues it. If the upload is cut off before, nothing is visible.

use std::{mem, pin::pin};

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
    check::{Checked, DEFAULT_POLICY, FIRST, Texts, invalid_file, without_file},
    files::{Staged, Stored},
    form::Form,
    identity::{Known, Uploaded, recognise},
    list::shape::Shape,
    message::Message,
    problems::{CONTENT_REUSED, FILE_TOO_LARGE, FILENAME_REUSED, INVALID_UPLOAD, MESSAGE_DIFFERS},
    tables::{
        chunks,
        mailings::{self, Mailing, New},
    },
};
use crate::http::{
    answers::patiently,
    fields::Wrong,
    problem::{Problem, of_store},
};

/// The most fields of an upload.
const MOST_FIELDS: usize = 32;

/// An upload whose file is stored and whose fields are read.
pub(super) struct Upload {
    pub(super) stored: Stored,
    pub(super) checked: Checked,
}

impl Service {
    /// Reads an upload from a request.
    pub(super) async fn receive(&self, mut form: Form) -> Result<Upload, Problem> {
        let (mut texts, mut wrong, mut file) = (Texts::default(), Wrong::default(), None);
        let read = self.receive_fields(&mut form, &mut texts, &mut wrong, &mut file).await;
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

    async fn receive_fields(
        &self,
        form: &mut Form,
        texts: &mut Texts,
        wrong: &mut Wrong,
        file: &mut Option<(Staged, Vec<u8>)>,
    ) -> Result<(), Problem> {
        let mut count = 0;
        while let Some(mut part) = form.next().await? {
            count += 1;
            if count > MOST_FIELDS {
                wrong.note("…", "are too many fields");
                return Err(mem::take(wrong).problem(&INVALID_UPLOAD));
            }
            let name = part.name.clone();
            let slot = match name.as_str() {
                "file" if file.is_none() => {
                    texts.filename = part.filename.take();
                    *file = Some(self.store(part.content()).await?);
                    continue;
                }
                "subject" => Some(&mut texts.given.subject),
                "from" => Some(&mut texts.given.from),
                "body" => Some(&mut texts.given.text),
                "html" => Some(&mut texts.given.html),
                "identity" => Some(&mut texts.identity),
                "policy" => Some(&mut texts.policy),
                "column" => Some(&mut texts.column),
                "sendAt" => Some(&mut texts.send_at),
                "dryRun" => Some(&mut texts.dry_run),
                _ => None,
            };
            match slot {
                None if name == "file" => wrong.note("file", "is given twice"),
                None => wrong.note(&name, "is not a field of an upload"),
                Some(Some(_)) => wrong.note(&name, "is given twice"),
                Some(slot) => match part.text().await? {
                    Ok(text) => *slot = Some(text),
                    Err(message) => wrong.note(&name, message),
                },
            }
            if !part.skip().await? {
                return Err(mem::take(wrong).problem(&INVALID_UPLOAD));
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

    /// Carries out an upload: a new mailing, a known one, or the report of a dry run, which ends early if its client is
    /// `gone`.
    pub(super) async fn take(
        &self,
        tenant: &str,
        actor: &str,
        mut upload: Upload,
        gone: impl Future<Output = ()> + Send,
    ) -> Result<Outcome, Problem> {
        if upload.checked.dry_run {
            return self.dry_run(tenant, upload, gone).await.map(Outcome::DryRun);
        }
        let (known, id) = match upload.checked.faults.take() {
            Some(faults) => (self.known_or(faults, tenant, &upload).await?, String::new()),
            None => self.create(tenant, actor, upload).await.map_err(of_store)?,
        };
        let reused = |kind, mailing: &Mailing| {
            let problem = Problem::new(kind).with("mailingId", mailing.id.clone());
            problem.with("mailingStatus", mailing.status.clone())
        };
        match known {
            Known::New => Ok(Outcome::Created { id }),
            Known::Same(mailing, differs) => Ok(Outcome::Known { id: mailing.id, status: mailing.status, differs }),
            Known::FilenameReused(mailing) => Err(reused(&FILENAME_REUSED, &mailing)),
            Known::ContentReused(mailing) => Err(reused(&CONTENT_REUSED, &mailing)),
            Known::MessageDiffers(mailing, fields) => Err(reused(&MESSAGE_DIFFERS, &mailing).detail(format!(
                "This file is a mailing already, with another {}. Nothing was stored or changed.",
                fields.join(" and another ")
            ))),
        }
    }

    /// The known mailing that an upload with a wrong message is; otherwise its faults. The file is not needed.
    async fn known_or(&self, faults: Problem, tenant: &str, upload: &Upload) -> Result<Known, Problem> {
        let known = self.database.read(async |conn| upload.recognise(conn, tenant).await);
        let known = patiently(known).await;
        self.files.discard(&upload.stored.url).await;
        match known? {
            Known::New => Err(faults),
            known => Ok(known),
        }
    }

    /// Makes the upload a mailing, or finds the one that it is.
    async fn create(&self, tenant: &str, actor: &str, upload: Upload) -> semel::Result<(Known, String)> {
        let id = uuid::Uuid::now_v7().hyphenated().to_string();
        let url = upload.stored.url.clone();
        let made = self.make(tenant, actor, &id, upload).await;
        crash_point!("mailing.committed");
        let needs_file = match &made {
            Ok(known) => matches!(known, Known::New),
            Err(Error::OutcomeUnknown(_)) => self.may_need(tenant, &url).await,
            Err(_) => false,
        };
        if !needs_file {
            self.files.discard(&url).await;
        }
        made.map(|known| (known, id))
    }

    /// The transaction of [`Service::create`].
    async fn make(&self, tenant: &str, actor: &str, id: &str, upload: Upload) -> semel::Result<Known> {
        let ([tenant, actor, id], store) = ([tenant, actor, id].map(str::to_owned), self.database.clone());
        let now = store.now().await?.as_micros();
        let made = self.ledger.transact(move |tx| async move {
            let known = decide(&tx, &tenant, &id, &upload, now).await?;
            if matches!(known, Known::New) {
                crash_point!("mailing.stored");
                store.put(&tx, vec![queued(&tenant, &id)?]).await?;
                let audit =
                    Audit { tenant: &tenant, actor: &actor, action: "mailings.create", subject: &id, reason: "" };
                let after = json!({ "status": "QUEUED", "run": 1, "filename": upload.checked.filename });
                store.audit_in(&tx, audit, None, Some(after)).await?;
            }
            Ok::<_, Error>(known)
        });
        made.await
    }

    /// Whether a mailing may have this file after a commit whose outcome is unknown. The commit may still be under way;
    /// it holds the tenant's lock, so this waits for its end. What stays in doubt is left to the sweep.
    async fn may_need(&self, tenant: &str, url: &str) -> bool {
        let [tenant, url] = [tenant, url].map(str::to_owned);
        let used = self.ledger.transact(move |tx| async move {
            let mut held = tx.connection().await?;
            let mut conn = held.get()?;
            mailings::one_at_a_time(&mut conn, &tenant).await?;
            chunks::is_used(&mut conn, &url).await
        });
        used.await.unwrap_or(true)
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
        let policy = policy.unwrap_or(DEFAULT_POLICY);
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
            message_domain: &message.message_domain,
            policy,
            shape: &json(serde_json::to_string(shape))?,
            address_column: i64::try_from(shape.email).unwrap_or(i64::MAX),
            send_at: send_at.map(Timestamp::as_micros),
        };
        new.insert(&mut conn, now).await?;
    }
    Ok(known)
}

impl Upload {
    /// What the upload is.
    pub(super) async fn recognise(&self, conn: &mut Conn<'_>, tenant: &str) -> semel::Result<Known> {
        let Checked { filename, given, identity, policy, shape, .. } = &self.checked;
        let alike = mailings::alike(conn, tenant, filename, &self.stored.hash).await?;
        let uploaded = Uploaded {
            content_hash: &self.stored.hash,
            message_hash: &given.hash(),
            policy: *policy,
            column: self.checked.names_column.then_some(shape.email),
            send_at: self.checked.send_at.map(Timestamp::as_micros),
        };
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

    /// How its file is read.
    pub(super) async fn shape_of(&self, mailing: &Mailing) -> semel::Result<Shape> {
        let number = mailing.number;
        let stored = self.database.read(async |conn| mailings::shape(conn, number).await).await?;
        serde_json::from_str(&stored).map_err(|_| Error::Corrupt("the description of a mailing's file"))
    }
}
