//! The ledger as the commands for people open it.

use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use semel::{Ledger, Options};
use semel_store::{Database, Settings};

use crate::{
    Error,
    config::{self, Config, DatabaseUrl, Environment, Flags, StoreFlags},
    services,
    view::words::quoted,
};

/// How long closing may take. The next process checkpoints the rest.
const CLOSE: Duration = Duration::from_secs(2);

/// The flags that locate the ledger, for every command for people.
#[derive(clap::Args)]
pub(super) struct LedgerFlags {
    /// The ledger: sqlite:PATH or postgres://… [env: SEMEL_DATABASE_URL] [default: semel.db in the data dir]
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,

    /// The data directory [env: SEMEL_DATA_DIR] [default: $XDG_STATE_HOME/semel or ~/.local/state/semel]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// Read settings from this TOML file [env: SEMEL_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print only errors and warnings on stderr
    #[arg(long, short)]
    pub(super) quiet: bool,
}

impl LedgerFlags {
    /// The URL of the ledger. Cron and shell must use the same one, so the default depends on the user and not, like the
    /// server's, on the working directory.
    pub(super) fn place(&self) -> anyhow::Result<DatabaseUrl> {
        Ok(self.read()?.database_url)
    }

    /// The configuration, with the ledger of these flags.
    fn read(&self) -> anyhow::Result<Config> {
        let store = StoreFlags {
            config: self.config.clone(),
            data_dir: self.data_dir.clone(),
            database_url: self.database_url.clone(),
        };
        let home = state_dir();
        let report = config::read(&Flags::from(store), &Environment::of_process(), home.clone().unwrap_or_default());
        // Also with --quiet: a misspelt variable may have been meant to name another ledger.
        for warning in report.warnings() {
            super::complain(format_args!("{warning}"));
        }
        let config = report.config().map_err(Error::from)?;
        if home.is_none() && report.is_default("database_url") && report.is_default("data_dir") {
            anyhow::bail!(
                "where is the ledger? Neither HOME nor XDG_STATE_HOME is set: set --data-dir or --database-url, or \
                 SEMEL_DATA_DIR or SEMEL_DATABASE_URL"
            );
        }
        Ok(config.clone())
    }

    /// Opens an existing ledger. A missing file is not created only to report that it is empty.
    pub(super) async fn look(&self) -> anyhow::Result<Opened> {
        Ok(self.look_with_config().await?.0)
    }

    /// Opens an existing ledger for a command, closes it, and prints what the command says.
    pub(super) async fn print(
        &self,
        command: impl AsyncFnOnce(&Opened) -> anyhow::Result<String>,
    ) -> anyhow::Result<ExitCode> {
        let opened = self.look().await?;
        let said = command(&opened).await;
        opened.close().await;
        super::say(&said?)?;
        Ok(ExitCode::SUCCESS)
    }

    /// As [`LedgerFlags::look`], for a command that needs other parts of the configuration, too.
    pub(super) async fn look_with_config(&self) -> anyhow::Result<(Opened, Config)> {
        let config = self.read()?;
        let place = &config.database_url;
        if let DatabaseUrl::Sqlite(path) = place
            && !path.exists()
        {
            anyhow::bail!("there is no ledger in {}", path.display());
        }
        Ok((self.open_at(place).await?, config))
    }

    /// Opens the ledger to work with it; a missing file is created.
    pub(super) async fn open(&self) -> anyhow::Result<Opened> {
        self.open_at(&self.place()?).await
    }

    async fn open_at(&self, place: &DatabaseUrl) -> anyhow::Result<Opened> {
        self.name(place);
        let opened = open(place, Options::default()).await?;
        Ok(Opened { flags: self.again(place), ..opened })
    }

