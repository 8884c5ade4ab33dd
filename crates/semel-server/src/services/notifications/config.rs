//! The section `[notifications]`.

use super::channels::Channels;
use crate::config::{Reader, Value, glob, wrong_type};

/// The kinds of recipients.
pub const KINDS: [&str; 4] = ["restaurant", "customer", "agency", "admin"];

/// The rules of the notifications service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notifications {
    /// Which kinds of recipients get which events.
    pub routes: Routes,
    /// How many recipients one transaction of a fan-out covers.
    pub chunk: usize,
    /// How many streams a tenant may have open at a node.
    pub streams: usize,
    /// The endpoints of the channels.
    pub channels: Channels,
}

impl Default for Notifications {
    fn default() -> Self {
        Self { routes: Routes::default(), chunk: CHUNK, streams: STREAMS, channels: Channels::default() }
    }
}

/// Large enough to be worth a commit, small enough that on SQLite, where it holds the only writer, others wait some
/// tens of milliseconds.
const CHUNK: usize = 1_000;
const LARGEST_CHUNK: usize = 10_000;

/// Each costs a connection and a few kilobytes.
const STREAMS: usize = 1_000;
const MOST_STREAMS: usize = 1_000_000;

impl Notifications {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let read = Self {
            routes: reader.field("notifications.routes", Routes::default),
            chunk: reader.field("notifications.chunk", || CHUNK),
            streams: reader.field("notifications.streams", || STREAMS),
            channels: Channels::read(reader),
        };
        if !(1..=LARGEST_CHUNK).contains(&read.chunk) {
            reader.mistake("notifications.chunk", format!("must be 1 to {LARGEST_CHUNK}"));
        }
        if !(1..=MOST_STREAMS).contains(&read.streams) {
            reader.mistake("notifications.streams", format!("must be 1 to {MOST_STREAMS}"));
        }
        read
    }
}

/// The routing rules: an event goes to the kinds of all rules that match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routes(Vec<Rule>);

/// One rule, written `AGGREGATE_TYPE/EVENT_TYPE=kind,kind`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    aggregate_type: String,
    /// With `*` for any text.
    event_type: String,
    kinds: Vec<&'static str>,
}

impl Default for Routes {
    fn default() -> Self {
        let rule = |kind: &'static str| Rule {
            aggregate_type: kind.to_uppercase(),
            event_type: "*".to_owned(),
            kinds: vec![kind],
        };
        Self(KINDS.into_iter().map(rule).collect())
    }
}

