//! A private PostgreSQL, to be killed and started again.
//!
//! It lives under `target/servers` by the rules of `scripts/postgres.sh`: a directory `postgres.XXXXXX` that is locked
//! while its owner lives. The next run of that script removes the directories of killed tests.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot set up its server fails")]

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal};

/// The tests are about durability, so the defaults are set explicitly. Loopback only, since every connection is
/// trusted.
const CONFIG: &str = "
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
fsync = on
synchronous_commit = on
max_connections = 100
";

/// A private PostgreSQL, gone when this is dropped.
pub struct Server {
    dir: tempfile::TempDir,
    /// The data directory, readable for the server's user.
    data: PathBuf,
    bin: PathBuf,
    port: u16,
    /// Keeps `postgres.sh` from removing the directory.
    _lock: File,
}

impl Server {
    /// Starts one, with these lines at the end of its configuration.
    #[must_use]
    pub fn start(config: &str) -> Self {
        let mut server = Self::in_a_new_directory();
        server.run("initdb", &["--username=semel", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]);
        let mut file = fs::OpenOptions::new().append(true).open(server.data.join("postgresql.conf")).unwrap();
        file.write_all(CONFIG.as_bytes()).unwrap();
        file.write_all(config.as_bytes()).unwrap();
        server.start_on_a_free_port();
        server
    }

