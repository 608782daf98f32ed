#!/usr/bin/env python3
"""Runs llama.cpp's own tests of its server against `mlx serve`, as a client sees it.

    python3 -m venv target/llama-tests/venv
    target/llama-tests/venv/bin/pip install -r tools/llama_server_tests.txt
    target/llama-tests/venv/bin/python tools/llama_server_tests.py target/release/mlx [MODEL.gguf]

The tests come from the source archive of llama-cpp-python, which pip fetches. They stay below
`target/`; nothing of them is part of this repository. They start the server themselves, with
llama-server's flags. So this script is also the program that they start: it translates those flags
and becomes `mlx serve`. The model is the first model instead of llama.cpp's tiny ones.

`NOT_PASSED` lists the tests that do not pass, each with its reason; of a test with parameters some
may pass. A failure that is not listed ends the script with exit code 1. A listed test without a
failure is named: some depend on what the model says.

`--only NAME` runs the tests whose names contain it; `--list` prints the result of each test.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.3.36"
ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target" / "llama-tests"
SOURCE = WORK / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
TESTS = SOURCE / "tools" / "server" / "tests"
MODEL = Path.home() / ".cache/rust-mlx/models/smollm2-135m-instruct"

FILES = [
    "basic",
    "chat_completion",
    "compat_anthropic",
    "compat_oai_responses",
    "completion",
    "ctx_shift",
    "embedding",
    "ignore_eos",
    "infill",
    "metrics",
    "rerank",
    "security",
    "stream",
    "template",
    "tokenize",
    "tool_call",
]

# Reasons for tests that do not pass.
TEXT = "expects the text or the token counts of llama.cpp's tiny models"
TOOLS = "needs another chat template; the first model's knows no tools and no reasoning"
FIRST = "expects null as content of a stream's first chunk, where OpenAI sends an empty text"
VERBOSE = "needs `__verbose`, which shows the prompt; `/apply-template` does"
GRAMMAR = "GBNF grammars from the network are refused; JSON schemas are supported"
RERANK = "needs a model that ranks documents; the first model does not"
CORS = "expects CORS for all or for localhost by default; here --allow-origin names origins"
METRICS = "expects llama.cpp's names of metrics; these are named inference_*"
STREAMS = "streams are not kept to be resumed"
MEDIA = "images and audio are not supported, which is status 400"
CODE = "the error has OpenAI's type; its code says what it is"
FLAG = "needs a flag of llama-server that `mlx serve` does not have"
POOLING = "vectors are the mean over the tokens; there is no other pooling"
FIM = "the first model has no tokens for infilling"
CONTENT = "an input is a text, token ids, or a list of them; lists are not mixed within one input"
PROGRESS = "prompt progress is not reported in streams"

NOT_PASSED = {
    "test_basic.py": {
        "test_server_multiple_addresses": FLAG,
        "test_server_props": "paths of this machine are not told to clients",
        "test_server_slots": "`/slots` is always there",
        "test_load_split_model": "downloads a model",
        "test_no_ui": "`/` is the page for browsers only; others get Ollama's sign of life",
        "test_server_model_aliases_and_tags": FLAG,
    },
    "test_chat_completion.py": {
        "test_chat_completion": TEXT,
        "test_chat_completion_cached_tokens": TEXT,
        "test_chat_completion_stream": FIRST,
        "test_chat_completion_with_openai_library": TEXT,
        "test_chat_template": VERBOSE,
        "test_chat_template_assistant_prefill": VERBOSE,
        "test_chat_template_continue_final_message_vllm_compat": VERBOSE,
        "test_apply_chat_template": TOOLS,
        "test_completion_with_grammar": GRAMMAR,
        "test_invalid_chat_completion_req": "two messages of the assistant in a row are allowed",
        "test_chat_completion_with_timings_per_token": FIRST,
        "test_logprobs_stream": FIRST,
        "test_context_size_exceeded": CODE,
        "test_context_size_exceeded_stream": CODE,
        "test_return_progress": PROGRESS,
        "test_verbose_debug": VERBOSE,
    },
    "test_compat_anthropic.py": {
        "test_anthropic_thinking": TOOLS,
        "test_anthropic_thinking_history_in_count_tokens": TOOLS,
        "test_anthropic_thinking_history_in_template": TOOLS,
        "test_anthropic_tool_result_with_image": MEDIA,
        "test_anthropic_vision_format_accepted": MEDIA,
        "test_anthropic_vision_base64_with_multimodal_model": MEDIA,
        "test_anthropic_empty_messages": "a conversation without messages is refused",
    },
    "test_compat_oai_responses.py": {
        "test_responses_with_openai_library": TEXT,
        "test_responses_stream_with_llama_telemetry": TEXT,
    },
    "test_completion.py": {
        "test_completion": TEXT,
        "test_completion_stream": TEXT,
        "test_completion_stream_vs_non_stream": "needs llama-server's --seed; requests have a seed",
        "test_completion_with_tokens_input": "needs llama-server's --seed; requests have a seed",
        "test_completion_with_openai_library": TEXT,
        "test_completion_stream_with_openai_library": TEXT,
        "test_nocache_long_input_prompt": TEXT,
        "test_completion_parallel_slots": TEXT,
        "test_completion_unified": TEXT,
        "test_completion_prompt_cache": TEXT,
        "test_completion_response_fields": "answers are whole; `response_fields` is ignored",
        "test_n_probs_post_sampling": "probabilities are those before sampling",
        "test_n_probs_post_backend_sampling": "probabilities are those before sampling",
    },
    "test_ctx_shift.py": {
        "test_ctx_shift_enabled": "nothing of a prompt or a reply is dropped silently",
        "test_ctx_shift_disabled_short_prompt": TEXT,
        "test_ctx_shift_disabled_long_prompt": TEXT,
    },
    "test_embedding.py": {
        "test_embedding_mixed_input": CONTENT,
        "test_embedding_content_text_same_as_string": CONTENT,
        "test_embedding_pooling_none": POOLING,
        "test_embedding_pooling_none_oai": POOLING,
        "test_embedding_error_prompt_too_long": "another text of the error",
        "test_embedding_usage_single": TEXT,
        "test_embedding_usage_multiple": TEXT,
    },
    "test_ignore_eos.py": {
        "test_ignore_eos_populates_logit_bias": "the settings in an answer have no biases",
        "test_ignore_eos_false_no_logit_bias": "the settings in an answer have no biases",
    },
    "test_infill.py": {
        "test_infill_without_input_extra": FIM,
        "test_infill_with_input_extra": FIM,
    },
    "test_metrics.py": {
        "test_metrics_disabled": "`/metrics` is always there",
        "test_metrics_prometheus_format": METRICS,
        "test_metrics_prompt_processed_and_cached": METRICS,
        "test_metrics_predicted_total_matches_requests": METRICS,
        "test_metrics_embedding_prompt_is_counted": METRICS,
        "test_metrics_timings_on_prompt_progress": PROGRESS,
    },
    "test_rerank.py": RERANK,
    "test_security.py": {
        "test_access_static_assets_without_api_key": "the page has other files",
        "test_cors_options": CORS,
        "test_cors_origins_localhost_reflects": CORS,
        "test_cors_origins_localhost_rejects": CORS,
        "test_cors_origins_defaults_to_localhost_with_tools_enabled": CORS,
        "test_cors_proxy_only_forwards_explicit_proxy_headers": "there is no proxy for web pages",
        "test_local_media_file": MEDIA,
    },
    "test_stream.py": STREAMS,
    "test_template.py": TOOLS,
    "test_tokenize.py": {
        "test_tokenize_with_bos": "the first model has no token for the start of a text",
    },
    "test_tool_call.py": {
        "test_completion_without_tool_call_fast": TOOLS,
    },
}


def serve(arguments):
    """Becomes `mlx serve`, with what llama-server's flags ask for."""
    given = {}
    while arguments:
        flag = arguments.pop(0)
        value = arguments.pop(0) if arguments and not arguments[0].startswith("--") else None
        given[flag] = value
    slots = int(given.get("--parallel", 4))
    alias = given.get("--alias", "model").split(",")[0]
    program, model = os.environ["MLX_TEST_PROGRAM"], os.environ["MLX_TEST_MODEL"]
    if os.path.basename(program) == "scripted":
        command = [program, "--keep", "--name", alias]
    else:
        # A model's name is its file's: a second name of the file gives it the wanted one.
        link = WORK / "models" / f"{alias}.gguf"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            os.link(model, link)
        command = [program, "serve", str(link), "--quiet"]
    command += ["--any-model", "--port", given["--port"], "--parallel", str(slots)]
    if "--ctx-size" in given:
        context = int(given["--ctx-size"])
        # llama-server divides the context between its slots.
        if "--kv-unified" not in given:
            context //= slots
        command += ["--ctx-size", str(context)]
    if "--api-key" in given:
        command += ["--api-key", given["--api-key"]]
    if "--no-ui" in given:
        command.append("--no-ui")
    os.execv(program, command)


