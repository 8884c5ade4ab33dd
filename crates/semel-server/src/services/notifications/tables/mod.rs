//! The SQL of the service: one text for both databases, but where it says why not.

pub(super) mod event_listing;
pub(super) mod events;
pub(super) mod fanouts;
pub(super) mod listing;
pub(super) mod notifications;
pub(super) mod recipients;
pub(super) mod within;
