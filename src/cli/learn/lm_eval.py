"""Runs tasks of lm-eval's harness (lm_eval) on a model that answers through two pipes.

The program that starts this script writes one JSON object to its input: the options. The script then writes requests to its
output, an object a line, and reads an answer for each. The last line has `results` or `error`. What libraries print goes to
standard error.
"""

import sys

# Python searches the working directory first, where a `json.py` would replace the library.
sys.path[:] = [directory for directory in sys.path if directory]

import json
import os

# Only requests may go to the pipe, so prints go to standard error.
OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def tell(message):
    """Writes a line."""
    OUT.write(json.dumps(message) + "\n")
    OUT.flush()


def ask(message):
    """Writes a request, and waits for the answer."""
    tell(message)
    line = sys.stdin.readline()
    if not line:
        # The program has ended.
        sys.exit(1)
    return json.loads(line)


def plain(value):
    """Converts numpy's numbers to Python's."""
    return value.item() if hasattr(value, "item") else str(value)


def main():
    """Evaluates the tasks."""
    options = json.loads(sys.stdin.readline())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if options["quiet"]:
        os.environ["TQDM_DISABLE"] = "1"
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
        from tqdm import tqdm
    except ImportError as error:
        tell({"error": f"{error}; install the harness for {sys.executable}: pip install lm_eval"})
        return

    class Piped(LM):
        """The model on the other side of the pipes."""

        tokenizer_name = options["name"]

        def loglikelihood(self, requests):
            # Requests with equal contexts are adjacent, so the next one reuses the computed context.
            places = {}
            for place, request in enumerate(requests):
                places.setdefault(request.args[0], []).append(place)
            order = [place for group in places.values() for place in group]
            scores = [None] * len(requests)
            for place in tqdm(order):
                context, continuation = requests[place].args
                score = ask({"do": "score", "context": context, "continuation": continuation})
                scores[place] = (score["logprob"], score["greedy"])
            return scores

        def loglikelihood_rolling(self, requests):
            return [ask({"do": "roll", "text": request.args[0]})["logprob"] for request in tqdm(requests)]

        def generate_until(self, requests):
            texts = []
            for request in tqdm(requests):
                context, how = request.args
                until = how.get("until") or []
                until = [until] if isinstance(until, str) else list(until)
                length = how.get("max_gen_toks")
                asked = {"do": "generate", "context": context, "until": until, "max_tokens": length}
                texts.append(ask(asked)["text"])
            return texts

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return ask({"do": "chat", "messages": chat_history, "reply": add_generation_prompt})["text"]

        def chat_template(self, chat_template=False):
            return options["template"]

    seed = options["seed"]
    try:
        found = lm_eval.simple_evaluate(
            model=Piped(),
            tasks=options["tasks"],
            task_manager=TaskManager(include_path=options["include_path"]),
            num_fewshot=options["num_shots"],
            limit=options["limit"],
            apply_chat_template=options["apply_chat_template"],
            fewshot_as_multiturn=options["fewshot_as_multiturn"],
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            confirm_run_unsafe_code=options["confirm_run_unsafe_code"],
        )
    except Exception as error:  # The program reports the message of any exception of a task.
        if options["verbose"]:
            raise
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    results = json.loads(json.dumps(found["results"], default=plain))
    tell({"results": results, "version": lm_eval.__version__})


main()
