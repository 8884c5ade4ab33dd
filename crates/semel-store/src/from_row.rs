//! Rows and migrations without sqlx's procedural macros: those would build tokio, rustls, SQLite and sqlx a second
//! time, for the compiler's own use, and double the time of a clean build.

use std::borrow::Cow;

use semel::Error;
use sqlx::{
    SqlSafeStr as _,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
};

/// Reads a struct from a row of either database: a column per field, or an expression of the row.
///
/// ```
/// struct Stored { id: i64, name: String, state: State }
/// # struct State(String);
///
/// semel_store::from_row!(Stored, row => { id, name, state: State(row.try_get("state")?) });
/// ```
#[macro_export]
macro_rules! from_row {
    ($type:ty, $row:ident => { $($field:ident $(: $read:expr)?),* $(,)? }) => {
        $crate::from_row!(@for sqlx::postgres::PgRow, $type, $row, { $($field $(: $read)?),* });
        $crate::from_row!(@for sqlx::sqlite::SqliteRow, $type, $row, { $($field $(: $read)?),* });
    };
    ($type:ty { $($field:ident),* $(,)? }) => {
        $crate::from_row!($type, row => { $($field),* });
    };
    (@for $from:ty, $type:ty, $row:ident, { $($field:ident $(: $read:expr)?),* }) => {
        impl sqlx::FromRow<'_, $from> for $type {
            fn from_row($row: &$from) -> Result<Self, sqlx::Error> {
                #[allow(unused_imports, reason = "an expression may need it, a plain column does not")]
                use sqlx::Row as _;
                Ok(Self { $($field: $crate::from_row!(@read $row, $field $(, $read)?)),* })
            }
        }
    };
    (@read $row:ident, $field:ident) => { sqlx::Row::try_get($row, stringify!($field))? };
    (@read $row:ident, $field:ident, $read:expr) => { $read };
}

/// The migrations of a folder, in order: `migrations!("../migrations/postgres", "0001_ledger", …)`. The path is
/// relative to the calling file; [`all_listed`] checks that the list is complete.
#[macro_export]
macro_rules! migrations {
    ($folder:literal, $($name:literal),+ $(,)?) => {
        $crate::migrator(&[$(($name, include_str!(concat!($folder, "/", $name, ".sql")))),+])
    };
}

/// A migrator of files named `NUMBER_what_it_does`.
///
/// # Panics
/// If a name does not begin with a number.
#[must_use]
pub fn migrator(files: &[(&'static str, &'static str)]) -> Migrator {
    let migration = |(name, text): &(&'static str, &'static str)| {
        let (number, what) = name.split_once('_').expect("a migration is called NUMBER_what_it_does");
        let number = number.parse().expect("a migration's name begins with its number");
        let what = Cow::Owned(what.replace('_', " "));
        Migration::new(number, what, MigrationType::Simple, text.into_sql_str(), false)
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

/// Converts an error of migrations. A database that a newer version has upgraded is not changed: this version may not
/// understand its data.
pub(crate) fn migration_failed(migrator: &Migrator, error: &MigrateError) -> Error {
    let table = &migrator.table_name;
    let newest = migrator.iter().map(|migration| migration.version).max().unwrap_or(0);
    match error {
        MigrateError::VersionMissing(version) => Error::Invalid(format!(
            "the database is too new for this program: a newer version of Semel has run migration {version} of {table}, \
             and this program knows migrations up to {newest}. Nothing was changed. Upgrade this program"
        )),
        MigrateError::VersionMismatch(version) => Error::Invalid(format!(
            "migration {version} of {table} is not the one that this program has: the database was made by a build \
             between two releases. Nothing was changed"
        )),
        error => Error::Unavailable(format!("migrations: {error}")),
    }
}

/// Panics unless every file of a folder is in a list of migrations.
///
/// # Panics
/// If one is missing. For tests.
pub fn all_listed(folder: &str, migrator: &Migrator) {
    let mut files = Vec::new();
    for file in std::fs::read_dir(folder).expect("the folder of the migrations") {
        let name = file.expect("a file").file_name().into_string().expect("a name");
        files.push(name.trim_end_matches(".sql").to_owned());
    }
    files.sort();
    let listed = |it: &Migration| format!("{:04}_{}", it.version, it.description.replace(' ', "_"));
    let listed: Vec<_> = migrator.iter().map(listed).collect();
    assert_eq!(files, listed, "the files of {folder} and the migrations that run");
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_migration_file_is_run() {
        super::all_listed("migrations/postgres", &crate::postgres::migrations());
        super::all_listed("migrations/sqlite", &crate::sqlite::migrations());
    }
}
