//! The section `[messages]`.

use std::time::Duration;

use semel::messaging::{ConsumerOptions, RelayOptions};

use crate::config::Reader;

/// How a node publishes and consumes messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Messages {
    /// How long a node leases its rows of the outbox, messages of the embedded broker and retries. Leases are renewed;
    /// those of a killed node go to another one when they expire.
    pub lease: Duration,
    /// How often a relay polls without being woken.
    pub poll: Duration,
    /// How many unacknowledged messages of a queue a node holds.
    pub prefetch: usize,
    /// How many runs may fail before a message is a dead letter.
    pub max_attempts: usize,
    /// How many runs may be cut off or kill their process before the message is a dead letter.
    pub max_crashes: usize,
}

impl Default for Messages {
    fn default() -> Self {
        let (relay, consumer) = (RelayOptions::default(), ConsumerOptions::default());
        Self {
            lease: relay.lease,
            poll: relay.poll,
            prefetch: usize::from(consumer.prefetch),
            max_attempts: consumer.max_attempts as usize,
            max_crashes: consumer.max_crashes as usize,
        }
    }
}

/// With shorter times, a slow node would lose its work to another.
const SHORTEST_LEASE: Duration = Duration::from_secs(1);
const LONGEST_LEASE: Duration = Duration::from_secs(3600);
const SHORTEST_POLL: Duration = Duration::from_millis(10);

/// The largest prefetch count of AMQP.
const MOST_PREFETCHED: usize = u16::MAX as usize;
const MOST_RUNS: usize = 1_000;

/// The former names of `messages.lease`.
const FORMER_LEASES: [&str; 3] = ["messages.relay_lease", "messages.visibility", "messages.retry_lease"];

impl Messages {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let default = Self::default();
        let read = Self {
            lease: reader.renamed("messages.lease", &FORMER_LEASES, || default.lease),
            poll: reader.field("messages.poll", || default.poll),
            prefetch: reader.field("messages.prefetch", || default.prefetch),
            max_attempts: reader.renamed("messages.max_attempts", &["messages.max_failures"], || default.max_attempts),
            max_crashes: reader.field("messages.max_crashes", || default.max_crashes),
        };
        for (name, time, shortest) in
            [("messages.lease", read.lease, SHORTEST_LEASE), ("messages.poll", read.poll, SHORTEST_POLL)]
        {
            if !(shortest..=LONGEST_LEASE).contains(&time) {
                let shortest = humantime::format_duration(shortest);
                reader.mistake(name, format!("must be at least {shortest} and at most 1h"));
            }
        }
        for (name, number, most) in [
            ("messages.prefetch", read.prefetch, MOST_PREFETCHED),
            ("messages.max_attempts", read.max_attempts, MOST_RUNS),
            ("messages.max_crashes", read.max_crashes, MOST_RUNS),
        ] {
            if !(1..=most).contains(&number) {
                reader.mistake(name, format!("must be 1 to {most}"));
            }
        }
        read
    }

    /// The settings of a relay.
    #[must_use]
    pub fn relay(&self) -> RelayOptions {
        RelayOptions { lease: self.lease, poll: self.poll, ..RelayOptions::default() }
    }

    /// The settings of a consumer.
    #[must_use]
    pub fn consumer(&self) -> ConsumerOptions {
        ConsumerOptions {
            prefetch: u16::try_from(self.prefetch).unwrap_or(u16::MAX),
            max_attempts: u32::try_from(self.max_attempts).unwrap_or(u32::MAX),
            max_crashes: u32::try_from(self.max_crashes).unwrap_or(u32::MAX),
            lease: self.lease,
            ..ConsumerOptions::default()
        }
    }
}
