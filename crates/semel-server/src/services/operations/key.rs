//! The key of an operation that is named by its inputs. docs/keys.md has the rule for other languages.

use semel::{Fingerprint, Key};

/// The longest readable head of a key that is too long: with the mark and the digits of the hash it has the longest
/// length of a key.
const HEAD: usize = Key::MAX_BYTES - 1 - 64;

/// What names an operation. An omitted part is an empty text.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts {
    pub(super) process: String,
    pub(super) activity: String,
    pub(super) name: String,
    pub(super) input_hash: String,
}

impl Parts {
    /// The key: the parts, joined. A longer one keeps its readable head, and a hash stands for the rest.
    pub(super) fn key(&self) -> String {
        let whole = format!("{}_{}_{}_{}", self.process, self.activity, self.name, self.input_hash);
        if whole.len() <= Key::MAX_BYTES {
            return whole;
        }
        let head = &whole[..whole.floor_char_boundary(HEAD)];
        format!("{head}~{}", semel::sha256_hex(whole.as_bytes()))
    }

    /// The fingerprint covers the parts as separate fields: two operations whose parts join to one text differ.
    pub(super) fn fingerprint(&self) -> Fingerprint {
        let fields = Fingerprint::fields();
        let fields = fields.field("processInstanceId", self.process.as_bytes());
        let fields = fields.field("activityId", self.activity.as_bytes());
        let fields = fields.field("operationName", self.name.as_bytes());
        fields.field("inputHash", self.input_hash.as_bytes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    struct Vector {
        process_instance_id: String,
        activity_id: String,
        operation_name: String,
        input_text: String,
        input_hash: String,
        key: String,
    }

    impl Default for Vector {
        fn default() -> Self {
            let [process_instance_id, activity_id, operation_name, input_text, input_hash, key] = Default::default();
            Self { process_instance_id, activity_id, operation_name, input_text, input_hash, key }
        }
    }

    #[test]
    fn keys_are_those_of_the_documented_vectors() {
        let vectors: Vec<Vector> = serde_json::from_str(include_str!("vectors.json")).unwrap();
        assert!(vectors.len() >= 8);
        let documented = include_str!("../../../../../docs/keys.md");
        for vector in vectors {
            let input_hash = semel::json_hash(vector.input_text.as_bytes()).unwrap();
            assert_eq!(input_hash, vector.input_hash, "{}", vector.input_text);
            let parts = Parts {
                process: vector.process_instance_id,
                activity: vector.activity_id,
                name: vector.operation_name,
                input_hash,
            };
            assert_eq!(parts.key(), vector.key);
            assert!(Key::new(&parts.key()).is_ok());
            assert!(documented.contains(&vector.key), "docs/keys.md has no {}", vector.key);
        }
    }

    #[test]
    fn parts_that_join_to_one_text_have_different_fingerprints() {
        let parts = |process: &str, activity: &str| Parts {
            process: process.to_owned(),
            activity: activity.to_owned(),
            name: "n".to_owned(),
            input_hash: "h".to_owned(),
        };
        let (one, other) = (parts("a_b", "c"), parts("a", "b_c"));
        assert_eq!(one.key(), other.key());
        assert_ne!(one.fingerprint(), other.fingerprint());
    }
}
