//! Addresses that are valid, and perhaps not meant so. They get their mails; a person may look at the list.

use super::address::Email;

/// Whether the local part has a tag: `ana+news@example.com` is often a second address of `ana@example.com`.
pub(crate) fn has_plus_tag(email: &Email) -> bool {
    email.normal.split('@').next().is_some_and(|local| local.find('+').is_some_and(|at| at > 0))
}

/// Whether a label of the domain or a word of the local part mixes letters of scripts that look alike: with a Cyrillic
/// letter like `a`, `example.com` is another domain, and `ana` another person. Words end at other characters than letters
/// and digits. Nearly all addresses are ASCII, which costs one search.
pub(crate) fn has_mixed_scripts(email: &Email) -> bool {
    let Some((local, domain)) = email.normal.rsplit_once('@') else { return false };
    if local.is_ascii() && !domain.contains("xn--") {
        return false;
    }
    let (domain, _) = idna::domain_to_unicode(domain);
    let scripts: [fn(char) -> bool; 3] = [is_latin, is_greek, is_cyrillic];
    let is_mixed = |word: &str| scripts.iter().filter(|script| word.chars().any(script)).count() > 1;
    domain.split('.').any(is_mixed) || local.split(|c: char| !c.is_alphanumeric()).any(is_mixed)
}

fn is_latin(c: char) -> bool {
    c.is_ascii_alphabetic() || matches!(c, '\u{c0}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}')
}

fn is_greek(c: char) -> bool {
    matches!(c, '\u{370}'..='\u{3ff}' | '\u{1f00}'..='\u{1fff}')
}

fn is_cyrillic(c: char) -> bool {
    matches!(c, '\u{400}'..='\u{52f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_and_mixed_scripts_are_noticed() {
        for (text, tag, mixed) in [
            ("ana@example.com", false, false),
            ("ana+news@example.com", true, false),
            ("+ana@example.com", false, false),
            ("u@m\u{fc}nchen.de", false, false),
            ("u@ex\u{430}mple.com", false, true),
            ("u@\u{43f}\u{440}\u{438}\u{43c}\u{435}\u{440}.com", false, false),
            ("u@\u{65e5}\u{672c}abc.jp", false, false),
            ("a+b@\u{3bf}racle.com", true, true),
            ("\u{430}na@example.com", false, true),
            ("\u{438}\u{432}\u{430}\u{43d}.ana@example.com", false, false),
        ] {
            let email = Email::parse(text).unwrap();
            assert_eq!((has_plus_tag(&email), has_mixed_scripts(&email)), (tag, mixed), "{text}");
        }
    }
}
