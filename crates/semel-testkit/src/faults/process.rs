//! A worker process, as seen by its test.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot start its processes fails")]

use std::{
    path::Path,
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Resource, Rlimit, Signal};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
    sync::mpsc,
};

use super::{Order, Report};

/// Longer than anything here takes on a busy machine: a test should fail, not hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// A worker process. It is killed when this is dropped, and ends by itself when its test is gone: its standard input
/// ends then.
pub struct Process {
    child: Child,
    pid: Pid,
    orders: ChildStdin,
    reports: mpsc::UnboundedReceiver<Report>,
}

impl Process {
    /// Starts `program` (the path of `semel-worker`) on a database and a file of effects, and waits until it is ready.
    /// A file size limit is an error for it, not its end: see [`Process::limit_files`].
    pub async fn start(program: &str, url: &str, bank: &Path, env: &[(&str, &str)]) -> Self {
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh", program, url])
            .arg(bank)
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
        let orders = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, reports) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let reports = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
                if sender.send(reports).is_err() {
                    break;
                }
            }
        });
        let mut process = Self { child, pid, orders, reports };
        assert_eq!(process.next().await, Some(Report::Ready));
        process
    }

    /// Sends an order. It is no error if the process has died meanwhile.
    pub async fn order(&mut self, order: &Order) {
        let mut line = serde_json::to_string(order).unwrap();
        line.push('\n');
        let _ = self.orders.write_all(line.as_bytes()).await;
    }

    /// Its next report; `None` if it has ended.
    pub async fn next(&mut self) -> Option<Report> {
        tokio::time::timeout(PATIENCE, self.reports.recv()).await.expect("the worker process reports nothing")
    }

    /// Its reports until an order is done, or until it ends.
    pub async fn until_done(&mut self) -> Vec<Report> {
        let mut all = Vec::new();
        while let Some(reports) = self.next().await.filter(|reports| *reports != Report::Done) {
            all.push(reports);
        }
        all
    }

    /// Sends an order and returns all its reports.
    pub async fn ask(&mut self, order: &Order) -> Vec<Report> {
        self.order(order).await;
        self.until_done().await
    }

    /// Its reports so far, without waiting.
    pub fn reports_so_far(&mut self) -> Vec<Report> {
        std::iter::from_fn(|| self.reports.try_recv().ok()).collect()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Stops it, like a long pause of its host; [`Process::wake`] continues it.
    pub async fn freeze(&self) {
        rustix::process::kill_process(self.pid, Signal::STOP).unwrap();
        self.until_frozen().await;
    }

    /// Waits until it is stopped.
    pub async fn until_frozen(&self) {
        let stat = format!("/proc/{}/stat", self.pid.as_raw_nonzero());
        let begun = Instant::now();
        loop {
            // The state is the first letter after the name, which is in parentheses.
            let text = std::fs::read_to_string(&stat).unwrap();
            if text.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "the worker process was not stopped");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Continues it.
    pub fn wake(&self) {
        rustix::process::kill_process(self.pid, Signal::CONT).unwrap();
    }

    /// Limits the size of its files: for it, the disk is full.
    pub fn limit_files(&self, bytes: Option<u64>) {
        rustix::process::prlimit(Some(self.pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    }

    /// Kills it with SIGKILL.
    pub async fn kill(&mut self) {
        self.child.start_kill().unwrap();
        self.ended().await;
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> ExitStatus {
        tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("the worker process does not end").unwrap()
    }

    /// Stops it gracefully.
    pub async fn stop(mut self) -> Vec<Report> {
        self.order(&Order::Stop).await;
        let mut reports = Vec::new();
        while let Some(one) = self.next().await {
            reports.push(one);
        }
        assert!(self.ended().await.success());
        reports
    }
}
