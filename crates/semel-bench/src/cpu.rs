//! CPU time: of this process and, for PostgreSQL, of the server's processes on the same machine.

use std::{fs, time::Duration};

use anyhow::Result;
use sqlx::PgConnection;

/// The processes whose CPU time is counted.
#[derive(Clone, Copy)]
pub(crate) struct Cpu {
    /// The server's first process, the parent of all others.
    postmaster: Option<u32>,
}

impl Cpu {
    pub(crate) fn of_this_process() -> Self {
        Self { postmaster: None }
    }

    /// Including the server's, if it runs on this machine.
    pub(crate) async fn with_server(connection: &mut PgConnection) -> Result<Self> {
        let backend: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(connection).await?;
        let backend = u32::try_from(backend)?;
        // For a server on another machine the pid would belong to another process here, or to none.
        let is_postgres =
            fs::read_to_string(format!("/proc/{backend}/comm")).is_ok_and(|name| name.starts_with("postgres"));
        let postmaster = if is_postgres { Stat::of(backend).map(|stat| stat.parent) } else { None };
        if postmaster.is_none() {
            eprintln!("the server is on another machine: its CPU time is not counted");
        }
        Ok(Self { postmaster })
    }

    /// The CPU time used so far, including that of ended processes.
    pub(crate) fn used(self) -> Duration {
        let own = Stat::of(std::process::id()).map_or(0, |stat| stat.own + stat.ended_children);
        let Some(postmaster) = self.postmaster else { return ticks(own) };
        let server = Stat::of(postmaster).map_or(0, |stat| stat.own + stat.ended_children);
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let children =
            pids.filter_map(Stat::of).filter(|stat| stat.parent == postmaster).map(|stat| stat.own).sum::<u64>();
        ticks(own + server + children)
    }
}

/// The CPU time that another process has used so far.
pub(crate) fn of_process(pid: u32) -> Duration {
    ticks(Stat::of(pid).map_or(0, |stat| stat.own))
}

fn ticks(ticks: u64) -> Duration {
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The contents of `/proc/PID/stat`, in clock ticks.
struct Stat {
    parent: u32,
    own: u64,
    ended_children: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The program's name is in parentheses and may contain anything; numbers follow.
        let (_, rest) = text.rsplit_once(") ")?;
        // From the third field of proc(5) on: state, parent, …; fields 14 to 17 are the times.
        let fields: Vec<&str> = rest.split(' ').collect();
        let time = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            own: time(14)? + time(15)?,
            ended_children: time(16)? + time(17)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shows_in_the_time_of_this_process() {
        let before = Cpu::of_this_process().used();
        // On a busy machine it takes a while until this process has had any CPU time.
        let until = std::time::Instant::now() + Duration::from_secs(30);
        while Cpu::of_this_process().used() == before && std::time::Instant::now() < until {
            std::hint::spin_loop();
        }
        assert!(Cpu::of_this_process().used() > before);
    }
}
