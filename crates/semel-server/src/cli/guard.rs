//! The hidden commands behind `semel once`; see [`crate::guard`].

use std::{error::Error, ffi::OsString, process::ExitCode};

use humantime::Duration;

use crate::guard;

/// Run a command and kill it when the parent process dies
#[derive(clap::Args)]
pub(super) struct Guard {
    /// The parent process
    #[arg(long, value_name = "PID")]
    parent: u32,
    /// The time between SIGTERM and SIGKILL
    #[arg(long, value_name = "TIME", default_value_t = guard::GRACE.into())]
    grace: Duration,
    /// End the command if the parent process was silent for this long
    #[arg(long, value_name = "TIME")]
    silence: Option<Duration>,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl Guard {
    pub(super) fn run(self) -> ExitCode {
        match guard::watch(self.parent, &self.command, self.grace.into(), self.silence.map(Into::into)) {
            Ok(code) => code.into(),
            Err(error) => failed(error, guard::GUARD_FAILED),
        }
    }
}

/// Execute a command that is killed when its guard dies
#[derive(clap::Args)]
pub(super) struct GuardExec {
    /// The guard
    #[arg(long, value_name = "PID")]
    parent: u32,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

impl GuardExec {
    pub(super) fn run(self) -> ExitCode {
        let not_run = guard::exec(self.parent, &self.command);
        let code = not_run.exit_code();
        failed(not_run, code)
    }
}

fn failed(error: impl Error + Send + Sync + 'static, code: u8) -> ExitCode {
    super::complain(format_args!("{:#}", anyhow::Error::new(error)));
    code.into()
}
