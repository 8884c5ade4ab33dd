//! The output of a command: forwarded at once, and kept.

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

/// The size of a read: the capacity of a pipe.
const CHUNK: usize = 64 << 10;

/// How many chunks may wait for a slow reader of our stdout before the command has to wait too, as it would without us.
const WAITING: usize = 16;

/// The most data in a pipe whose writer has ended: `/proc/sys/fs/pipe-max-size`, unless root changes it.
const PIPE: usize = 1 << 20;

/// Our stdout, written by its own thread: a reader that does not read must not delay the kill of the command after a
/// lost lease, nor the storing of its outcome.
#[derive(Clone)]
pub(super) struct Stdout(mpsc::Sender<Bytes>);

/// The end of that thread, with its write error, if any.
pub(super) type Written = oneshot::Receiver<io::Result<()>>;

/// Starts the thread.
pub(super) fn stdout() -> (Stdout, Written) {
    let (chunks, mut waiting) = mpsc::channel::<Bytes>(WAITING);
    let (done, written) = oneshot::channel();
    thread::spawn(move || {
        let mut result = Ok(());
        // After an error the rest is still read, so that the command continues: its effect matters more.
        while let Some(chunk) = waiting.blocking_recv() {
            if result.is_ok() {
                let mut stdout = io::stdout().lock();
                result = stdout.write_all(&chunk).and_then(|()| stdout.flush());
            }
        }
        // A reader that closed the pipe, such as `head`, wanted no more.
        let result = result.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        });
        let _ = done.send(result);
    });
    (Stdout(chunks), written)
}

/// Reads the output of a command.
pub(super) struct Tee {
    pipe: Option<Receiver>,
    stdout: Stdout,
    /// A reserved slot for the last chunk, so that sending it never waits.
    last: mpsc::OwnedPermit<Bytes>,
    printed: Printed,
}

impl Tee {
    pub(super) async fn new(pipe: ChildStdout, stdout: Stdout) -> io::Result<Self> {
        let pipe = Receiver::from_owned_fd(OwnedFd::from(pipe))?;
        let last = stdout.0.clone().reserve_owned().await.map_err(io::Error::other)?;
        Ok(Self { pipe: Some(pipe), stdout, last, printed: Printed::default() })
    }

    /// Forwards one chunk. Cancel-safe: there is no await between reading and keeping. Once the command has closed its
    /// stdout, this waits for ever.
    pub(super) async fn pass_on(&mut self) {
        let Some(pipe) = &self.pipe else { return std::future::pending().await };
        // Reserve the slot first: data that was read must not wait.
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

    /// Reads the rest of the pipe after the command has ended. Does not wait for processes that it left behind:
    /// they may hold the pipe open for days.
    pub(super) fn finish(mut self) -> Printed {
        let mut rest = Vec::new();
        if let Some(pipe) = &self.pipe {
            let mut chunk = vec![0; CHUNK];
            // Reads directly: the runtime may not have noticed yet that the pipe is readable.
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
