//! Limits on the size of a grammar. Grammar libraries recurse over schemas, and some schemas need
//! exponential time. So a grammar above the limits is refused before a library receives it. The
//! check does not recurse, so a small stack suffices.

use std::collections::HashMap;

use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};

/// Bytes of a schema, approximately the length of its text.
pub const SCHEMA_BYTES: usize = 1 << 20;
/// Nesting depth of JSON values; `serde_json` has the same limit.
pub const SCHEMA_DEPTH: usize = 128;
/// Number of JSON values in a schema.
pub const SCHEMA_VALUES: usize = 100_000;
/// Number of members in one object, such as `properties` or definitions.
pub const MEMBERS: usize = 2_000;
/// Number of values in an `enum`.
pub const ENUM: usize = 10_000;
/// Number of elements in any other array, such as `anyOf` or `prefixItems`.
pub const ELEMENTS: usize = 2_000;
/// Number of distinct targets of `$ref`. The limit also bounds the length of a chain of references.
pub const REFERENCES: usize = 1_000;
/// Sum of the depths of all `$ref` targets, which bounds nesting through references.
pub const REFERENCED_DEPTH: usize = 4_096;
/// Bytes of one `pattern`, or of a key of `patternProperties`.
pub const PATTERN: usize = 4_096;
/// Number of keys in one `patternProperties`. Each key is compared with every other key.
pub const PATTERN_PROPERTIES: usize = 64;
/// Number of patterns and formats that one string must match at once, through `allOf` and `$ref`.
/// Each one doubles the time to combine them.
pub const COMBINED_PATTERNS: usize = 10;
/// A repetition count, such as `maxItems`.
pub const REPETITIONS: u64 = i32::MAX as u64;
/// Bytes of a regular expression.
pub const REGEX_BYTES: usize = 256 << 10;
/// Bytes of a Lark grammar.
pub const LARK_BYTES: usize = 128 << 10;
/// Number of colons in a Lark grammar. Each rule and each terminal has one colon.
pub const LARK_COLONS: usize = 4_000;
/// Number of `&` operators in a Lark grammar. The reason is that of [`COMBINED_PATTERNS`].
pub const LARK_INTERSECTIONS: usize = 10;

/// The maximum length of a JSON pointer in an error, in characters.
const SHOWN: usize = 200;

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

/// The step from a value to one of its children.
#[derive(Clone, Copy)]
enum Step<'a> {
    Root,
    Key(&'a str),
    Index(usize),
}

struct Node<'a> {
    value: &'a Value,
    parent: usize,
    step: Step<'a>,
    depth: usize,
    /// The members or elements are the nodes `first..first + count`.
    first: usize,
    count: usize,
}

struct Walk<'a> {
    nodes: Vec<Node<'a>>,
}

/// Refuses a schema that is too large, too deep, or too expensive to compile.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] with the exceeded limit and the JSON pointer of the value.
pub fn check_schema(schema: &Value) -> Result<()> {
    let walk = Walk::new(schema)?;
    for at in 0..walk.nodes.len() {
        walk.check_keywords(at)?;
    }
    let targets = walk.check_references(schema)?;
    walk.check_patterns(&targets)
}

impl<'a> Walk<'a> {
    /// Lists all values of a schema. Each value precedes its children.
    fn new(schema: &'a Value) -> Result<Self> {
        let mut walk = Self {
            nodes: vec![Node {
                value: schema,
                parent: 0,
                step: Step::Root,
                depth: 1,
                first: 0,
                count: 0,
            }],
        };
        let mut bytes = 0usize;
        let mut at = 0;
        while at < walk.nodes.len() {
            let (value, depth) = (walk.nodes[at].value, walk.nodes[at].depth);
            if depth > SCHEMA_DEPTH {
                return walk.refuse(
                    at,
                    format!("values are nested deeper than {SCHEMA_DEPTH} levels"),
                );
            }
            if let Step::Key(key) = walk.nodes[at].step {
                bytes = bytes.saturating_add(key.len() + 3);
            }
            bytes = bytes.saturating_add(match value {
                Value::String(text) => text.len() + 3,
                Value::Number(_) => 8,
                _ => 3,
            });
            if bytes > SCHEMA_BYTES {
                return walk.refuse(
                    at,
                    format!("the schema is longer than {SCHEMA_BYTES} bytes"),
                );
            }
            walk.check_lengths(at)?;
            let first = walk.nodes.len();
            let child = |value, step| Node {
                value,
                parent: at,
                step,
                depth: depth + 1,
                first: 0,
                count: 0,
            };
            match value {
                Value::Object(members) => {
                    let members = members.iter();
                    let nodes = members.map(|(key, value)| child(value, Step::Key(key)));
                    walk.nodes.extend(nodes);
                }
                Value::Array(elements) => {
                    let elements = elements.iter().enumerate();
                    let nodes = elements.map(|(i, value)| child(value, Step::Index(i)));
                    walk.nodes.extend(nodes);
                }
                _ => {}
            }
            let count = walk.nodes.len() - first;
            (walk.nodes[at].first, walk.nodes[at].count) = (first, count);
            if walk.nodes.len() > SCHEMA_VALUES {
                return walk.refuse(
                    at,
                    format!("the schema has more than {SCHEMA_VALUES} values"),
                );
            }
            at += 1;
        }
        Ok(walk)
    }

