//! Mailings: the import next to a bare COPY (PostgreSQL), and the sending next to the bare transport in a loop.
//!
//! The real program imports and sends, in a process of its own. The limits are what a person would write by hand: a COPY
//! of prepared rows into a table with the same columns and constraints; sixteen tasks that send prepared mails.

use std::{
    fs,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use semel_testkit::smtp::SmtpSink;
use serde_json::Value;
use sqlx::{Connection as _, PgConnection};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    task::JoinSet,
};

use crate::{
    Plan,
    cpu::{Cpu, of_process},
    load::Figure,
    report::{Report, Subject},
    site::{Backend, Site},
};

pub(crate) const IMPORT: &str = "import";
pub(crate) const COPY: &str = "bare COPY";
pub(crate) const SEND_SMTP: &str = "sending by SMTP";
pub(crate) const BARE_SMTP: &str = "bare SMTP in a loop";
pub(crate) const SEND_FILE: &str = "sending to files";
pub(crate) const BARE_FILE: &str = "bare files in a loop";

/// The connections of a node, and of the loops.
const CONNECTIONS: usize = 16;

pub(crate) fn subject(backend: Backend, how: &'static str) -> Subject {
    Subject { section: "mailings", backend, how, tasks: CONNECTIONS }
}

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let (rows, mails) = if plan.rounds == 1 { (200_000, 10_000) } else { (1_000_000, 30_000) };
    for round in 0..plan.rounds {
        if plan.wants(IMPORT, CONNECTIONS) {
            import(plan, backend, rows, report).await?;
        }
        if plan.wants("sending", CONNECTIONS) {
            send(plan, backend, mails, report).await?;
        }
        if round == 0 && plan.rounds > 1 && backend == Backend::Postgres && plan.wants(IMPORT, CONNECTIONS) {
            import_many(plan, backend, 10 * rows, report).await?;
        }
    }
    Ok(())
}

/// The list, as a file: each row has an address and a name.
fn list(path: &Path, rows: usize) -> Result<()> {
    let mut file = std::io::BufWriter::new(fs::File::create(path)?);
    writeln!(file, "email,name")?;
    for i in 0..rows {
        writeln!(file, "user{i}.{:08x}@example.com,User {i}", fastrand::u32(..))?;
    }
    file.flush().context("the list")
}

async fn import(plan: &Plan, backend: Backend, rows: usize, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("list.csv");
    list(&path, rows)?;
    let server = Server::start(&site, dir.path(), "file:mail", &[]).await?;
    let (took, cpu) = server.import(&site, &path).await?;
    report.add(subject(backend, IMPORT), figure(rows, took, cpu));
    report.say(format!("{backend}: import of {rows} rows, peak memory {} MiB", server.peak()? >> 10));
    drop(server);
    if backend == Backend::Postgres {
        report.add(subject(backend, COPY), copy(&site, rows).await?);
    }
    site.remove().await
}

/// A long list once, for its memory.
async fn import_many(plan: &Plan, backend: Backend, rows: usize, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("list.csv");
    list(&path, rows)?;
    let server = Server::start(&site, dir.path(), "file:mail", &[]).await?;
    let (took, _) = server.import(&site, &path).await?;
    let rate = rows as f64 / took.as_secs_f64();
    report.say(format!("{backend}: import of {rows} rows: {rate:.0}/s, peak memory {} MiB", server.peak()? >> 10));
    drop(server);
    site.remove().await
}

fn figure(n: usize, took: Duration, cpu: Duration) -> Figure {
    let n = n as f64;
    Figure { rate: n / took.as_secs_f64(), p50: f64::NAN, p99: f64::NAN, per_cpu: n / cpu.as_secs_f64() }
}

