//! Level 2: the file becomes one entry per address.
//!
//! Batches of rows are written in steps, each with the place in the file, so a killed import continues after its last
//! batch. On PostgreSQL new addresses are copied; those that a filter in memory has perhaps seen are inserted, and the
//! table's unique constraint decides. If the filter is wrong (it is empty after a restart), the copy is refused and the
//! batch is inserted instead. A batch that fails is read again from the checkpoint as smaller ones, down to one row.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use semel::{Error, Result, Unfinished, crash_point};
use semel_store::Conn;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{
    files::Content,
    list::{
        broken::Broken,
        canon::ListHash,
        doubt::{has_mixed_scripts, has_plus_tag},
        rows::{Kind, Place, Row},
        seen::Seen,
        shape::Shape,
    },
    reader::{Next, Reader},
    run::{Change, Halt, Run},
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

/// A batch that fails after this time was perhaps too large: a transaction may take 5 s on SQLite, a statement 10 s on
/// PostgreSQL.
const LONG: Duration = Duration::from_secs(4);

/// The checkpoint of an import.
#[derive(Clone, Serialize, Deserialize)]
struct Progress {
    place: Place,
    hash: ListHash,
}

/// Rows of a file, read ahead.
#[derive(Default)]
struct Batch {
    /// Rows whose addresses are new, unless the filter is wrong.
    new: Vec<NewEntry>,
    /// Rows whose addresses may have an entry.
    suspects: Vec<NewEntry>,
    rejects: Vec<Reject>,
    place: Option<Place>,
    is_last: bool,
}

impl Batch {
    fn rows(&self) -> usize {
        self.new.len() + self.suspects.len() + self.rejects.len()
    }
}

/// Imports the rest of the file.
pub(super) async fn import(run: &Run, mut mailing: Mailing) -> Result<Result<Mailing, Halt>, Unfinished> {
    let shape = run.service.shape_of(&mailing).await.map_err(unfinished)?;
    let Some(url) = mailing.storage_url.clone() else {
        return Err(Unfinished::failed_for_good("the file is gone, although it was not imported"));
    };
    let most = if run.service.is_postgres { ROWS.0 } else { ROWS.1 };
    let (mut hash, mut batches) = read_ahead(run, &mailing, &shape, &url, most).await?;
    let mut refused = 0;
    loop {
        if run.context.turn_is_over() {
            return Err(Unfinished::TurnOver);
        }
        let Some(batch) = batches.recv().await else {
            return Err(Unfinished::failed("the reader of the file has stopped"));
        };
        let batch = Arc::new(batch?);
        let begun = Instant::now();
        match write(run, &batch, hash, &mut refused).await {
            Ok(Err(halt)) => return Ok(Err(halt)),
            Ok(Ok((None, _))) => return run.end("stopped").await.map(|ended| ended.and(Err(Halt::Stopped))),
            Ok(Ok((Some(new_hash), changed))) => (hash, mailing) = (new_hash, changed),
            Err(why) if batch.rows() > 1 && may_be_too_large(&why, begun.elapsed()) => {
                tracing::warn!(
                    mailing = run.id,
                    rows = batch.rows(),
                    "a batch of an import failed; smaller ones follow"
                );
                mailing = match run.step(Look).await? {
                    Ok(((), mailing)) => mailing,
                    Err(halt) => return Ok(Err(halt)),
                };
                if mailing.phase != "importing" {
                    break;
                }
                (hash, batches) = read_ahead(run, &mailing, &shape, &url, batch.rows() / 2).await?;
                continue;
            }
            Err(why) => return Err(why),
        }
        crash_point!("mailing.imported_batch");
        if batch.is_last {
            break;
        }
    }
    if let Err(error) = run.service.files.remove(&url).await {
        tracing::warn!(%error, "an imported file could not be removed yet; a sweep removes it");
    }
    Ok(Ok(mailing))
}

/// Whether a smaller batch may succeed: the database refused this one, or it took so long that its failure is no outage.
fn may_be_too_large(why: &Unfinished, took: Duration) -> bool {
    matches!(why, Unfinished::Failed(_)) || took >= LONG
}

/// Reads the mailing again: the commit of a step that failed may have taken effect.
struct Look;

impl Change for Look {
    type Out = ();

    async fn make(self, _: &mut Conn<'_>, _: &mut Mailing, _: i64) -> Result<()> {
        Ok(())
    }
}

/// Reads the file from the checkpoint on, in batches of so many rows. Returns the hash of the list before it, too.
async fn read_ahead(
    run: &Run,
    mailing: &Mailing,
    shape: &Shape,
    url: &str,
    most: usize,
) -> Result<(ListHash, mpsc::Receiver<Result<Batch, Unfinished>>), Unfinished> {
    let Progress { place, hash } = match &mailing.place {
        None => Progress { place: shape.start(), hash: ListHash::default() },
        Some(place) => serde_json::from_str(place)
            .map_err(|_| Unfinished::failed_for_good("the place in the file cannot be read"))?,
    };
    let source = Source::open(run, mailing, shape, url, place, most).await.map_err(unfinished)?;
    Ok((hash, source.read_ahead()))
}

/// How many copies of a turn may be refused. The filter is empty when a turn begins, so a list with many duplicates of
/// earlier rows would copy each batch in vain before it inserts it.
const REFUSED: usize = 2;

/// Writes a batch: by a copy first, and by an insert if the copy is refused. `times`: how often one was.
async fn write(
    run: &Run,
    batch: &Arc<Batch>,
    hash: ListHash,
    times: &mut usize,
) -> Result<Result<Written, Halt>, Unfinished> {
    let refused = Arc::new(AtomicBool::new(false));
    let copies = run.service.is_postgres && !batch.new.is_empty() && *times < REFUSED;
    let change = Write { batch: batch.clone(), copies, hash, refused: refused.clone() };
    match run.step(change.clone()).await {
        Err(_) if refused.load(Ordering::Relaxed) => {
            *times += 1;
            run.step(Write { copies: false, ..change }).await
        }
        written => written,
    }
}

/// The hash of the list so far, or `None` if the mailing was stopped and nothing was written.
type Written = (Option<ListHash>, Mailing);

/// A batch to be written.
#[derive(Clone)]
struct Write {
    batch: Arc<Batch>,
    /// Whether new rows are copied. Otherwise all are inserted.
    copies: bool,
    hash: ListHash,
    /// Whether the copy was refused.
    refused: Arc<AtomicBool>,
}

impl Change for Write {
    type Out = Option<ListHash>;

    fn is_progress(&self) -> bool {
        true
    }

    async fn make(mut self, conn: &mut Conn<'_>, mailing: &mut Mailing, now: i64) -> Result<Self::Out> {
        if mailing.is_stopped() {
            return Ok(None);
        }
        let (number, batch) = (mailing.number, &self.batch);
        let mut inserted: Vec<&NewEntry> = Vec::with_capacity(batch.new.len());
        let mut suspects: Vec<&NewEntry> = batch.suspects.iter().collect();
        match conn {
            Conn::Postgres(conn) if self.copies => {
                if imports::copy(conn, number, &batch.new, now).await? == Copied::Known {
                    self.refused.store(true, Ordering::Relaxed);
                    return Err(Error::Refused("an address of the batch has an entry".into()));
                }
                inserted.extend(&batch.new);
            }
            _ => {
                suspects.extend(&batch.new);
                suspects.sort_by_key(|row| row.line);
            }
        }
        if !suspects.is_empty() {
            let lines: HashSet<i64> = imports::insert(conn, number, &suspects, now).await?.into_iter().collect();
            inserted.extend(suspects.iter().filter(|row| lines.contains(&row.line)));
            if lines.len() < suspects.len() {
                mailing.duplicate_rows += imports::duplicates(conn, number, &suspects).await?;
            }
        }
        inserted.iter().for_each(|row| self.hash.add(&row.email));
        let count = |fits: fn(&NewEntry) -> bool| {
            i64::try_from(inserted.iter().filter(|row| fits(row)).count()).unwrap_or(i64::MAX)
        };
        mailing.plus_tags += count(|row| row.has_plus_tag);
        mailing.mixed_scripts += count(|row| row.has_mixed_scripts);
        mailing.total += i64::try_from(inserted.len()).unwrap_or(i64::MAX);
        imports::reject(conn, number, &batch.rejects).await?;
        mailing.rejected_rows += i64::try_from(batch.rejects.len()).unwrap_or(i64::MAX);
        if let Some(place) = batch.place {
            mailing.blank_rows = i64::try_from(place.blank).unwrap_or(i64::MAX);
        }
        if batch.is_last {
            mailing.phase = "sending".to_owned();
            (mailing.place, mailing.storage_url) = (None, None);
            // Empty lists are no twins of one another.
            mailing.list_hash = (mailing.total > 0).then(|| self.hash.to_hex());
        } else if let Some(place) = batch.place {
            let progress = serde_json::to_string(&Progress { place, hash: self.hash });
            mailing.place = Some(progress.map_err(|error| Error::Invalid(error.to_string()))?);
        }
        crash_point!("mailing.importing_batch");
        Ok(Some(self.hash))
    }
}

/// The file, as batches of rows.
struct Source {
    content: Content,
    sorter: Sorter,
}

/// Makes batches of rows. It computes, and so belongs to a blocking thread.
struct Sorter {
    reader: Reader,
    seen: Seen,
    most: usize,
}

/// Why a batch is not longer.
enum Full {
    /// It is long enough, or took long enough.
    Enough,
    /// There is no whole row.
    Hungry,
}

impl Source {
    async fn open(run: &Run, mailing: &Mailing, shape: &Shape, url: &str, place: Place, most: usize) -> Result<Self> {
        let content = run.service.files.open(url, place.offset, mailing.content_bytes.unsigned_abs()).await?;
        let message = run.service.message_of(mailing).await?;
        message.templates().map_err(|_| Error::Corrupt("the templates of a mailing"))?;
        // A row has seldom fewer bytes.
        let seen = Seen::with_room(usize::try_from(mailing.content_bytes / 16).unwrap_or(0));
        Ok(Self { content, sorter: Sorter { reader: Reader::at(shape, place, Some(&message)), seen, most } })
    }

    /// Reads in a task of its own, one batch ahead of the database. It ends when nobody takes the next batch.
    fn read_ahead(mut self) -> mpsc::Receiver<Result<Batch, Unfinished>> {
        let (give, take) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let (sorter, batch) = match batch(self.sorter, &mut self.content).await {
                    Ok((sorter, batch)) => (sorter, batch),
                    Err(why) => return drop(give.send(Err(why)).await),
                };
                self.sorter = sorter;
                let is_last = batch.is_last;
                if give.send(Ok(batch)).await.is_err() || is_last {
                    return;
                }
            }
        });
        take
    }
}

