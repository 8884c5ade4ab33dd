//! Finds the event that a person names: by source, id and, if events take effect once per function, function.

use std::{collections::BTreeSet, sync::Arc};

use semel::{Key, Operation, prelude::*};

use super::{Receiver, SERVICE, source::Source};
use crate::{
    http::{
        answers::{missing, one_row, patiently},
        fields::Wrong,
        problem::{INVALID_QUERY, Problem},
    },
    services::webhooks::config::is_function,
};

/// How many functions are searched for an event, if it takes effect once per function. Configured ones are at most half
/// of it, and all of them are searched.
const MOST_FUNCTIONS: usize = 202;

/// An event that was found, and its source.
pub(crate) struct Named {
    pub(crate) source: Arc<Source>,
    pub(crate) operation: Operation,
}

impl Named {
    /// Finds an event of a tenant's source.
    pub(crate) async fn find(
        receiver: &Receiver,
        tenant: &str,
        (source, id): (&str, &str),
        function: Option<&str>,
    ) -> Result<Self, Problem> {
        let source = receiver.source_of(tenant, source)?;
        let key = Key::new(id).map_err(|_| missing())?;
        let functions = match function {
            Some(function) => vec![function.to_owned()],
            None if source.config.dedup_per_function => patiently(functions(receiver, &source)).await?,
            None => vec![source.name.clone()],
        };
        let mut found = Vec::new();
        for name in functions {
            let Ok(scope) = source.scope(&name) else { continue };
            let help = format!("see semel operations show {id} --scope {}/{}", scope.service(), scope.kind());
            let operation = one_row(receiver.ledger().store().by_key(&scope, &key), id, &help).await?;
            let meant = |op: &Operation| function.is_none_or(|function| op.labels.0[1].as_deref() == Some(function));
            found.extend(operation.filter(meant).map(|operation| (name, operation)));
        }
        match found.len() {
            0 => Err(missing()),
            1 => found.pop().map(|(_, operation)| Self { source, operation }).ok_or_else(missing),
            _ => Err(which(found.into_iter().map(|(function, _)| function).collect())),
        }
    }
}

impl Receiver {
    /// A source, if it is this tenant's.
    pub(crate) fn source_of(&self, tenant: &str, name: &str) -> Result<Arc<Source>, Problem> {
        let found = self.source(name).filter(|source| source.config.tenant == tenant);
        found.cloned().ok_or_else(|| missing().detail("There is no source of this name."))
    }
}

/// The functions of a source, if events take effect once per function: the configured ones, and former ones that still
/// have events.
pub(super) async fn functions(receiver: &Receiver, source: &Source) -> semel::Result<Vec<String>> {
    let prefix = source.kind("");
    let kinds = receiver.ledger().store().kinds(&source.config.tenant, SERVICE, &prefix).await?;
    let former = kinds.iter().filter_map(|kind| kind.strip_prefix(&prefix)).filter(|name| is_function(name));
    let mut names: BTreeSet<_> = [&source.name].into_iter().chain(&source.config.functions.0).cloned().collect();
    for name in former {
        if names.len() < MOST_FUNCTIONS {
            names.insert(name.to_owned());
        }
    }
    Ok(names.into_iter().collect())
}

/// The problem of an id that exists in several functions.
fn which(functions: Vec<String>) -> Problem {
    let mut wrong = Wrong::default();
    wrong.note("function", format!("must be one of the functions that have this event: {}", functions.join(", ")));
    wrong.problem(&INVALID_QUERY).with("functions", functions)
}