def unpack():
    """Fetches the archive, and unpacks the server's tests and their templates."""
    if TESTS.is_dir():
        return
    WORK.mkdir(parents=True, exist_ok=True)
    package = f"llama-cpp-python=={VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", "llama-cpp-python", "--dest", str(WORK), package]
    subprocess.run(pip, check=True)
    archive = WORK / f"llama_cpp_python-{VERSION}.tar.gz"
    wanted = re.compile(r"[^/]+/vendor/llama\.cpp/(tools/server/tests/|models/templates/)")
    with tarfile.open(archive) as tar:
        members = [m for m in tar if wanted.match(m.name) and (m.isfile() or m.isdir())]
        tar.extractall(WORK, members=members)
    archive.unlink()


# What pytest calls, which loads this file as a plugin.

results, causes = {}, {}


def pytest_sessionstart():
    sys.path.insert(0, str(TESTS))
    import utils

    # It starts a server for each model to download it.
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def name_of(nodeid):
    return nodeid.removeprefix("unit/").replace("\n", "\\n")


def pytest_runtest_logreport(report):
    name = name_of(report.nodeid)
    if report.failed:
        results[name] = "failed"
        crash = getattr(report.longrepr, "reprcrash", None)
        causes[name] = crash.message.split("\n")[0][:200] if crash else str(report.longrepr)[-200:]
    elif report.skipped:
        results.setdefault(name, "skipped")
    elif report.when == "call":
        results.setdefault(name, "passed")


