//! Checks whether a program can be executed, before anything is started.

use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};

use crate::guard::NotRun;

/// Searches for a program as `execvp` does.
///
/// Exit code 127 does not tell a command that could not be started from a shell script whose last step was missing: the
/// first has done nothing, the second may have done much. So this is checked beforehand.
///
/// # Errors
/// When there is no such program, or it cannot be executed.
pub(super) fn find(program: &OsStr) -> Result<(), NotRun> {
    find_in(program, env::var_os("PATH"))
}

fn find_in(program: &OsStr, path: Option<OsString>) -> Result<(), NotRun> {
    let not_found = || NotRun::NotFound(program.to_owned());
    if program.is_empty() {
        return Err(not_found());
    }
    // With a slash in it, a name is a path.
    let by_path = program.as_encoded_bytes().contains(&b'/');
    let places: Vec<PathBuf> = match path {
        _ if by_path => vec![program.into()],
        // The default of the C library without PATH.
        None => ["/bin", "/usr/bin"].iter().map(|folder| Path::new(folder).join(program)).collect(),
        Some(path) => env::split_paths(&path).map(|folder| folder.join(program)).collect(),
    };
    let mut refused = None;
    for place in places {
        match runnable(&place) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.map_or_else(not_found, |error| NotRun::NotExecutable(program.to_owned(), error)))
}

fn runnable(place: &Path) -> io::Result<()> {
    if place.metadata()?.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(access(place, Access::EXEC_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(program: &str, path: Option<&str>) -> Option<u8> {
        find_in(OsStr::new(program), path.map(OsString::from)).err().map(|error| error.exit_code())
    }

    #[test]
    fn a_program_is_found_as_a_shell_finds_it() {
        assert_eq!(code("sh", Some("/nowhere:/bin")), None);
        assert_eq!(code("sh", None), None);
        assert_eq!(code("/bin/sh", Some("")), None);
        assert_eq!(code("sh", Some("/nowhere")), Some(127));
        assert_eq!(code("", Some("/bin")), Some(127));
        assert_eq!(code("/bin/no-such-program", Some("/bin")), Some(127));
        assert_eq!(code("/bin", None), Some(126));
        let file = tempfile::NamedTempFile::new().unwrap();
        let (folder, name) = (file.path().parent().unwrap(), file.path().file_name().unwrap());
        assert_eq!(code(file.path().to_str().unwrap(), None), Some(126));
        assert_eq!(code(name.to_str().unwrap(), folder.to_str()), Some(126));
    }
}
