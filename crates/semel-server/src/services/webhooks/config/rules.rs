//! The rules of a source's events.

use semel::messaging::Topic;

use crate::config::{Endpoint, Value, glob, wrong_type};

/// The action of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deed {
    /// It is only stored: it can be run again when there is a rule for it.
    Store,
    /// It goes to the outbox, in the commit that completes it; to this topic, or to `webhook.SOURCE.TYPE`.
    Outbox(Option<Topic>),
    /// It is posted to a URL; a 2xx is success.
    Forward(Endpoint),
    /// A handler of the program gets it.
    Handler(String),
    /// It waits until a program asks for it: `POST /v1/operations/next`.
    Pull,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A pattern of event types; `*` matches any text.
    pub kind: String,
    /// The action for these events.
    pub deed: Deed,
}

/// The rules of a source: the first match counts. Events without a match are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(pub Vec<Rule>);

/// The action for events without a matching rule.
static OTHERWISE: Deed = Deed::Store;

impl Rules {
    /// The action for events of this type.
    #[must_use]
    pub fn of(&self, kind: &str) -> &Deed {
        self.0.iter().find(|rule| glob(&rule.kind, kind)).map_or(&OTHERWISE, |rule| &rule.deed)
    }

    /// The index of the matching rule; none if there is no match.
    #[must_use]
    pub fn place(&self, kind: &str) -> Option<usize> {
        self.0.iter().position(|rule| glob(&rule.kind, kind))
    }

    /// Whether any event may go to the outbox.
    pub(super) fn publishes(&self) -> bool {
        let catches_all = self.0.iter().position(|rule| rule.kind == "*");
        let reached = &self.0[..catches_all.map_or(self.0.len(), |last| last + 1)];
        reached.iter().any(|rule| matches!(rule.deed, Deed::Outbox(_)))
    }
}

impl Rule {
    /// Reads `TYPE=store`, `TYPE=pull`, `TYPE=outbox`, `TYPE=outbox:TOPIC`, `TYPE=handler:NAME` or `TYPE=URL`.
    fn parse(text: &str) -> Result<Self, String> {
        let (kind, deed) = text.split_once('=').ok_or("has a rule that is not written such as invoice.*=outbox")?;
        let deed = match deed.trim().split_once(':') {
            None if deed.trim() == "outbox" => Deed::Outbox(None),
            None if deed.trim() == "store" => Deed::Store,
            None if deed.trim() == "pull" => Deed::Pull,
            Some(("outbox", topic)) => Deed::Outbox(Some(read_topic(topic)?)),
            Some(("handler", name)) => Deed::Handler(name.to_owned()),
            _ => Deed::Forward(read_url(deed.trim())?),
        };
        Self::of(kind.trim(), deed)
    }

    fn of(kind: &str, deed: Deed) -> Result<Self, String> {
        if kind.is_empty() || kind.chars().any(char::is_control) {
            return Err("has a rule without a type such as invoice.*".to_owned());
        }
        if matches!(&deed, Deed::Handler(name) if name.is_empty()) {
            return Err("has a rule with a handler without a name".to_owned());
        }
        Ok(Self { kind: kind.to_owned(), deed })
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        const FIELDS: [&str; 6] = ["type", "do", "topic", "forward", "handler", "pull"];
        let table = match value {
            toml::Value::String(text) => return Self::parse(text),
            toml::Value::Table(table) => table,
            other => return Err(wrong_type(other, Rules::EXAMPLE)),
        };
        if let Some(name) = table.keys().find(|name| !FIELDS.contains(&name.as_str())) {
            return Err(format!("has a rule with \"{name}\", but a rule has {}", FIELDS.join(", ")));
        }
        let text = |name: &str| match table.get(name) {
            Some(toml::Value::String(text)) => Ok(Some(text.as_str())),
            Some(_) => Err(format!("has a rule whose {name} is not a string")),
            None => Ok(None),
        };
        let topic = text("topic")?.map(read_topic).transpose()?;
        let pull = match table.get("pull") {
            None | Some(toml::Value::Boolean(false)) => false,
            Some(toml::Value::Boolean(true)) => true,
            Some(_) => return Err("has a rule whose pull is not true or false".to_owned()),
        };
        let deed = match (text("do")?, text("forward")?, text("handler")?) {
            (None, None, None) if pull && topic.is_none() => Deed::Pull,
            _ if pull => return Err("has a rule with pull and another action".to_owned()),
            (None | Some("outbox"), None, None) => Deed::Outbox(topic),
            (Some("store"), None, None) if topic.is_none() => Deed::Store,
            (Some(other), None, None) if other != "store" => {
                return Err(format!("has a rule that does \"{other}\", but it can only do \"outbox\" or \"store\""));
            }
            (None, Some(url), None) if topic.is_none() => Deed::Forward(read_url(url)?),
            (None, None, Some(name)) if topic.is_none() => Deed::Handler(name.to_owned()),
            _ => {
                return Err(
                    "has a rule with more than one of do, forward and handler, or a topic without do = \"outbox\""
                        .to_owned(),
                );
            }
        };
        Self::of(text("type")?.unwrap_or("*"), deed)
    }

