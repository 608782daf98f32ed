//! Fields that accept several JSON types. The deserializers are handwritten, because serde's
//! `untagged` copies each value once per nesting level of such types.

use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::at_most;
use crate::error::ApiError;
use crate::state::App;

/// A text, or a list.
#[derive(Debug, Clone)]
pub(crate) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Reader<T> {
            type Value = TextOr<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a list")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(TextOr::List)
            }
        }
        deserializer.deserialize_any(Reader(PhantomData))
    }
}

/// One text or several.
pub(crate) type OneOrMore = TextOr<String>;

impl OneOrMore {
    pub(crate) fn list(&self) -> Vec<String> {
        match self {
            TextOr::Text(text) => vec![text.clone()],
            TextOr::List(texts) => texts.clone(),
        }
    }
}

/// Prompts as clients write them.
#[derive(Debug, Clone)]
pub(crate) enum Prompts {
    One(inference::Prompt),
    More(Vec<inference::Prompt>),
}

/// An element of a list of prompts: a prompt, or one token id of a single prompt.
enum Element {
    Id(u32),
    Prompt(inference::Prompt),
}

/// llama.cpp's object form of a prompt. llama.cpp also allows other fields there; this server
/// allows only text.
fn of_object<E: de::Error>(mut map: Map<String, Value>) -> Result<inference::Prompt, E> {
    match (map.remove("prompt_string"), map.is_empty()) {
        (Some(Value::String(text)), true) => Ok(text.into()),
        _ => Err(E::custom(
            "a prompt object has prompt_string and nothing else",
        )),
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Element;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text, a token id or a list of token ids")
            }
            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
                let actual = de::Unexpected::Unsigned(id);
                u32::try_from(id)
                    .map(Element::Id)
                    .map_err(|_| E::invalid_value(actual, &self))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Prompt(text.into()))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Element, E> {
                Ok(Element::Prompt(text.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Element, A::Error> {
                let ids: Vec<u32> = Vec::deserialize(SeqAccessDeserializer::new(list))?;
                Ok(Element::Prompt(ids.into()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Element, A::Error> {
                let map = Map::deserialize(MapAccessDeserializer::new(map))?;
                of_object(map).map(Element::Prompt)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Prompts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text, a list of texts, token ids, or a list of lists of token ids")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts::One(text.into()))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Prompts, E> {
                Ok(Prompts::One(text.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                let (mut ids, mut prompts) = (Vec::new(), Vec::new());
                while let Some(element) = list.next_element()? {
                    match element {
                        Element::Id(id) if prompts.is_empty() => ids.push(id),
                        Element::Prompt(prompt) if ids.is_empty() => prompts.push(prompt),
                        _ => {
                            let message = "a list has either token ids or prompts";
                            return Err(de::Error::custom(message));
                        }
                    }
                }
                Ok(match prompts.is_empty() {
                    true => Prompts::One(ids.into()),
                    false => Prompts::More(prompts),
                })
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Prompts, A::Error> {
                let map = Map::deserialize(MapAccessDeserializer::new(map))?;
                of_object(map).map(Prompts::One)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl Prompts {
    pub(crate) fn list(self) -> Vec<inference::Prompt> {
        match self {
            Prompts::One(prompt) => vec![prompt],
            Prompts::More(prompts) => prompts,
        }
    }

    /// The prompts of a request. There must be at least one, and no more than the limit.
    pub(crate) fn checked(
        prompts: Option<Self>,
        app: &App,
    ) -> Result<Vec<inference::Prompt>, ApiError> {
        let prompts = prompts.map(Self::list).unwrap_or_default();
        at_most("prompt", prompts.len(), app.limits.prompts)?;
        if prompts.is_empty() {
            return Err(ApiError::field("prompt", "there is no prompt"));
        }
        Ok(prompts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inference::Prompt;

    fn prompts(json: &str) -> Result<(bool, Vec<Prompt>), String> {
        let read: Prompts = serde_json::from_str(json).map_err(|e| e.to_string())?;
        Ok((matches!(read, Prompts::More(_)), read.list()))
    }

    #[test]
    fn prompts_have_many_forms() {
        let ids = |ids: &[u32]| Prompt::from(ids);
        for (json, several, expected) in [
            (r#""a\n""#, false, vec![Prompt::from("a\n")]),
            ("[]", false, vec![ids(&[])]),
            ("[1, 2]", false, vec![ids(&[1, 2])]),
            (r#"["a", "b"]"#, true, vec!["a".into(), "b".into()]),
            ("[[1], [2, 3]]", true, vec![ids(&[1]), ids(&[2, 3])]),
            (r#"["a", [1]]"#, true, vec!["a".into(), ids(&[1])]),
            (r#"{"prompt_string": "a"}"#, false, vec!["a".into()]),
            (r#"[{"prompt_string": "a"}]"#, true, vec!["a".into()]),
        ] {
            assert_eq!(prompts(json).unwrap(), (several, expected), "{json}");
        }
        for (json, says) in [
            ("[1, \"a\"]", "either"),
            ("[\"a\", 1]", "either"),
            ("[-1]", "a token id"),
            ("[4294967296]", "a token id"),
            ("[[[1]]]", "u32"),
            ("3", "a list of texts"),
            ("{}", "prompt_string"),
            (r#"{"prompt_string": "a", "b": 1}"#, "prompt_string"),
        ] {
            let error = prompts(json).unwrap_err();
            assert!(error.contains(says), "{json}: {error}");
        }
    }

    #[test]
    fn a_text_or_a_list() {
        let read = |json: &str| serde_json::from_str::<OneOrMore>(json).map(|o| o.list());
        assert_eq!(read("\"a\"").unwrap(), ["a"]);
        assert_eq!(read("[\"a\", \"b\"]").unwrap(), ["a", "b"]);
        for bad in ["1", "{}", "[1]", "null"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
