//! Outbox to broker, broker to handler: whatever breaks in between, each message takes effect once.

mod away;
mod brokers;
mod consumer;
mod end_to_end;
mod glimpses;
mod relay;
mod retries;
mod tools;
mod unreliable;
