//! Repeats of one request: a client that hears nothing sends it again, perhaps while the first is still being answered.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use semel::Token;
use tokio::sync::Mutex as Turn;

/// The requests that are being answered, by their tokens.
#[derive(Clone, Default)]
pub(super) struct Repeats(Arc<Mutex<HashMap<Token, Weak<Turn<()>>>>>);

/// How many tokens are kept before those without a request are forgotten.
const MANY: usize = 1024;

impl Repeats {
    /// The lock of requests with this token: one of them is answered at a time.
    pub(super) fn of(&self, token: Token) -> Arc<Turn<()>> {
        let mut all = self.0.lock();
        if all.len() >= MANY {
            all.retain(|_, turn| turn.strong_count() > 0);
        }
        if let Some(turn) = all.get(&token).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::new(Turn::new(()));
        all.insert(token, Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_with_one_token_share_a_turn_and_old_ones_are_forgotten() {
        let repeats = Repeats::default();
        let token = |n: usize| Token::kept(&["acme", &n.to_string()]);
        let first = repeats.of(token(0));
        assert!(Arc::ptr_eq(&first, &repeats.of(token(0))));
        for n in 1..5 * MANY {
            assert!(!Arc::ptr_eq(&first, &repeats.of(token(n))));
        }
        assert!(Arc::ptr_eq(&first, &repeats.of(token(0))) && repeats.0.lock().len() <= MANY);
    }
}
