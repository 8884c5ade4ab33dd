//! Crash points: places where a process may die, each with a test that kills it there.

/// Kills this process with SIGKILL on the n-th hit of a named point, if the environment has `SEMEL_CRASH=name` (or
/// `name:n`). With `name:n:stop` it stops there until it gets SIGCONT, as in a long pause of its host; with
/// `name:n:panic` only the current task dies, by a panic. `SEMEL_CRASH_LOG=file` appends the name of each point that is
/// hit, so that a test can find points that were never reached.
///
/// Compiled into debug builds only, unless the feature `crash-points` is on.
#[macro_export]
macro_rules! crash_point {
    ($name:literal) => {
        $crate::crash::hit($name)
    };
}

/// Every crash point of the engine and the stores. A test hits them all.
pub const POINTS: &[&str] = &[
    "claim.before",
    "claim.after",
    "enqueue.before",
    "enqueue.after",
    "take.before",
    "take.after",
    "work.before",
    "work.after",
    "settle.before",
    "settle.after",
    "renew.before",
    "renew.after",
    "atomic.begun",
    "atomic.before_complete",
    "atomic.before_commit",
    "atomic.after_commit",
    "step.begun",
    "step.before_commit",
    "step.after_commit",
    "store.claim.inserted",
    "store.claim.taken_over",
    "store.take.claimed",
    "store.write.completed",
    "store.write.saved",
    "store.projected",
    "sweep.before",
    "sweep.lapsed",
    "sweep.tended",
    "sweep.folded",
    "sweep.after",
    "repeats.before",
    "repeats.noted",
];

/// Every crash point of a worker's timetable. A test with schedules hits them all.
pub const SCHEDULE_POINTS: &[&str] = &["schedule.before_commit", "schedule.after_commit"];

/// Every crash point of the relay and the consumer. A test with messages hits them all.
pub const MESSAGING_POINTS: &[&str] = &[
    "relay.taken",
    "relay.published",
    "relay.marked",
    "consumer.begun",
    "consumer.before_commit",
    "consumer.after_commit",
    "consumer.acked",
    "consumer.letter_put",
    "consumer.retry_taken",
    "consumer.retry_failed",
    "queue.taken",
    "queue.said",
];

/// Every crash point of the server's services. Tests of the server hit them all.
pub const SERVER_POINTS: &[&str] = &[
    "events.stored",
    "fanout.inserted",
    "fanout.goes_on",
    "fanout.chunk",
    "in_app.given",
    "job.carried",
    "deliver.sent",
    "deliveries.carried",
    "streams.looked",
    "webhooks.after_store",
    "webhooks.after_effect",
    "webhooks.before_answer",
    "mailing.stored",
    "mailing.committed",
    "mailing.begun",
    "mailing.importing_batch",
    "mailing.imported_batch",
    "mailing.marked",
    "mailing.sent",
    "mailing.finishing",
];

/// Called by [`crash_point!`](crate::crash_point): does nothing in a release build.
#[cfg(not(any(debug_assertions, feature = "crash-points")))]
#[inline(always)]
pub fn hit(_name: &str) {}

/// Called by [`crash_point!`](crate::crash_point).
///
/// # Panics
/// When the environment asks for it.
#[cfg(any(debug_assertions, feature = "crash-points"))]
pub fn hit(name: &str) {
    use std::{
        env,
        io::Write as _,
        sync::{
            OnceLock,
            atomic::{AtomicU32, Ordering},
        },
    };

    use rustix::process::{Signal, getpid, kill_process};

    static CHOSEN: OnceLock<Option<(String, u32, Option<String>)>> = OnceLock::new();
    static LOG: OnceLock<Option<std::path::PathBuf>> = OnceLock::new();
    static HITS: AtomicU32 = AtomicU32::new(0);

    let known = [POINTS, SCHEDULE_POINTS, MESSAGING_POINTS, SERVER_POINTS].concat().contains(&name);
    debug_assert!(known, "{name} is not in the list of crash points");
    if let Some(path) = LOG.get_or_init(|| env::var_os("SEMEL_CRASH_LOG").map(Into::into))
        && let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path)
    {
        // One short write with O_APPEND: lines of several processes do not mix.
        let _ = file.write_all(format!("{name}\n").as_bytes());
    }
    let chosen = CHOSEN.get_or_init(|| {
        let text = env::var("SEMEL_CRASH").ok()?;
        let mut parts = text.split(':');
        let name = parts.next()?.to_owned();
        let nth = parts.next().and_then(|nth| nth.parse().ok()).unwrap_or(1);
        Some((name, nth, parts.next().map(str::to_owned)))
    });
    if let Some((chosen, nth, how)) = chosen
        && chosen == name
        && HITS.fetch_add(1, Ordering::Relaxed) + 1 == *nth
    {
        // A signal may take a moment to arrive; nothing after the point may run before that.
        match how.as_deref() {
            Some("panic") => panic!("on purpose, at {name}"),
            Some("stop") => {
                // Other threads end their short transactions first. A process that stops in the middle of one would
                // hold the only writer of an SQLite file, which is not what these tests are about.
                std::thread::sleep(std::time::Duration::from_millis(100));
                let _ = kill_process(getpid(), Signal::STOP);
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            _ => {
                let _ = kill_process(getpid(), Signal::KILL);
                loop {
                    std::thread::park();
                }
            }
        }
    }
}
