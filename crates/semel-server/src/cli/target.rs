//! Which operation a person means.

use semel::{
    Key, Operation, Scope, Store,
    look::{Filter, Page},
};
use semel_store::Database;

use super::{ledger::Opened, words::DEFAULT_SCOPE};

/// How far back a hash is looked for. There is no index on it, and nobody asks about a log line of last year.
const NEWEST: usize = 5_000;

/// One operation, by its key or by its number.
#[derive(clap::Args)]
pub(super) struct Target {
    /// The operation's key
    #[arg(value_parser = Key::new, required_unless_present = "id")]
    pub(super) key: Option<Key>,
    /// The operation's number instead of its key
    #[arg(long, value_name = "N", conflicts_with = "key")]
    pub(super) id: Option<i64>,
    /// Where the key belongs: service/kind or tenant/service/kind
    #[arg(long, default_value = DEFAULT_SCOPE, value_parser = Scope::parse)]
    pub(super) scope: Scope,
}

impl Target {
    /// Finds it by its key or its number.
    pub(super) async fn find(&self, opened: &Opened) -> anyhow::Result<Operation> {
        let store = opened.ledger.store();
        let found = match (&self.key, self.id) {
            (Some(key), _) => store.by_key(&self.scope, key).await?,
            (None, Some(id)) => store.by_id(self.scope.tenant(), id).await?,
            (None, None) => None,
        };
        found.ok_or_else(|| self.not_found(opened))
    }

    /// Finds it also by the number or the short hash that a log line shows in place of the key. Only for looking:
    /// whoever changes something says exactly what.
    pub(super) async fn find_somehow(&self, opened: &Opened) -> anyhow::Result<Operation> {
        let (Some(key), store) = (&self.key, opened.ledger.store()) else { return self.find(opened).await };
        if let Some(found) = store.by_key(&self.scope, key).await? {
            return Ok(found);
        }
        if let Some(id) = self.number()
            && let Some(found) = store.by_id(self.scope.tenant(), id).await?
        {
            return Ok(found);
        }
        if is_hash(key.as_str())
            && let Some(found) = self.by_hash(store, key.as_str()).await?
        {
            return Ok(found);
        }
        Err(self.not_found(opened))
    }

    /// The operation's number, if what was given can be one.
    pub(super) fn number(&self) -> Option<i64> {
        self.id.or_else(|| self.key.as_ref()?.as_str().parse().ok())
    }

    /// Looks through the newest operations of the tenant, whatever their scope.
    async fn by_hash(&self, store: &Database, hash: &str) -> anyhow::Result<Option<Operation>> {
        let filter = Filter::tenant(self.scope.tenant());
        let mut page = Page { after: None, limit: 100 };
        let mut seen = 0;
        while seen < NEWEST {
            let listing = store.list(&filter, page).await?;
            seen += listing.items.len();
            if let Some(found) = listing.items.into_iter().find(|op| op.short_hash() == hash) {
                // Looked up again: a list does not bring what is in the archive.
                return Ok(store.by_id(self.scope.tenant(), found.id).await?);
            }
            let Some(next) = listing.next else { return Ok(None) };
            page.after = Some(next);
        }
        Ok(None)
    }

    fn not_found(&self, opened: &Opened) -> anyhow::Error {
        let place = &opened.place;
        match &self.key {
            Some(key) => anyhow::anyhow!(
                "the key {} is not known in the scope {} of the ledger in {place}. It was never claimed there, or has \
                 been purged, or its retention is over. Keys of another scope are found with --scope",
                super::words::quoted(key.as_str()),
                self.scope
            ),
            None => anyhow::anyhow!(
                "there is no operation {} of the tenant {} in the ledger in {place}",
                self.id.unwrap_or_default(),
                self.scope.tenant()
            ),
        }
    }
}

/// As [`Operation::short_hash`] writes it.
fn is_hash(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'))
}
