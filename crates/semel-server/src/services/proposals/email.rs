//! The validation of email addresses.

/// Accepts a valid email of at most 255 characters. The quoted local parts and bracketed hosts of the old standards are
/// refused: in a form, they are mistakes. Only ASCII is accepted: two addresses that look the same could otherwise be
/// two clients, and two that differ could be one.
pub(super) fn valid(email: &str) -> Result<(), &'static str> {
    if email.chars().count() > 255 {
        return Err("must have at most 255 characters");
    }
    if !email.is_ascii() {
        return Err("must be in ASCII");
    }
    let right = email.rsplit_once('@').is_some_and(|(local, domain)| is_local(local) && is_domain(domain));
    if right { Ok(()) } else { Err("must be an address such as ana@example.com") }
}

fn is_local(local: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+/=?^_`{|}~-".contains(c);
    local.len() <= 64 && local.split('.').all(|part| !part.is_empty() && part.chars().all(fits))
}

fn is_domain(domain: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    domain.contains('.') && domain.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_addresses_are_accepted_and_malformed_ones_refused() {
        for email in ["joao@example.com", "a.b+c@x.co.uk", "o'neil@x-y.org", "1@2.3x"] {
            assert_eq!(valid(email), Ok(()), "{email}");
        }
        let long = format!("{}@example.com", "a".repeat(65));
        let longer = format!("a@{}com", "example.".repeat(32));
        for email in [
            "",
            "@",
            "joao",
            "joao@",
            "@example.com",
            "joao@example",
            "joao@@example.com",
            "jo ao@example.com",
            ".joao@example.com",
            "joao.@example.com",
            "jo..ao@example.com",
            "joao@.com",
            "joao@example.com.",
            "joao@-x.com",
            "joao@x-.com",
            "joao@exam_ple.com",
            "joão@example.com",
            "\u{212a}ai@example.com",
            "joao@exâmple.com",
            "Joao <joao@example.com>",
            " joao@example.com",
            "joao@example.com\n",
            &long,
            &longer,
        ] {
            assert!(valid(email).is_err(), "{email}");
        }
    }
}
