//! A private PgBouncer in front of a PostgreSQL.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot set up its pooler fails")]

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use super::{proxy::host_of, server::is_root};

/// A PgBouncer, gone when this is dropped.
pub struct PgBouncer {
    process: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl PgBouncer {
    /// Starts one in front of the server of a URL, with these lines in its configuration and otherwise the defaults.
    #[must_use]
    pub fn start(url: &str, config: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("semel-pgbouncer-").tempdir().unwrap();
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let (host, port) = host_of(url).split_once(':').unwrap();
        let user = url.split_once("://").unwrap().1.split(['@', ':']).next().unwrap();
        for attempt in 0..20 {
            let listen = 20_000 + u16::try_from((std::process::id() * 11 + attempt * 617) % 12_000).unwrap();
            let file = dir.path().join("pgbouncer.ini");
            let text = format!(
                "[databases]\n* = host={host} port={port} user={user}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {listen}\nunix_socket_dir =\nauth_type = any\n{config}\n"
            );
            fs::write(&file, text).unwrap();
            let mut process = start(&file);
            // It ends at once if the port is taken, and listens otherwise.
            while process.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", listen)).is_ok() && process.try_wait().unwrap().is_none() {
                    return Self { process, port: listen, _dir: dir };
                }
                sleep(Duration::from_millis(10));
            }
        }
        panic!("PgBouncer did not start");
    }

    /// The same URL, through it.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        url.replacen(host_of(url), &format!("127.0.0.1:{}", self.port), 1)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(file: &Path) -> Child {
    let program: PathBuf = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
        .expect("PgBouncer is missing: `make test` installs it (Debian's package pgbouncer)");
    let mut command = Command::new(program);
    if is_root() {
        // It refuses to run as root.
        command.args(["-u", "postgres"]);
    }
    command.arg("-q").arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}