    /// The flags with which another command finds the same ledger. It reads the same environment. A placeholder
    /// replaces a URL with a password.
    pub(super) fn again(&self, place: &DatabaseUrl) -> String {
        let has_password = matches!(place, DatabaseUrl::Postgres(_)) && place.to_string().contains("***");
        let url = self.database_url.as_ref().map(|url| if has_password { "…" } else { url.as_str() });
        let config = self.config.as_ref().map(|path| path.to_string_lossy());
        let flags =
            [("--config", config.as_deref()), ("--data-dir", self.data_dir.as_deref()), ("--database-url", url)];
        let given = flags.iter().filter_map(|(flag, value)| Some(format!("{flag} {}", quoted((*value)?))));
        given.collect::<Vec<_>>().join(" ")
    }

    fn name(&self, place: &DatabaseUrl) {
        if !self.quiet {
            super::complain(format_args!("the ledger is in {}", place.place()));
        }
    }
}

/// An open ledger.
pub(super) struct Opened {
    pub(super) ledger: Ledger<Database>,
    /// Its location, for people.
    pub(super) place: String,
    /// The flags for a suggested command, see [`LedgerFlags::again`].
    pub(super) flags: String,
}

impl Opened {
    /// Stops the ledger and closes the database. If no other process has it open, a SQLite database is then one file.
    pub(super) async fn close(self) {
        self.ledger.stop(Duration::ZERO).await;
        let _ = tokio::time::timeout(CLOSE, self.ledger.store().close()).await;
    }
}

/// Opens the ledger in a database.
pub(super) async fn open(place: &DatabaseUrl, options: Options) -> anyhow::Result<Opened> {
    let cannot = || format!("cannot open the ledger in {}", place.place());
    if let DatabaseUrl::Sqlite(path) = place
        && let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
    {
        // Keys, payloads and outcomes are for this user only.
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| no_directory(folder, &error)).with_context(cannot)?;
    }
    let settings = Settings { projections: services::projections(), ..Settings::default() };
    let database = Database::open(&place.expose(), settings).await.map_err(said).with_context(cannot)?;
    let ledger = Ledger::new(database, options).with_context(cannot)?;
    Ok(Opened { ledger, place: place.place(), flags: String::new() })
}

/// The error for a directory that cannot be created, with the remedy.
fn no_directory(folder: &Path, error: &std::io::Error) -> anyhow::Error {
    let instead = "set another directory by --data-dir, or another file by --database-url";
    let file = folder.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir());
    match file {
        _ if error.kind() == std::io::ErrorKind::ReadOnlyFilesystem => anyhow::anyhow!(
            "the directory {} cannot be created: its file system is mounted read-only; mount it for writing, or {instead}",
            folder.display()
        ),
        Some(file) => anyhow::anyhow!("{} is a file, not a directory; {instead}", file.display()),
        None => anyhow::anyhow!("the directory {} cannot be created: {error}; {instead}", folder.display()),
    }
}

/// The engine's error without its prefix, which "cannot open the ledger" replaces.
pub(super) fn said(error: semel::Error) -> anyhow::Error {
    match error {
        semel::Error::Unavailable(why) | semel::Error::Invalid(why) => anyhow::Error::msg(why),
        other => other.into(),
    }
}

/// The state directory by the XDG rules: an empty or relative path counts as not set.
fn state_dir() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("semel"))
}

/// The person who acts, for the audit.
pub(super) fn actor() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let uid = rustix::process::getuid().as_raw();
    let name =
        ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok().filter(|name| !name.is_empty()));
    match name {
        // The name comes from the environment; the uid comes from the system.
        Some(name) => format!("{name}@{host} (uid {uid})"),
        None => format!("uid {uid}@{host}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suggested_command_contains_no_password() {
        let advice = |url: &str| {
            let url = Some(url.to_owned());
            let flags = LedgerFlags { database_url: url, data_dir: None, config: None, quiet: true };
            flags.again(&flags.place().unwrap())
        };
        for secret in ["postgres://ana:geheim@db/x", "postgres://ana@db/x?password=geheim"] {
            assert_eq!(advice(secret), "--database-url '…'");
        }
        assert_eq!(advice("postgres://ana@db/x?a=b"), "--database-url 'postgres://ana@db/x?a=b'");
        assert_eq!(advice("sqlite:a b.db"), "--database-url 'sqlite:a b.db'");
    }
}
