//! The SQL of the service: one text for both databases, or the reason why not.

pub(super) mod event_listing;
pub(super) mod events;
pub(super) mod fanouts;
pub(super) mod listing;
pub(super) mod notifications;
pub(super) mod recipients;
pub(super) mod within;

/// The statements of the service, except those of deliveries.
#[cfg(test)]
pub(super) fn statements() -> Vec<crate::sql::Statement> {
    let of_events = [event_listing::statements(), events::statements(), fanouts::statements(), listing::statements()];
    let others = [notifications::statements(), recipients::statements(), within::statements()];
    of_events.into_iter().chain(others).flatten().collect()
}
