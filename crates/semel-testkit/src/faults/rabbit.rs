//! A private RabbitMQ, to be stopped, starved and killed; or a private virtual host on the shared one.
//!
//! `scripts/rabbitmq.sh` starts it, and removes it when its standard input ends: when this is dropped, and also when
//! the test is killed.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot set up its server fails")]

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use super::proxy::host_of;

/// The address of the RabbitMQ to test with.
///
/// # Panics
/// If there is none: a missing server fails the tests, it does not skip them.
#[must_use]
pub fn rabbitmq_server() -> String {
    #[expect(clippy::expect_used, reason = "tests must not be skipped silently")]
    std::env::var("SEMEL_TEST_RABBITMQ_URL").expect(
        "SEMEL_TEST_RABBITMQ_URL is not set: run the tests with `make test`, or under `scripts/rabbitmq.sh run`",
    )
}

/// A private RabbitMQ, gone when this is dropped.
pub struct Rabbit {
    script: Child,
    dir: PathBuf,
    url: String,
}

impl Rabbit {
    /// Starts one; this takes a few seconds.
    #[must_use]
    pub fn start() -> Self {
        let announce = r#"echo "$SEMEL_TEST_RABBITMQ_URL $SEMEL_SERVER_DIR"; exec cat >/dev/null"#;
        let mut script = Command::new(script())
            .args(["run", "bash", "-c", announce])
            .env_remove("SEMEL_TEST_RABBITMQ_URL")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(script.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (url, dir) = line.trim().split_once(' ').expect("the script has said above what is wrong");
        Self { dir: dir.into(), url: url.to_owned(), script }
    }

    /// Starts one with these lines in its configuration.
    #[must_use]
    pub fn start_with(config: &str) -> Self {
        let rabbit = Self::start();
        std::fs::write(rabbit.dir.join("extra.conf"), config).unwrap();
        rabbit.kill();
        rabbit.start_again();
        rabbit
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs `rabbitmqctl`, and returns its output.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.call("ctl", arguments)
    }

    /// Kills it with SIGKILL.
    pub fn kill(&self) {
        self.call("kill", &[]);
    }

    /// Starts it again on its data, at the same address.
    pub fn start_again(&self) {
        self.call("again", &[]);
    }

    fn call(&self, command: &str, arguments: &[&str]) -> String {
        call(command, &self.dir, arguments)
    }
}

/// Runs the script for the node of a directory.
fn call(command: &str, dir: &Path, arguments: &[&str]) -> String {
    let mut call = Command::new(script());
    // Reading a pipe would wait until the last server that inherited it has ended.
    let said = tempfile::NamedTempFile::new().unwrap();
    let (out, err) = (said.reopen().unwrap(), said.reopen().unwrap());
    let status = call.arg(command).arg(dir).args(arguments).stdin(Stdio::null()).stdout(out).stderr(err);
    let status = status.status().unwrap();
    let said = std::fs::read_to_string(said.path()).unwrap();
    assert!(status.success(), "rabbitmq.sh {command} {arguments:?}: {said}");
    said
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        let _ = self.script.wait();
    }
}

/// A private virtual host on the server of this run: queues of the same name in two of them are separate. Removed on
/// drop.
pub struct Vhost {
    dir: PathBuf,
    name: String,
    url: String,
}

impl Vhost {
    /// A new one; this takes a second.
    #[must_use]
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (server, dir) = (rabbitmq_server(), dir_of_the_server());
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let started = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros();
        let name = format!("test-{}-{number}-{started}", std::process::id());
        // The permissions are set in the same call: each call of rabbitmqctl takes a second.
        let make = format!(
            "ok = rabbit_vhost:add(<<\"{name}\">>, <<\"test\">>), \
             rabbit_auth_backend_internal:set_permissions(<<\"guest\">>, <<\"{name}\">>, <<\".*\">>, <<\".*\">>, <<\".*\">>, <<\"test\">>)."
        );
        call("ctl", &dir, &["eval", &make]);
        let (server, _) = server.rsplit_once('/').unwrap();
        Self { url: format!("{server}/{name}"), dir, name }
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Default for Vhost {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        // Not awaited: the node ends with the run at the latest, and the next test need not wait.
        let ctl = Command::new(script())
            .args(["ctl".as_ref(), self.dir.as_os_str()])
            .args(["delete_vhost", &self.name])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        drop(ctl);
    }
}

/// The directory of the server of this run, found by its port.
fn dir_of_the_server() -> PathBuf {
    let url = rabbitmq_server();
    let port = host_of(&url).rsplit_once(':').unwrap().1.to_owned();
    let servers = script().parent().unwrap().join("../target/servers");
    let is_it = |dir: &PathBuf| {
        let ports = std::fs::read_to_string(dir.join("ports")).unwrap_or_default();
        ports.split_whitespace().any(|word| word.strip_prefix("port=") == Some(&port))
    };
    let found = std::fs::read_dir(&servers).unwrap().map(|entry| entry.unwrap().path()).find(is_it);
    found.expect("a virtual host can be made on a server of scripts/rabbitmq.sh only")
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/rabbitmq.sh")
}
