//! Ends expired leases.

use semel::{
    Result, crash_point,
    machine::{Answer, Event},
};

use super::Part;
use crate::{
    Database,
    apply::{Changes, load_each},
    batch::saved,
};

impl Database {
    /// Ends expired leases, by the terms that are stored with each.
    pub(super) async fn lapse(&self, ids: &[i64]) -> Result<Part> {
        self.in_round(ids.len(), async |round| {
            let locked = round.lock(ids).await?;
            let (now, fences) = self.draw(round, locked.len()).await?;
            let (operations, unreadable) = load_each(&mut round.conn(), self.sql(), &locked).await?;
            let mut part = Part { handled: locked.len(), ..Part::default() };
            let mut changes = Changes::default();
            for (op, fence) in operations.iter().zip(fences) {
                let applied = changes.step(Some(op), &Event::Lapse { fence }, now);
                part.swept.lapsed += u64::from(applied.answer == Answer::Lapsed);
            }
            saved(changes.save(&mut round.conn(), self.sql()).await?)?;
            crash_point!("sweep.lapsed");
            part.unreadable = unreadable.into_iter().map(|row| (row.id, row.why)).collect();
            Ok(part)
        })
        .await
    }

    /// Whether operations that a worker could not read are readable by now.
    pub(super) async fn readable(&self, ids: &[i64]) -> Result<Part> {
        let mut reader = self.reader().await?;
        let (operations, unreadable) = load_each(&mut reader.conn(), self.sql(), ids).await?;
        reader.leave();
        let unreadable: Vec<_> = unreadable.into_iter().map(|row| (row.id, row.why)).collect();
        Ok(Part { handled: operations.len() + unreadable.len(), unreadable, ..Part::default() })
    }
}
