//! Logs an outage of the database once for all parts of the server.
//!
//! Every part of a server notices that its database is unreachable, retries, and would log each try. Their lines are
//! suppressed: the log says once that the database is unreachable, once a minute that it still is, and once that it is
//! back. A line is recognised by its error, which begins with one of the store's reasons. So the parts need not know of
//! each other, and new parts need no changes.

use std::{
    fmt::{self, Write as _},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel_store::{AWAY, DISK_FULL, Database, FILE_HELD, FILE_LOST, NO_CONNECTION, READ_ONLY};
use tokio::sync::Notify;
use tracing::{Event, Level, Metadata, field::Field};
use tracing_subscriber::layer::{Context, Filter};

/// How often the log repeats that the database is unreachable, and how often the database is checked.
const PACE: Pace = Pace { say: Duration::from_secs(60), ask: Duration::from_secs(1) };

/// After how many good checks in a row an outage is over although lines still arrive: long enough for statements in
/// flight to fail late. One part that keeps failing is not an outage: the log must not contradict `/readyz`.
const GOOD_CHECKS: u32 = 10;

#[derive(Clone, Copy)]
struct Pace {
    say: Duration,
    ask: Duration,
}

/// The reasons that concern all parts.
const REASONS: [&str; 6] = [AWAY, DISK_FULL, READ_ONLY, NO_CONNECTION, FILE_LOST, FILE_HELD];

/// The prefixes of the engine's errors that contain a reason of the store.
const ERRORS: [&str; 2] = ["the store is unavailable: ", "the outcome is unknown: "];

/// The state of the outage. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Outage(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    noticed: Notify,
}

#[derive(Default)]
struct State {
    /// Whether a task reports outages: lines are suppressed only then.
    watched: bool,
    away: Option<Away>,
    /// Until when each part logs for itself: the last outage ended although lines arrived. They would begin the next
    /// outage at once, and the log would alternate between the two states.
    apart: Option<Instant>,
}

struct Away {
    since: Instant,
    /// The error of the first line.
    error: String,
    lines: u64,
}

impl Outage {
    /// Reports outages for all parts of the server from now on.
    pub(crate) fn watch(self, database: Database) {
        self.state(|state| state.watched = true);
        tokio::spawn(async move {
            loop {
                self.0.noticed.notified().await;
                self.follow(PACE, || database.check_writes()).await;
            }
        });
    }

    /// Follows one outage to its end.
    async fn follow<B: Future<Output = semel::Result<()>> + Send>(&self, pace: Pace, check: impl Fn() -> B) {
        let Some((since, error)) = self.state(|state| state.away.as_ref().map(|away| (away.since, away.error.clone())))
        else {
            return;
        };
        tracing::warn!(error, "the database cannot be used; the log says so once a minute until it can");
        let (mut told, mut good) = (Instant::now(), 0);
        loop {
            // An outage is over when the database works and no part has reported an error for a moment: a statement in
            // flight may fail late, and would begin another outage.
            let before = self.lines();
            tokio::time::sleep(pace.ask).await;
            good = if check().await.is_ok() { good + 1 } else { 0 };
            if good >= GOOD_CHECKS || (good > 0 && self.lines() == before) {
                break;
            }
            if told.elapsed() >= pace.say {
                told = Instant::now();
                let lines = self.lines();
                tracing::warn!(since = ?since.elapsed(), lines_left_out = lines, error, "the database still cannot be used");
            }
        }
        let lines = self.state(|state| {
            state.apart = (good >= GOOD_CHECKS).then(|| Instant::now() + pace.say);
            state.away.take().map_or(0, |away| away.lines)
        });
        tracing::info!(after = ?since.elapsed(), lines_left_out = lines, "the database can be used again");
    }

    /// How many lines were suppressed in this outage.
    fn lines(&self) -> u64 {
        self.state(|state| state.away.as_ref().map_or(0, |away| away.lines))
    }

    /// Whether to suppress a line, because it repeats what is known.
    fn swallows(&self, event: &Event<'_>) -> bool {
        let metadata = event.metadata();
        // Debug lines that `RUST_LOG` asks for are shown, and so are the lines of this module.
        if *metadata.level() > Level::INFO || metadata.target() == module_path!() {
            return false;
        }
        let mut told = Told::default();
        event.record(&mut told);
        let Told { error: Some(error), of_one: false } = told else { return false };
        let first = self.state(|state| {
            if !state.watched {
                return None;
            }
            // A part reports that it continues after this error. It may notice late, after the outage.
            if *metadata.level() == Level::INFO {
                return Some(false);
            }
            let first = state.away.is_none();
            if first && state.apart.is_some_and(|until| Instant::now() < until) {
                return None;
            }
            state.away.get_or_insert_with(|| Away { since: Instant::now(), error, lines: 0 }).lines += 1;
            Some(first)
        });
        if first == Some(true) {
            self.0.noticed.notify_one();
        }
        first.is_some()
    }

    fn state<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.state.lock())
    }
}

impl<S> Filter<S> for Outage {
    fn enabled(&self, _metadata: &Metadata<'_>, _context: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _context: &Context<'_, S>) -> bool {
        !self.swallows(event)
    }
}

/// The fields of an event that matter here.
#[derive(Default)]
struct Told {
    /// One of the [`REASONS`].
    error: Option<String>,
    /// Whether it is about one operation: no other line reports it.
    of_one: bool,
}

impl tracing::field::Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        if write!(text, "{value:?}").is_ok() {
            self.take(field, &text);
        }
    }

    /// Without this, the text would arrive in quotes, as [`fmt::Debug`] writes it.
    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, value);
    }
}

