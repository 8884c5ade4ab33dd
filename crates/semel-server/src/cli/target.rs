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
    /// The scope of the operation: service/kind or tenant/service/kind [default: cli/once; commands that only read then
    /// search the other scopes]
    #[arg(long = "scope", value_name = "SCOPE", value_parser = Scope::parse)]
    given: Option<Scope>,
}

impl Target {
    /// The scope that was given, or the default.
    pub(super) fn scope(&self) -> anyhow::Result<Scope> {
        Ok(match &self.given {
            Some(scope) => scope.clone(),
            None => Scope::parse(DEFAULT_SCOPE)?,
        })
    }

    /// Finds it by its key or its number. If it exists in another scope only, the error names that: a command that
    /// changes something does not guess.
    pub(super) async fn find(&self, opened: &Opened) -> anyhow::Result<Operation> {
        let (store, scope) = (opened.ledger.store(), self.scope()?);
        let Some(key) = &self.key else {
            let found = self.by_number(store).await?.ok_or_else(|| self.not_found(&scope, opened))?;
            anyhow::ensure!(
                self.given.is_none() || found.scope == scope,
                "nothing was changed: operation {} is not in the scope {scope}, but in {}",
                found.id,
                found.scope
            );
            return Ok(found);
        };
        if let Some(found) = store.by_key(&scope, key).await? {
            return Ok(found);
        }
        match &self.among_the_newest(store, |op| op.key == *key).await?[..] {
            [] => Err(self.not_found(&scope, opened)),
            elsewhere => {
                let scopes: Vec<_> = elsewhere.iter().map(|op| op.scope.to_string()).collect();
                Err(anyhow::anyhow!(
                    "nothing was changed: the key {} is not known in the scope {scope}; it is in {}; use {}",
                    quoted(key.as_str()),
                    scopes.join(" and in "),
                    flags(elsewhere).join(" or ")
                ))
            }
        }
    }

    /// Finds it also by the number, or by the short hash that log lines show in place of the key. Only for commands that
    /// read: a command that changes something does not guess.
    pub(super) async fn find_somehow(&self, opened: &Opened) -> anyhow::Result<Operation> {
        let (store, scope) = (opened.ledger.store(), self.scope()?);
        let Some(key) = &self.key else {
            return self.by_number(store).await?.ok_or_else(|| self.not_found(&scope, opened));
        };
        if let Some(found) = store.by_key(&scope, key).await? {
            return Ok(found);
        }
        // Without --scope, the key may belong to any scope.
        let (anywhere, hash) = (self.given.is_none(), key.as_str());
        let meant = |op: &Operation| (anywhere && op.key == *key) || (is_hash(hash) && op.short_hash() == hash);
        let known = self.among_the_newest(store, meant).await?;
        let numbered = self.by_number(store).await?;
        match (&known[..], numbered) {
            ([], Some(found)) => Ok(found),
            ([], None) => Err(self.not_found(&scope, opened)),
            ([one], Some(other)) if one.id != other.id => anyhow::bail!(
                "{} is the key of an operation in {}, and the number of another one, with the key {} in {}; say which is \
                 meant: {}, or --id {} without a key",
                quoted(hash),
                one.scope,
                quoted(other.key.as_str()),
                other.scope,
                flags(&known).join(""),
                other.id
            ),
            // Read again, because a list does not contain archived data.
            ([one], _) => store.by_id(scope.tenant(), one.id).await?.ok_or_else(|| self.not_found(&scope, opened)),
            (many, _) => anyhow::bail!(
                "the key {} is known in several scopes; say which is meant: {}",
                quoted(hash),
                flags(many).join(", ")
            ),
        }
    }

    /// The operation with the number that was given.
    async fn by_number(&self, store: &Database) -> anyhow::Result<Option<Operation>> {
        let Some(id) = self.number() else { return Ok(None) };
        Ok(store.by_id(self.scope()?.tenant(), id).await?)
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
            && let Some(found) = store.unreadable_by_key(&self.scope()?, key, why).await?
        {
            return Ok(Some(found));
        }
        let Some(id) = self.number() else { return Ok(None) };
        Ok(store.unreadable_by_id(self.scope()?.tenant(), id, why).await?)
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
        let filter = Filter::tenant(self.scope()?.tenant());
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

    fn not_found(&self, scope: &Scope, opened: &Opened) -> anyhow::Error {
        let place = &opened.place;
        match &self.key {
            Some(key) => anyhow::anyhow!(
                "the key {} is not known in the scope {scope} of the ledger in {place}. It was never claimed there, or has \
                 been purged, or its retention is over. Use --scope for a key of another scope; {} lists them",
                quoted(key.as_str()),
                format!("semel operations list {}", opened.flags).trim_end()
            ),
            None => anyhow::anyhow!(
                "there is no operation {} of the tenant {} in the ledger in {place}",
                self.id.unwrap_or_default(),
                scope.tenant()
            ),
        }
    }
}

/// The flags that name the scopes of operations.
fn flags(operations: &[Operation]) -> Vec<String> {
    operations.iter().map(|op| format!("--scope {}", quoted(&op.scope.to_string()))).collect()
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