impl Routes {
    /// The kinds of recipients that get an event, each once; none if no rule matches.
    #[must_use]
    pub fn kinds(&self, aggregate_type: &str, event_type: &str) -> Vec<&'static str> {
        let fits = |rule: &&Rule| rule.aggregate_type == aggregate_type && glob(&rule.event_type, event_type);
        let named: Vec<_> = self.0.iter().filter(fits).flat_map(|rule| &rule.kinds).collect();
        KINDS.into_iter().filter(|kind| named.contains(&kind)).collect()
    }

    /// Reads rules as an environment variable has them: `ORDER/ORDER_*=restaurant,customer; ADMIN=admin`.
    ///
    /// # Errors
    /// With the mistake.
    pub fn of(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    /// Whether any rule is about this type of aggregate.
    #[must_use]
    pub fn knows(&self, aggregate_type: &str) -> bool {
        self.0.iter().any(|rule| rule.aggregate_type == aggregate_type)
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("has \"{text}\", and a rule is written such as ORDER/ORDER_*=restaurant,customer");
        let (pattern, kinds) = text.split_once('=').ok_or_else(wrong)?;
        let (aggregate_type, event_type) = pattern.split_once('/').unwrap_or((pattern, "*"));
        let kinds: Vec<_> = kinds.split(',').map(str::trim).collect();
        Self::of(aggregate_type.trim(), event_type.trim(), &kinds)
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        let table = match value {
            toml::Value::String(text) => return Self::parse(text),
            toml::Value::Table(table) => table,
            _ => return Err(format!("must be a list of rules such as \"{}\"", Routes::EXAMPLE)),
        };
        if let Some(name) =
            table.keys().find(|name| !["aggregate_type", "event_type", "kinds"].contains(&name.as_str()))
        {
            return Err(format!("has a rule with \"{name}\", but a rule has aggregate_type, event_type and kinds"));
        }
        let text = |name: &str| match table.get(name) {
            Some(toml::Value::String(text)) => Ok(Some(text.as_str())),
            Some(_) => Err(format!("has a rule whose {name} is not a string")),
            None => Ok(None),
        };
        let aggregate_type = text("aggregate_type")?.ok_or("has a rule without aggregate_type")?;
        let kinds = table.get("kinds").and_then(toml::Value::as_array).ok_or("has a rule without a list of kinds")?;
        let kinds: Option<Vec<_>> = kinds.iter().map(toml::Value::as_str).collect();
        let kinds = kinds.ok_or("has a rule whose kinds are not strings")?;
        Self::of(aggregate_type, text("event_type")?.unwrap_or("*"), &kinds)
    }

    fn of(aggregate_type: &str, event_type: &str, kinds: &[&str]) -> Result<Self, String> {
        // Rules are written with these three characters.
        let fits = |text: &str| !text.is_empty() && text.chars().all(|c| !c.is_control() && !"/=;".contains(c));
        if !fits(aggregate_type) || !fits(event_type) {
            return Err("has a rule whose aggregate_type or event_type is empty or contains / = or ;".to_owned());
        }
        if aggregate_type.contains('*') {
            return Err(format!("has the rule \"{aggregate_type}\", but only an event_type may have a * in it"));
        }
        let known = |name: &&str| {
            let kind = KINDS.into_iter().find(|kind| kind == name);
            kind.ok_or_else(|| format!("has the kind \"{name}\", but kinds are {}", KINDS.join(", ")))
        };
        let kinds = kinds.iter().map(known).collect::<Result<Vec<_>, _>>()?;
        if kinds.is_empty() {
            return Err("has a rule without kinds".to_owned());
        }
        Ok(Self { aggregate_type: aggregate_type.to_owned(), event_type: event_type.to_owned(), kinds })
    }
}

impl Value for Routes {
    const EXAMPLE: &'static str = "RESTAURANT/*=restaurant; ORDER/ORDER_*=restaurant,customer";

    fn parse(text: &str) -> Result<Self, String> {
        let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
        rules.map(Rule::parse).collect::<Result<_, _>>().map(Self)
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Array(rules) => rules.iter().map(Rule::from_toml).collect::<Result<_, _>>().map(Self),
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        let written = |rule: &Rule| format!("{}/{}={}", rule.aggregate_type, rule.event_type, rule.kinds.join(","));
        self.0.iter().map(written).collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_an_aggregate_type_notifies_the_kind_of_the_same_name() {
        let routes = Routes::default();
        assert_eq!(routes.kinds("RESTAURANT", "RESERVATION_REQUESTED"), ["restaurant"]);
        assert_eq!(routes.kinds("ADMIN", ""), ["admin"]);
        assert!(routes.kinds("restaurant", "X").is_empty() && routes.kinds("ORDER", "X").is_empty());
    }

    #[test]
    fn an_event_notifies_the_kinds_of_all_matching_rules() {
        let routes = Routes::parse("ORDER=restaurant; ORDER/*_LATE*=admin,customer; ORDER/X=admin").unwrap();
        assert_eq!(routes.kinds("ORDER", "MADE"), ["restaurant"]);
        assert_eq!(routes.kinds("ORDER", "VERY_LATE_1"), ["restaurant", "customer", "admin"]);
        assert_eq!(routes.kinds("ORDER", "X"), ["restaurant", "admin"]);
    }

    #[test]
    fn rules_are_read_as_they_are_shown() {
        let routes = Routes::parse("RESTAURANT/*=restaurant,admin;ORDER/ORDER_*=customer").unwrap();
        assert_eq!(Routes::from_toml(&routes.to_toml()), Ok(routes.clone()));
        let tables = "r = [{ aggregate_type = 'RESTAURANT', kinds = ['restaurant', 'admin'] },
                           { aggregate_type = 'ORDER', event_type = 'ORDER_*', kinds = ['customer'] }]";
        let tables: toml::Table = tables.parse().unwrap();
        assert_eq!(Routes::from_toml(&tables["r"]), Ok(routes));
        for wrong in ["RESTAURANT", "=admin", "A/=admin", "A=", "A=boss", "A*=admin", "A/B/C=admin"] {
            assert!(Routes::parse(wrong).is_err(), "{wrong}");
        }
    }
}
