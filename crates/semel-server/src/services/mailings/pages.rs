//! Pages of entries with a status, which no index has: a page reads a mailing in bounded pieces, for a bounded time.

use std::time::{Duration, Instant};

use super::{
    Service,
    tables::entries::{self, Shown},
};
use crate::http::{answers::patiently, problem::Problem, query::Place};

/// How many lines a statement reads at most, so that it ends before its time limit of 10 s.
const LINES: i64 = 100_000;

/// How long one request looks for entries before it answers with those that it has found.
const LOOKING: Duration = Duration::from_secs(2);

impl Service {
    /// The entries after a place, and the cursor of the next page. A page that was long in the making has fewer items
    /// than its limit, or none, and still a cursor.
    pub(super) async fn entries_of(
        &self,
        mailing: i64,
        status: &str,
        place: Place,
    ) -> Result<(Vec<Shown>, Option<String>), Problem> {
        let last = patiently(self.database.read(async |conn| entries::last(conn, mailing).await)).await?;
        let (begun, mut search) = (Instant::now(), Search { place, last, after: place.after, found: Vec::new() });
        loop {
            let (lines, most) = search.piece();
            let read = self.database.read(async |conn| entries::page(conn, mailing, lines, status, most).await);
            let read = patiently(read).await?;
            search = match search.with(read, begun.elapsed() >= LOOKING, |entry| entry.line) {
                Found::Page(items, next) => return Ok((items, next)),
                Found::Searching(search) => search,
            };
        }
    }
}

/// A page in the making.
struct Search<T> {
    place: Place,
    last: i64,
    /// The last line that was read.
    after: i64,
    found: Vec<T>,
}

enum Found<T> {
    Page(Vec<T>, Option<String>),
    Searching(Search<T>),
}

impl<T> Search<T> {
    /// The lines to be read next, and how many entries of them.
    fn piece(&self) -> ((i64, i64), i64) {
        let missing = self.place.limit + 1 - i64::try_from(self.found.len()).unwrap_or(i64::MAX);
        ((self.after, self.after.saturating_add(LINES)), missing)
    }

    /// Adds the entries of a piece. The page ends when it is full, when the last line was read, or when its time is over.
    fn with(mut self, read: Vec<T>, time_is_over: bool, line: impl FnOnce(&T) -> i64) -> Found<T> {
        let ((_, to), missing) = self.piece();
        let is_full = i64::try_from(read.len()).unwrap_or(i64::MAX) >= missing;
        self.found.extend(read);
        if is_full || to >= self.last {
            let (items, next) = self.place.cut(self.found, line);
            return Found::Page(items, next);
        }
        self.after = to;
        match time_is_over {
            true => Found::Page(self.found, Some(to.to_string())),
            false => Found::Searching(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of a mailing of a million lines, of which some are looked for.
    fn look(place: Place, in_a_hurry: bool, wanted: &[i64]) -> (Vec<i64>, Option<String>) {
        let mut search = Search { place, last: 1_000_000, after: place.after, found: Vec::new() };
        loop {
            let ((after, to), most) = search.piece();
            assert!(to - after <= LINES);
            let read = wanted.iter().copied().filter(|line| after < *line && *line <= to);
            let read = read.take(usize::try_from(most).unwrap()).collect();
            search = match search.with(read, in_a_hurry, |line| *line) {
                Found::Page(items, next) => return (items, next),
                Found::Searching(search) => search,
            };
        }
    }

    #[test]
    fn a_page_is_filled_from_as_many_pieces_as_it_needs() {
        let place = Place { after: 0, limit: 2 };
        let wanted = [5, 400_000, 999_999];
        assert_eq!(look(place, false, &wanted), (vec![5, 400_000], Some("400000".to_owned())));
        assert_eq!(look(Place { after: 400_000, limit: 2 }, false, &wanted), (vec![999_999], None));
        assert_eq!(look(place, false, &[]), (vec![], None));
    }

    #[test]
    fn a_page_whose_time_is_over_has_a_cursor_and_all_pages_together_have_every_entry() {
        let (wanted, mut found, mut after, mut pages) = ([5, 400_000, 1_000_000], Vec::new(), 0, 0);
        loop {
            let (items, next) = look(Place { after, limit: 50 }, true, &wanted);
            (found, pages) = ([found, items].concat(), pages + 1);
            let Some(next) = next else { break };
            after = next.parse().unwrap();
        }
        assert_eq!((found.as_slice(), pages), (&wanted[..], 10));
    }
}
