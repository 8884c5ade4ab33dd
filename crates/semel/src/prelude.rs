//! The methods of a store, for callers that have one of a concrete type: `use semel::prelude::*;`.

pub use crate::{
    fleet::Fleet as _,
    messaging::{ConsumerStore as _, LetterStore as _, OutboxStore as _, RelayStore as _},
    store::{Look as _, Operations as _, Sweep as _, TimeSource as _, Transactions as _},
};
