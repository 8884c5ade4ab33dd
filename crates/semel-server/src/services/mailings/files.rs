//! Uploaded files until they are imported: chunk rows on PostgreSQL, whose nodes share no disk; files beside the database
//! on SQLite.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use semel::{Error, Ledger, Result, prelude::*};
use semel_store::{Conn, Database};
use sha2::{Digest as _, Sha256};
use tokio::{
    fs,
    io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _},
};

use super::tables::chunks;

/// The size of a part: a row on PostgreSQL, a read from a file.
pub(super) const PART: usize = 512 << 10;

/// How long an upload may take.
pub(super) const LONGEST_UPLOAD: Duration = Duration::from_secs(5 * 3600);

/// A file that belongs to no mailing is removed when its last part is older. Above [`LONGEST_UPLOAD`]: a file must not
/// lose its parts before its mailing is stored.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(6 * 3600);

/// How many files are looked for at a time.
pub(super) const FILES_AT_ONCE: i64 = 8;

/// How many parts are removed in one transaction.
const REMOVED_AT_ONCE: i64 = 64;

/// Addresses are for this user only, as the database is.
pub(super) const OWN_DIRECTORY: u32 = 0o700;
const OWN_FILE: u32 = 0o600;

/// Where files are kept.
#[derive(Clone)]
pub(super) enum Files {
    /// In the database.
    Rows(Ledger<Database>),
    /// In this directory.
    Disk(PathBuf),
}

/// A file that is being stored. Nothing of it is visible until a mailing names it.
pub(super) struct Staged {
    files: Files,
    id: String,
    hash: Sha256,
    bytes: u64,
    /// The bytes that are not stored yet.
    rest: Vec<u8>,
    parts: i64,
    open: Option<fs::File>,
}

/// A stored file.
pub(super) struct Stored {
    pub(super) url: String,
    pub(super) hash: String,
    pub(super) bytes: u64,
}

impl Files {
    pub(super) async fn stage(&self) -> Result<Staged> {
        let id = uuid::Uuid::now_v7().hyphenated().to_string();
        let open = match self {
            Self::Rows(_) => None,
            Self::Disk(dir) => {
                make(dir).await?;
                let path = dir.join(format!("{id}.part"));
                let made = fs::OpenOptions::new().write(true).create_new(true).mode(OWN_FILE).open(&path).await;
                Some(made.map_err(|error| broken("create", &path, &error))?)
            }
        };
        Ok(Staged { files: self.clone(), id, hash: Sha256::new(), bytes: 0, rest: Vec::new(), parts: 0, open })
    }

    /// Opens a stored file of so many bytes at an offset.
    pub(super) async fn open(&self, url: &str, offset: u64, bytes: u64) -> Result<Content> {
        let left = bytes.saturating_sub(offset);
        match (self, url.split_once(':')) {
            (Self::Rows(ledger), Some(("rows", id))) => {
                let part = PART as u64;
                let skip = usize::try_from(offset % part).unwrap_or(0);
                let next = i64::try_from(offset / part).unwrap_or(i64::MAX);
                let source = Source::Rows { database: ledger.store().clone(), id: id.to_owned(), next, skip };
                Ok(Content { source, left })
            }
            (Self::Disk(dir), Some(("file", name))) => {
                let path = dir.join(name);
                let mut file = fs::File::open(&path).await.map_err(|error| broken("open", &path, &error))?;
                file.seek(io::SeekFrom::Start(offset)).await.map_err(|error| broken("read", &path, &error))?;
                Ok(Content { source: Source::Disk(file, path), left })
            }
            _ => Err(Error::Refused(format!("the file is at {url}, which this node cannot read"))),
        }
    }

