//! Finds the operation that a person named.

use semel::{
    Key, Operation, Scope,
    look::{Filter, Page, Unreadable},
    prelude::*,
};
use semel_store::Database;
use serde_json::json;

use super::ledger::Opened;
use crate::{
    once::DEFAULT_SCOPE,
    view::{json, words::quoted},
};

/// How many of the newest operations are searched for a hash, or for a key of an unknown scope: neither has an index.
const NEWEST: usize = 5_000;

/// One operation, by its key or its number.
#[derive(clap::Args)]
pub(super) struct Target {
    /// The operation's key
    #[arg(value_parser = Key::new, required_unless_present = "id")]
    pub(super) key: Option<Key>,
    /// The operation's number instead of its key
    #[arg(long, value_name = "N", conflicts_with = "key", value_parser = number)]
    pub(super) id: Option<i64>,
    /// The scope of the key: service/kind or tenant/service/kind [default: cli/once; commands that only read then search
    /// the other scopes]
    #[arg(long, default_value = DEFAULT_SCOPE, hide_default_value = true, value_parser = Scope::parse)]
    pub(super) scope: Scope,
}

impl Target {
    /// Finds it by its key or its number. If the key exists in other scopes only, the error names them: a command that
    /// changes something does not guess.
    pub(super) async fn find(&self, opened: &Opened) -> anyhow::Result<Operation> {
        let store = opened.ledger.store();
        let found = match (&self.key, self.id) {
            (Some(key), _) => store.by_key(&self.scope, key).await?,
            (None, Some(id)) => store.by_id(self.scope.tenant(), id).await?,
            (None, None) => None,
        };
        match (found, &self.key) {
            (Some(found), _) => Ok(found),
            (None, Some(key)) => match &self.among_the_newest(store, |op| op.key == *key).await?[..] {
                [] => Err(self.not_found(opened)),
                elsewhere => Err(self.elsewhere(key, elsewhere)),
            },
            (None, None) => Err(self.not_found(opened)),
        }
    }

    /// The error for a key that exists in these scopes only.
    fn elsewhere(&self, key: &Key, known: &[Operation]) -> anyhow::Error {
        let scopes: Vec<_> = known.iter().map(|op| op.scope.to_string()).collect();
        let flags: Vec<_> = scopes.iter().map(|scope| format!("--scope {}", quoted(scope))).collect();
        anyhow::anyhow!(
            "nothing was changed: the key {} is not known in the scope {}; it is in {}; use {}",
            quoted(key.as_str()),
            self.scope,
            scopes.join(" and in "),
            flags.join(" or ")
        )
    }

    /// Finds it also by the number, or by the short hash that log lines show in place of the key. Only for commands that
    /// read: a command that changes something does not guess.
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
        // Without --scope, the key may belong to any scope.
        let anywhere = Scope::parse(DEFAULT_SCOPE).is_ok_and(|scope| scope == self.scope);
        let hash = key.as_str();
        let meant = |op: &Operation| (anywhere && op.key == *key) || (is_hash(hash) && op.short_hash() == hash);
        match &self.among_the_newest(store, meant).await?[..] {
            [] => {}
            // Read again, because a list does not contain archived data.
            [one] => {
                if let Some(found) = store.by_id(self.scope.tenant(), one.id).await? {
                    return Ok(found);
                }
            }
            many => anyhow::bail!(
                "the key {} is known in several scopes; say which is meant: {}",
                quoted(key.as_str()),
                many.iter()
                    .map(|op| format!("--scope {}", quoted(&op.scope.to_string())))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }
        Err(self.not_found(opened))
    }

    /// The readable columns of the operation if `error` says that it exists and cannot be read.
    pub(super) async fn unreadable(
        &self,
        opened: &Opened,
        error: &anyhow::Error,
    ) -> anyhow::Result<Option<Unreadable>> {
        let Some(why) = error.downcast_ref::<semel::Error>().filter(|why| !why.is_transient()) else { return Ok(None) };
        let store = opened.ledger.store();
        if let Some(key) = &self.key
            && let Some(found) = store.unreadable_by_key(&self.scope, key, why).await?
        {
            return Ok(Some(found));
        }
        let Some(id) = self.number() else { return Ok(None) };
        Ok(store.unreadable_by_id(self.scope.tenant(), id, why).await?)
    }

    /// The operation's number, if the argument can be one.
    pub(super) fn number(&self) -> Option<i64> {
        self.id.or_else(|| self.key.as_ref()?.as_str().parse().ok())
    }

    /// Searches the newest operations of the tenant, in all scopes.
    async fn among_the_newest(
        &self,
        store: &Database,
        meant: impl Fn(&Operation) -> bool,
    ) -> anyhow::Result<Vec<Operation>> {
        let filter = Filter::tenant(self.scope.tenant());
        let mut page = Page { after: None, limit: 100 };
        let (mut seen, mut found) = (0, Vec::new());
        while seen < NEWEST {
            let listing = store.list(&filter, page).await?;
            seen += listing.items.len();
            found.extend(listing.items.into_iter().filter(&meant));
            let Some(next) = listing.next else { break };
            page.after = Some(next);
        }
        Ok(found)
    }

    fn not_found(&self, opened: &Opened) -> anyhow::Error {
        let place = &opened.place;
        match &self.key {
            Some(key) => anyhow::anyhow!(
                "the key {} is not known in the scope {} of the ledger in {place}. It was never claimed there, or has \
                 been purged, or its retention is over. Use --scope for a key of another scope; {} lists them",
                quoted(key.as_str()),
                self.scope,
                format!("semel operations list {}", opened.flags).trim_end()
            ),
            None => anyhow::anyhow!(
                "there is no operation {} of the tenant {} in the ledger in {place}",
                self.id.unwrap_or_default(),
                self.scope.tenant()
            ),
        }
    }
}

fn number(text: &str) -> Result<i64, &'static str> {
    text.parse().map_err(|_| "it must be an operation's number from a list or a log line, such as 42")
}

/// As [`Operation::short_hash`] writes it.
fn is_hash(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'))
}

/// The output of a command about an operation that it changed.
pub(super) fn changed(json: bool, operation: &Operation, then: &str) -> String {
    if json {
        return format!("{:#}\n", json!({ "operation": json::whole(operation) }));
    }
    format!("{} in {}: {then}\n", operation.key.as_str(), operation.scope)
}
