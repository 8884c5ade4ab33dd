//! `semel config check` and `semel config show`.

use std::process::ExitCode;

use crate::{
    Error,
    config::{DATA_DIR, Environment, Flags},
};

/// Check or show the configuration
#[derive(clap::Subcommand)]
pub(super) enum ConfigCommand {
    /// Check the configuration and list everything that is wrong with it
    Check {
        /// Tell it as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        flags: Flags,
    },
    /// Show the configuration in effect and where each value came from, secrets hidden
    Show {
        /// Show it as JSON
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
                let report = crate::config::read(&flags, &Environment::of_process(), DATA_DIR).without_handlers();
                super::say(&format!("{:#}\n", report.verdict()))?;
                if report.config().is_err() {
                    return Ok(ExitCode::FAILURE);
                }
            }
            Self::Check { json: false, flags } => {
                super::load(&flags)?;
                super::say("the configuration is right\n")?;
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
