//! The time of a SQLite file: the host's, but it never goes back.
//!
//! The file has a mark, the latest time that any process has seen, so that a clock which is set back revives no lease.
//! A clock that was ahead once and came back leaves a mark in the future. If the mark stood still until the clock has
//! caught up, no lease would expire and no backoff end. So the mark advances by the host's boot clock, which cannot be
//! set: a little slower than real time, until the host's clock has caught up. (This is safe: a node counts its own
//! deadlines by the boot clock, so it stops before a lease ends that lasts longer.)
//!
//! Processes share it through the file, which has the mark and the boot clock at that mark. After a restart of the host
//! the boot clock starts anew, and so does the count.

use std::time::Duration;

use parking_lot::Mutex;
use semel::Result;
use sqlx::SqliteConnection;

use super::hot;
use crate::{clock::Clock, connection::broken};

/// The speed of the mark: nine tenths of real time. An hour is caught up in ten.
const SPEED: (i64, i64) = (9, 10);

/// From how far ahead a mark is reported, and stored with the boot clock. Less is caught up in a few seconds.
const FAR: i64 = 1_000_000;

pub(crate) struct HeldClock {
    host: Clock,
    boot_id: Option<String>,
    /// A mark, and the boot clock at that moment.
    mark: Mutex<(i64, i64)>,
}

impl HeldClock {
    /// The clock of an open file, which continues from the mark in it.
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
            *clock.mark.lock() = (mark, boot);
        }
        clock.saw(latest);
        Ok(clock)
    }

    /// The time: the host's, or the advanced mark.
    pub(crate) fn host(&self) -> i64 {
        self.host.wall().max(self.marked())
    }

    fn marked(&self) -> i64 {
        let (mark, boot) = *self.mark.lock();
        let passed = self.host.boot().saturating_sub(boot).max(0);
        mark.saturating_add(passed / SPEED.1 * SPEED.0)
    }

    /// Records a time that was read from the file.
    pub(crate) fn saw(&self, time: i64) {
        if time > self.host() {
            *self.mark.lock() = (time, self.host.boot());
        }
    }

    /// How far the file's time is ahead of the host's, if it is far ahead.
    pub(crate) fn ahead(&self) -> Option<Duration> {
        let ahead = self.host() - self.host.wall();
        (ahead > FAR).then(|| Duration::from_micros(ahead.unsigned_abs()))
    }

    /// The time of the host alone.
    pub(super) fn wall(&self) -> i64 {
        self.host.wall()
    }

    /// Whether the boot clock at the mark should be stored for later processes.
    pub(super) fn is_to_be_kept(&self) -> bool {
        self.ahead().is_some() && self.boot_id.is_some()
    }

    /// Stores it, in a transaction.
    pub(super) async fn keep(&self, file: &mut SqliteConnection) -> Result<()> {
        let keep = sqlx::query(hot::KEEP_MARK).bind(self.host()).bind(self.host.boot()).bind(&self.boot_id);
        keep.execute(file).await.map(drop).map_err(broken)
    }
}
