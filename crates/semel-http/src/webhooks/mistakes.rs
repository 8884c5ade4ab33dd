//! Mistakes in the settings of a verifier.

use std::{error::Error, fmt};

/// A setting that cannot be used. It never repeats a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The setting: `tolerance`, `secrets`, `secrets[1]`, or a field of [`HmacScheme`](super::HmacScheme).
    pub field: String,
    /// The mistake; completes a sentence that begins with the field.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field, self.what)
    }
}

/// All mistakes in the settings of a verifier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistakes(Vec<Mistake>);

impl Mistakes {
    /// The mistakes, at least one, in the order of the settings.
    #[must_use]
    pub fn all(&self) -> &[Mistake] {
        &self.0
    }

    pub(super) fn add(&mut self, field: impl Into<String>, what: impl Into<String>) {
        self.0.push(Mistake { field: field.into(), what: what.into() });
    }

    pub(super) fn none_or_err(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, mistake) in self.0.iter().enumerate() {
            write!(f, "{}{mistake}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl Error for Mistakes {}
