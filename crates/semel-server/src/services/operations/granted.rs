//! The leases that this node has granted. A holder names its operation and fence with every call; if the operation is
//! here, its row need not be read to check the tenant and to show the result. Nothing here decides: the fence does.

use std::sync::Arc;

use quick_cache::sync::Cache;
use semel::{Fence, Operation};

/// The most operations, each of a few hundred bytes without its input.
const MOST: usize = 16 << 10;

/// The granted leases, by operation.
#[derive(Clone)]
pub(super) struct Granted(Arc<Cache<i64, Arc<Operation>>>);

impl Default for Granted {
    fn default() -> Self {
        Self(Arc::new(Cache::new(MOST)))
    }
}

impl Granted {
    /// Remembers an operation as it was when its lease was granted.
    pub(super) fn remember(&self, held: &Operation) -> Arc<Operation> {
        let held = Arc::new(Operation { payload: None, checkpoint: None, ..held.clone() });
        self.0.insert(held.id, held.clone());
        held
    }

    /// The operation of a tenant whose lease has this fence.
    pub(super) fn find(&self, tenant: &str, id: i64, fence: Fence) -> Option<Arc<Operation>> {
        self.0.get(&id).filter(|held| held.fence == fence && held.scope.tenant() == tenant)
    }

    /// Forgets an operation whose run has ended.
    pub(super) fn forget(&self, id: i64) {
        self.0.remove(&id);
    }
}
