//! Requests of a worker for due operations.

use std::time::Duration;

use crate::{Policy, Scope, Token};

/// Free seats of a worker for one kind and tenant.
#[derive(Clone, Debug)]
pub struct Want {
    /// The scope.
    pub scope: Scope,
    /// The most operations to take.
    pub most: u32,
    /// How many were taken since the last longest-due one: every tenth is the longest due one, whatever its priority.
    /// Without it, all are taken by priority.
    pub since: Option<u32>,
    /// The policy of operations that were enqueued without one.
    pub policy: Policy,
    /// The length of the leases of operations that were enqueued with a policy, if not that of their policy.
    pub lease: Option<Duration>,
    /// The limits of the fleet for this kind.
    pub limits: Limits,
}

impl Want {
    /// One of this many operations is the longest due one: so low priorities do not starve.
    pub const OLDEST_OF: u32 = 10;

    /// How many longest-due ones are among the next `most`. A limit of the fleet may allow fewer than are wanted.
    #[must_use]
    pub fn oldest(&self, most: u32) -> u32 {
        self.since.map_or(0, |since| since.saturating_add(most) / Self::OLDEST_OF)
    }
}

/// Limits of a kind over all nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// How many may run concurrently.
    pub at_once: Option<u32>,
    /// The interval between two starts: a rate.
    pub every: Option<Duration>,
}

impl Limits {
    /// Whether there is no limit.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A request that claims due operations.
#[derive(Clone, Debug)]
pub struct Take {
    /// The wants, each of another scope.
    pub wants: Vec<Want>,
    /// The most operations of all wants together, if there is a limit.
    pub most: Option<u32>,
    /// The owner, for the journal.
    pub owner: String,
    /// The token of all its leases: they are found by it if the answer is lost.
    pub token: Token,
}

impl Take {
    /// The most bytes of stored data that are taken at once, which the first operation may exceed.
    pub const BYTES: usize = 16 << 20;
}