    /// Refuses objects and arrays that are too long, before their elements are listed.
    fn check_lengths(&self, at: usize) -> Result<()> {
        let step = self.nodes[at].step;
        let (count, most, what) = match (self.nodes[at].value, step) {
            (Value::Object(members), Step::Key("patternProperties")) => {
                (members.len(), PATTERN_PROPERTIES, "patternProperties")
            }
            (Value::Object(members), _) => (members.len(), MEMBERS, "members of one object"),
            (Value::Array(values), Step::Key("enum")) => (values.len(), ENUM, "values of an enum"),
            (Value::Array(values), _) => (values.len(), ELEMENTS, "elements of one array"),
            _ => return Ok(()),
        };
        if count > most {
            return self.refuse(
                at,
                format!("there are {count} {what}; at most {most} are allowed"),
            );
        }
        Ok(())
    }

    fn check_keywords(&self, at: usize) -> Result<()> {
        let node = &self.nodes[at];
        let Step::Key(key) = node.step else {
            return Ok(());
        };
        let in_patterns = matches!(self.nodes[node.parent].step, Step::Key("patternProperties"));
        let pattern = match (key, node.value) {
            ("pattern" | "whitespace_pattern", Value::String(pattern)) => pattern.len(),
            _ if in_patterns => key.len(),
            _ => 0,
        };
        if pattern > PATTERN {
            return self.refuse(
                at,
                format!("a pattern has {pattern} bytes; at most {PATTERN} are allowed"),
            );
        }
        let counts = ["minItems", "maxItems", "minLength", "maxLength"];
        let counts = counts.iter().chain(&["minProperties", "maxProperties"]);
        let mut counts = counts.filter(|name| **name == key);
        match (counts.next(), node.value.as_u64()) {
            (Some(name), Some(n)) if n > REPETITIONS => self.refuse(
                at,
                format!("{name} is {n}; at most {REPETITIONS} are allowed"),
            ),
            _ => Ok(()),
        }
    }