def reason_of(name):
    """The reason listed for a test: for its file, or its name without parameters."""
    file, function = name.split("[")[0].split("::")
    reasons = NOT_PASSED.get(file, {})
    return reasons if isinstance(reasons, str) else reasons.get(function)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="mlx")
    parser.add_argument("model", nargs="?", help="a model's file; without it, the first model")
    parser.add_argument("--only", help="tests whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the result of each test")
    parser.add_argument("--verbose", action="store_true", help="print failures as pytest does")
    options = parser.parse_args()
    models = [options.model] if options.model else sorted(MODEL.glob("*.gguf"))
    if not models and os.path.basename(options.program) != "scripted":
        raise SystemExit(f"no model in {MODEL}; run `mlx pull smollm2`, or name a file")
    unpack()
    os.environ["MLX_TEST_PROGRAM"] = os.path.abspath(options.program)
    os.environ["MLX_TEST_MODEL"] = os.path.abspath(models[0]) if models else ""
    os.environ["LLAMA_SERVER_BIN_PATH"] = os.path.abspath(__file__)
    os.environ.setdefault("PORT", "18080")
    os.chdir(TESTS)

    import pytest

    arguments = [f"unit/test_{name}.py" for name in FILES]
    arguments += ["-p", "no:cacheprovider", "-q", "--tb=long" if options.verbose else "--tb=no"]
    arguments += ["-m", "not slow"]
    if options.only:
        arguments += ["-k", options.only]
    pytest.main(arguments, plugins=[sys.modules[__name__]])

    passed = sum(result == "passed" for result in results.values())
    failed = {name.split("[")[0] for name, result in results.items() if result == "failed"}
    listed = {f"{file}::{name}" for file, names in NOT_PASSED.items() for name in names
              if not isinstance(names, str)}
    wrong, reasons = [], {}
    for name, result in results.items():
        reason = reason_of(name)
        if result == "failed" and reason is None:
            wrong.append(f"failed: {name}: {causes[name]}")
        elif result == "failed":
            reasons.setdefault(reason, []).append(name)
        if options.list:
            print(f"{result:8} {name} {causes.get(name, '')}")
    for reason, names in sorted(reasons.items()):
        print(f"\nnot passed: {reason}")
        for name in names:
            print(f"  {name}")
    if not options.only:
        for name in sorted(listed - failed):
            print(f"listed, and passed this time: {name}")
    print(f"\n{passed} of {len(results)} passed")
    for line in wrong:
        print(line)
    sys.exit(1 if wrong or not results else 0)


if __name__ == "__main__":
    if "MLX_TEST_PROGRAM" in os.environ and "--port" in sys.argv:
        serve(sys.argv[1:])
    main()