impl Told {
    fn take(&mut self, field: &Field, text: &str) {
        self.of_one |= field.name() == "key";
        if is_about_the_database(text) {
            self.error = Some(text.to_owned());
        }
    }
}

/// Whether a text is an error of the store with one of the [`REASONS`]. A text that only quotes such an error, such as
/// another service's answer, is not one.
fn is_about_the_database(text: &str) -> bool {
    let text = text.trim_start_matches('"');
    let words = ERRORS.iter().find_map(|error| text.strip_prefix(error)).unwrap_or(text);
    REASONS.iter().any(|reason| words.starts_with(reason))
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    };

    use tracing_subscriber::{Layer as _, layer::SubscriberExt as _};

    use super::*;

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        fn all(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().clone()).unwrap().lines().map(str::to_owned).collect()
        }
    }

    #[test]
    fn every_error_of_an_unusable_store_is_recognised() {
        for reason in [AWAY, DISK_FULL, READ_ONLY, NO_CONNECTION, FILE_LOST, FILE_HELD] {
            let error = semel::Error::Unavailable(format!("{reason}: sorry"));
            assert!(is_about_the_database(&error.to_string()), "{error}");
        }
        assert!(!is_about_the_database("the endpoint cannot be reached"));
    }

    #[test]
    fn an_error_is_not_logged_a_second_time_by_a_library() {
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        let filter = tracing_subscriber::EnvFilter::new(crate::log::SERVER);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer.with_filter(filter)), || {
            tracing::error!(target: "lapin::channels", "Connection error");
            tracing::warn!(target: "semel_amqp::link", "no connection to RabbitMQ; trying again");
        });
        let [line] = &lines.all()[..] else { panic!("{:?}", lines.all()) };
        assert!(line.contains("no connection to RabbitMQ"), "{line}");
    }

    #[tokio::test]
    async fn an_outage_is_logged_at_its_start_at_intervals_and_at_its_end() {
        let (lines, outage, back) = (Lines::default(), Outage::default(), AtomicBool::new(false));
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        let _guard =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(layer.with_filter(outage.clone())));
        let error = semel::Error::Unavailable(format!("{AWAY}: connection refused"));
        tracing::warn!(%error, "without a watcher each part logs for itself");
        assert_eq!(lines.all().len(), 1);

        outage.state(|state| state.watched = true);
        let good = AtomicUsize::new(0);
        let check = || async {
            let back = back.load(Ordering::SeqCst);
            // The last line of a part arrives when the database is back already: the outage is not over, so that this
            // line does not begin another one.
            if !back || good.fetch_add(1, Ordering::SeqCst) == 0 {
                tracing::warn!(%error, "a part tries again");
            }
            if back { Ok(()) } else { Err(error.clone()) }
        };
        tracing::error!(why = error.to_string(), "a part notices");
        let pace = Pace { say: Duration::from_millis(50), ask: Duration::from_millis(1) };
        let end = async {
            while lines.all().len() < 4 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            back.store(true, Ordering::SeqCst);
        };
        tokio::join!(outage.follow(pace, check), end);
        assert_eq!(good.load(Ordering::SeqCst), 2);
        let quoted = format!("the endpoint said: {AWAY}");
        tracing::warn!(error = quoted, "what is about something else is told");
        tracing::info!(after = %error, "a part goes on");
        let all = lines.all();
        let told = ["cannot be used; the log says so once", "still cannot be used", "still cannot be used"];
        for (line, told) in all[1..].iter().zip(told) {
            assert!(line.contains(told) && line.contains("connection refused\""), "an error is quoted once: {line}");
        }
        let end = &all[all.len() - 2..];
        assert!(end[0].contains("can be used again") && end[1].contains("something else"), "{end:?}");
        assert!(!all[1..].iter().any(|line| line.contains("a part")), "{all:?}");
        assert!(outage.state(|state| state.away.is_none()), "a part that goes on begins no outage");
        tracing::warn!(%error, key = "0123456789ab", "a run is told of by name");
        assert_eq!(lines.all().len(), all.len() + 1);
    }

    #[tokio::test]
    async fn an_outage_ends_after_consecutive_good_checks_even_if_one_part_still_fails() {
        let (lines, outage, checks) = (Lines::default(), Outage::default(), AtomicUsize::new(0));
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        let _guard =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(layer.with_filter(outage.clone())));
        let error = semel::Error::Unavailable(format!("{READ_ONLY}: for this one part"));
        outage.state(|state| state.watched = true);
        tracing::warn!(%error, "the part fails");
        // The fifth check fails: the count begins anew.
        let check = || async {
            tracing::warn!(%error, "the part fails again");
            let n = checks.fetch_add(1, Ordering::SeqCst) + 1;
            if n == 5 { Err(error.clone()) } else { Ok(()) }
        };
        let pace = Pace { say: Duration::from_secs(3600), ask: Duration::from_millis(1) };
        let followed = tokio::time::timeout(Duration::from_secs(30), outage.follow(pace, check)).await;
        assert!(followed.is_ok(), "it goes on for ever: {:?}", lines.all());
        assert_eq!(checks.load(Ordering::SeqCst), 5 + GOOD_CHECKS as usize);
        let all = lines.all();
        assert!(all.last().unwrap().contains("can be used again"), "{all:?}");
        // A part that still fails then logs for itself, and begins no new outage at once.
        tracing::warn!(%error, "the part fails still");
        assert!(lines.all().last().unwrap().contains("the part fails still"));
        assert!(outage.state(|state| state.away.is_none()));
        outage.state(|state| state.apart = Some(Instant::now()));
        tracing::warn!(%error, "the part fails later");
        assert!(outage.state(|state| state.away.is_some()), "after a while it counts as one again");
    }
}
