//! A route with its layer: the scopes of its requests.

use std::sync::OnceLock;

use http::Method;
use semel::Scope;

use crate::{Route, ask::fitting};

/// A route with its layer.
pub(crate) struct Bound {
    route: Route,
    /// Most routes have one scope; building it for each request would be a good part of the cost of a replay from
    /// memory.
    first: OnceLock<First>,
}

/// The scope of a first request, and its parts.
struct First {
    tenant: String,
    method: Method,
    template: String,
    scope: Scope,
}

impl std::ops::Deref for Bound {
    type Target = Route;
    fn deref(&self) -> &Route {
        &self.route
    }
}

impl Bound {
    pub(crate) fn new(route: Route) -> Self {
        Self { route, first: OnceLock::new() }
    }

    /// The scope of a request.
    pub(crate) fn scope(&self, tenant: &str, method: &Method, template: &str) -> semel::Result<Scope> {
        let same = |first: &&First| first.tenant == tenant && first.method == method && first.template == template;
        if let Some(first) = self.first.get().filter(same) {
            return Ok(first.scope.clone());
        }
        let kind = match &self.kind {
            Some(kind) => kind.clone(),
            None => fitting(format!("{method} {template}"), 200),
        };
        let scope = Scope::new(tenant, &self.service, &kind)?;
        let (tenant, method, template) = (tenant.to_owned(), method.clone(), template.to_owned());
        let _ = self.first.set(First { tenant, method, template, scope: scope.clone() });
        Ok(scope)
    }
}
