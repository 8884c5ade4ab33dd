//! Wakes a worker.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::Scope;

/// The most scopes that are named between two waits. With more, the worker looks at all.
const MOST: usize = 1000;

/// Wakes a worker when operations may have become due. Cheap to clone; what is told between two waits is heard at once.
#[derive(Clone, Default)]
pub struct DueWake(Arc<Told>);

/// Tells a worker, as long as it exists.
pub struct DueTeller(Weak<Told>);

#[derive(Default)]
struct Told {
    any: Notify,
    news: Mutex<DueNews>,
}

/// What has become due.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DueNews {
    /// Operations of these scopes.
    pub scopes: BTreeSet<Scope>,
    /// Others, of any scope, perhaps later.
    pub others: bool,
}

impl DueWake {
    /// A way to tell it.
    #[must_use]
    pub fn teller(&self) -> DueTeller {
        DueTeller(Arc::downgrade(&self.0))
    }

    /// Waits for news, or returns if there are some.
    pub async fn woken(&self) {
        self.0.any.notified().await;
    }

    /// The news since the last call.
    #[must_use]
    pub fn hear(&self) -> DueNews {
        std::mem::take(&mut *self.0.news.lock())
    }
}

impl DueTeller {
    /// Tells that an operation of this scope is due, or `None` for any scope. False if the worker is gone.
    pub fn tell(&self, scope: Option<&Scope>) -> bool {
        let Some(told) = self.0.upgrade() else { return false };
        let mut news = told.news.lock();
        match scope {
            Some(scope) if news.scopes.contains(scope) => {}
            Some(scope) if news.scopes.len() < MOST => drop(news.scopes.insert(scope.clone())),
            _ => news.others = true,
        }
        drop(news);
        told.any.notify_one();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(tenant: usize) -> Scope {
        Scope::new(&tenant.to_string(), "service", "kind").unwrap()
    }

    #[tokio::test]
    async fn scopes_are_named_and_too_many_of_them_are_others() {
        let wake = DueWake::default();
        let teller = wake.teller();
        (0..=MOST).chain(0..=MOST).for_each(|n| assert!(teller.tell(Some(&scope(n)))));
        wake.woken().await;
        let heard = wake.hear();
        assert_eq!((heard.scopes.len(), heard.others), (MOST, true));
        assert_eq!(wake.hear(), DueNews::default());
        teller.tell(None);
        assert_eq!(wake.hear(), DueNews { scopes: BTreeSet::new(), others: true });
        drop(wake);
        assert!(!teller.tell(None), "the worker is gone");
    }
}
