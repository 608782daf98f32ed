"""Renders chat templates with Jinja2 the way Hugging Face's transformers sets it up."""

from __future__ import annotations

from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(template: str, messages: list[dict[str, str]], add_generation_prompt: bool = True, **tokens: str) -> str:
    """The text of `messages`; `tokens` are names like bos_token that templates may use."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=add_generation_prompt, **tokens
    )
