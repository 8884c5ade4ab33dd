//! The section `[messages]`.

use std::time::Duration;

use semel::messaging::{ConsumerOptions, RelayOptions};

use super::reader::Reader;

/// How a node carries messages to the broker and takes them from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Messages {
    /// How long rows of the outbox are leased to a relay, which renews them: those of a killed one are published by
    /// another after that.
    pub relay_lease: Duration,
    /// How often a relay looks without being woken.
    pub poll: Duration,
    /// The embedded broker: how long a message is leased to its consumer, which renews it.
    pub visibility: Duration,
    /// How long a retry is leased to its consumer until it begins.
    pub retry_lease: Duration,
    /// How many messages of a queue a node has in its hands at once.
    pub prefetch: usize,
    /// How many runs may fail before a message is a dead letter.
    pub max_failures: usize,
    /// How many runs may be cut off, or kill their process, before it is one.
    pub max_crashes: usize,
}

impl Default for Messages {
    fn default() -> Self {
        let (relay, consumer) = (RelayOptions::default(), ConsumerOptions::default());
        Self {
            relay_lease: relay.lease,
            poll: relay.poll,
            // As long as the others: what a killed node had goes on within 12 s.
            visibility: relay.lease,
            retry_lease: consumer.retry_lease,
            prefetch: usize::from(consumer.prefetch),
            max_failures: consumer.max_failures as usize,
            max_crashes: consumer.max_crashes as usize,
        }
    }
}

/// Below these, a node that is only slow would lose what it has to another.
const SHORTEST_LEASE: Duration = Duration::from_secs(1);
const LONGEST_LEASE: Duration = Duration::from_secs(3600);
const SHORTEST_POLL: Duration = Duration::from_millis(10);

/// As many as RabbitMQ can count.
const MOST_PREFETCHED: usize = u16::MAX as usize;
const MOST_RUNS: usize = 1_000;

impl Messages {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let default = Self::default();
        let read = Self {
            relay_lease: reader.field("messages.relay_lease", || default.relay_lease),
            poll: reader.field("messages.poll", || default.poll),
            visibility: reader.field("messages.visibility", || default.visibility),
            retry_lease: reader.field("messages.retry_lease", || default.retry_lease),
            prefetch: reader.field("messages.prefetch", || default.prefetch),
            max_failures: reader.field("messages.max_failures", || default.max_failures),
            max_crashes: reader.field("messages.max_crashes", || default.max_crashes),
        };
        for (name, time, shortest) in [
            ("messages.relay_lease", read.relay_lease, SHORTEST_LEASE),
            ("messages.poll", read.poll, SHORTEST_POLL),
            ("messages.visibility", read.visibility, SHORTEST_LEASE),
            ("messages.retry_lease", read.retry_lease, SHORTEST_LEASE),
        ] {
            if !(shortest..=LONGEST_LEASE).contains(&time) {
                let shortest = humantime::format_duration(shortest);
                reader.mistake(name, format!("must be at least {shortest} and at most 1h"));
            }
        }
        for (name, number, most) in [
            ("messages.prefetch", read.prefetch, MOST_PREFETCHED),
            ("messages.max_failures", read.max_failures, MOST_RUNS),
            ("messages.max_crashes", read.max_crashes, MOST_RUNS),
        ] {
            if !(1..=most).contains(&number) {
                reader.mistake(name, format!("must be 1 to {most}"));
            }
        }
        read
    }

    /// As a relay is told.
    #[must_use]
    pub fn relay(&self) -> RelayOptions {
        RelayOptions { lease: self.relay_lease, poll: self.poll, ..RelayOptions::default() }
    }

    /// As a consumer is told.
    #[must_use]
    pub fn consumer(&self) -> ConsumerOptions {
        ConsumerOptions {
            prefetch: u16::try_from(self.prefetch).unwrap_or(u16::MAX),
            max_failures: u32::try_from(self.max_failures).unwrap_or(u32::MAX),
            max_crashes: u32::try_from(self.max_crashes).unwrap_or(u32::MAX),
            retry_lease: self.retry_lease,
            ..ConsumerOptions::default()
        }
    }
}
