//! Migrations, without sqlx's procedural macros (see `from_row`).
//!
//! sqlx stores the SHA-384 of each file in the database, and refuses a file with another one. A file whose comments were
//! reworded after its release has two lines at its top: the checksum of its first text, which databases have stored,
//! and a digest of its statements, by which a test notices that more than comments were changed.

use std::borrow::Cow;

use semel::Error;
use sqlx::{
    AssertSqlSafe, SqlSafeStr as _,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
};

/// Begins the line with the checksum of the first text.
const FIRST: &str = "-- Checksum of the first text: ";

/// Begins the line with the digest of the statements.
const STATEMENTS: &str = "-- Its statements: ";

/// The migrations of a folder, in order: `migrations!("../migrations/postgres", "0001_ledger", …)`. The path is
/// relative to the calling file; [`all_listed`] checks that the list is complete.
#[macro_export]
macro_rules! migrations {
    ($folder:literal, $($name:literal),+ $(,)?) => {
        $crate::migrator(&[$(($name, include_str!(concat!($folder, "/", $name, ".sql")))),+])
    };
}

/// A migrator of files named `NUMBER_what_it_does`. A file with the checksum of its first text keeps that checksum.
///
/// # Panics
/// If a name does not begin with a number, or a first checksum is not one.
#[must_use]
pub fn migrator(files: &[(&'static str, &'static str)]) -> Migrator {
    let migration = |(name, text): &(&'static str, &'static str)| {
        let (number, what) = name.split_once('_').expect("a migration is called NUMBER_what_it_does");
        let number = number.parse().expect("a migration's name begins with its number");
        let what = Cow::Owned(what.replace('_', " "));
        let file = Migration::new(number, what, MigrationType::Simple, text.into_sql_str(), false);
        let checksum = first_checksum(text).map_or(file.checksum, |first| Cow::Owned(first.to_vec()));
        Migration { checksum, ..file }
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

/// The checksum of the first text of a file that was reworded.
fn first_checksum(text: &str) -> Option<[u8; 48]> {
    let mut checksum = [0; 48];
    hex::decode_to_slice(header(text, FIRST)?, &mut checksum).expect("the checksum of a first text has 96 hex digits");
    Some(checksum)
}

/// A line of the header of a file, without its name.
fn header<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().take(2).find_map(|line| line.strip_prefix(name))
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

/// Panics unless databases of released versions accept these migrations: each has its checksum, given by its first
/// digits, and files that were reworded have the statements of their first text.
///
/// # Panics
/// If one was changed. For tests.
pub fn all_as_released(migrator: &Migrator, released: &[(i64, &str)]) {
    for migration in migrator.iter() {
        let (number, text) = (migration.version, migration.sql.as_str());
        let found = header(text, FIRST).map(|_| short(&checksum(statements(text))));
        assert_eq!(found.as_deref(), header(text, STATEMENTS), "the digest of the statements of migration {number}");
    }
    let checksums: Vec<_> = migrator.iter().map(|it| (it.version, short(&it.checksum))).collect();
    for (number, checksum) in released {
        let found = checksums.iter().find(|(version, _)| version == number).map(|(_, checksum)| checksum.as_str());
        assert_eq!(found, Some(*checksum), "the checksum that databases have stored for migration {number}");
    }
}

/// A text without comments and with single spaces. It would also cut a string with `--` in it, but always in the same
/// way, so two texts can be compared.
fn statements(text: &str) -> String {
    let code = text.lines().filter_map(|line| line.split("--").next());
    code.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

/// The checksum that sqlx has for a text.
fn checksum(text: String) -> Cow<'static, [u8]> {
    Migration::new(0, "".into(), MigrationType::Simple, AssertSqlSafe(text).into_sql_str(), false).checksum
}

/// The first 16 digits of a checksum.
fn short(checksum: &[u8]) -> String {
    hex::encode(&checksum[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    // The released migrations, with the first digits of the SHA-384 of each as it was released.
    const POSTGRES: [(i64, &str); 11] = [
        (1, "1058f5a5ec004e0b"),
        (2, "54c621705e4fba0a"),
        (3, "d551409f670fd3e7"),
        (4, "4f31271d1d986421"),
        (5, "c161dc0e654ce18b"),
        (6, "436f57af11149fc6"),
        (7, "68c3db79dfcdb79a"),
        (8, "0b661c0aba24e8b0"),
        (9, "8ad7c48ab2b52a39"),
        (10, "b440764061e2fb03"),
        (11, "a41d98bc0debac98"),
    ];

    const SQLITE: [(i64, &str); 8] = [
        (1, "1f1437f4b51b6f9a"),
        (2, "1e271409e0f25d48"),
        (3, "686cbc8a2b6a0a47"),
        (4, "3e924cd69204840a"),
        (7, "857b024b0b3d751a"),
        (9, "23bb5fcfefbebba5"),
        (10, "95ff28102fbaaf1f"),
        (11, "3b2ff94c049481ea"),
    ];

    /// A released file.
    const RELEASED: &str = "-- Rows.\nCREATE TABLE a (n INT);\n";

    fn reworded(first: &str, digest: &str, text: &str) -> Migrator {
        migrator(&[("0001_a", format!("{FIRST}{first}\n{STATEMENTS}{digest}\n\n{text}").leak())])
    }

    fn first() -> String {
        hex::encode(checksum(RELEASED.to_owned()))
    }

    #[test]
    fn every_migration_file_is_run() {
        all_listed("migrations/postgres", &crate::postgres::migrations());
        all_listed("migrations/sqlite", &crate::sqlite::migrations());
    }

    #[test]
    fn databases_of_released_versions_accept_every_migration() {
        all_as_released(&crate::postgres::migrations(), &POSTGRES);
        all_as_released(&crate::sqlite::migrations(), &SQLITE);
    }

    #[test]
    fn a_reworded_file_keeps_the_checksum_of_its_first_text() {
        let digest = short(&checksum("CREATE TABLE a (n INT);".to_owned()));
        let reworded =
            reworded(&first(), &digest, "-- The rows of a,\n-- one each.\nCREATE TABLE a (n INT); -- a number\n");
        all_as_released(&reworded, &[(1, &first()[..16])]);
        assert_eq!(reworded.migrations[0].checksum, migrator(&[("0001_a", RELEASED)]).migrations[0].checksum);
    }

    #[test]
    #[should_panic(expected = "the digest of the statements of migration 1")]
    fn a_reworded_file_with_other_statements_is_noticed() {
        let digest = short(&checksum("CREATE TABLE a (n INT);".to_owned()));
        all_as_released(&reworded(&first(), &digest, "CREATE TABLE a (n BIGINT);\n"), &[]);
    }

    #[test]
    #[should_panic(expected = "the digest of the statements of migration 1")]
    fn a_reworded_file_without_the_digest_of_its_statements_is_noticed() {
        let text = format!("{FIRST}{}\n-- Rows.\nCREATE TABLE a (n INT);\n", first());
        all_as_released(&migrator(&[("0001_a", text.leak())]), &[]);
    }

    #[test]
    #[should_panic(expected = "the checksum that databases have stored for migration 1")]
    fn a_released_file_that_is_edited_without_its_first_checksum_is_noticed() {
        let edited = migrator(&[("0001_a", "-- The rows of a.\nCREATE TABLE a (n INT);\n")]);
        all_as_released(&edited, &[(1, &first()[..16])]);
    }
}
