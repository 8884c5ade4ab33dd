//! Level 2: the file becomes one entry per address.
//!
//! Batches of rows are written in steps, each with the place in the file, so a killed import continues after its last
//! batch. On PostgreSQL new addresses are copied; those that a filter in memory has perhaps seen are inserted, and the
//! table's unique constraint decides. If the filter is wrong (it is empty after a restart), the copy is refused and the
//! batch is inserted instead.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use semel::{Error, Result, Unfinished, crash_point};
use semel_store::Conn;
use serde::{Deserialize, Serialize};

use super::{
    files::Content,
    list::{
        broken::Broken,
        canon::ListHash,
        rows::{Kind, Place, Row, Rows},
        seen::Seen,
        shape::Shape,
    },
    mail::template::Templates,
    run::{Change, Halt, Run},
    send::rendered,
    tables::{
        imports::{self, Copied, NewEntry, Reject},
        mailings::Mailing,
    },
};
use crate::unfinished::unfinished;

/// The rows of a batch on PostgreSQL, and on SQLite, whose only writer a batch holds.
const ROWS: (usize, usize) = (10_000, 2_000);

/// The bytes of a batch.
const BYTES: usize = 8 << 20;

/// The checkpoint of an import.
#[derive(Clone, Serialize, Deserialize)]
struct Progress {
    place: Place,
    hash: ListHash,
}

/// Rows of a file, read ahead.
#[derive(Clone, Default)]
struct Batch {
    entries: Vec<NewEntry>,
    rejects: Vec<Reject>,
    place: Option<Place>,
    is_last: bool,
}

/// Imports the rest of the file.
pub(super) async fn import(run: &Run, mut mailing: Mailing) -> Result<Result<Mailing, Halt>, Unfinished> {
    let shape: Shape = serde_json::from_str(&mailing.shape)
        .map_err(|_| Unfinished::failed_for_good("the description of the file cannot be read"))?;
    let progress = match &mailing.place {
        None => Progress { place: shape.start(), hash: ListHash::default() },
        Some(place) => serde_json::from_str(place)
            .map_err(|_| Unfinished::failed_for_good("the place in the file cannot be read"))?,
    };
    let Some(url) = mailing.storage_url.clone() else {
        return Err(Unfinished::failed_for_good("the file is gone, although it was not imported"));
    };
    let mut source = Source::open(run, &mailing, &shape, &url, progress.place).await.map_err(unfinished)?;
    // A row has seldom fewer bytes.
    let mut seen = Seen::with_room(usize::try_from(mailing.content_bytes / 16).unwrap_or(0));
    let mut hash = progress.hash;
    let mut next = source.batch().await?;
    loop {
        if run.context.turn_is_over() {
            return Err(Unfinished::TurnOver);
        }
        let batch = Arc::new(next);
        let (clean, suspects) = batch.split(&mut seen);
        let writes = write(run, &batch, clean, suspects, hash);
        // The next batch is read while the database writes this one.
        let (written, following) = tokio::join!(writes, async {
            match batch.is_last {
                true => Ok(Batch::default()),
                false => source.batch().await,
            }
        });
        match written? {
            Err(halt) => return Ok(Err(halt)),
            Ok((stopped, (new_hash, changed))) => {
                (hash, mailing) = (new_hash, changed);
                if stopped {
                    return run.end("stopped").await.map(|ended| ended.and(Err(Halt::Stopped)));
                }
            }
        }
        crash_point!("mailing.imported_batch");
        if batch.is_last {
            break;
        }
        next = following?;
    }
    if let Err(error) = run.service.files.remove(&url).await {
        tracing::warn!(%error, "an imported file could not be removed yet; a sweep removes it");
    }
    Ok(Ok(mailing))
}

type Written = Result<(bool, (ListHash, Mailing)), Halt>;

/// Writes a batch: by a copy first, and by an insert if the copy is refused.
async fn write(
    run: &Run,
    batch: &Arc<Batch>,
    clean: Vec<NewEntry>,
    suspects: Vec<NewEntry>,
    hash: ListHash,
) -> Result<Written, Unfinished> {
    let refused = Arc::new(AtomicBool::new(false));
    let copying = Write {
        batch: batch.clone(),
        clean: clean.clone(),
        suspects: suspects.clone(),
        hash,
        refused: refused.clone(),
    };
    let written = match run.step(copying).await {
        Err(_) if refused.load(Ordering::Relaxed) => {
            let mut suspects = [clean, suspects].concat();
            suspects.sort_by_key(|row| row.line);
            run.step(Write { batch: batch.clone(), clean: Vec::new(), suspects, hash, refused }).await
        }
        written => written,
    };
    Ok(written?.map(|((stopped, hash), mailing)| (stopped, (hash, mailing))))
}

/// A batch to be written.
struct Write {
    batch: Arc<Batch>,
    /// Rows whose addresses are new, unless the filter is wrong.
    clean: Vec<NewEntry>,
    /// Rows whose addresses may have an entry.
    suspects: Vec<NewEntry>,
    hash: ListHash,
    /// Whether the copy was refused.
    refused: Arc<AtomicBool>,
}

impl Change for Write {
    /// Whether the mailing was stopped (nothing was written then), and the hash of the list so far.
    type Out = (bool, ListHash);

