//! A scripted agent over HTTP: ten turns, in each of which a grammar forces a call of a tool. The
//! weights are random, so only the grammar makes the calls correct.

use serde_json::{Value, json};

use crate::served::Served;
use crate::{long_copy, serve_args};

const TURNS: usize = 10;
const PLACES: [&str; 3] = ["cellar", "kitchen", "attic"];
const GOODS: [&str; 3] = ["apples", "salt", "soap"];

/// The tools of the agent: a name, a description and a schema.
fn tools() -> [(&'static str, &'static str, Value); 2] {
    let places = json!({"type": "string", "enum": PLACES});
    let count = json!({
        "type": "object",
        "properties": {"place": places, "exact": {"type": "boolean"}},
        "required": ["place", "exact"],
        "additionalProperties": false,
    });
    let goods = json!({"type": "string", "enum": GOODS});
    let carry = json!({
        "type": "object",
        "properties": {
            "load": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
                "type": "object",
                "properties": {"goods": goods, "boxes": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["goods", "boxes"],
                "additionalProperties": false,
            }},
            "to": places,
        },
        "required": ["load", "to"],
        "additionalProperties": false,
    });
    [
        ("count", "Counts the boxes in a place.", count),
        ("carry", "Carries boxes to a place.", carry),
    ]
}

/// The number of boxes of each kind of goods, in each place.
#[derive(Default)]
struct House([[u64; GOODS.len()]; PLACES.len()]);

fn index(names: &[&str], name: &Value) -> usize {
    let name = name.as_str().unwrap();
    names.iter().position(|known| *known == name).unwrap()
}

impl House {
    /// Executes a call. Panics if the arguments do not fit the schema.
    fn call(&mut self, name: &str, arguments: &Value) -> String {
        match name {
            "count" => {
                assert!(arguments["exact"].is_boolean(), "{arguments}");
                let boxes = self.0[index(&PLACES, &arguments["place"])];
                let all = GOODS.iter().zip(boxes);
                let all: Vec<String> = all.map(|(goods, n)| format!("{n} {goods}")).collect();
                all.join(", ")
            }
            "carry" => {
                let to = index(&PLACES, &arguments["to"]);
                let load = arguments["load"].as_array().unwrap();
                assert!((1..=2).contains(&load.len()), "{arguments}");
                for part in load {
                    let boxes = part["boxes"].as_u64().unwrap();
                    assert!((1..=9).contains(&boxes), "{arguments}");
                    self.0[to][index(&GOODS, &part["goods"])] += boxes;
                }
                String::from("done")
            }
            other => panic!("there is no tool {other}"),
        }
    }
}

/// A call: its name, and its arguments as text.
type Call = (String, String);

/// The events of a stream, without its end.
fn events(server: &Served, path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (status, text) = server.post(path, &body);
    assert_eq!(status, 200, "{text}");
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let data = data.filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The call of a turn in OpenAI's API, whole and in pieces.
fn openai(server: &Served, body: &Value) -> [Call; 2] {
    let path = "/v1/chat/completions";
    let whole = server.json(path, body);
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 1, "{whole}");
    let function = &calls[0]["function"];
    let whole = (text(&function["name"]), text(&function["arguments"]));
    let (mut streamed, mut pieces) = (Call::default(), 0);
    for event in events(server, path, body) {
        let calls = event["choices"][0]["delta"]["tool_calls"].as_array();
        for call in calls.into_iter().flatten() {
            assert_eq!(call["index"], 0);
            streamed.0 += &text(&call["function"]["name"]);
            streamed.1 += &text(&call["function"]["arguments"]);
            pieces += 1;
        }
    }
    assert!(pieces > 3, "the arguments come in {pieces} pieces");
    [whole, streamed]
}

