//! The label of an upload, from the name that the client gave its file.

use unicode_normalization::UnicodeNormalization;

use super::text::is_bidi;

/// What common file systems allow, so a download can use the label again.
const MAX_BYTES: usize = 255;
/// Longer endings are no extensions but text that happens to contain a dot.
const MAX_EXTENSION: usize = 16;

/// The base name, safe to show and to log. It is a label only: no path is ever made of it, hence names such as `CON`
/// need no care. `None` if nothing is left.
pub(crate) fn clean(name: &str) -> Option<String> {
    let base = name.rsplit(['/', '\\']).next()?;
    let is_dropped = |c: char| c.is_control() || is_bidi(c) || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}');
    let visible: String = base.chars().filter(|&c| !is_dropped(c)).nfc().collect();
    let label = shorten(visible.trim());
    let is_empty = label.chars().all(|c| c == '.' || c.is_whitespace());
    if is_empty { None } else { Some(label) }
}

/// Cuts the end of the stem, so that a long `.csv` remains one.
fn shorten(name: &str) -> String {
    if name.len() <= MAX_BYTES {
        return name.to_owned();
    }
    let extension = match name.rfind('.') {
        Some(dot) if dot > 0 && name.len() - dot <= MAX_EXTENSION => &name[dot..],
        _ => "",
    };
    let stem = &name[..name.len() - extension.len()];
    let stem = &stem[..stem.floor_char_boundary(MAX_BYTES - extension.len())];
    format!("{}{extension}", stem.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cleaned(name: &str) -> String {
        clean(name).unwrap_or_else(|| panic!("{name:?} leaves nothing"))
    }

    #[test]
    fn only_the_base_name_is_kept() {
        assert_eq!(cleaned("../../etc/passwd"), "passwd");
        assert_eq!(cleaned(r"C:\x.csv"), "x.csv");
        assert_eq!(cleaned(r"C:\fakepath/a\b.csv"), "b.csv");
        assert_eq!(cleaned("list.csv"), "list.csv");
    }

    #[test]
    fn control_characters_and_bidi_overrides_are_removed() {
        assert_eq!(cleaned("a\0b.csv"), "ab.csv");
        assert_eq!(cleaned("a\r\nb.csv\n"), "ab.csv");
        assert_eq!(cleaned("list\u{202e}vsc.exe"), "listvsc.exe");
        assert_eq!(cleaned("\u{2067}a\u{2069}\u{200f}\u{feff}.csv"), "a.csv");
    }

    #[test]
    fn a_name_without_visible_text_is_none() {
        for name in ["", ".", "..", "...", " ", "a/", r"a\", ".\0.", "\n", "\u{202e}", "../..", ". ."] {
            assert_eq!(clean(name), None, "{name:?}");
        }
    }

    #[test]
    fn reserved_names_are_labels_like_others() {
        assert_eq!(cleaned("CON"), "CON");
        assert_eq!(cleaned(".htaccess"), ".htaccess");
    }

    #[test]
    fn composed_and_decomposed_names_are_equal() {
        assert_eq!(cleaned("cafe\u{301}.csv"), cleaned("caf\u{e9}.csv"));
    }

    #[test]
    fn a_long_name_is_cut_at_a_character_and_keeps_its_extension() {
        assert_eq!(cleaned(&format!("{}.csv", "a".repeat(296))), format!("{}.csv", "a".repeat(251)));
        assert_eq!(cleaned(&format!("{}.csv", "ü".repeat(148))), format!("{}.csv", "ü".repeat(125)));
        assert_eq!(cleaned(&"a".repeat(300)), "a".repeat(255));
        assert_eq!(cleaned(&format!("a.{}", "b".repeat(298))), format!("a.{}", "b".repeat(253)));
        assert_eq!(cleaned(&"a".repeat(255)), "a".repeat(255));
    }

    proptest::proptest! {
        #[test]
        fn a_clean_name_is_short_and_stays_as_it_is(name in ".{0,300}") {
            if let Some(label) = clean(&name) {
                assert!(label.len() <= MAX_BYTES && !label.contains(['/', '\\', '\0', '\n']));
                assert_eq!(clean(&label), Some(label));
            }
        }
    }
}