    async fn make(mut self, conn: &mut Conn<'_>, mailing: &mut Mailing, now: i64) -> Result<Self::Out> {
        if ["PAUSED", "CANCELLED"].contains(&mailing.status.as_str()) {
            return Ok((true, self.hash));
        }
        let number = mailing.number;
        let mut inserted: Vec<&NewEntry> = Vec::with_capacity(self.clean.len());
        match conn {
            Conn::Postgres(conn) if !self.clean.is_empty() => {
                if imports::copy(conn, number, &self.clean, now).await? == Copied::Known {
                    self.refused.store(true, Ordering::Relaxed);
                    return Err(Error::Refused("an address of the batch has an entry".into()));
                }
                inserted.extend(&self.clean);
            }
            Conn::Postgres(_) => {}
            Conn::Sqlite(_) => self.suspects.append(&mut self.clean),
        }
        if !self.suspects.is_empty() {
            self.suspects.sort_by_key(|row| row.line);
            let lines: HashSet<i64> = imports::insert(conn, number, &self.suspects, now).await?.into_iter().collect();
            inserted.extend(self.suspects.iter().filter(|row| lines.contains(&row.line)));
            if lines.len() < self.suspects.len() {
                mailing.duplicate_rows += imports::duplicates(conn, number, &self.suspects).await?;
            }
        }
        inserted.iter().for_each(|row| self.hash.add(&row.email));
        mailing.total += i64::try_from(inserted.len()).unwrap_or(i64::MAX);
        imports::reject(conn, number, &self.batch.rejects).await?;
        mailing.rejected_rows += i64::try_from(self.batch.rejects.len()).unwrap_or(i64::MAX);
        if self.batch.is_last {
            mailing.phase = "sending".to_owned();
            (mailing.place, mailing.storage_url) = (None, None);
            mailing.list_hash = Some(self.hash.to_hex());
        } else if let Some(place) = self.batch.place {
            let progress = serde_json::to_string(&Progress { place, hash: self.hash });
            mailing.place = Some(progress.map_err(|error| Error::Invalid(error.to_string()))?);
        }
        crash_point!("mailing.importing_batch");
        Ok((false, self.hash))
    }
}

impl Batch {
    /// The rows whose addresses are new, and those whose addresses may have been before.
    fn split(&self, seen: &mut Seen) -> (Vec<NewEntry>, Vec<NewEntry>) {
        self.entries.iter().cloned().partition(|row| !seen.insert(&row.email))
    }
}

/// The file, as batches of rows.
struct Source {
    content: Content,
    rows: Rows,
    shape: Shape,
    /// Set if a row may lack a variable: then each is rendered once before anything is sent.
    check: Option<Templates>,
    most: usize,
    is_over: bool,
}

impl Source {
    async fn open(run: &Run, mailing: &Mailing, shape: &Shape, url: &str, place: Place) -> Result<Self> {
        let content = run.service.files.open(url, place.offset).await?;
        let templates = run.service.message_of(mailing).await?.templates();
        let templates = templates.map_err(|_| Error::Corrupt("the templates of a mailing"))?;
        let check = (!templates.missing(&shape.columns).is_empty()).then_some(templates);
        let most = if run.service.is_postgres { ROWS.0 } else { ROWS.1 };
        Ok(Self { content, rows: Rows::resume(shape, place), shape: shape.clone(), check, most, is_over: false })
    }

    async fn batch(&mut self) -> Result<Batch, Unfinished> {
        let (mut batch, mut bytes) = (Batch::default(), 0);
        while batch.entries.len() + batch.rejects.len() < self.most && bytes < BYTES {
            let broken = |broken: Broken| Unfinished::failed_for_good(broken.to_string());
            match self.rows.next().map_err(broken)? {
                Some(row) => bytes += self.add(&mut batch, row)?,
                None if self.is_over => {
                    batch.is_last = true;
                    break;
                }
                None => match self.content.next().await.map_err(unfinished)? {
                    Some(part) => self.rows.feed(&part),
                    None => {
                        self.rows.finish();
                        self.is_over = true;
                    }
                },
            }
        }
        batch.place = Some(self.rows.place());
        Ok(batch)
    }

    /// Adds a row; returns its approximate size.
    fn add(&self, batch: &mut Batch, Row { line, kind }: Row) -> Result<usize, Unfinished> {
        let line = i64::try_from(line).unwrap_or(i64::MAX);
        let size = match kind {
            Kind::Reject { column, code, value } => {
                let size = value.len();
                batch.rejects.push(Reject { line, column, code: code.to_owned(), value });
                size
            }
            Kind::Entry { email, values } => {
                if let Some(templates) = &self.check
                    && let Err(why) = rendered(templates, &self.shape.columns, &values, &email.normal, None)
                {
                    batch.rejects.push(Reject { line, column: None, code: "missing-variable".into(), value: why });
                    return Ok(64);
                }
                let cells = serde_json::to_vec(&values).map_err(|error| Unfinished::failed(error.to_string()))?;
                let mut token = [0; 16];
                fill(&mut token)?;
                let original = (email.original != email.normal).then_some(email.original);
                let size = cells.len() + email.normal.len();
                batch.entries.push(NewEntry { line, email: email.normal, original, token, cells });
                size
            }
        };
        Ok(size + 64)
    }
}

/// Fills a token with random bytes that nobody can guess.
fn fill(token: &mut [u8]) -> Result<(), Unfinished> {
    getrandom::fill(token).map_err(|error| Unfinished::failed(format!("no random bytes: {error}")))
}
