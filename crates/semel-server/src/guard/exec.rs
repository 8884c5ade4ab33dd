//! The last step before the command: ties it to its guard, then executes it.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::process::CommandExt as _,
    process::Command,
};

use rustix::process::{Signal, set_parent_process_death_signal};

/// Why a command was not run.
#[derive(Debug, thiserror::Error)]
pub enum NotRun {
    /// There is no such program.
    #[error("cannot run {0:?}: there is no such command")]
    NotFound(OsString),
    /// The program cannot be executed.
    #[error("cannot run {0:?}")]
    NotExecutable(OsString, #[source] io::Error),
    /// The guard ended first.
    #[error("cannot run the command: its guard is gone")]
    Orphaned,
    /// The command could not be tied to its guard.
    #[error("cannot tie the command to its guard")]
    NotTied(#[source] io::Error),
}

impl NotRun {
    /// The exit code that shells use for it.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(..) => 126,
            Self::NotTied(_) => super::GUARD_FAILED,
            Self::Orphaned => super::ORPHANED,
        }
    }
}

/// Executes the command; returns only if that fails.
#[must_use]
pub fn exec(guard: u32, command: &[OsString]) -> NotRun {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return NotRun::NotTied(error.into());
    }
    // Checked after the signal is set: a guard that ended before would never cause it.
    if std::os::unix::process::parent_id() != guard {
        return NotRun::Orphaned;
    }
    let (program, arguments) = command.split_first().map_or((OsStr::new(""), command), |(p, a)| (p.as_os_str(), a));
    let error = Command::new(program).args(arguments).exec();
    match error.kind() {
        io::ErrorKind::NotFound => NotRun::NotFound(program.to_owned()),
        _ => NotRun::NotExecutable(program.to_owned(), error),
    }
}
