//! Dry runs: what an upload would do. The file is read, and nothing stays stored.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use semel_store::Conn;
use serde_json::{Value, json};

use super::{
    Hasher, Service,
    check::invalid_file,
    identity::Known,
    list::{
        address::Email,
        broken::Broken,
        doubt::{has_mixed_scripts, has_plus_tag},
        rows::{Kind, Row},
    },
    mail::template::Templates,
    message::Message,
    reader::{Next, Reader},
    send::rendered,
    tables::suppressions,
    upload::Upload,
};
use crate::http::{
    answers::patiently,
    problem::{BODY_INCOMPLETE, Problem, of_store},
};

/// How many addresses are remembered to count duplicates, as hashes: 2 million take some 40 MB, and 60 MB while the table
/// grows.
const REMEMBERED: usize = 2_000_000;

/// How long a dry run reads. Then it reports what it has counted: a node does one at a time, and others wait. A million
/// rows with simple templates take some seconds.
const LONGEST: Duration = Duration::from_secs(60);

/// How many rejected rows a dry run shows.
const SHOWN: usize = 20;

/// How many addresses are looked for among the suppressed ones at a time.
const ASKED_AT_ONCE: usize = 2_000;

impl Service {
    /// Reads the file and reports what would happen, unless the client is gone before.
    pub(super) async fn dry_run(
        &self,
        tenant: &str,
        upload: Upload,
        gone: impl Future<Output = ()> + Send,
    ) -> Result<Value, Problem> {
        let report = tokio::select! {
            report = self.report(tenant, &upload, LONGEST) => report,
            () = gone => Err(Problem::new(&BODY_INCOMPLETE)),
        };
        self.files.discard(&upload.stored.url).await;
        report
    }

    async fn report(&self, tenant: &str, upload: &Upload, longest: Duration) -> Result<Value, Problem> {
        let known = self.database.read(async |conn| upload.recognise(conn, tenant).await);
        let known = patiently(known).await?;
        let checked = &upload.checked;
        if let (Known::New, Some(faults)) = (&known, &checked.faults) {
            return Err(faults.clone());
        }
        // Of a known upload whose defaults were removed since, no mail can be shown.
        let message = checked.faults.is_none().then_some(&checked.message);
        let counts = self.count(tenant, upload, message, longest).await?;
        let is_exact = counts.is_whole && counts.seen.len() < REMEMBERED;
        Ok(json!({
            "dryRun": true,
            "wouldBe": would_be(&known),
            "filename": checked.filename,
            "contentHash": upload.stored.hash,
            "delimiter": char::from(checked.shape.delimiter).to_string(),
            "columns": checked.shape.columns,
            "total": counts.total,
            "suppressed": counts.suppressed,
            "duplicateRows": counts.duplicates,
            "rejectedRows": counts.rejected,
            "blankRows": counts.blank,
            "exact": is_exact,
            "complete": counts.is_whole,
            "warnings": { "plusTags": counts.plus_tags, "mixedScripts": counts.mixed_scripts },
            "rejects": counts.rejects,
            "preview": counts.preview,
        }))
    }

    /// Counts the rows of the file. They are read on a blocking thread, a part of the file at a time.
    async fn count(
        &self,
        tenant: &str,
        upload: &Upload,
        message: Option<&Message>,
        longest: Duration,
    ) -> Result<Counts, Problem> {
        let _permit = self.intake.dry_run().await?;
        let begun = Instant::now();
        let shape = &upload.checked.shape;
        let mut content =
            self.files.open(&upload.stored.url, shape.start().offset, upload.stored.bytes).await.map_err(of_store)?;
        let mut counts = Counts::of(upload, message, self.hasher.clone());
        let mut reader = Reader::at(shape, shape.start(), message);
        loop {
            reader.begin();
            let counted = tokio::task::spawn_blocking(move || {
                let next = counts.read(&mut reader)?;
                Ok::<_, Broken>((next, counts, reader))
            });
            let next;
            (next, counts, reader) = match counted.await {
                Ok(Ok(counted)) => counted,
                Ok(Err(broken)) => return Err(invalid_file(&broken)),
                Err(_) => return Err(of_store(semel::Error::Unavailable("the reader of the file failed".into()))),
            };
            for emails in std::mem::take(&mut counts.emails).chunks(ASKED_AT_ONCE) {
                let look = async |conn: &mut Conn<'_>| suppressions::count(conn, tenant, emails).await;
                counts.suppressed += patiently(self.database.read(look)).await?;
            }
            match next {
                Next::Over => {
                    counts.is_whole = true;
                    return Ok(counts);
                }
                _ if begun.elapsed() >= longest => return Ok(counts),
                Next::Hungry => reader.feed(content.next().await.map_err(of_store)?.as_deref()),
                Next::Tired | Next::Row(_) => {}
            }
        }
    }
}

