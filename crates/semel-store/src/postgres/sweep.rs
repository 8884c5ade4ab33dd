//! The sweep: lapsed leases, expiry, the archive, and the folding of counters.

use semel::{Result, crash_point, store::Swept};

use super::{Postgres, begin, commit, hot, try_lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id},
    batch::{saved, swept_rows},
    connection::broken,
    counters,
};

impl Postgres {
    pub(crate) async fn sweep(&self, limit: u32) -> Result<Swept> {
        let mut swept = Swept::default();
        for find in [self.sql.find_lapsed, self.sql.find_due] {
            self.lane.answered(self.sweep_found(&mut swept, find, limit)).await?;
        }
        self.lane.answered(self.fold(&mut swept, limit)).await?;
        Ok(swept)
    }

    async fn sweep_found(&self, swept: &mut Swept, find: &'static str, limit: u32) -> Result<()> {
        let mut seat = self.lane.take().await?;
        let (now, _) = self.draw(&mut seat, 1).await?;
        let ids: Vec<i64> = sqlx::query_scalar(find)
            .bind(now.as_micros())
            .bind(i64::from(limit))
            .fetch_all(&mut *seat)
            .await
            .map_err(broken)?;
        if ids.is_empty() {
            seat.leave();
            return Ok(());
        }
        begin(&mut seat).await?;
        let locked = try_lock(&mut seat, &ids).await?;
        // If others hold all of them, going round again at once would only burn their time.
        swept.more |= ids.len() >= limit as usize && !locked.is_empty();
        let (now, fences) = self.draw(&mut seat, locked.len()).await?;
        let rows = load_by_id(&mut Conn::Postgres(&mut seat), &self.sql, &locked).await?;
        let mut changes = Changes::default();
        swept_rows(swept, &mut changes, rows, fences, now, find == self.sql.find_lapsed);
        saved(changes.save(&mut Conn::Postgres(&mut seat), &self.sql).await?)?;
        match find == self.sql.find_lapsed {
            true => crash_point!("sweep.lapsed"),
            false => crash_point!("sweep.tended"),
        }
        commit(&mut seat).await?;
        seat.leave();
        Ok(())
    }

    async fn fold(&self, swept: &mut Swept, limit: u32) -> Result<()> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        let taken: Vec<counters::CountRow> =
            sqlx::query_as(hot::TAKE_DELTAS).bind(i64::from(limit)).fetch_all(&mut *seat).await.map_err(broken)?;
        swept.folded += taken.len() as u64;
        swept.more |= taken.len() >= limit as usize;
        let folded = counters::fold(taken);
        Conn::Postgres(&mut seat).batch(self.sql.fold_counters, &folded).await?;
        crash_point!("sweep.folded");
        commit(&mut seat).await?;
        seat.leave();
        Ok(())
    }
}
