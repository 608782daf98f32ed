//! What goes into a model: chat messages and prompts.

use serde::{Deserialize, Serialize};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what the model's template knows besides.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }

    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// An instruction to the model.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A turn of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// What a model continues.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text, encoded with the special tokens the model wants around it, without a chat template.
    Text(String),
    /// Token ids, used exactly as they are.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Prompt::Text(text.to_owned())
    }
}
impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text(text)
    }
}
impl From<&String> for Prompt {
    fn from(text: &String) -> Self {
        Prompt::Text(text.clone())
    }
}
impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Prompt::Tokens(ids)
    }
}
impl From<&[u32]> for Prompt {
    fn from(ids: &[u32]) -> Self {
        Prompt::Tokens(ids.to_vec())
    }
}
impl<const N: usize> From<[u32; N]> for Prompt {
    fn from(ids: [u32; N]) -> Self {
        Prompt::Tokens(ids.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_come_from_text_and_ids() {
        assert_eq!(Prompt::from("a"), Prompt::Text(String::from("a")));
        assert_eq!(Prompt::from(&String::from("a")), Prompt::from("a"));
        assert_eq!(Prompt::from(vec![1, 2]), Prompt::from(&[1u32, 2][..]));
        assert_eq!(Prompt::from([1, 2]), Prompt::Tokens(vec![1, 2]));
    }

    #[test]
    fn messages_survive_json() {
        let m = Message::assistant("hi \"there\"");
        let json = serde_json::to_string(&m).unwrap();
        assert_eq!(json, r#"{"role":"assistant","content":"hi \"there\""}"#);
        assert_eq!(serde_json::from_str::<Message>(&json).unwrap(), m);
        assert!(serde_json::from_str::<Message>(r#"{"role": "user"}"#).is_err());
    }
}
