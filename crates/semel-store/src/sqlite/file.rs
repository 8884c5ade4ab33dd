//! The file: where it is, and whether it can be trusted.

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
            "database url: write sqlite:PATH with the path of a file (a ledger in memory would forget)".into(),
        ));
    }
    Ok(PathBuf::from(path))
}

/// The file that a path leads to, which SQLite keeps its log beside: a link may lead to a file that is not there yet.
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

/// Refuses a log whose database is gone or empty. SQLite would delete the log and begin an empty database, and with that
/// every key would be new again.
pub(crate) fn check_log(path: &Path) -> Result<()> {
    let database = target(path);
    let log = beside(&database, "-wal");
    let size = |path: &Path| fs::metadata(path).ok().map(|file| file.len());
    // The log is looked at first. A process that makes both at this moment writes to the log only after the database has
    // its first page.
    let Some(bytes @ 1..) = size(&log) else { return Ok(()) };
    let found = match size(&database) {
        None => "is not there",
        Some(0) => "is empty (0 bytes)",
        Some(_) => return Ok(()),
    };
    Err(Error::Unavailable(format!(
        "{} {found}, but its log {} is ({bytes} bytes): the database was deleted, moved or not restored together with its \
         log. Nothing was changed. Put the database file back beside its log (or restore both from one backup); to begin \
         an empty ledger, in which every key is new, move the log away first",
        database.display(),
        log.display(),
    )))
}

/// The end of the name of the mark that a process leaves when the database was deleted under it.
const LOST: &str = "-lost";

/// The shortest that a database can be: one page of the smallest size. A shorter file is what is left of one that was cut.
const SHORTEST: u64 = 512;

pub(super) fn is_missing_or_empty(database: &Path) -> bool {
    !fs::metadata(database).is_ok_and(|file| file.len() >= SHORTEST)
}

/// Leaves a mark if the database is not there any more, see [`check_mark`]. A clean stop empties the log, and without the
/// mark the next start would find nothing that tells of the database.
pub(super) fn mark_lost(database: &Path) {
    if !is_missing_or_empty(database) {
        return;
    }
    let text = "The database beside this file was deleted, moved or emptied while a process of Semel had it open.\n\
                Put it back; the next start then removes this file. Remove it by hand only to begin an empty ledger.\n";
    let mark = beside(database, LOST);
    let written = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&mark);
    if let Err(error) = written.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all())) {
        tracing::error!(%error, mark = %mark.display(), "the mark that the database is lost cannot be written");
    }
}

/// Refuses to begin an empty ledger in the place of one that was deleted under a process. Once the database is back, the
/// mark has done its work.
pub(crate) fn check_mark(path: &Path) -> Result<()> {
    let database = target(path);
    let mark = beside(&database, LOST);
    if !mark.exists() {
        return Ok(());
    }
    if !is_missing_or_empty(&database) {
        tracing::warn!(mark = %mark.display(), "the database was lost while a process had it open, and is back; removing the mark");
        // A mark that stays does no harm while the database is there.
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

/// Makes a new file that only its owner may read: keys, payloads and outcomes concern no other user. SQLite gives the log
/// and its index the mode of the file. A file that is there keeps its mode; if none can be made, SQLite says why.
///
/// A file that is there is not opened, either. When a process closes any descriptor of a file, the kernel drops all locks
/// that the process has on it: those of a database that the same process has open would be lost without a word.
pub(crate) fn make_private(path: &Path) {
    let _ = OpenOptions::new().create_new(true).write(true).mode(0o600).open(target(path));
}

/// How long to wait for another process that writes.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// The first connection to a file. Of several processes that open a new one together, each turns it to write-ahead
/// logging; whoever comes second is told at once that it is locked, without SQLite's own waiting.
pub(crate) async fn open(options: &SqliteConnectOptions) -> sqlx::Result<SqliteConnection> {
    let begun = Instant::now();
    loop {
        match options.connect().await {
            Err(error) if is_locked(&error) && begun.elapsed() < PATIENCE => sleep(Duration::from_millis(10)).await,
            opened => return opened,
        }
    }
}

/// What keeps a file from being opened, and what to do about it.
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

/// Whether the file's directory is on a file system that takes no writes, whatever the permissions say.
fn is_mounted_read_only(path: &Path) -> bool {
    let flags = rustix::fs::statvfs(folder(path)).map(|stat| stat.f_flag);
    flags.is_ok_and(|flags| flags.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Refuses a file that can only be read: SQLite opens it all the same, and says so at the first write. A table that is
/// never made is a write to SQLite, and nothing to the disk.
pub(crate) async fn prove_writable(connection: &mut SqliteConnection) -> sqlx::Result<()> {
    let write = "BEGIN IMMEDIATE; CREATE TABLE semel_can_write (n INTEGER); ROLLBACK";
    sqlx::raw_sql(write).execute(connection).await.map(drop)
}

/// Another process has kept the lock of the file for longer than one waits.
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

/// `SQLITE_BUSY`, whatever else its extended code tells.
pub(super) fn is_locked(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

/// How every connection to the file is set up: nothing is acknowledged that is not on disk.
pub(crate) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(PATIENCE)
        // 64 MB: the upper levels of the indexes stay in memory.
        .pragma("cache_size", "-65536")
        // A checkpoint inside of a commit at 32 MB of log; most of it has been done beside the writer
        // by then, see `checkpoint`.
        .pragma("wal_autocheckpoint", "8000")
        // A statement of many rows keeps the pages it changes, in case it fails half-way: in memory (a
        // batch is bounded), not in a file made for each statement.
        .pragma("temp_store", "memory")
        // The rows of a whole batch: the thread that runs SQLite does not stop half-way for us to
        // take some off its hands.
        .row_buffer_size(1024)
        .disable_statement_logging()
}

/// Refuses a file system on which SQLite's locks or its shared memory do not hold: two hosts would
/// each believe to be the writer.
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