/// The next batch. Rows are read and tried on a blocking thread: ten thousand with a slow template take seconds, and the
/// runtime's threads renew leases.
async fn batch(mut sorter: Sorter, content: &mut Content) -> Result<(Sorter, Batch), Unfinished> {
    let (mut batch, mut bytes) = (Batch::default(), 0);
    sorter.reader.begin();
    loop {
        let sorted = tokio::task::spawn_blocking(move || {
            let full = sorter.fill(&mut batch, &mut bytes)?;
            Ok::<_, Unfinished>((full, sorter, batch, bytes))
        });
        let full;
        (full, sorter, batch, bytes) =
            sorted.await.map_err(|_| Unfinished::failed("the reader of the file failed"))??;
        match full {
            Full::Enough => break,
            Full::Hungry => sorter.reader.feed(content.next().await.map_err(unfinished)?.as_deref()),
        }
    }
    batch.place = Some(sorter.reader.place());
    Ok((sorter, batch))
}

impl Sorter {
    fn fill(&mut self, batch: &mut Batch, bytes: &mut usize) -> Result<Full, Unfinished> {
        while batch.rows() < self.most && *bytes < BYTES {
            let broken = |broken: Broken| Unfinished::failed_for_good(format!("{broken} ({})", broken.code));
            match self.reader.next().map_err(broken)? {
                Next::Row(row) => *bytes += self.add(batch, row)?,
                Next::Hungry => return Ok(Full::Hungry),
                Next::Tired => break,
                Next::Over => {
                    batch.is_last = true;
                    break;
                }
            }
        }
        Ok(Full::Enough)
    }

    /// Adds a row; returns its approximate size.
    fn add(&mut self, batch: &mut Batch, Row { line, kind }: Row) -> Result<usize, Unfinished> {
        let line = i64::try_from(line).unwrap_or(i64::MAX);
        let size = match kind {
            Kind::Reject { column, code, value } => {
                let size = value.len() + column.as_ref().map_or(0, String::len);
                batch.rejects.push(Reject { line, column, code: code.to_owned(), value });
                size
            }
            Kind::Entry { email, values } => {
                let cells = serde_json::to_vec(&values).map_err(|error| Unfinished::failed(error.to_string()))?;
                let mut token = [0; 16];
                fill(&mut token)?;
                let (has_plus_tag, has_mixed_scripts) = (has_plus_tag(&email), has_mixed_scripts(&email));
                let original = (email.original != email.normal).then_some(email.original);
                let size = cells.len() + email.normal.len();
                let rows = if self.seen.insert(&email.normal) { &mut batch.suspects } else { &mut batch.new };
                let email = email.normal;
                rows.push(NewEntry { line, email, original, token, cells, has_plus_tag, has_mixed_scripts });
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
