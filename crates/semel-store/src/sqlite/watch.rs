//! Files that are deleted, emptied or replaced while they are in use.
//!
//! A process that has a file open goes on with it when the file's name is gone. What it commits to a log that was
//! deleted is lost when the process ends, and a process that opens the database meanwhile makes a new log: the two know
//! nothing of each other. So each transaction begins with a look at the names.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::file;

pub(super) struct Watch {
    database: PathBuf,
    log: PathBuf,
    /// The database, its log and the index of the log, each with its device and number.
    files: Vec<(PathBuf, (u64, u64))>,
}

impl Watch {
    /// Watches the files of a database, which is open and has been written to: its log exists.
    pub(super) fn over(database: &Path) -> Self {
        let beside = |end: &str| file::beside(database, end);
        let files = [database.to_owned(), beside("-wal"), beside("-shm")];
        let files = files.into_iter().filter_map(|path| Some((path.clone(), identity(&path)?))).collect();
        Self { database: database.to_owned(), log: beside("-wal"), files }
    }

    /// The file whose name is gone, is another file's, or is a database that was emptied.
    pub(super) fn lost(&self) -> Option<&Path> {
        if file::is_missing_or_empty(&self.database) {
            return Some(&self.database);
        }
        let lost = self.files.iter().find(|(path, known)| identity(path) != Some(*known));
        lost.map(|(path, _)| path.as_path())
    }

    /// Whether the database is there, and was cut to nothing.
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
