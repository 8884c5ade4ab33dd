//! The file: its path, and whether it can be trusted.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use semel::{Error, Result};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};
use tokio::time::sleep;

use crate::connection::FILE_HELD;

/// The path in `sqlite:PATH`.
pub(crate) fn path(url: &str) -> Result<PathBuf> {
    let path = url.strip_prefix("sqlite:").unwrap_or(url);
    let path = path.strip_prefix("//").unwrap_or(path);
    if path.is_empty() || path.contains(":memory:") || path.contains('?') {
        return Err(Error::Invalid(
            "database url: write sqlite:PATH with the path of a file (a ledger in memory loses data)".into(),
        ));
    }
    Ok(PathBuf::from(path))
}

/// The file that a path leads to; SQLite keeps its log beside it. A link may lead to a file that does not exist yet.
pub(super) fn target(path: &Path) -> PathBuf {
    /// As many links as Linux follows.
    const MOST_LINKS: u32 = 40;
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        if let Ok(target) = path.canonicalize() {
            return target;
        }
        let Ok(link) = fs::read_link(&path) else { break };
        path = path.parent().unwrap_or(Path::new("")).join(link);
    }
    path
}

/// The name of a file that SQLite keeps beside the database.
pub(super) fn beside(database: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(database);
    name.push(end);
    PathBuf::from(name)
}

/// Refuses a log whose database is missing or empty. SQLite would delete the log and create an empty database, in which
/// every key would be new.
pub(crate) fn check_log(path: &Path) -> Result<()> {
    let database = target(path);
    let log = beside(&database, "-wal");
    let size = |path: &Path| fs::metadata(path).ok().map(|file| file.len());
    // The log is checked first. A process that creates both at this moment writes to the log only after the database
    // has its first page.
    let Some(bytes @ 1..) = size(&log) else { return Ok(()) };
    let found = match size(&database) {
        None => "is missing",
        Some(0) => "is empty (0 bytes)",
        Some(_) => return Ok(()),
    };
    Err(Error::Unavailable(format!(
        "{} {found}, but its log {} has {bytes} bytes: the database was deleted, moved or not restored together with \
         its log. Nothing was changed. Put the database file back beside its log (or restore both from one backup); to \
         begin an empty ledger, in which every key is new, move the log away first",
        database.display(),
        log.display(),
    )))
}

/// The suffix of the mark that a process leaves if the database was deleted while it was open.
const LOST: &str = "-lost";

/// The smallest size of a database: one page of the smallest size. A shorter file is the rest of a truncated one.
const SHORTEST: u64 = 512;

pub(super) fn is_missing_or_empty(database: &Path) -> bool {
    !fs::metadata(database).is_ok_and(|file| file.len() >= SHORTEST)
}

/// Leaves a mark if the database is missing, see [`check_mark`]. A clean stop empties the log, so without the mark the
/// next start would find no trace of the database.
pub(super) fn mark_lost(database: &Path) {
    if !is_missing_or_empty(database) {
        return;
    }
    let text = "The database beside this file was deleted, moved or emptied while a process of Semel had it open.\n\
                Put it back; the next start then removes this file. Remove it by hand only to begin an empty ledger.\n";
    let mark = beside(database, LOST);
    let written = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&mark);
    if let Err(error) = written.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all())) {
        tracing::error!(%error, mark = %mark.display(), "the mark of a lost database cannot be written");
    }
}

/// Refuses to create an empty ledger in the place of one that was deleted while it was open. Once the database is back,
/// the mark is removed.
pub(crate) fn check_mark(path: &Path) -> Result<()> {
    let database = target(path);
    let mark = beside(&database, LOST);
    if !mark.exists() {
        return Ok(());
    }
    if !is_missing_or_empty(&database) {
        tracing::warn!(mark = %mark.display(), "the database was lost while a process had it open, and is back; removing the mark");
        // A mark that stays is harmless while the database exists.
        let _ = fs::remove_file(&mark);
        return Ok(());
    }
    Err(Error::Unavailable(format!(
        "{} was deleted, moved or emptied while a process had it open, as {} says. Nothing was changed. Put the database file back, \
         or restore it from a backup; to begin an empty ledger, in which every key is new, remove {} first",
        database.display(),
        mark.display(),
        mark.display(),
    )))
}

/// Creates a new file that only its owner may read: keys, payloads and outcomes are private. SQLite gives the log and
/// its index the mode of the file. An existing file keeps its mode; if none can be created, SQLite reports why.
///
/// An existing file is not opened here. When a process closes any descriptor of a file, the kernel drops all locks that
/// the process has on it: a database that the same process has open would silently lose its locks.
pub(crate) fn make_private(path: &Path) {
    let _ = OpenOptions::new().create_new(true).write(true).mode(0o600).open(target(path));
}