/// Copies prepared rows into a table like that of entries, in one statement and one transaction.
async fn copy(site: &Site, rows: usize) -> Result<Figure> {
    let mut connection = PgConnection::connect(&site.url).await?;
    let table = "CREATE TABLE bare_entries (LIKE mailing_entries INCLUDING ALL) WITH (fillfactor = 70)";
    sqlx::raw_sql(table).execute(&mut connection).await?;
    let mut text = String::new();
    for i in 0..rows {
        let (a, b, c) = (fastrand::u32(..), fastrand::u64(..), fastrand::u64(..));
        text.push_str(&format!(
            "1\t{}\tuser{i}.{a:08x}@example.com\t\\\\x{b:016x}{c:016x}\t\\\\x0100{}\t1\t1\n",
            i + 2,
            hex(format!("[\"user{i}.{a:08x}@example.com\",\"User {i}\"]").as_bytes()),
        ));
    }
    let (begun, cpu) = (Instant::now(), site.cpu.used());
    let sql = "COPY bare_entries (mailing, line, email, token, cells, created_at, updated_at) FROM STDIN";
    let mut copy = connection.copy_in_raw(sql).await?;
    for part in text.as_bytes().chunks(1 << 20) {
        copy.send(part).await?;
    }
    copy.finish().await?;
    Ok(figure(rows, begun.elapsed(), site.cpu.used() - cpu))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn send(plan: &Plan, backend: Backend, mails: usize, report: &mut Report) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("list.csv");
    list(&path, mails)?;
    let sink = SmtpSink::start().await;
    let site = Site::fresh(plan, backend).await?;
    let server = Server::start(&site, dir.path(), &sink.url(), &[]).await?;
    let (took, cpu) = server.send(&site, &path).await?;
    ensure!(sink.count() == mails, "{} of {mails} mails have arrived", sink.count());
    report.add(subject(backend, SEND_SMTP), figure(mails, took, cpu));
    drop(server);
    site.remove().await?;
    report.add(subject(backend, BARE_SMTP), bare_smtp(mails).await?);

    let site = Site::fresh(plan, backend).await?;
    let server = Server::start(&site, dir.path(), "file:mail", &[]).await?;
    let (took, cpu) = server.send(&site, &path).await?;
    report.add(subject(backend, SEND_FILE), figure(mails, took, cpu));
    drop(server);
    site.remove().await?;
    report.add(subject(backend, BARE_FILE), bare_files(dir.path(), mails).await?);
    Ok(())
}

/// A mail like those of the mailing.
fn mail(i: usize) -> String {
    format!(
        "From: News <news@example.com>\r\nTo: user{i}@example.com\r\nSubject: Hello User {i}\r\n\
         Message-ID: <{i}@bench>\r\nDate: Wed, 18 Nov 2026 12:00:00 +0000\r\nMIME-Version: 1.0\r\n\
         Content-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: 7bit\r\n\r\nHello User {i}!\r\n"
    )
}

/// Runs `one` for each number below `n`, in as many tasks as there are connections.
async fn in_a_loop<F, Fut>(n: usize, one: F) -> Result<Figure>
where
    F: Fn(usize) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    let (cpu, begun, next) = (Cpu::of_this_process(), Instant::now(), Arc::new(AtomicUsize::new(0)));
    let before = cpu.used();
    let mut tasks = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let (one, next) = (one.clone(), next.clone());
        tasks.spawn(async move {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= n {
                    return anyhow::Ok(());
                }
                one(i).await?;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(figure(n, begun.elapsed(), cpu.used() - before))
}

/// Sixteen open connections, each with its own loop. Commands go out at once: lettre's own loop would wait 40 ms for
/// each final dot, which it writes apart from the message.
async fn bare_smtp(mails: usize) -> Result<Figure> {
    let sink = SmtpSink::start().await;
    let address = sink.address();
    let mut idle = Vec::new();
    for _ in 0..CONNECTIONS {
        idle.push(Connection::open(address).await?);
    }
    let idle = Arc::new(Mutex::new(idle));
    in_a_loop(mails, move |i| {
        let idle = idle.clone();
        async move {
            let mut connection = idle.lock().expect("a lock").pop().context("a connection")?;
            connection.say("MAIL FROM:<news@example.com>\r\n", "250").await?;
            connection.say(&format!("RCPT TO:<user{i}@example.com>\r\n"), "250").await?;
            connection.say("DATA\r\n", "354").await?;
            connection.say(&(mail(i) + ".\r\n"), "250").await?;
            idle.lock().expect("a lock").push(connection);
            Ok(())
        }
    })
    .await
}

/// A connection to the server of mails.
struct Connection(BufReader<TcpStream>);

impl Connection {
    async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut connection = Self(BufReader::new(stream));
        connection.hear("220").await?;
        connection.say("EHLO bench\r\n", "250").await?;
        Ok(connection)
    }

    async fn say(&mut self, command: &str, expected: &str) -> Result<()> {
        self.0.get_mut().write_all(command.as_bytes()).await?;
        self.hear(expected).await
    }

    /// A reply, to its last line.
    async fn hear(&mut self, expected: &str) -> Result<()> {
        let mut line = String::new();
        loop {
            line.clear();
            self.0.read_line(&mut line).await?;
            ensure!(line.starts_with(expected), "{expected} was expected, not {line:?}");
            if line.as_bytes().get(3) != Some(&b'-') {
                return Ok(());
            }
        }
    }
}