    /// Removes a stored file; a file that is gone is fine.
    pub(super) async fn remove(&self, url: &str) -> Result<()> {
        match (self, url.split_once(':')) {
            (Self::Rows(ledger), Some(("rows", id))) => loop {
                let id = id.to_owned();
                let removed = ledger.transact(move |tx| async move {
                    chunks::remove(&mut tx.connection().await?.get()?, &id, REMOVED_AT_ONCE).await
                });
                if removed.await? == 0 {
                    return Ok(());
                }
            },
            (Self::Disk(dir), Some(("file", name))) => match fs::remove_file(dir.join(name)).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(broken("remove", dir, &error)),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Removes a stored file, or logs why it is still there: a sweep removes it later.
    pub(super) async fn discard(&self, url: &str) {
        if let Err(error) = self.remove(url).await {
            tracing::warn!(%error, url, "a file that is not needed could not be removed yet; a sweep removes it");
        }
    }

    /// Removes files that belong to no mailing: their uploads were cut off. One that cannot be removed keeps no other.
    pub(super) async fn remove_forgotten(&self, database: &Database, now: i64) -> Result<()> {
        let before = now - i64::try_from(FORGOTTEN_AFTER.as_micros()).unwrap_or(i64::MAX);
        match self {
            Self::Rows(_) => {
                let mut after = String::new();
                loop {
                    let look = async |conn: &mut Conn<'_>| chunks::forgotten(conn, before, &after, FILES_AT_ONCE).await;
                    let page = database.read(look).await?;
                    for id in &page {
                        self.discard(&format!("rows:{id}")).await;
                    }
                    let Some(last) = page.into_iter().next_back() else { break };
                    after = last;
                }
            }
            Self::Disk(dir) => {
                let mut entries = match fs::read_dir(dir).await {
                    Ok(entries) => entries,
                    // Nothing was uploaded yet.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                    Err(error) => return Err(broken("list", dir, &error)),
                };
                while let Some(entry) = entries.next_entry().await.map_err(|error| broken("list", dir, &error))? {
                    let old = |changed: SystemTime| changed.elapsed().is_ok_and(|age| age > FORGOTTEN_AFTER);
                    let is_old = entry.metadata().await.is_ok_and(|data| data.modified().is_ok_and(old));
                    let url = format!("file:{}", entry.file_name().to_string_lossy());
                    if is_old && !database.read(async |conn| chunks::is_used(conn, &url).await).await? {
                        self.discard(&url).await;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Staged {
    /// Stores more bytes.
    pub(super) async fn write(&mut self, data: &[u8]) -> Result<()> {
        self.hash.update(data);
        self.bytes += data.len() as u64;
        self.rest.extend_from_slice(data);
        while self.rest.len() >= PART {
            let later = self.rest.split_off(PART);
            let part = std::mem::replace(&mut self.rest, later);
            self.put(part).await?;
        }
        Ok(())
    }

    async fn put(&mut self, part: Vec<u8>) -> Result<()> {
        match &self.files {
            Files::Rows(ledger) => {
                let (id, n, store) = (self.id.clone(), self.parts, ledger.store().clone());
                let now = store.now().await?.as_micros();
                let put = ledger.transact(move |tx| async move {
                    chunks::put(&mut tx.connection().await?.get()?, &id, n, &part, now).await
                });
                put.await?;
            }
            Files::Disk(dir) => {
                let file = self.open.as_mut().ok_or(Error::Contradiction("a file that is not open"))?;
                file.write_all(&part).await.map_err(|error| broken("write to", dir, &error))?;
            }
        }
        self.parts += 1;
        Ok(())
    }

    /// Makes the file durable. If that fails, what was stored is removed.
    pub(super) async fn finish(mut self) -> Result<Stored> {
        match self.make_durable().await {
            Ok(url) => Ok(Stored { url, hash: hex::encode(self.hash.finalize()), bytes: self.bytes }),
            Err(error) => {
                self.drop_it().await;
                Err(error)
            }
        }
    }

    /// Returns where the file is.
    async fn make_durable(&mut self) -> Result<String> {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() || self.parts == 0 {
            self.put(rest).await?;
        }
        match &self.files {
            Files::Rows(_) => Ok(format!("rows:{}", self.id)),
            Files::Disk(dir) => {
                let mut file = self.open.take().ok_or(Error::Contradiction("a file that is not open"))?;
                // The write may still be under way, and only a flush says how it ended.
                file.flush().await.map_err(|error| broken("write to", dir, &error))?;
                let written = file.metadata().await.map_err(|error| broken("look at a file in", dir, &error))?.len();
                if written != self.bytes {
                    let why = format!("an upload of {} bytes has {written} in its file", self.bytes);
                    return Err(Error::Unavailable(why));
                }
                file.sync_all().await.map_err(|error| broken("write to", dir, &error))?;
                let name = format!("{}.csv", self.id);
                let moved = fs::rename(dir.join(format!("{}.part", self.id)), dir.join(&name)).await;
                moved.map_err(|error| broken("rename a file in", dir, &error))?;
                sync(dir).await?;
                Ok(format!("file:{name}"))
            }
        }
    }

    /// Removes what was stored.
    pub(super) async fn drop_it(self) {
        let removed = match &self.files {
            Files::Rows(_) => self.files.remove(&format!("rows:{}", self.id)).await,
            // It has its last name if only the directory could not be synced.
            Files::Disk(_) => match self.files.remove(&format!("file:{}.part", self.id)).await {
                Ok(()) => self.files.remove(&format!("file:{}.csv", self.id)).await,
                error => error,
            },
        };
        if let Err(error) = removed {
            let upload = self.id;
            tracing::warn!(%error, upload, "an upload that was cut off could not be removed yet; a sweep removes it");
        }
    }
}

/// The content of a file, part by part.
pub(super) struct Content {
    source: Source,
    /// The bytes that were not read yet.
    left: u64,
}

enum Source {
    Rows { database: Database, id: String, next: i64, skip: usize },
    Disk(fs::File, PathBuf),
}

impl Content {
    /// The next bytes; none at the end. A file that ends too early is an error: a part that is missing must not be
    /// taken for the end of the list.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.left == 0 {
            return Ok(None);
        }
        match self.source.next().await? {
            Some(part) if !part.is_empty() => {
                self.left = self.left.saturating_sub(part.len() as u64);
                Ok(Some(part))
            }
            _ => {
                Err(Error::Refused(format!("the stored file is incomplete: its last {} bytes are missing", self.left)))
            }
        }
    }
}

impl Source {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        match self {
            Self::Rows { database, id, next, skip } => {
                let part = database.read(async |conn| chunks::get(conn, id, *next).await).await?;
                *next += 1;
                Ok(part.map(|mut part| {
                    part.drain(..std::mem::take(skip).min(part.len()));
                    part
                }))
            }
            Self::Disk(file, path) => {
                let mut part = vec![0; PART];
                let read = file.read(&mut part).await.map_err(|error| broken("read", path, &error))?;
                part.truncate(read);
                Ok((read > 0).then_some(part))
            }
        }
    }
}

/// Makes a directory durably: a new one whose name is lost in a power failure takes its files with it.
async fn make(dir: &Path) -> Result<()> {
    if fs::try_exists(dir).await.unwrap_or(false) {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(OWN_DIRECTORY).create(dir).await;
    made.map_err(|error| broken("create", dir, &error))?;
    match dir.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync(Path::new(".")).await,
        Some(parent) => sync(parent).await,
        None => Ok(()),
    }
}

async fn sync(dir: &Path) -> Result<()> {
    let file = fs::File::open(dir).await.map_err(|error| broken("open", dir, &error))?;
    file.sync_all().await.map_err(|error| broken("write to", dir, &error))
}

/// The error of a mailing is shown to its tenant: it has the last name of a path, and the log has all of it.
fn broken(verb: &str, path: &Path, error: &io::Error) -> Error {
    tracing::warn!(%error, path = %path.display(), "cannot {verb} an uploaded file or its directory");
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let why = format!("cannot {verb} {name}: {error}");
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Error::Refused(why),
        _ => Error::Unavailable(why),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    async fn read(mut content: Content) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(part) = content.next().await? {
            all.extend(part);
        }
        Ok(all)
    }

    /// Who may read a file or a directory.
    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_file_that_ends_too_early_is_an_error_and_not_the_end_of_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::Disk(dir.path().to_owned());
        let mut staged = files.stage().await.unwrap();
        staged.write(b"ana@example.com\nbob@example.com\n").await.unwrap();
        let stored = staged.finish().await.unwrap();
        let path = dir.path().join(stored.url.strip_prefix("file:").unwrap());
        assert_eq!(mode(&path), 0o600);
        let all = read(files.open(&stored.url, 16, stored.bytes).await.unwrap()).await;
        assert_eq!(all.unwrap(), b"bob@example.com\n");
        let cut = read(files.open(&stored.url, 0, stored.bytes + 3).await.unwrap()).await;
        assert!(cut.unwrap_err().to_string().contains("its last 3 bytes are missing"));
    }

    /// The file is open for reading only, so each write to it fails. The last one is under way when the upload ends.
    #[tokio::test]
    async fn an_upload_whose_last_write_fails_is_no_stored_file() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::Disk(dir.path().join("uploads"));
        let mut staged = files.stage().await.unwrap();
        let path = dir.path().join("uploads").join(format!("{}.part", staged.id));
        staged.open = Some(fs::File::open(&path).await.unwrap());
        staged.write(b"ana@example.com\n").await.unwrap();
        let why = staged.finish().await.err().unwrap().to_string();
        assert!(why.contains("uploads") && !why.contains(dir.path().to_str().unwrap()), "{why}");
        assert_eq!(std::fs::read_dir(dir.path().join("uploads")).unwrap().count(), 0, "nothing stays");
        assert_eq!(mode(&dir.path().join("uploads")), 0o700);
    }

    #[test]
    fn an_upload_ends_before_the_sweep_removes_its_file() {
        assert!(LONGEST_UPLOAD < FORGOTTEN_AFTER);
    }
}
