//! The guard's process.

use std::{ffi::OsString, future::pending, io, time::Duration};

use rustix::{
    io::Errno,
    process::{
        Pid, Signal, WaitOptions, WaitStatus, getpgid, getpgrp, getpid, getppid, kill_current_process_group,
        kill_process, set_child_subreaper, set_parent_process_death_signal, setpgid, wait,
    },
};
use tokio::{
    signal::unix::{self, SignalKind, signal},
    time::{Instant, sleep_until, timeout},
};

use super::{ALIVE, ORPHANED, this_program, tree::descendants};
use crate::{Error, Result};

/// How long killed processes may take to vanish. A process that takes longer is stuck in the kernel, and waiting does
/// not help.
const BURIAL: Duration = Duration::from_secs(1);

/// The time between two scans of the tree while it is being killed.
const LOOK: Duration = Duration::from_millis(20);

/// Runs a command until it ends, `parent` ends, or `parent` is silent for too long. Returns the command's exit code.
///
/// # Errors
/// When the command could not be guarded and so was not started.
pub fn watch(parent: u32, command: &[OsString], grace: Duration, silence: Option<Duration>) -> Result<u8> {
    let refused = |what| move |source: io::Error| Error::System { what, source };
    // One thread: the command's parent-death signal follows the thread that started it.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(refused("start a runtime"))?;
    runtime.block_on(async {
        // Listen before anything is started: an unhandled signal would kill the guard alone.
        let signals = Signals::new().map_err(refused("listen to signals"))?;
        lead_own_group().map_err(refused("lead a process group"))?;
        set_child_subreaper(Some(getpid())).map_err(|e| refused("become the reaper of the command")(e.into()))?;
        set_parent_process_death_signal(Some(Signal::TERM))
            .map_err(|e| refused("set the parent-death signal")(e.into()))?;
        let parent = i32::try_from(parent).ok().and_then(Pid::from_raw);
        // Checked after the signal is set: a parent that ended before would never cause it.
        if getppid() != parent {
            return Ok(ORPHANED);
        }
        let child = this_program()
            .args(["guard-exec", "--parent", &std::process::id().to_string(), "--"])
            .args(command)
            .spawn()
            .map_err(refused("start the command"))?;
        let command = Pid::from_child(&child);
        let watch = Watch { parent, command, code: None, signals, deadline: None, heard: Instant::now() };
        Ok(watch.run(grace, silence).await)
    })
}

/// Killing the group must never reach beyond the guard and its command, however the guard was started.
fn lead_own_group() -> io::Result<()> {
    if getpgrp() != getpid() {
        setpgid(None, None)?;
    }
    Ok(())
}

struct Watch {
    parent: Option<Pid>,
    command: Pid,
    /// The command's exit code, once it has ended.
    code: Option<u8>,
    signals: Signals,
    /// The deadline of the tree, once it was asked to stop.
    deadline: Option<Instant>,
    /// When the parent was last known to be alive.
    heard: Instant,
}

enum Event {
    /// A process of the tree ended, or nothing relevant happened.
    Look,
    /// Stop the command.
    Stop,
    /// Kill the tree.
    Kill,
}

impl Watch {
    async fn run(mut self, grace: Duration, silence: Option<Duration>) -> u8 {
        loop {
            let empty = self.reap();
            let stopping = self.deadline.is_some();
            match self.code {
                // After a stop request the whole tree must end; otherwise only the command.
                Some(code) if empty || !stopping => return code,
                _ => {}
            }
            match self.next(silence).await {
                Event::Look => {}
                Event::Stop => {
                    self.deadline = Some(Instant::now() + grace);
                    ask_all_to_stop();
                }
                Event::Kill => {
                    self.kill_all().await;
                    return self.code.unwrap_or(128 + 9);
                }
            }
        }
    }

    async fn next(&mut self, silence: Option<Duration>) -> Event {
        let stopping = self.deadline.is_some();
        let deadline = async |deadline| match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => pending().await,
        };
        let again = if stopping { Event::Kill } else { Event::Stop };
        tokio::select! {
            // In this order: a tree that forks without end must not starve the other events, and a pending heartbeat
            // counts before the silence does.
            biased;
            _ = self.signals.quit.recv() => Event::Kill,
            _ = self.signals.interrupt.recv() => again,
            _ = self.signals.hangup.recv() => again,
            _ = self.signals.terminate.recv() => match getppid() == self.parent {
                false => Event::Kill,
                // The guard receives its own SIGTERM to the group.
                true if stopping => Event::Look,
                true => Event::Stop,
            },
            _ = self.signals.alive.recv() => {
                self.heard = Instant::now();
                Event::Look
            }
            () = deadline(self.deadline) => Event::Kill,
            () = deadline(silence.map(|silence| self.heard + silence)) => self.silent(silence.unwrap_or_default()),
            _ = self.signals.child.recv() => Event::Look,
        }
    }

    /// The parent was silent for too long. If the guard itself wakes late, the whole machine was suspended and the
    /// parent could not send: it gets the time of one heartbeat.
    fn silent(&mut self, silence: Duration) -> Event {
        let late = self.heard.elapsed().saturating_sub(silence);
        if late < silence / 10 {
            return Event::Kill;
        }
        self.heard += late + silence / 5;
        Event::Look
    }

    /// Reaps every process that ended; returns whether none is left.
    fn reap(&mut self) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.command => self.code = Some(code(status)),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    /// Kills the tree, scan by scan, until it is empty.
    async fn kill_all(&mut self) {
        let end = Instant::now() + BURIAL;
        while Instant::now() < end {
            for pid in descendants() {
                let _ = kill_process(pid, Signal::KILL);
            }
            if self.reap() {
                return;
            }
            let _ = timeout(LOOK, self.signals.child.recv()).await;
        }
        // A tree that forks faster than it is scanned: the kernel kills the group, with this process, in one step.
        let _ = kill_current_process_group(Signal::KILL);
    }
}

/// Sends SIGTERM to the group in one step, and to each process that left it.
fn ask_all_to_stop() {
    let group = getpgrp();
    let left = descendants().into_iter().filter(|pid| getpgid(Some(*pid)).is_ok_and(|other| other != group));
    for pid in left {
        let _ = kill_process(pid, Signal::TERM);
    }
    let _ = kill_current_process_group(Signal::TERM);
    // A suspended process would not receive it.
    let _ = kill_current_process_group(Signal::CONT);
}

/// A status as an exit code of a shell.
fn code(status: WaitStatus) -> u8 {
    let code = status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// The signals that the guard handles.
struct Signals {
    alive: unix::Signal,
    child: unix::Signal,
    hangup: unix::Signal,
    interrupt: unix::Signal,
    quit: unix::Signal,
    terminate: unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            alive: signal(SignalKind::from_raw(ALIVE.as_raw()))?,
            child: signal(SignalKind::child())?,
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }
}
