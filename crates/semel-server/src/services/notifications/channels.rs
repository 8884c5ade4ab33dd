//! The sections `[notifications.channels.PUSH]`, `.EMAIL` and `.SMS`.

use std::{collections::BTreeMap, time::Duration};

use semel::OnLost;

use crate::config::{Endpoint, Reader};

/// The endpoints by channel. The notifications of a channel without an endpoint stay PENDING, for the application to
/// fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Channels(pub BTreeMap<&'static str, Channel>);

/// How the notifications of a channel are delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channel {
    /// The endpoint.
    pub url: Endpoint,
    /// How long a call may take.
    pub timeout: Duration,
    /// The rule for a notification whose call may or may not have arrived.
    pub on_lost: OnLost,
    /// How many calls may fail before the notification is FAILED.
    pub max_attempts: usize,
    /// The wait after the first failure; it doubles with each further one.
    pub backoff: Duration,
    /// How many calls a node has open at a time.
    pub concurrency: usize,
}

/// The longest time of a call: its lease is renewed as long.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(300);

/// The longest wait between two calls.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(600);

/// The most failed calls and the most open calls: far beyond the needs of an endpoint.
const MOST: usize = 1000;

/// The names of a channel's fields, for the reader.
struct Names {
    channel: &'static str,
    url: &'static str,
    timeout: &'static str,
    on_lost: &'static str,
    max_attempts: &'static str,
    backoff: &'static str,
    concurrency: &'static str,
}

macro_rules! names {
    ($channel:literal) => {
        Names {
            channel: $channel,
            url: concat!("notifications.channels.", $channel, ".url"),
            timeout: concat!("notifications.channels.", $channel, ".timeout"),
            on_lost: concat!("notifications.channels.", $channel, ".on_lost"),
            max_attempts: concat!("notifications.channels.", $channel, ".max_attempts"),
            backoff: concat!("notifications.channels.", $channel, ".backoff"),
            concurrency: concat!("notifications.channels.", $channel, ".concurrency"),
        }
    };
}

/// The channels that are delivered by a call. IN_APP notifications are read from a stream.
const CHANNELS: [Names; 3] = [names!("EMAIL"), names!("PUSH"), names!("SMS")];

impl Channels {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let channels = CHANNELS.into_iter().filter_map(|names| Some((names.channel, Channel::read(reader, &names)?)));
        Self(channels.collect())
    }
}

impl Channel {
    fn read(reader: &mut Reader<'_>, names: &Names) -> Option<Self> {
        let url: Option<Endpoint> = reader.field(names.url, || None);
        let timeout = reader.field(names.timeout, || Duration::from_secs(10));
        let on_lost = reader.field(names.on_lost, || OnLost::Hold);
        let max_attempts = reader.field(names.max_attempts, || 5);
        let backoff = reader.field(names.backoff, || Duration::from_secs(10));
        let concurrency = reader.field(names.concurrency, || 16);
        if timeout.is_zero() || timeout > LONGEST_TIMEOUT {
            reader.mistake(names.timeout, "must be longer than 0s and at most 5m".to_owned());
        }
        if backoff > LONGEST_BACKOFF {
            reader.mistake(names.backoff, "must be at most 10m".to_owned());
        }
        for (name, number) in [(names.max_attempts, max_attempts), (names.concurrency, concurrency)] {
            if !(1..=MOST).contains(&number) {
                reader.mistake(name, format!("must be 1 to {MOST}"));
            }
        }
        Some(Self { url: url?, timeout, on_lost, max_attempts, backoff, concurrency })
    }
}