/// The call of a turn in Anthropic's API, whole and in pieces.
fn anthropic(server: &Served, body: &Value) -> [Call; 2] {
    let whole = server.json("/v1/messages", body);
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let blocks = whole["content"].as_array().unwrap();
    let block = blocks.iter().find(|block| block["type"] == "tool_use");
    let block = block.unwrap();
    let mut streamed = Call::default();
    for event in events(server, "/v1/messages", body) {
        streamed.0 += &text(&event["content_block"]["name"]);
        streamed.1 += &text(&event["delta"]["partial_json"]);
    }
    // Whole arguments are an object here, so the texts are compared as values.
    let arguments: Value = serde_json::from_str(&streamed.1).unwrap();
    streamed.1 = arguments.to_string();
    [(text(&block["name"]), block["input"].to_string()), streamed]
}

/// The parts of an API that an agent needs.
struct Api {
    call: fn(&Served, &Value) -> [Call; 2],
    /// Whether requests have a seed. Without one, replies are greedy.
    seeds: bool,
    tool: fn(&str, &str, &Value) -> Value,
    /// The choice that forces any tool, or this one.
    choice: fn(Option<&str>) -> Value,
    /// The messages with a call and its result.
    result: fn(&str, &Call, &str) -> [Value; 2],
}

const OPENAI: Api = Api {
    call: openai,
    seeds: true,
    tool: |name, description, schema| {
        json!({"type": "function", "function": {"name": name, "description": description,
            "parameters": schema, "strict": true}})
    },
    choice: |name| match name {
        Some(name) => json!({"type": "function", "function": {"name": name}}),
        None => json!("required"),
    },
    result: |id, (name, arguments), answer| {
        let call = json!({"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}});
        [
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": id, "content": answer}),
        ]
    },
};

const ANTHROPIC: Api = Api {
    call: anthropic,
    seeds: false,
    tool: |name, description, schema| json!({"name": name, "description": description, "input_schema": schema, "strict": true}),
    choice: |name| match name {
        Some(name) => json!({"type": "tool", "name": name, "disable_parallel_tool_use": true}),
        None => json!({"type": "any", "disable_parallel_tool_use": true}),
    },
    result: |id, (name, arguments), answer| {
        let input: Value = serde_json::from_str(arguments).unwrap();
        let used = json!({"type": "tool_use", "id": id, "name": name, "input": input});
        let result = json!({"type": "tool_result", "tool_use_id": id, "content": answer});
        [
            json!({"role": "assistant", "content": [used]}),
            json!({"role": "user", "content": [result]}),
        ]
    },
};

#[test]
fn ten_turns_of_forced_calls_stream_what_they_say() {
    let mut seen = [0; 2];
    for (model, api) in [("llama", OPENAI), ("qwen3", ANTHROPIC)] {
        let dir = long_copy(model);
        let server = serve_args(&[dir.path().to_str().unwrap()]);
        let mut house = House::default();
        let tools = tools();
        let listed = tools.each_ref();
        let listed = listed.map(|(name, text, schema)| (api.tool)(name, text, schema));
        let mut messages = vec![json!({"role": "user", "content": "Put the house in order."})];
        for turn in 0..TURNS {
            // Every other turn forces a certain tool.
            let forced = (turn % 2 == 1).then(|| tools[turn / 2 % 2].0);
            let mut body = json!({"messages": messages, "tools": listed,
                "tool_choice": (api.choice)(forced), "max_tokens": 400, "temperature": 0});
            if api.seeds {
                body["temperature"] = json!(1);
                body["seed"] = json!(turn);
                body["parallel_tool_calls"] = json!(false);
            }
            let [whole, streamed] = (api.call)(&server, &body);
            assert_eq!(streamed, whole, "{model}, turn {turn}");
            let (name, arguments) = &whole;
            assert!(forced.is_none_or(|forced| forced == name), "{name}");
            let value: Value = serde_json::from_str(arguments).unwrap();
            let answer = house.call(name, &value);
            seen[usize::from(name == "carry")] += 1;
            messages.extend((api.result)(&format!("call_{turn}"), &whole, &answer));
        }
    }
    assert!(seen.iter().all(|calls| *calls >= 4), "{seen:?}");
}
