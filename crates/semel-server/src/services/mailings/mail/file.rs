//! Mails as files: for tests and audits. A file stays until its mailing is over: a file that is gone looks like a mail that
//! was not sent.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    message::Outgoing,
    transport::MAY_NOT,
    verdict::{Sent, Settle},
};
use crate::http::held::{Held, LeaseLost};

/// Distinguishes the temporary files of this process.
static ATTEMPT: AtomicU64 = AtomicU64::new(0);

/// A directory that receives one file per mail.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    id: String,
}

/// The file that has the id of a directory.
const ID: &str = ".semel-directory";

impl Directory {
    /// Uses a directory that exists.
    pub(super) fn new(path: PathBuf) -> Result<Self, String> {
        match fs::metadata(&path) {
            Ok(found) if found.is_dir() => match id_of(&path) {
                Ok(id) => Ok(Self { path, id }),
                Err(error) => Err(format!("{}: {error}", path.join(ID).display())),
            },
            Ok(_) => Err(format!("{} is not a directory", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Its id, the same for all who use the directory.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Writes the mail. Blocking calls run apart, so that many files are synced at the same time.
    pub(super) async fn send(&self, mail: &Outgoing, bytes: Vec<u8>, held: &Held) -> Sent {
        let Some(file) = self.file(&mail.id) else {
            return Sent::Refused { why: "the id of the mail cannot be a file name".to_owned() };
        };
        let held = held.clone();
        match tokio::task::spawn_blocking(move || held.check().map(|()| write(&file, &bytes))).await {
            Ok(Ok(Ok(()))) => Sent::Accepted { external_id: None },
            Ok(Ok(Err(Failed::Before(error)))) => Sent::Away { why: error.to_string() },
            Ok(Ok(Err(Failed::After(error)))) => Sent::Unknown { why: error.to_string() },
            Ok(Err(LeaseLost)) => Sent::Away { why: MAY_NOT.to_owned() },
            Err(error) => Sent::Unknown { why: error.to_string() },
        }
    }

    /// Looks whether the mail was written completely. Temporary files of an interrupted attempt do not count.
    pub(super) async fn settle(&self, id: &str) -> Settle {
        let Some(file) = self.file(id) else { return Settle::Unknown };
        let found = tokio::task::spawn_blocking(move || find(&file)).await;
        match found {
            Ok(Ok(true)) => Settle::Sent { external_id: None },
            Ok(Ok(false)) => Settle::Resend,
            Ok(Err(_)) | Err(_) => Settle::Unknown,
        }
    }

    fn file(&self, id: &str) -> Option<PathBuf> {
        let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        let is_name = !id.is_empty() && id.len() <= 200 && !id.starts_with('.') && id.bytes().all(fits);
        is_name.then(|| self.path.join(format!("{id}.eml")))
    }
}

/// The id of a directory; the first who uses it makes one. It appears as a whole, so another process reads all of it.
fn id_of(path: &Path) -> io::Result<String> {
    let file = path.join(ID);
    if !file.try_exists()? {
        let id = uuid::Uuid::now_v7().hyphenated().to_string();
        let temporary = path.join(format!("{ID}.{id}.tmp"));
        fs::write(&temporary, format!("file:{id}"))?;
        File::open(&temporary)?.sync_all()?;
        let linked = fs::hard_link(&temporary, &file);
        fs::remove_file(&temporary)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => sync_directory_of(&file)?,
        }
    }
    fs::read_to_string(file)
}

/// Whether the mail may be there.
enum Failed {
    Before(io::Error),
    After(io::Error),
}

/// Writes under another name first: a reader, or a restart after a crash, must never see half a mail.
fn write(file: &Path, bytes: &[u8]) -> Result<(), Failed> {
    let attempt = ATTEMPT.fetch_add(1, Ordering::Relaxed);
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let temporary = file.with_file_name(format!(".{name}.{}-{attempt}.tmp", std::process::id()));
    let written = || {
        let mut file = File::create_new(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    let renamed = written().and_then(|()| fs::rename(&temporary, file));
    if let Err(error) = renamed {
        // If this fails as well, a leftover remains, which is never taken for a mail.
        let _ = fs::remove_file(&temporary);
        return Err(Failed::Before(error));
    }
    sync_directory_of(file).map_err(Failed::After)
}

/// The name is synced before it counts: the attempt may have died between its rename and its sync.
fn find(file: &Path) -> io::Result<bool> {
    if !file.try_exists()? {
        return Ok(false);
    }
    sync_directory_of(file)?;
    Ok(true)
}

fn sync_directory_of(file: &Path) -> io::Result<()> {
    match file.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}
