//! What a command prints: passed on as it comes, and kept.

use std::{
    io::{self, Write as _},
    os::fd::OwnedFd,
    process::ChildStdout,
    thread,
};

use bytes::Bytes;
use tokio::{
    net::unix::pipe::Receiver,
    sync::{mpsc, oneshot},
};

use super::outcome::Printed;

/// How much is read at once: what a pipe holds.
const CHUNK: usize = 64 << 10;

/// How many chunks may wait for a slow reader of our own stdout before the command has to wait too, as it would
/// without us.
const WAITING: usize = 16;

/// The most that can be in a pipe when its writer has ended: `/proc/sys/fs/pipe-max-size`, unless root says otherwise.
const PIPE: usize = 1 << 20;

/// Our own stdout, written to by a thread of its own: a reader that does not read must not keep the command from being
/// killed when its lease is lost, nor its outcome from being stored.
#[derive(Clone)]
pub(super) struct Stdout(mpsc::Sender<Bytes>);

/// The end of that thread: what could not be written, if anything.
pub(super) type Written = oneshot::Receiver<io::Result<()>>;

/// Starts the thread.
pub(super) fn stdout() -> (Stdout, Written) {
    let (chunks, mut waiting) = mpsc::channel::<Bytes>(WAITING);
    let (done, written) = oneshot::channel();
    thread::spawn(move || {
        let mut result = Ok(());
        // After an error the rest is still taken, so that the command goes on: its work matters more than its words.
        while let Some(chunk) = waiting.blocking_recv() {
            if result.is_ok() {
                let mut stdout = io::stdout().lock();
                result = stdout.write_all(&chunk).and_then(|()| stdout.flush());
            }
        }
        // A reader that went away, such as `head`, has seen what it wanted.
        let result = result.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        });
        let _ = done.send(result);
    });
    (Stdout(chunks), written)
}

/// Reads what a command prints.
pub(super) struct Tee {
    pipe: Option<Receiver>,
    stdout: Stdout,
    /// A place for the last chunk, so that handing it over never waits.
    last: mpsc::OwnedPermit<Bytes>,
    printed: Printed,
}

impl Tee {
    pub(super) async fn new(pipe: ChildStdout, stdout: Stdout) -> io::Result<Self> {
        let pipe = Receiver::from_owned_fd(OwnedFd::from(pipe))?;
        let last = stdout.0.clone().reserve_owned().await.map_err(io::Error::other)?;
        Ok(Self { pipe: Some(pipe), stdout, last, printed: Printed::default() })
    }

    /// Passes on one chunk. Dropping the future loses nothing: there is no waiting between reading and keeping. Once
    /// the command has closed its stdout, this waits for ever.
    pub(super) async fn pass_on(&mut self) {
        let Some(pipe) = &self.pipe else { return std::future::pending().await };
        // Room first: what has been read must not wait.
        let (Ok(room), Ok(())) = (self.stdout.0.reserve().await, pipe.readable().await) else {
            return self.pipe = None;
        };
        let mut chunk = vec![0; CHUNK];
        match pipe.try_read(&mut chunk) {
            Ok(0) => self.pipe = None,
            Ok(n) => {
                chunk.truncate(n);
                self.printed.add(&chunk);
                room.send(chunk.into());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.pipe = None,
        }
    }

    /// Takes what is left in the pipe after the command has ended, without waiting for processes that it left behind
    /// and that may hold the pipe open for days.
    pub(super) fn finish(mut self) -> Printed {
        let mut rest = Vec::new();
        if let Some(pipe) = &self.pipe {
            let mut chunk = vec![0; CHUNK];
            // Past the runtime, which may not have noticed yet that there is something to read.
            while rest.len() < PIPE
                && let Ok(n) = rustix::io::read(pipe, &mut chunk[..])
                && n > 0
            {
                rest.extend_from_slice(&chunk[..n]);
            }
        }
        self.printed.add(&rest);
        self.last.send(rest.into());
        self.printed
    }
}