    /// Returns the target node of each `$ref` whose target is in the schema.
    fn check_references(&self, schema: &'a Value) -> Result<HashMap<&'a str, usize>> {
        let places: HashMap<*const Value, usize> = self
            .nodes
            .iter()
            .enumerate()
            .map(|(at, node)| (std::ptr::from_ref(node.value), at))
            .collect();
        let mut heights = vec![1usize; self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate().skip(1).rev() {
            heights[node.parent] = heights[node.parent].max(heights[at] + 1);
        }
        let mut targets: HashMap<&str, usize> = HashMap::new();
        let mut names = 0;
        let mut depth = heights[0];
        for (at, node) in self.nodes.iter().enumerate() {
            let (Step::Key("$ref"), Value::String(target)) = (node.step, node.value) else {
                continue;
            };
            if targets.contains_key(target.as_str()) {
                continue;
            }
            names += 1;
            if names > REFERENCES {
                return self.refuse(
                    at,
                    format!("there are more than {REFERENCES} different targets of $ref"),
                );
            }
            let place = resolve(schema, target).and_then(|v| places.get(&std::ptr::from_ref(v)));
            if let Some(&place) = place {
                depth += heights[place];
                targets.insert(target, place);
            }
            if depth > REFERENCED_DEPTH {
                return self.refuse(
                    at,
                    format!(
                        "the targets of $ref are deeper than {REFERENCED_DEPTH} levels together"
                    ),
                );
            }
        }
        Ok(targets)
    }

    /// Refuses schemas in which one string must match too many patterns at once.
    fn check_patterns(&self, targets: &HashMap<&str, usize>) -> Result<()> {
        /// State of a node: unvisited, in progress, or the number of patterns that a string in it
        /// must match.
        #[derive(Clone, Copy, PartialEq)]
        enum State {
            New,
            Open,
            Done(usize),
        }
        let mut states = vec![State::New; self.nodes.len()];
        // Depth-first search: a node is finished at its second visit, after the nodes that it
        // depends on.
        let mut stack = vec![0];
        while let Some(&at) = stack.last() {
            let node = &self.nodes[at];
            let children = node.first..node.first + node.count;
            let target = match (node.step, node.value) {
                (Step::Key("$ref"), Value::String(target)) => targets.get(target.as_str()),
                _ => None,
            };
            if states[at] == State::New {
                states[at] = State::Open;
                let needed = children.clone().chain(target.copied());
                stack.extend(needed.filter(|&other| states[other] == State::New));
                continue;
            }
            stack.pop();
            if states[at] != State::Open {
                continue;
            }
            // A reference to a node in progress closes a cycle, which adds no patterns.
            let of = |other: usize| match states[other] {
                State::Done(n) => n,
                _ => 0,
            };
            let most = || children.clone().map(of).max().unwrap_or(0);
            let count = match (node.step, node.value) {
                (Step::Key("$ref"), _) => target.map_or(0, |&other| of(other)),
                (Step::Key("pattern" | "format"), Value::String(_)) => 1,
                (Step::Key("allOf"), Value::Array(_)) => children.clone().map(of).sum(),
                (Step::Key("enum" | "const" | "default" | "examples"), _) => 0,
                // All keywords of a schema apply to the same value, so their patterns add up.
                // Entries of `properties` apply to different values.
                (_, Value::Object(_)) if !self.is_map(at) => {
                    let mut together = 0;
                    let mut apart = 0;
                    for child in children.clone() {
                        match self.nodes[child].step {
                            Step::Key(
                                "items"
                                | "prefixItems"
                                | "additionalProperties"
                                | "additionalItems"
                                | "$defs"
                                | "definitions",
                            ) => apart = apart.max(of(child)),
                            _ => together += of(child),
                        }
                    }
                    together.max(apart)
                }
                _ => most(),
            };
            if count > COMBINED_PATTERNS {
                return self.refuse(
                    at,
                    format!(
                        "a string must match {count} patterns or formats at once; at most {COMBINED_PATTERNS} are allowed"
                    ),
                );
            }
            states[at] = State::Done(count);
        }
        Ok(())
    }

    /// Whether an object maps names to schemas, and so does not contain keywords.
    fn is_map(&self, at: usize) -> bool {
        let maps = ["properties", "patternProperties", "$defs", "definitions"];
        let Step::Key(key) = self.nodes[at].step else {
            return false;
        };
        // A property may have the name of a keyword, so the parent decides.
        maps.contains(&key) && (at == 0 || !self.is_map_key(self.nodes[at].parent))
    }

    fn is_map_key(&self, at: usize) -> bool {
        let maps = ["properties", "patternProperties", "$defs", "definitions"];
        matches!(self.nodes[at].step, Step::Key(key) if maps.contains(&key))
    }

    /// The error about a node.
    fn refuse<T>(&self, at: usize, message: String) -> Result<T> {
        let mut steps = Vec::new();
        let mut node = at;
        loop {
            match self.nodes[node].step {
                Step::Root => break,
                Step::Key(key) => steps.push(key.replace('~', "~0").replace('/', "~1")),
                Step::Index(i) => steps.push(i.to_string()),
            }
            node = self.nodes[node].parent;
        }
        let mut pointer = String::new();
        for step in steps.iter().rev() {
            pointer.push('/');
            pointer.push_str(step);
        }
        // Names and JSON pointers may be long, so the message contains only a part.
        let place = match pointer.chars().count() {
            0 => String::from("its root"),
            1..=SHOWN => format!("`{pointer}`"),
            _ => format!("`{}...`", pointer.chars().take(SHOWN).collect::<String>()),
        };
        invalid(format!(
            "the JSON schema is too large: at {place}, {message}"
        ))
    }
}

/// The value in `schema` that a `$ref` refers to, if it exists.
fn resolve<'a>(schema: &'a Value, target: &str) -> Option<&'a Value> {
    let pointer = target.strip_prefix('#')?;
    if pointer.is_empty() || pointer == "/" {
        return Some(schema);
    }
    // Libraries differ in whether they decode escapes in JSON pointers, so both forms are tried.
    let plain = pointer.strip_prefix('/')?.split('/');
    let plain = plain
        .into_iter()
        .try_fold(schema, |value, key| match value {
            Value::Array(elements) => elements.get(key.parse::<usize>().ok()?),
            _ => value.get(key),
        });
    plain.or_else(|| schema.pointer(pointer))
}

/// Refuses a regular expression that is too long.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] naming the limit.
pub fn check_regex(regex: &str) -> Result<()> {
    if regex.len() > REGEX_BYTES {
        return invalid(format!(
            "the regular expression has {} bytes; at most {REGEX_BYTES} are allowed",
            regex.len()
        ));
    }
    Ok(())
}

/// Refuses a Lark grammar that is too large, or that contains a schema that is too large.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] naming the limit, and the line of a schema.
pub fn check_lark(text: &str) -> Result<()> {
    let most = |what: &str, count: usize, most: usize| {
        if count > most {
            return invalid(format!(
                "the Lark grammar has {count} {what}; at most {most} are allowed"
            ));
        }
        Ok(())
    };
    most("bytes", text.len(), LARK_BYTES)?;
    let colons = text.matches(':').count();
    most("colons, one a rule", colons, LARK_COLONS)?;
    let intersections = text.matches('&').count();
    most("intersections (&)", intersections, LARK_INTERSECTIONS)?;
    for (at, keyword) in text.match_indices("%json") {
        let rest = &text[at + keyword.len()..];
        let schemas = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        // Invalid JSON is ignored here, because the grammar library reports it.
        if let Some(Ok(schema)) = schemas.into_iter().next() {
            let line = text[..at].lines().count().max(1);
            check_schema(&schema).map_err(|e| e.context(format!("line {line} of the grammar")))?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "grammar_limits_tests.rs"]
mod tests;
