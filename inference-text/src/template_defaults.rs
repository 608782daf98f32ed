//! The published chat formats of families, for models without a template.
//!
//! A model's own template has priority; see `chat_template`.

use inference_formats::Family;
use inference_formats::family::ChatFormat;

/// `<|im_start|>role … <|im_end|>`: Qwen 2 and 3, SmolLM.
const CHATML: &str = "\
{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// `<|start_header_id|>role<|end_header_id|> … <|eot_id|>`: Llama 3.
const LLAMA3: &str = "\
{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ (message.content | trim) ~ '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

/// `[INST] … [/INST] answer</s>`: Mistral. A system message precedes the first user message.
const MISTRAL: &str = "\
{{ bos_token }}{% set ns = namespace(system='', user=true) %}{% for message in messages %}\
{% if message.role == 'system' and loop.first %}{% set ns.system = message.content ~ '\\n\\n' %}\
{% elif message.role == 'user' and ns.user %}{{ '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' }}\
{% set ns.system = '' %}{% set ns.user = false %}\
{% elif message.role == 'assistant' and not ns.user %}{{ message.content ~ eos_token }}{% set ns.user = true %}\
{% else %}{{ raise_exception('this format takes a system message at most once, first, and then user and assistant in turn; message ' ~ loop.index ~ ' is from ' ~ message.role) }}\
{% endif %}{% endfor %}";

/// `<start_of_turn>role … <end_of_turn>`: Gemma. The assistant's role is `model`; a system message
/// precedes the first user message.
const GEMMA: &str = "\
{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}\
{% if message.role == 'system' %}{% set ns.system = (message.content | trim) ~ '\\n\\n' %}{% else %}\
{{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' ~ ns.system ~ (message.content | trim) ~ '<end_of_turn>\\n' }}\
{% set ns.system = '' %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";

/// Name and source of a family's format. `knows` tests whether the vocabulary has a token. `None`
/// if neither family nor vocabulary determines a format.
pub(crate) fn family_format(
    model_type: &str,
    knows: impl Fn(&str) -> bool,
) -> Option<(&'static str, &'static str)> {
    let chatml = knows("<|im_start|>").then_some(("chatml", CHATML));
    match Family::of(model_type).and_then(|family| family.chat) {
        Some(ChatFormat::ChatMl) => Some(("chatml", CHATML)),
        Some(ChatFormat::Mistral) => chatml.or(Some(("mistral", MISTRAL))),
        Some(ChatFormat::Gemma) => Some(("gemma", GEMMA)),
        None => chatml
            .or_else(|| knows("<|start_header_id|>").then_some(("llama3", LLAMA3)))
            .or_else(|| knows("<start_of_turn>").then_some(("gemma", GEMMA))),
    }
}
