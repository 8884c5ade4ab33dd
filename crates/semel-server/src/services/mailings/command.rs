//! The service for commands: the functions of the routes, with answers as JSON where the routes answer so.

use std::io;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, TryStreamExt as _, stream};
use semel::prelude::*;
use serde_json::{Value, json};
use tokio::{fs::File, io::AsyncReadExt as _};

use super::{
    Service,
    act::Who,
    check::{FIRST, Texts, invalid_file},
    form::text,
    list::{
        broken::Broken,
        rows::{Kind, Rows},
        shape::Shape,
    },
    message::Given,
    run,
    tables::{mailings, suppressions},
    view,
};
pub(crate) use super::{act::Act, list::address::Email, routes::STATUSES, upload::Outcome};
use crate::http::{
    answers::{missing, patiently},
    fields::Wrong,
    problem::{BODY_INCOMPLETE, Problem, of_store},
    query::Place,
};

/// How much of a file is read at a time.
const PART: usize = 256 << 10;

/// How many addresses of a file are suppressed at a time.
const SUPPRESSED_AT_ONCE: usize = 1_000;

/// How many refused lines of a file are shown.
const SHOWN: usize = 20;

/// The tenant on whose mailings a command works, and the person.
#[derive(Clone, Copy)]
pub(crate) struct By<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) actor: &'a str,
    pub(crate) reason: &'a str,
}

/// The fields of an upload. Texts are bytes, because they may come from files.
#[derive(Default)]
pub(crate) struct Asked {
    pub(crate) filename: String,
    pub(crate) subject: Option<String>,
    pub(crate) from: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) html: Option<Vec<u8>>,
    pub(crate) identity: Option<String>,
    pub(crate) policy: Option<String>,
    pub(crate) column: Option<String>,
    pub(crate) send_at: Option<String>,
    pub(crate) dry_run: bool,
}

/// What became of a file of suppressed addresses.
#[derive(Default)]
pub(crate) struct Imported {
    pub(crate) added: usize,
    pub(crate) known: usize,
    pub(crate) refused: u64,
    /// The first refused lines, with their reasons.
    pub(crate) first: Vec<(u64, String)>,
}

/// Whether a tenant may have this name.
pub(crate) fn tenant(name: &str) -> Result<String, semel::Error> {
    run::scope(name).map(|scope| scope.tenant().to_owned())
}

impl Service {
    /// `POST /mailings` with a file. `progress` is called with the number of bytes that were read.
    pub(crate) async fn upload_file(
        &self,
        by: By<'_>,
        file: File,
        asked: Asked,
        progress: impl Fn(usize),
    ) -> Result<Outcome, Problem> {
        let (staged, first) = self.store(parts(file).inspect_ok(|part| progress(part.len()))).await?;
        let mut wrong = Wrong::default();
        let mut told = |field, bytes: Option<Vec<u8>>| {
            bytes.and_then(|bytes| text(bytes).map_err(|message| wrong.note(field, message)).ok())
        };
        let [subject, from] = [asked.subject, asked.from].map(|text| text.map(String::into_bytes));
        let given = Given {
            subject: told("subject", subject),
            from: told("from", from),
            text: told("body", asked.body),
            html: told("html", asked.html),
        };
        let texts = Texts {
            given,
            filename: Some(asked.filename),
            identity: asked.identity,
            policy: asked.policy,
            column: asked.column,
            send_at: asked.send_at,
            dry_run: asked.dry_run.then(|| "true".to_owned()),
        };
        let upload = self.accept(staged, &first, texts, wrong).await?;
        self.take(by.tenant, by.actor, upload, std::future::pending()).await
    }

    /// `GET /mailings/{id}`
    pub(crate) async fn mailing(&self, tenant: &str, id: &str) -> Result<Value, Problem> {
        self.show(&self.find(tenant, id).await?).await
    }

    /// `GET /mailings`. Also the cursor of the next page.
    pub(crate) async fn mailings(
        &self,
        tenant: &str,
        status: &str,
        place: Place,
    ) -> Result<(Vec<Value>, Option<String>), Problem> {
        let page = self.database.read(async |conn| mailings::page(conn, tenant, status, "", place).await);
        let (page, next) = place.cut(patiently(page).await?, |mailing| mailing.number);
        let now = patiently(self.database.now()).await?.as_micros();
        Ok((page.iter().map(|mailing| view::mailing(mailing, now, None)).collect(), next))
    }

    /// The first entries in doubt: their lines and addresses.
    pub(crate) async fn in_doubt(&self, tenant: &str, id: &str, most: i64) -> Result<Vec<(i64, String)>, Problem> {
        let number = self.find(tenant, id).await?.number;
        let (mut found, mut place) = (Vec::new(), Place { after: 0, limit: most });
        // A page of a large mailing may be empty and have a next one.
        loop {
            let (page, next) = self.entries_of(number, "IN_DOUBT", place).await?;
            found.extend(page.into_iter().map(|entry| (entry.line, entry.email)));
            place.limit = most - i64::try_from(found.len()).unwrap_or(most);
            match next.and_then(|next| next.parse().ok()) {
                Some(after) if place.limit > 0 => place.after = after,
                _ => return Ok(found),
            }
        }
    }

