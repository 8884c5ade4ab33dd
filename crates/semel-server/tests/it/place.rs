//! A ledger for one test, on either database.

use std::{
    ffi::OsStr,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use rustix::process::Pid;
use serde_json::Value;
use sqlx::{ConnectOptions as _, Executor as _};
use tempfile::TempDir;

use crate::support::{Process, SOON, eventually, semel, stderr, stdout};

/// Runs each law on both databases.
macro_rules! on_both_databases {
    ($($law:ident)+) => {
        mod sqlite {
            $(#[test] fn $law() { super::$law(&crate::place::Place::sqlite()) })+
        }
        mod postgres {
            $(#[test] fn $law() { super::$law(&crate::place::Place::postgres()) })+
        }
    };
}
pub(crate) use on_both_databases;

/// A ledger, and a directory for the files of a test's commands.
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) dir: TempDir,
    schema: Option<String>,
}

impl Place {
    pub(crate) fn sqlite() -> Self {
        let dir = TempDir::new().unwrap();
        let url = format!("sqlite:{}", dir.path().join("semel.db").display());
        Self { url, dir, schema: None }
    }

    pub(crate) fn postgres() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let started = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros();
        let schema = format!("server_{}_{number}_{started}", std::process::id());
        execute(&format!("CREATE SCHEMA {schema}"));
        let server = server();
        let mark = if server.contains('?') { '&' } else { '?' };
        let url = format!("{server}{mark}options=-csearch_path%3D{schema}");
        Self { url, dir: TempDir::new().unwrap(), schema: Some(schema) }
    }

    /// A ledger on the test's own server.
    pub(crate) fn at(url: String) -> Self {
        Self { url, dir: TempDir::new().unwrap(), schema: None }
    }

    /// The program, on this ledger, in this directory.
    pub(crate) fn semel<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = semel();
        command.args(arguments).env("SEMEL_DATABASE_URL", &self.url).env("USER", "ana").current_dir(&self.dir);
        command
    }

    /// `semel once` with a shell script.
    pub(crate) fn once(&self, key: &str, flags: &[&str], script: &str) -> Command {
        let mut command = self.semel(["once", "--quiet", "--key", key]);
        command.args(flags).args(["--", "sh", "-c", script]);
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Output {
        self.semel(arguments).output().unwrap()
    }

    /// What a command prints that must succeed.
    pub(crate) fn say<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).to_owned()
    }

    /// What a command prints as JSON.
    pub(crate) fn json<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Value {
        serde_json::from_str(&self.say(arguments)).unwrap()
    }

    /// The state of an operation.
    pub(crate) fn state(&self, key: &str) -> String {
        self.json(["operations", "show", key, "--json"])["state"].as_str().unwrap().to_owned()
    }

    /// Runs `once` to its end: exit code, stdout, stderr.
    pub(crate) fn ends(&self, key: &str, flags: &[&str], script: &str) -> (i32, String, String) {
        ended(&self.once(key, flags, script).output().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The lines of a file; none if it does not exist.
    pub(crate) fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Lets the commands at the gate continue.
    pub(crate) fn open_gate(&self) {
        std::fs::write(self.path("gate"), "").unwrap();
    }

    /// Starts `once` with [`GATED`], and waits until its command runs.
    pub(crate) fn start_gated(&self, key: &str, flags: &[&str]) -> (Process, Pid) {
        let before = self.lines("pids").len();
        let mut command = self.once(key, flags, GATED);
        let process = Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        eventually(SOON, "the command runs", || self.lines("pids").len() > before);
        let pid = self.lines("pids").last().unwrap().parse().unwrap();
        (process, Pid::from_raw(pid).unwrap())
    }
}

/// A script that writes its process id and waits for the gate.
pub(crate) const GATED: &str = "echo $$ >>pids; until [ -e gate ]; do sleep 0.02; done; echo through";

pub(crate) fn ended(output: &Output) -> (i32, String, String) {
    (output.status.code().unwrap(), stdout(output).to_owned(), stderr(output).to_owned())
}

/// Asserts that a process is gone soon. A zombie counts as gone.
pub(crate) fn assert_gone_within(limit: Duration, pid: Pid) {
    let stat = format!("/proc/{}/stat", pid.as_raw_pid());
    eventually(limit, "the command is dead", || {
        let stat = std::fs::read_to_string(&stat).unwrap_or_default();
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
    });
}

impl Drop for Place {
    /// Cleans up. Statements of a killed server go on for a moment and may deadlock with the drop: one of them is then
    /// refused. What cannot be dropped stays until the test database server is restarted.
    fn drop(&mut self) {
        let Some(schema) = &self.schema else { return };
        for _ in 0..3 {
            let Err(problem) = try_execute(&format!("DROP SCHEMA {schema} CASCADE")) else { return };
            eprintln!("{schema} is still there: {problem}");
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

pub(crate) fn server() -> String {
    std::env::var("SEMEL_TEST_POSTGRES_URL")
        .expect("these tests need PostgreSQL: set SEMEL_TEST_POSTGRES_URL, or run `make test`, which starts one")
}

fn execute(statement: &str) {
    try_execute(statement).unwrap();
}

fn try_execute(statement: &str) -> sqlx::Result<()> {
    let options: sqlx::postgres::PgConnectOptions = server().parse()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut connection = options.connect().await?;
        connection.execute(sqlx::AssertSqlSafe(statement.to_owned())).await.map(drop)
    })
}