async fn bare_files(dir: &Path, mails: usize) -> Result<Figure> {
    let dir = dir.join("bare");
    fs::create_dir(&dir)?;
    in_a_loop(mails, move |i| {
        let dir = dir.clone();
        async move { tokio::task::spawn_blocking(move || file(&dir, i)).await? }
    })
    .await
}

/// A durable file that is there as a whole or not at all.
fn file(dir: &Path, i: usize) -> Result<()> {
    let (part, whole) = (dir.join(format!("{i}.part")), dir.join(format!("{i}.eml")));
    let mut file = fs::File::create(&part)?;
    file.write_all(mail(i).as_bytes())?;
    file.sync_all()?;
    fs::rename(part, whole)?;
    fs::File::open(dir)?.sync_all().context("a file")
}

/// The program, on a site.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    async fn start(site: &Site, dir: &Path, transport: &str, variables: &[(&str, &str)]) -> Result<Self> {
        let program: PathBuf = std::env::current_exe()?.with_file_name("semel");
        ensure!(program.exists(), "{} is missing: scripts/bench.sh builds it", program.display());
        let transport = match transport {
            "file:mail" => {
                fs::create_dir_all(dir.join("mail"))?;
                format!("file:{}", dir.join("mail").display())
            }
            other => other.to_owned(),
        };
        let mut child = Command::new(program)
            .args(["serve", "--listen", "127.0.0.1:0", "--database-url", &site.url, "--mail-transport", &transport])
            .envs(variables.iter().copied())
            .env("RUST_LOG", "error")
            .current_dir(dir)
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("its output")?;
        let line = std::io::BufRead::lines(std::io::BufReader::new(stdout)).next().context("its first line")??;
        let address = line.rsplit_once("http://").context("its address")?.1.to_owned();
        Ok(Self { child, address })
    }

    /// Uploads a list that is sent later; the time and CPU from the answer until it is imported.
    async fn import(&self, site: &Site, list: &Path) -> Result<(Duration, Duration)> {
        let id = self.upload(list, Some("2100-01-01T00:00:00Z")).await?;
        let (begun, cpu) = (Instant::now(), site.cpu.used() + of_process(self.child.id()));
        self.until(&id, |mailing| mailing["phase"] == "sending").await?;
        Ok((begun.elapsed(), site.cpu.used() + of_process(self.child.id()) - cpu))
    }

    /// Uploads a list; the time and CPU from the end of its import until all mails are sent.
    async fn send(&self, site: &Site, list: &Path) -> Result<(Duration, Duration)> {
        let id = self.upload(list, None).await?;
        self.until(&id, |mailing| mailing["phase"] == "sending").await?;
        let (begun, cpu) = (Instant::now(), site.cpu.used() + of_process(self.child.id()));
        self.until(&id, |mailing| mailing["status"] == "COMPLETED").await?;
        Ok((begun.elapsed(), site.cpu.used() + of_process(self.child.id()) - cpu))
    }

    /// The largest memory so far, in kibibytes.
    fn peak(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
        line.trim().trim_end_matches(" kB").parse().context("VmHWM")
    }

    async fn until(&self, id: &str, is_over: impl Fn(&Value) -> bool) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(1800);
        while Instant::now() < end {
            let mailing = self.request(&format!("GET /mailings/{id}"), "", &[]).await?;
            if is_over(&mailing) {
                return Ok(());
            }
            ensure!(mailing["status"] != "FAILED", "the mailing has failed: {mailing}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bail!("the mailing was not over in time")
    }

    async fn upload(&self, list: &Path, send_at: Option<&str>) -> Result<String> {
        let mut body = String::new();
        let fields =
            [("subject", "Hello {{ name }}"), ("body", "Hello {{ name }}!"), ("from", "News <news@example.com>")];
        for (name, value) in fields.into_iter().chain(send_at.map(|at| ("sendAt", at))) {
            body += &format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        }
        body += "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"list.csv\"\r\n\r\n";
        let parts = [body.into_bytes(), fs::read(list)?, b"\r\n--b--\r\n".to_vec()];
        let kind = "content-type: multipart/form-data; boundary=b\r\n";
        let made = self.request("POST /mailings", kind, &parts.concat()).await?;
        Ok(made["mailingId"].as_str().with_context(|| format!("the upload was refused: {made}"))?.to_owned())
    }

    async fn request(&self, what: &str, headers: &str, body: &[u8]) -> Result<Value> {
        let mut connection = TcpStream::connect(&self.address).await?;
        let head = format!(
            "{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
            body.len()
        );
        connection.write_all(head.as_bytes()).await?;
        connection.write_all(body).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        let (_, body) = answer.split_once("\r\n\r\n").context("an answer")?;
        serde_json::from_str(body).with_context(|| format!("an answer: {answer}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
