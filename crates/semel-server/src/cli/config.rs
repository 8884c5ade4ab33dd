//! `semel config check` and `semel config show`.

use std::process::ExitCode;

use crate::{
    Error,
    config::{DATA_DIR, Environment, Flags},
    services::webhooks::config::refuse_handlers,
};

/// Check or show the configuration
#[derive(clap::Subcommand)]
pub(super) enum ConfigCommand {
    /// Check the configuration and report all mistakes at once
    Check {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        flags: Flags,
    },
    /// Show the configuration in effect and the source of each value, with secrets hidden
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        flags: Flags,
    },
}

impl ConfigCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Check { json: true, flags } => {
                let report = refuse_handlers(crate::config::read(&flags, &Environment::of_process(), DATA_DIR));
                super::say(&format!("{:#}\n", report.verdict()))?;
                if report.config().is_err() {
                    return Ok(ExitCode::FAILURE);
                }
            }
            Self::Check { json: false, flags } => {
                super::load(&flags)?;
                super::say("the configuration is valid\n")?;
            }
            Self::Show { json, flags } => {
                let report = super::read(&flags);
                report.config().map_err(Error::from)?;
                let text = if json { format!("{:#}\n", report.to_json()) } else { report.to_toml() };
                super::say(&text)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