/// What a dry run has counted.
struct Counts {
    hasher: Hasher,
    /// Whether the file was read to its end.
    is_whole: bool,
    seen: HashSet<u64>,
    /// Addresses that are not yet looked for among the suppressed ones.
    emails: Vec<String>,
    /// For the preview of the first mail.
    templates: Option<Templates>,
    link: Option<String>,
    columns: Vec<String>,
    total: u64,
    suppressed: i64,
    duplicates: u64,
    rejected: u64,
    blank: u64,
    plus_tags: u64,
    mixed_scripts: u64,
    rejects: Vec<Value>,
    preview: Option<Value>,
}

impl Counts {
    fn of(upload: &Upload, message: Option<&Message>, hasher: Hasher) -> Self {
        Self {
            hasher,
            is_whole: false,
            seen: HashSet::new(),
            emails: Vec::new(),
            templates: message.and_then(|message| message.templates().ok()),
            link: message.and_then(Message::sample_link),
            columns: upload.checked.shape.columns.clone(),
            total: 0,
            suppressed: 0,
            duplicates: 0,
            rejected: 0,
            blank: 0,
            plus_tags: 0,
            mixed_scripts: 0,
            rejects: Vec::new(),
            preview: None,
        }
    }

    /// Counts the rows that the reader has.
    fn read(&mut self, reader: &mut Reader) -> Result<Next, Broken> {
        loop {
            match reader.next()? {
                Next::Row(row) => self.add(row),
                next => {
                    self.blank = reader.place().blank;
                    return Ok(next);
                }
            }
        }
    }

    fn add(&mut self, row: Row) {
        match row.kind {
            Kind::Reject { column, code, value } => {
                self.rejected += 1;
                if self.rejects.len() < SHOWN {
                    self.rejects.push(json!({ "line": row.line, "column": column, "code": code, "value": value }));
                }
            }
            Kind::Entry { email, values } => {
                if self.is_duplicate(&email) {
                    self.duplicates += 1;
                    return;
                }
                self.total += 1;
                self.plus_tags += u64::from(has_plus_tag(&email));
                self.mixed_scripts += u64::from(has_mixed_scripts(&email));
                if self.preview.is_none() {
                    self.preview = self.preview_of(&email, &values);
                }
                self.emails.push(email.normal);
            }
        }
    }

    /// Whether the address came before. Beyond the limit, only the remembered ones are known.
    fn is_duplicate(&mut self, email: &Email) -> bool {
        let hash = self.hasher.hash(&email.normal);
        match self.seen.len() < REMEMBERED {
            true => !self.seen.insert(hash),
            false => self.seen.contains(&hash),
        }
    }

    fn preview_of(&self, email: &Email, values: &[String]) -> Option<Value> {
        let mail = rendered(self.templates.as_ref()?, &self.columns, values, &email.normal, self.link.as_deref());
        Some(match mail {
            Ok(mail) => json!({ "to": email.normal, "subject": mail.subject, "text": mail.text, "html": mail.html }),
            Err(why) => json!({ "to": email.normal, "error": why }),
        })
    }
}

/// What an upload would be: `created`, `known`, or the name of the problem.
fn would_be(known: &Known) -> Value {
    let (result, mailing) = known.named();
    let mut shown = json!({ "result": result });
    if let Some(mailing) = mailing {
        (shown["mailingId"], shown["mailingStatus"]) = (json!(mailing.id), json!(mailing.status));
    }
    match known {
        Known::Same(_, true) => shown["contentDiffers"] = true.into(),
        Known::MessageDiffers(_, fields) => shown["differsIn"] = json!(fields),
        _ => {}
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::mailings::fixture::Fixture;

    #[tokio::test]
    async fn a_dry_run_that_takes_too_long_reports_what_it_has_counted() {
        let fixture = Fixture::new().await;
        let upload = fixture.upload("email\nana@example.com\nbob@example.com\n").await;
        for (longest, is_whole, total) in [(LONGEST, true, 2), (Duration::ZERO, false, 0)] {
            let report = fixture.service.report("default", &upload, longest).await.unwrap();
            let [exact, complete] = ["exact", "complete"].map(|name| report[name].clone());
            assert_eq!((exact, complete, &report["total"]), (json!(is_whole), json!(is_whole), &json!(total)));
        }
    }
}
