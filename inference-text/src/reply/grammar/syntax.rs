//! The syntax in which a family writes a call whose arguments are not JSON.

use super::super::{Family, Tool, Tools};
use super::schema::{self, Members};
use super::tagged::Tags;
use super::values::{MAX_KEY, Notation, Values, is_bare};
use super::{CallBody, CallShape, GrammarUnavailable};

/// How a family writes a call.
pub(super) enum Syntax {
    /// Each argument between tags.
    Tagged(&'static Tags),
    /// `f(k=v)`.
    Python,
    /// `call:f{k:v}` between two tags, with a mark around strings.
    Gemma {
        open: &'static str,
        mark: &'static str,
        close: &'static str,
    },
}

impl Syntax {
    /// The syntax of a family; `None` if it writes JSON.
    pub(super) fn of(family: Family) -> Option<Self> {
        match family {
            Family::Qwen3Coder => Some(Self::Tagged(&Tags::QWEN)),
            Family::Glm4Moe => Some(Self::Tagged(&Tags::GLM)),
            Family::MiniMax => Some(Self::Tagged(&Tags::MINIMAX)),
            Family::Pythonic | Family::Lfm2 | Family::Olmo3 => Some(Self::Python),
            Family::FunctionGemma => Some(Self::Gemma {
                open: "<start_function_call>",
                mark: "<escape>",
                close: "<end_function_call>",
            }),
            Family::Gemma4 => Some(Self::Gemma {
                open: "<|tool_call>",
                mark: "<|\"|>",
                close: "<tool_call|>",
            }),
            _ => None,
        }
    }

    /// The call of a tool, whose rules contain `index` in their names.
    pub(super) fn shape(
        &self,
        family: Family,
        tools: &Tools,
        tool: &Tool,
        index: usize,
    ) -> Result<CallShape, GrammarUnavailable> {
        self.try_shape(tools, tool, index)
            .map_err(|what| GrammarUnavailable::Inexpressible {
                family,
                tool: tool.name.clone(),
                what,
            })
    }

    fn try_shape(&self, tools: &Tools, tool: &Tool, index: usize) -> Result<CallShape, String> {
        let name = &tool.name;
        let root = &tool.parameters;
        let members = schema::arguments(root)?;
        let (prefix, notation, suffix) = match self {
            Self::Tagged(tags) => (tags.head(name)?, Notation::Json, tags.foot.to_owned()),
            Self::Python => {
                if !is_python_name(name) {
                    return Err(String::from(
                        "the tool's name is no name of a Python function",
                    ));
                }
                (format!("{name}("), Notation::Python, String::from(")"))
            }
            Self::Gemma { open, mark, close } => {
                if !is_bare(name) {
                    return Err(String::from("the tool's name cannot be written"));
                }
                (
                    format!("{open}call:{name}{{"),
                    Notation::Gemma(mark),
                    format!("}}{close}"),
                )
            }
        };
        let mut values = Values::new(root, notation, index);
        let start = values.name("arguments");
        let named = match self {
            Self::Tagged(tags) => tags.arguments(&mut values, tools, name, &members)?,
            _ => {
                for (key, _, _) in &members.named {
                    self.check_key(key)?;
                }
                let named = Members {
                    others: None,
                    ..members
                };
                values.members(&start, &named, true)?
            }
        };
        values.rule(&start, &named);
        Ok(CallShape {
            tool: name.clone(),
            prefix,
            body: CallBody::Rules {
                start,
                rules: values.finish()?,
            },
            suffix,
        })
    }

    /// Refuses the name of an argument that the family cannot write.
    fn check_key(&self, key: &str) -> Result<(), String> {
        let usable = match self {
            Self::Python => is_python_name(key) && !key.contains('-'),
            _ => is_bare(key),
        };
        if usable && key.len() <= MAX_KEY {
            Ok(())
        } else {
            Err(format!(
                "the property '{key}' cannot be written as the name of an argument"
            ))
        }
    }
}

fn is_python_name(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_alphabetic() || c == '_')
        && chars.all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
}
