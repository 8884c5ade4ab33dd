//! The roles of a node.

use std::{collections::BTreeSet, fmt};

use super::value::{Value, wrong_type};

/// One role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeRole {
    /// Answers HTTP requests.
    Api,
    /// Publishes the outbox to the broker.
    Relay,
    /// Consumes messages, runs background jobs, schedules and clean-ups.
    Worker,
    /// Sweeps the ledger.
    Sweeper,
}

impl NodeRole {
    const ALL: [Self; 4] = [Self::Api, Self::Relay, Self::Worker, Self::Sweeper];

    /// The role's name, as in `--roles`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::Relay => "relay",
            Self::Worker => "worker",
            Self::Sweeper => "sweeper",
        }
    }
}

/// The roles of one node: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roles(BTreeSet<NodeRole>);

impl Roles {
    /// Every role, as a single node has.
    #[must_use]
    pub fn all() -> Self {
        Self(NodeRole::ALL.into())
    }

    /// Whether the node has this role.
    #[must_use]
    pub fn contains(&self, role: NodeRole) -> bool {
        self.0.contains(&role)
    }

    /// Their names, in order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|role| role.name().to_owned()).collect()
    }

    fn of<'a>(names: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        let mut roles = BTreeSet::new();
        let mut wrong = Vec::new();
        for name in names.map(str::trim).filter(|name| !name.is_empty()) {
            match NodeRole::ALL.into_iter().find(|role| role.name() == name) {
                Some(role) => drop(roles.insert(role)),
                None => wrong.push(format!("\"{name}\"")),
            }
        }
        match (wrong.as_slice(), roles.is_empty()) {
            ([], false) => Ok(Self(roles)),
            ([], true) => Err("must name at least one of api, relay, worker, sweeper".to_owned()),
            (wrong, _) => Err(format!("may only name api, relay, worker, sweeper, not {}", wrong.join(", "))),
        }
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(","))
    }
}

impl Value for Roles {
    const EXAMPLE: &'static str = "api,worker";

    fn parse(text: &str) -> Result<Self, String> {
        Self::of(text.split(','))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Array(items) => {
                let names: Option<Vec<_>> = items.iter().map(toml::Value::as_str).collect();
                Self::of(names.ok_or("must be a list of strings")?.into_iter())
            }
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.names().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_a_set_in_any_order() {
        assert_eq!(Roles::parse(" sweeper, api,api ").map(|roles| roles.to_string()).as_deref(), Ok("api,sweeper"));
        assert!(!Roles::parse("api").unwrap().contains(NodeRole::Relay));
    }

    #[test]
    fn no_role_and_every_unknown_role_are_refused() {
        assert!(Roles::parse(" , ").is_err());
        let message = Roles::parse("api,boss,king").unwrap_err();
        assert!(message.contains("\"boss\", \"king\""), "{message}");
    }
}
