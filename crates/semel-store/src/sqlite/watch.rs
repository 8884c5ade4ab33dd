//! Files that are deleted, truncated or replaced while they are in use.
//!
//! A process keeps using an open file after its name is deleted. Commits to a deleted log are lost when the process
//! ends, and another process that opens the database creates a new log: the two do not see each other. So each
//! transaction begins with a check of the names.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::file;

pub(super) struct Watch {
    database: PathBuf,
    log: PathBuf,
    /// The database, its log and the index of the log, each with device and inode.
    files: Vec<(PathBuf, (u64, u64))>,
}

impl Watch {
    /// Watches the files of an open database that has been written to: its log exists.
    pub(super) fn over(database: &Path) -> Self {
        let beside = |end: &str| file::beside(database, end);
        let files = [database.to_owned(), beside("-wal"), beside("-shm")];
        let files = files.into_iter().filter_map(|path| Some((path.clone(), identity(&path)?))).collect();
        Self { database: database.to_owned(), log: beside("-wal"), files }
    }

    /// A file whose name is gone or belongs to another file, or a truncated database.
    pub(super) fn lost(&self) -> Option<&Path> {
        if file::is_missing_or_empty(&self.database) {
            return Some(&self.database);
        }
        let lost = self.files.iter().find(|(path, known)| identity(path) != Some(*known));
        lost.map(|(path, _)| path.as_path())
    }

    /// Whether the database exists and was truncated.
    pub(super) fn is_emptied(&self) -> bool {
        self.database.exists() && file::is_missing_or_empty(&self.database)
    }

    /// The database itself.
    pub(super) fn database(&self) -> &Path {
        &self.database
    }

    /// The size of the log, in bytes.
    pub(super) fn log_size(&self) -> u64 {
        fs::metadata(&self.log).map_or(0, |file| file.len())
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}