    /// Pauses a mailing, resumes it, and so on. Returns it as it was left.
    pub(crate) async fn act_on(&self, id: &str, by: By<'_>, act: Act) -> Result<Value, Problem> {
        let who = Who { tenant: by.tenant, actor: by.actor, reason: by.reason };
        let mailing = self.act(id, &who, act).await?;
        self.show(&mailing).await
    }

    /// `POST /mailings/{id}/test`
    pub(crate) async fn test_mail(&self, by: By<'_>, id: &str, to: Email) -> Result<Value, Problem> {
        let mailing = self.find(by.tenant, id).await?;
        self.send_test(&mailing, by.actor, to).await
    }

    /// `GET /suppressions`: the addresses after one, and whether there are more.
    pub(crate) async fn suppressed(&self, tenant: &str, after: &str, most: i64) -> Result<(Vec<Value>, bool), Problem> {
        let page = self.database.read(async |conn| suppressions::page(conn, tenant, after, "", most + 1).await);
        let (mut items, most) = (patiently(page).await?, usize::try_from(most).unwrap_or(usize::MAX));
        let more = items.len() > most;
        items.truncate(most);
        Ok((items.into_iter().map(|item| json!(item)).collect(), more))
    }

    /// `POST /suppressions`: how many were added.
    pub(crate) async fn add_suppressions(&self, by: By<'_>, emails: Vec<Email>) -> Result<usize, Problem> {
        self.suppress(by.tenant, by.actor, emails, by.reason).await.map_err(of_store)
    }

    /// `DELETE /suppressions/{email}`
    pub(crate) async fn remove_suppression(&self, by: By<'_>, email: &Email) -> Result<(), Problem> {
        match self.unsuppress(by.tenant, by.actor, email, by.reason).await.map_err(of_store)? {
            true => Ok(()),
            false => Err(missing()),
        }
    }

    /// Suppresses the addresses of a list. If the file is broken, the lines before stay: `imported` counts them.
    pub(crate) async fn import_suppressions(
        &self,
        by: By<'_>,
        parts: impl Stream<Item = Result<Bytes, Problem>>,
        column: Option<&str>,
        imported: &mut Imported,
    ) -> Result<(), Problem> {
        let broken = |broken: Broken| invalid_file(&broken);
        let mut parts = std::pin::pin!(parts);
        let mut first = BytesMut::new();
        while first.len() < FIRST
            && let Some(part) = parts.try_next().await?
        {
            first.extend_from_slice(&part);
        }
        let looked_at = &first[..first.len().min(FIRST)];
        let shape = Shape::look(looked_at, first.len() < FIRST, column).map_err(broken)?;
        let mut rows = Rows::new(&shape);
        rows.feed(&first[usize::try_from(shape.skip).unwrap_or(0)..]);
        let (mut emails, mut is_over) = (Vec::new(), false);
        loop {
            match rows.next() {
                Ok(Some(row)) => match row.kind {
                    Kind::Entry { email, .. } => emails.push(email),
                    Kind::Reject { code, value, .. } => {
                        imported.refused += 1;
                        if imported.first.len() < SHOWN {
                            imported.first.push((row.line, format!("{code}: {value}")));
                        }
                    }
                },
                Ok(None) if is_over => return self.add_some(by, emails, imported).await,
                Ok(None) => match parts.try_next().await? {
                    Some(part) => rows.feed(&part),
                    None => {
                        rows.finish();
                        is_over = true;
                    }
                },
                Err(why) => {
                    self.add_some(by, emails, imported).await?;
                    return Err(broken(why));
                }
            }
            if emails.len() >= SUPPRESSED_AT_ONCE {
                self.add_some(by, std::mem::take(&mut emails), imported).await?;
            }
        }
    }

    async fn add_some(&self, by: By<'_>, emails: Vec<Email>, imported: &mut Imported) -> Result<(), Problem> {
        let given = emails.len();
        let added = self.add_suppressions(by, emails).await?;
        (imported.added, imported.known) = (imported.added + added, imported.known + given - added);
        Ok(())
    }
}

/// A file in parts.
pub(crate) fn parts(file: File) -> impl Stream<Item = Result<Bytes, Problem>> {
    let unreadable =
        |error: io::Error| Problem::new(&BODY_INCOMPLETE).detail(format!("The file cannot be read: {error}."));
    stream::try_unfold(file, move |mut file| async move {
        let mut part = BytesMut::with_capacity(PART);
        let read = file.read_buf(&mut part).await.map_err(unreadable)?;
        Ok((read > 0).then(|| (part.freeze(), file)))
    })
}
