//! `semel gateway`: a reverse proxy that gives Idempotency-Key to what is behind it.

use std::process::ExitCode;

/// Run a reverse proxy that makes keyed requests take effect once
#[derive(clap::Args)]
pub(super) struct Gateway {}

impl Gateway {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        anyhow::bail!("not yet")
    }
}