    /// As shown to people, with a URL without its secrets.
    fn to_toml(&self) -> toml::Value {
        let mut table = toml::Table::new();
        let mut put = |name: &str, text: &str| drop(table.insert(name.to_owned(), text.into()));
        put("type", &self.kind);
        match &self.deed {
            Deed::Store => put("do", "store"),
            Deed::Pull => {}
            Deed::Outbox(topic) => {
                put("do", "outbox");
                if let Some(topic) = topic {
                    put("topic", topic.as_str());
                }
            }
            Deed::Forward(url) => put("forward", &url.to_string()),
            Deed::Handler(name) => put("handler", name),
        }
        if self.deed == Deed::Pull {
            table.insert("pull".to_owned(), true.into());
        }
        table.into()
    }
}

fn read_topic(text: &str) -> Result<Topic, String> {
    Topic::new(text)
        .map_err(|_| "has a topic that is not 1 to 200 letters, digits, '.', '-', '_', ':' or '/'".to_owned())
}

fn read_url(text: &str) -> Result<Endpoint, String> {
    // The text may contain a password, so no error repeats it.
    let url = <Option<Endpoint>>::parse(text).ok().flatten();
    url.ok_or_else(|| "has a rule whose forward is no URL such as https://app.example.com/hooks".to_owned())
}

impl Value for Rules {
    const EXAMPLE: &'static str = "invoice.*=https://app.example.com/hooks; *=outbox";

    fn parse(text: &str) -> Result<Self, String> {
        let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
        all(rules.map(Rule::parse))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Array(rules) => all(rules.iter().map(Rule::from_toml)),
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.iter().map(Rule::to_toml).collect::<Vec<_>>().into()
    }
}

/// All rules, or all their mistakes.
fn all(read: impl Iterator<Item = Result<Rule, String>>) -> Result<Rules, String> {
    let (mut rules, mut wrong) = (Vec::new(), Vec::new());
    for rule in read {
        match rule {
            Ok(rule) => rules.push(rule),
            Err(message) => wrong.push(message),
        }
    }
    if wrong.is_empty() { Ok(Rules(rules)) } else { Err(wrong.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(toml: &str) -> Result<Rules, String> {
        let table: toml::Table = toml.parse().unwrap();
        Rules::from_toml(&table["handlers"])
    }

    #[test]
    fn the_first_rule_that_fits_counts_and_the_rest_is_stored() {
        let rules = rules(
            "[[handlers]]\ntype = 'invoice.*'\nforward = 'https://app.example.com/hooks'\n\
             [[handlers]]\ntype = 'invoice.paid'\nhandler = 'never reached'\n\
             [[handlers]]\ntype = 'charge.*'\ndo = 'outbox'\ntopic = 'charges'\n",
        )
        .unwrap();
        assert!(matches!(rules.of("invoice.paid"), Deed::Forward(_)));
        assert!(matches!(rules.of("charge.refunded"), Deed::Outbox(Some(topic)) if topic.as_str() == "charges"));
        assert_eq!(rules.of("customer.created"), &Deed::Store);
        assert_eq!(Rules::default().of("x"), &Deed::Store);
        assert_eq!((rules.place("charge.refunded"), rules.place("x")), (Some(2), None));
    }

    #[test]
    fn rules_are_read_as_they_are_shown_and_as_a_variable_has_them() {
        let written = "a.*=outbox; s=store; p=pull; b=outbox:there; c=handler:mine; *=https://x.example/y?z=1";
        let rules = Rules::parse(written).unwrap();
        let shown = rules.to_toml();
        assert!(!shown.to_string().contains("z=1") && !shown.to_string().contains("/y"), "each may be a secret");
        let plain =
            Rules::parse("a.*=outbox; s=store; p=pull; b=outbox:there; c=handler:mine; *=https://x.example/").unwrap();
        assert_eq!(Rules::from_toml(&plain.to_toml()), Ok(plain));
    }

    #[test]
    fn every_wrong_rule_is_reported() {
        let told = rules(
            "handlers = [{ type = 'a', do = 'dance' }, { type = 'b', forward = 'geheim' }, { typ = 'c' },
                         { type = 'd', forward = 'https://x.example', handler = 'e' }, { handler = '' },
                         { pull = true, do = 'store' }, { pull = 'yes' }]",
        )
        .unwrap_err();
        assert_eq!(told.split("; ").count(), 7, "{told}");
        assert!(told.contains("dance") && told.contains("\"typ\"") && !told.contains("geheim"), "{told}");
    }

    #[test]
    fn rules_after_one_that_matches_everything_are_ignored() {
        let publishes = |text| Rules::parse(text).unwrap().publishes();
        assert!(publishes("*=outbox") && publishes("a=outbox; *=handler:x") && publishes("a=outbox"));
        for text in ["", "a=handler:x", "*=store", "*=handler:x", "*=handler:x; a=outbox"] {
            assert!(!publishes(text), "{text}");
        }
    }
}