    /// Starts a standby. It replicates synchronously once it is named in `synchronous_standby_names`.
    #[must_use]
    pub fn standby(&self) -> Self {
        let mut standby = Self::in_a_new_directory();
        let from = ["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "semel"].map(str::to_owned);
        let from: Vec<&str> = from.iter().map(String::as_str).collect();
        standby
            .run("pg_basebackup", &[&from[..], &["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]].concat());
        standby.start_on_a_free_port();
        standby
    }

    fn in_a_new_directory() -> Self {
        let servers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/servers");
        fs::create_dir_all(&servers).unwrap();
        // Directories are created and removed under this lock only; see the script.
        let all = File::open(&servers).unwrap();
        all.lock().unwrap();
        let dir = tempfile::Builder::new().prefix("postgres.").rand_bytes(6).tempdir_in(&servers).unwrap();
        let lock = File::open(dir.path()).unwrap();
        lock.lock().unwrap();
        drop(all);
        let data = make_data_dir(dir.path());
        Self { dir, data, bin: find_bin(), port: 0, _lock: lock }
    }

    fn start_on_a_free_port(&mut self) {
        // A free port is one that the server could bind; asking beforehand would be a race.
        for attempt in 0..20 {
            self.port = 20_000 + u16::try_from((std::process::id() * 7 + attempt * 613) % 12_000).unwrap();
            if self.try_start() {
                return;
            }
        }
        panic!("PostgreSQL did not start: {}", self.log());
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://semel@127.0.0.1:{}/postgres?sslmode=disable", self.port)
    }

    /// Stops it like a power failure, except that its children are signalled: no checkpoint, no graceful close.
    pub fn crash(&self) {
        self.run("pg_ctl", &["stop", "--mode=immediate", "-w"]);
    }

    /// Kills its first process with SIGKILL; the others notice.
    pub fn kill(&self) {
        rustix::process::kill_process(self.pid().unwrap(), Signal::KILL).unwrap();
    }

    /// Starts it again on its data.
    pub fn restart(&self) {
        let begun = Instant::now();
        // After a kill, the children may hold the shared memory for a moment.
        while !self.try_start() {
            assert!(begun.elapsed() < Duration::from_secs(60), "PostgreSQL did not start again: {}", self.log());
            sleep(Duration::from_millis(50));
        }
    }

    /// Changes a setting while it runs.
    pub fn set(&self, line: &str) {
        let mut file = fs::OpenOptions::new().append(true).open(self.data.join("postgresql.conf")).unwrap();
        writeln!(file, "{line}").unwrap();
        self.run("pg_ctl", &["reload"]);
    }

    /// Promotes a standby.
    pub fn promote(&self) {
        self.run("pg_ctl", &["promote", "-w", "-t", "60"]);
    }

    /// Starts a new timeline without another server: restarts it as a standby without a primary, and promotes it.
    pub fn begin_a_timeline(&self) {
        self.run("pg_ctl", &["stop", "--mode=fast", "-w"]);
        let signal = self.data.join("standby.signal");
        assert!(as_owner(Path::new("touch")).arg(signal).status().unwrap().success());
        self.restart();
        self.promote();
    }

    /// Copies its database into a new one on another server, by `pg_dump` and `psql`; returns its URL.
    #[must_use]
    pub fn dump_into(&self, other: &Self, name: &str) -> String {
        let dump = self.data.join(format!("{name}.sql"));
        let run = |program: &str, port: u16, arguments: &[&str]| {
            let mut command = as_owner(&self.bin.join(program));
            command.args(["-h", "127.0.0.1", "-U", "semel", "-p", &port.to_string()]).args(arguments);
            let said = command.output().unwrap();
            assert!(said.status.success(), "{program}: {}", String::from_utf8_lossy(&said.stderr));
        };
        let file = dump.to_str().unwrap();
        run("pg_dump", self.port, &["-f", file, "postgres"]);
        run("createdb", other.port, &[name]);
        run("psql", other.port, &["-q", "-v", "ON_ERROR_STOP=1", "-f", file, name]);
        other.url().replacen("/postgres?", &format!("/{name}?"), 1)
    }

    fn try_start(&self) -> bool {
        let (port, log) = (format!("-p {}", self.port), self.data.join("server.log"));
        self.call("pg_ctl", &["start", "-w", "-t", "60", "-o", &port, "-l", log.to_str().unwrap()]).status.success()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.data.join("server.log")).unwrap_or_default()
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let said = self.call(program, arguments);
        assert!(said.status.success(), "{program}: {} {}", String::from_utf8_lossy(&said.stderr), self.log());
    }

    fn call(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = as_owner(&self.bin.join(program));
        command.arg("-D").arg(&self.data).args(arguments).output().unwrap()
    }

    /// Its pid, if it runs and is ours: a postmaster works in its data directory, and the pid in a stale file may
    /// belong to another process.
    fn pid(&self) -> Option<Pid> {
        let text = fs::read_to_string(self.data.join("postmaster.pid")).ok()?;
        let pid = Pid::from_raw(text.lines().next()?.trim().parse().ok()?)?;
        let cwd = fs::read_link(format!("/proc/{}/cwd", pid.as_raw_nonzero())).ok()?;
        (cwd == self.data).then_some(pid)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let begun = Instant::now();
        while let Some(pid) = self.pid() {
            // "Immediate shutdown": no checkpoint for data that is about to be removed.
            let _ = rustix::process::kill_process(pid, Signal::QUIT);
            if begun.elapsed() > Duration::from_secs(20) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            sleep(Duration::from_millis(20));
        }
        if !self.data.starts_with(self.dir.path()) {
            let _ = fs::remove_dir_all(&self.data);
        }
    }
}

/// A data directory that the server's user owns and can reach.
fn make_data_dir(dir: &Path) -> PathBuf {
    let data = dir.join("data");
    fs::create_dir(&data).unwrap();
    // PostgreSQL refuses a directory that others may read.
    fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    if is_root() {
        fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        give_away(&data);
        let reachable = as_owner(Path::new("test")).arg("-w").arg(&data).status().unwrap();
        if !reachable.success() {
            // For a checkout in a private home directory. Not in /tmp, which may be in memory, where fsync costs
            // nothing and proves nothing.
            let elsewhere = tempfile::Builder::new().prefix("semel-postgres.").tempdir_in("/var/tmp").unwrap().keep();
            give_away(&elsewhere);
            fs::remove_dir(&data).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &data).unwrap();
        }
    }
    fs::canonicalize(data).unwrap()
}

fn give_away(dir: &Path) {
    assert!(Command::new("chown").arg("postgres:").arg(dir).status().unwrap().success());
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// PostgreSQL's programs refuse root, for whom the packages made a user.
fn as_owner(program: &Path) -> Command {
    let mut command = match is_root() {
        true => {
            let mut command = Command::new("runuser");
            command.args(["-u", "postgres", "--"]).arg(program);
            command
        }
        false => Command::new(program),
    };
    command.current_dir("/");
    for (name, _) in std::env::vars_os() {
        // The caller's PG* variables refer to another server.
        if name.to_string_lossy().starts_with("PG") {
            command.env_remove(name);
        }
    }
    command
}

/// The directory of PostgreSQL's programs: set by `postgres.sh run`, else the newest there is.
fn find_bin() -> PathBuf {
    if let Some(bin) = std::env::var_os("SEMEL_TEST_POSTGRES_BIN") {
        return bin.into();
    }
    let versions =
        fs::read_dir("/usr/lib/postgresql").expect("SEMEL_TEST_POSTGRES_BIN is not set: run with `make test`");
    let version = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()?.parse().ok()).unwrap_or(0u32);
    let newest = versions.filter_map(|entry| Some(entry.ok()?.path())).max_by_key(version).unwrap();
    newest.join("bin")
}
