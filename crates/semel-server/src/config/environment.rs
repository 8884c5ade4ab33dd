//! The environment variables, as a value that tests can make up.

use std::{collections::BTreeMap, ffi::OsString};

/// A set of environment variables.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

/// The variable is set to bytes that are not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotText;

impl Environment {
    /// The variables this process was started with.
    #[must_use]
    pub fn of_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// The value of a variable, which may be empty.
    pub(super) fn get(&self, name: &str) -> Result<Option<&str>, NotText> {
        self.0.get(&OsString::from(name)).map(|value| value.to_str().ok_or(NotText)).transpose()
    }

    /// The names that begin with `SEMEL_`, without those of Kubernetes and of the tests.
    ///
    /// A service named `semel` makes Kubernetes set `SEMEL_SERVICE_HOST`, `SEMEL_PORT=tcp://…` and the like in every
    /// pod of its namespace; warnings about those would bury the others. The scripts that start servers for the tests
    /// set `SEMEL_TEST_…` and `SEMEL_SERVER_DIR`, which are not for the program.
    pub(super) fn ours(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|(name, value)| {
            let name = name.to_str()?;
            let rest = name.strip_prefix("SEMEL_")?;
            let kubernetes = rest.starts_with("SERVICE_")
                || rest.starts_with("PORT_")
                || (rest == "PORT" && value.to_str().is_some_and(|value| value.contains("://")));
            let tests = rest.starts_with("TEST_") || rest == "SERVER_DIR";
            (!kubernetes && !tests).then_some(name)
        })
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}
