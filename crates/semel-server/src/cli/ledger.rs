//! The ledger as the commands for people open it.

use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use semel::{Ledger, Options};
use semel_store::{Database, Settings};

use crate::{
    Error,
    config::{self, DatabaseUrl, Environment, Flags, StoreFlags},
};

/// How long closing may take. Whatever has not gone from the log into the file by then does so the next time.
const CLOSE: Duration = Duration::from_secs(2);

/// The flags that say where the ledger is: for every command that a person uses on it.
#[derive(clap::Args)]
pub(super) struct LedgerFlags {
    /// The ledger: sqlite:PATH or postgres://… [env: SEMEL_DATABASE_URL] [default: semel.db in the data dir]
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,

    /// The directory for files [env: SEMEL_DATA_DIR] [default: $XDG_STATE_HOME/semel or ~/.local/state/semel]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// Read settings from this TOML file [env: SEMEL_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Say nothing on stderr but what went wrong
    #[arg(long, short)]
    pub(super) quiet: bool,
}

impl LedgerFlags {
    /// Where the ledger is. Cron and shell must agree on it, so the default hangs on the user and not, as the server's,
    /// on the directory that a command happens to be started in.
    pub(super) fn place(&self) -> anyhow::Result<DatabaseUrl> {
        let store = StoreFlags {
            config: self.config.clone(),
            data_dir: self.data_dir.clone(),
            database_url: self.database_url.clone(),
        };
        let home = state_dir();
        let report = config::read(&Flags::from(store), &Environment::of_process(), home.clone().unwrap_or_default());
        for warning in report.warnings().iter().filter(|_| !self.quiet) {
            super::complain(format_args!("{warning}"));
        }
        let config = report.config().map_err(Error::from)?;
        if home.is_none() && report.is_default("database_url") && report.is_default("data_dir") {
            anyhow::bail!(
                "where is the ledger? Neither HOME nor XDG_STATE_HOME is set: say it by --database-url or SEMEL_DATABASE_URL"
            );
        }
        Ok(config.database_url.clone())
    }

    /// Opens the ledger to look at it. A file that is not there is not made just to say that nothing is in it.
    pub(super) async fn look(&self) -> anyhow::Result<Opened> {
        let place = self.place()?;
        if let DatabaseUrl::Sqlite(path) = &place
            && !path.exists()
        {
            anyhow::bail!("there is no ledger in {}", path.display());
        }
        self.name(&place);
        open(&place, Options::default()).await
    }

    /// Opens the ledger to work with it; a file that is not there is made.
    pub(super) async fn open(&self) -> anyhow::Result<Opened> {
        let place = self.place()?;
        self.name(&place);
        open(&place, Options::default()).await
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
    /// Where it is, for people.
    pub(super) place: String,
}

impl Opened {
    /// Ends what is left to do and closes the database, so that a SQLite file is all there is if no other process has it
    /// open.
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
        // Keys, payloads and outcomes are nobody else's business.
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| no_directory(folder, &error)).with_context(cannot)?;
    }
    let database = Database::open(&place.expose(), Settings::default()).await.map_err(said).with_context(cannot)?;
    let ledger = Ledger::new(database, options).with_context(cannot)?;
    Ok(Opened { ledger, place: place.place() })
}

/// Why there is no directory for the ledger, and what to do.
fn no_directory(folder: &Path, error: &std::io::Error) -> anyhow::Error {
    let instead = "name another directory by --data-dir, or another file by --database-url";
    let file = folder.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir());
    match file {
        Some(file) => anyhow::anyhow!("{} is a file and no directory; {instead}", file.display()),
        None => anyhow::anyhow!("the directory {} cannot be made: {error}; {instead}", folder.display()),
    }
}

/// The engine's words without the preamble, which "cannot open the ledger" says already.
pub(super) fn said(error: semel::Error) -> anyhow::Error {
    match error {
        semel::Error::Unavailable(why) | semel::Error::Invalid(why) => anyhow::Error::msg(why),
        other => other.into(),
    }
}

/// Where a user's programs keep what should outlive a restart, by the XDG rules: an empty or relative path counts as
/// not set.
fn state_dir() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("semel"))
}

/// Who acts, when a person does.
pub(super) fn actor() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let uid = rustix::process::getuid().as_raw();
    let name =
        ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok().filter(|name| !name.is_empty()));
    match name {
        // The name is only what the environment says; the number is what the system knows.
        Some(name) => format!("{name}@{host} (uid {uid})"),
        None => format!("uid {uid}@{host}"),
    }
}