/// How long to wait for another process that writes.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// The first connection to a file. If several processes open a new file together, each switches it to write-ahead
/// logging; the second one gets "locked" at once, without SQLite's own waiting.
pub(crate) async fn open(options: &SqliteConnectOptions) -> sqlx::Result<SqliteConnection> {
    let begun = Instant::now();
    loop {
        match options.connect().await {
            Err(error) if is_locked(&error) && begun.elapsed() < PATIENCE => sleep(Duration::from_millis(10)).await,
            opened => return opened,
        }
    }
}

/// Why a file cannot be opened, and what to do about it.
pub(crate) fn cannot(path: &Path, error: &sqlx::Error) -> Error {
    let read_only = is_mounted_read_only(path);
    let path = path.display();
    if read_only {
        return Error::Unavailable(format!(
            "{path} is on a file system that is mounted read-only ({error}): mount it for writing, or keep the ledger in \
             another place"
        ));
    }
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    Error::Unavailable(match code.map(|code| code & 0xff) {
        // SQLITE_READONLY
        Some(8) => format!(
            "{path} cannot be written ({error}): this user must be allowed to write to the file and to its directory, \
             on a disk that is not mounted read-only"
        ),
        // SQLITE_CANTOPEN
        Some(14) => format!(
            "{path} cannot be opened ({error}): its directory must be there, and this user must be allowed to write to \
             it, since the log is kept beside the file"
        ),
        // SQLITE_BUSY
        Some(5) => return held(),
        _ => format!("{path} cannot be opened: {error}"),
    })
}

/// Whether the file's directory is on a read-only file system. Permissions do not count.
fn is_mounted_read_only(path: &Path) -> bool {
    let flags = rustix::fs::statvfs(folder(path)).map(|stat| stat.f_flag);
    flags.is_ok_and(|flags| flags.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Refuses a read-only file: SQLite opens it, and fails at the first write. `CREATE TABLE` in a transaction that is
/// rolled back counts as a write for SQLite, and leaves the disk unchanged.
pub(crate) async fn prove_writable(connection: &mut SqliteConnection) -> sqlx::Result<()> {
    let write = "BEGIN IMMEDIATE; CREATE TABLE semel_can_write (n INTEGER); ROLLBACK";
    sqlx::raw_sql(write).execute(connection).await.map(drop)
}

/// The error if another process holds the lock of the file for too long.
pub(super) fn held() -> Error {
    Error::Unavailable(format!(
        "{FILE_HELD}: it has kept the lock of the file for over {} s; see which one has the file open, and end its \
         transaction",
        PATIENCE.as_secs()
    ))
}

/// How long SQLite itself waits for other processes on this connection.
pub(super) async fn wait_for_others(connection: &mut SqliteConnection, time: Duration) -> sqlx::Result<()> {
    let wait = format!("PRAGMA busy_timeout = {}", time.as_millis());
    sqlx::raw_sql(AssertSqlSafe(wait)).execute(connection).await.map(drop)
}

/// `SQLITE_BUSY`, with any extended code.
pub(super) fn is_locked(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

/// The settings of every connection to the file: a commit is acknowledged only when it is on disk.
pub(crate) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(PATIENCE)
        // 64 MB: the upper levels of the indexes stay in memory.
        .pragma("cache_size", "-65536")
        // A checkpoint inside a commit at 32 MB of log; most of it has been done beside the writer by then, see
        // `checkpoint`.
        .pragma("wal_autocheckpoint", "8000")
        // A statement of many rows keeps the pages it changes, in case it fails half-way: in memory (a batch is
        // bounded), not in a temporary file per statement.
        .pragma("temp_store", "memory")
        // The rows of a whole batch fit the buffer, so that the thread of SQLite does not wait for their reader.
        .row_buffer_size(1024)
        .disable_statement_logging()
}

/// Refuses a file system on which SQLite's locks or its shared memory do not work: two hosts could both be the writer.
pub(crate) fn check_file_system(path: &Path) -> Result<()> {
    const NETWORK: [(u64, &str); 10] = [
        (0x6969, "NFS"),
        (0x517b, "SMB"),
        (0xff53_4d42, "CIFS"),
        (0xfe53_4d42, "SMB2"),
        (0x0102_1997, "9p"),
        (0x5346_414f, "AFS"),
        (0x00c3_6400, "Ceph"),
        (0x0bd0_0bd0, "Lustre"),
        (0x4750_4653, "GPFS"),
        (0x0116_1970, "GFS2"),
    ];
    const FUSE: u64 = 0x6573_5546;
    let Ok(stat) = rustix::fs::statfs(folder(path)) else { return Ok(()) };
    let kind = stat.f_type as u64;
    if let Some((_, name)) = NETWORK.iter().find(|(magic, _)| *magic == kind) {
        return Err(Error::Invalid(format!(
            "database url: {} is on a network file system ({name}), where SQLite cannot keep its promises; \
             use a local disk, or PostgreSQL for several hosts",
            path.display()
        )));
    }
    if kind == FUSE {
        tracing::warn!(path = %path.display(), "the database is on a FUSE file system; make sure that it is local and syncs");
    }
    Ok(())
}
