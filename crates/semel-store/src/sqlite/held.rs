//! The time of a SQLite file: the host's, held from going back.
//!
//! The file has a mark, the latest moment that anybody has seen, so that a clock which is set back revives no lease.
//! A clock that was ahead once and came back leaves a mark in the future. If that stood until the clock has caught up,
//! no lease would lapse and no backoff end for as long. So the mark goes on by the host's boot clock, which cannot be
//! set: a little slower than real time, until the host's clock has caught up with it. (That is safe: a node counts its
//! own deadlines by the boot clock, so it stops before a lease ends that lasts longer.)
//!
//! Processes that come and go agree on it by the file: it has the mark, and where the boot clock stood at that mark.
//! After a restart of the host the boot clock begins anew, and so does the count.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use semel::Result;
use sqlx::SqliteConnection;

use super::hot;
use crate::{clock::Clock, connection::broken};

/// How fast the mark goes on: nine tenths of real time. An hour is caught up with in ten.
const SPEED: (i64, i64) = (9, 10);

/// How far ahead a mark is told of, and kept with the boot clock. Less is caught up with in a few seconds.
const FAR: i64 = 1_000_000;

pub(crate) struct HeldClock {
    host: Clock,
    boot_id: Option<String>,
    /// A mark, and the boot clock at that moment.
    mark: Mutex<(i64, i64)>,
}

impl HeldClock {
    /// The clock of an open file, which goes on from the mark in it.
    pub(super) async fn of(host: Clock, file: &mut SqliteConnection) -> Result<Self> {
        let boot_id = host.boot_id();
        let clock = Self { boot_id, mark: Mutex::new((0, host.boot())), host };
        let stored: (i64, Option<i64>, Option<i64>, Option<String>) =
            sqlx::query_as(hot::MARK).fetch_one(&mut *file).await.map_err(broken)?;
        let (latest, mark, boot, boot_id) = stored;
        if let (Some(mark), Some(boot)) = (mark, boot)
            && boot_id.is_some()
            && boot_id == clock.boot_id
            && boot <= clock.host.boot()
        {
            *clock.mark.lock().unwrap_or_else(PoisonError::into_inner) = (mark, boot);
        }
        clock.saw(latest);
        Ok(clock)
    }

    /// The time: the host's, or where the mark has come to meanwhile.
    pub(crate) fn host(&self) -> i64 {
        self.host.wall().max(self.marked())
    }

    fn marked(&self) -> i64 {
        let (mark, boot) = *self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = self.host.boot().saturating_sub(boot).max(0);
        mark.saturating_add(passed / SPEED.1 * SPEED.0)
    }

    /// Takes note of a time that was seen in the file.
    pub(crate) fn saw(&self, time: i64) {
        if time > self.host() {
            *self.mark.lock().unwrap_or_else(PoisonError::into_inner) = (time, self.host.boot());
        }
    }

    /// By how much the file's time is ahead of the host's, if it is far ahead.
    pub(crate) fn ahead(&self) -> Option<Duration> {
        let ahead = self.host() - self.host.wall();
        (ahead > FAR).then(|| Duration::from_micros(ahead.unsigned_abs()))
    }

    /// The time of the host alone.
    pub(super) fn wall(&self) -> i64 {
        self.host.wall()
    }

    /// Whether processes that come later should find in the file where the boot clock stood.
    pub(super) fn is_to_be_kept(&self) -> bool {
        self.ahead().is_some() && self.boot_id.is_some()
    }

    /// Keeps it, in a transaction.
    pub(super) async fn keep(&self, file: &mut SqliteConnection) -> Result<()> {
        let keep = sqlx::query(hot::KEEP_MARK).bind(self.host()).bind(self.host.boot()).bind(&self.boot_id);
        keep.execute(file).await.map(drop).map_err(broken)
    }
}
