//! The hidden commands behind `semel once`; see [`crate::guard`].

use std::{error::Error, ffi::OsString, process::ExitCode};

use humantime::Duration;

use crate::guard;

/// Run a command that dies with the process that asked for it
#[derive(clap::Args)]
pub(super) struct Guard {
    /// The process that asked
    #[arg(long, value_name = "PID")]
    parent: u32,
    /// How long the command may take to end after it was asked to
    #[arg(long, value_name = "TIME", default_value_t = guard::GRACE.into())]
    grace: Duration,
    /// End the command when the process that asked was not heard of for this long
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

/// Become a command that dies with its guard
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
