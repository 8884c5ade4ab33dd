//! A worker process, as the test that started it sees it.
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

use super::{Order, Told};

/// Longer than anything here takes on a busy machine: a test that waits in vain should fail, not
/// hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// A worker process. It is killed when this is dropped, and ends by itself when the test that
/// started it is gone: its standard input ends then.
pub struct Process {
    child: Child,
    pid: Pid,
    orders: ChildStdin,
    told: mpsc::UnboundedReceiver<Told>,
}

impl Process {
    /// Starts `program` (the path of `semel-worker`) on a database and a file of effects, and waits
    /// until it is ready. A file that it may not let grow any further is an error to it, not its
    /// end: see [`Process::limit_files`].
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
        let (sender, told) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let told = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
                if sender.send(told).is_err() {
                    break;
                }
            }
        });
        let mut process = Self { child, pid, orders, told };
        assert_eq!(process.next().await, Some(Told::Ready));
        process
    }

    /// Gives an order. That the process has died meanwhile is no error here.
    pub async fn order(&mut self, order: &Order) {
        let mut line = serde_json::to_string(order).unwrap();
        line.push('\n');
        let _ = self.orders.write_all(line.as_bytes()).await;
    }

    /// What it tells next; nothing if it has ended.
    pub async fn next(&mut self) -> Option<Told> {
        tokio::time::timeout(PATIENCE, self.told.recv()).await.expect("the worker process says nothing")
    }

    /// What it tells until an order is done, or until it ends.
    pub async fn until_done(&mut self) -> Vec<Told> {
        let mut all = Vec::new();
        while let Some(told) = self.next().await.filter(|told| *told != Told::Done) {
            all.push(told);
        }
        all
    }

    /// Gives an order and waits for all that it is told.
    pub async fn ask(&mut self, order: &Order) -> Vec<Told> {
        self.order(order).await;
        self.until_done().await
    }

    /// What it has told so far, without waiting.
    pub fn told_so_far(&mut self) -> Vec<Told> {
        std::iter::from_fn(|| self.told.try_recv().ok()).collect()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Stops it, as a long pause of its host would; [`Process::wake`] lets it go on.
    pub async fn freeze(&self) {
        rustix::process::kill_process(self.pid, Signal::STOP).unwrap();
        self.until_frozen().await;
    }

    /// Waits until something has stopped it.
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

    /// Lets it go on.
    pub fn wake(&self) {
        rustix::process::kill_process(self.pid, Signal::CONT).unwrap();
    }

    /// Lets no file of its grow beyond `bytes`: for it, the disk is full.
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

    /// Ends it in order.
    pub async fn stop(mut self) -> Vec<Told> {
        self.order(&Order::Stop).await;
        let mut told = Vec::new();
        while let Some(one) = self.next().await {
            told.push(one);
        }
        assert!(self.ended().await.success());
        told
    }
}
