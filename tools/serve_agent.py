#!/usr/bin/env python3
"""Runs an agent on a real model: ten turns of forced tool calls, by OpenAI's client for Python.

    target/clients/bin/python tools/serve_agent.py target/release/mlx [MODEL]

`target/clients` is a virtual environment with `tools/serve_clients.txt`. MODEL is `smollm2` without
an argument. The agent keeps a store: it counts goods, and moves them between shelves. Each turn asks
twice for a call, whole and streamed, with one seed. Both must be equal, and the arguments must fit
the schema of the tool. The first failure ends the script with exit code 1.
"""

import json
import subprocess
import sys

from openai import OpenAI

TURNS = 10
SHELVES = ["left", "middle", "right"]
GOODS = ["apples", "salt", "soap"]


def tool(name, description, properties):
    """A tool whose arguments are all required."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema["additionalProperties"] = False
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


SHELF, GOOD = {"type": "string", "enum": SHELVES}, {"type": "string", "enum": GOODS}
COUNT = {"type": "integer", "minimum": 1, "maximum": 99}
TOOLS = [
    tool("count", "Counts the boxes on a shelf.", {"shelf": SHELF}),
    tool("put", "Puts boxes on a shelf.", {"shelf": SHELF, "goods": GOOD, "boxes": COUNT}),
]


class Store:
    """The boxes on each shelf."""

    def __init__(self):
        self.boxes = {shelf: dict.fromkeys(GOODS, 0) for shelf in SHELVES}

    def call(self, name, arguments):
        """Does what a call asks for. Arguments that do not fit the schema are an error."""
        shelf = self.boxes[arguments.pop("shelf")]
        if name == "count":
            assert not arguments, arguments
            return json.dumps(shelf)
        assert name == "put", name
        goods, boxes = arguments.pop("goods"), arguments.pop("boxes")
        assert not arguments and type(boxes) is int and 1 <= boxes <= 99, (arguments, boxes)
        shelf[goods] += boxes
        return f"There are {shelf[goods]} boxes of {goods} now."


def whole(client, asked):
    """The call of a turn: its id, name and arguments."""
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls", choice.finish_reason
    (call,) = choice.message.tool_calls
    return call.id, call.function.name, call.function.arguments


def streamed(client, asked):
    """The name and the arguments of the call, from a stream, and the number of its pieces."""
    name, arguments, pieces = "", "", 0
    for chunk in client.chat.completions.create(stream=True, **asked):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            assert call.index == 0, call.index
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            pieces += 1
    return name, arguments, pieces


def run(client):
    """All turns."""
    store = Store()
    messages = [
        {"role": "system", "content": "You keep a store with the shelves left, middle, right."},
        {"role": "user", "content": "Put apples, salt and soap on the shelves, and count them."},
    ]
    for turn in range(TURNS):
        forced = TOOLS[turn // 2 % 2]["function"]["name"] if turn % 2 else None
        named = {"type": "function", "function": {"name": forced}}
        asked = {"model": "any", "messages": messages, "tools": TOOLS, "seed": turn}
        asked |= {"tool_choice": named if forced else "required", "max_tokens": 400}
        asked |= {"temperature": 0.7, "parallel_tool_calls": False}
        ident, name, arguments = whole(client, asked)
        *parts, pieces = streamed(client, asked)
        assert parts == [name, arguments], f"turn {turn}: {parts} is not {[name, arguments]}"
        assert forced in (None, name), f"turn {turn}: {name} instead of {forced}"
        answer = store.call(name, json.loads(arguments))
        print(f"{turn}: {name}({arguments}) in {pieces} pieces: {answer}", flush=True)
        call = {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": ident, "content": answer})
    reply = client.chat.completions.create(
        model="any", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=60
    )
    print(f"The agent says: {reply.choices[0].message.content}")


def main():
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    program, model = sys.argv[1], (sys.argv[2:] or ["smollm2"])[0]
    command = [program, "serve", model, "--port", "0", "--any-model", "--quiet"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().strip()
        if not address:
            sys.exit("error: the server did not start")
        run(OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0))
    finally:
        server.terminate()
        server.wait()
    print(f"{TURNS} turns passed")


if __name__ == "__main__":
    main()
