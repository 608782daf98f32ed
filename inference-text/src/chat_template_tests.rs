//! Tests of templates: formats, Python's behavior, limits, and line numbers in errors.

use super::*;

fn messages(list: &[(&str, &str)]) -> Vec<Message> {
    list.iter()
        .map(|(role, content)| Message::new(*role, *content))
        .collect()
}

fn render(source: &str, list: &[(&str, &str)]) -> Result<String> {
    ChatTemplate::new(source, "a test")?.render(
        &messages(list),
        &ChatOptions::answer().with_now(1_709_211_909),
        "<s>",
        "</s>",
    )
}

fn text(source: &str) -> String {
    render(source, &[("user", "hi")]).unwrap()
}

const TALK: [(&str, &str); 4] = [
    ("system", "Be brief."),
    ("user", " Hi "),
    ("assistant", "Hello."),
    ("user", "Bye"),
];

#[test]
fn family_formats_are_the_published_ones() {
    let format = |model: &str, knows: &str, answer: bool| {
        ChatTemplate::for_family(model, |t| t == knows)
            .unwrap()
            .render(
                &messages(&TALK),
                &ChatOptions::default().with_add_generation_prompt(answer),
                "<B>",
                "<E>",
            )
            .unwrap()
    };
    let chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n\
                  <|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n";
    assert_eq!(format("qwen2", "", false), chatml);
    assert_eq!(
        format("qwen3", "", true),
        format!("{chatml}<|im_start|>assistant\n")
    );
    assert_eq!(format("llama", "<|im_start|>", false), chatml);
    assert_eq!(
        format("llama", "<|start_header_id|>", true),
        "<B><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(
        format("mistral", "", true),
        "<B>[INST] Be brief.\n\n Hi  [/INST]Hello.<E>[INST] Bye [/INST]"
    );
    assert_eq!(
        format("gemma3", "", true),
        "<B><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n\
         <start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    );
    assert!(ChatTemplate::for_family("llama", |_| false).is_none());
    let mistral = ChatTemplate::for_family("mistral", |_| false).unwrap();
    let twice = messages(&[("user", "a"), ("user", "b")]);
    let error = mistral
        .render(&twice, &ChatOptions::answer(), "", "")
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(
        error.to_string().contains("message 2 is from user"),
        "{error}"
    );
}

#[test]
fn templates_see_what_hugging_face_gives_them() {
    assert_eq!(
        text("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ none }}{{ nothing }}"),
        "<s></s>TrueNone"
    );
    assert_eq!(
        text("{{ tools is none }}{{ tools is defined }}{{ tools is not none }}"),
        "TrueTrueFalse"
    );
    // Block tags on separate lines add nothing to the text, and the last newline is removed.
    assert_eq!(
        text("{% if true %}\n  a\n  {% endif %}\n  {%- if true %} b{% endif %}\n\n"),
        "  a\n b"
    );
    assert_eq!(
        text(
            "{{ messages[0]['role'].upper() }} {{ messages[0].content.startswith('h') }} {{ ' x '.strip() }}|"
        ),
        "USER True x|"
    );
    assert_eq!(
        text(
            "{{ messages[-1].content.split('h')[-1] }}{{ messages[::-1] | length }}{{ 'abab'.replace('a', 'cc') }}"
        ),
        "i1ccbccb"
    );
    assert_eq!(text("{{ strftime_now('%d %b %Y') }}"), "29 Feb 2024");
    assert_eq!(
        text("{{ {'a': [1, 'é<', none, true, 1.5]} | tojson }}"),
        r#"{"a": [1, "é<", null, true, 1.5]}"#
    );
    assert_eq!(
        text("{{ {'b': [], 'a': {'c': 1}} | tojson(indent=2) }}"),
        "{\n  \"b\": [],\n  \"a\": {\n    \"c\": 1\n  }\n}"
    );
    assert_eq!(
        text("{{ 'é😀' | tojson(ensure_ascii=true) }}"),
        r#""\u00e9\ud83d\ude00""#
    );
    assert_eq!(
        text(
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
        ),
        "2"
    );
    assert_eq!(
        text("{{ 1.0 }} {{ [1, 'a', none] }} {{ {'a': \"it's\"} }} {{ 7 // 2 }}"),
        "1.0 [1, 'a', None] {'a': \"it's\"} 3"
    );
    assert_eq!(
        text(
            "{% generation %}a{% endgeneration %}{{ ['x', 'y'] | join(', ') }}{{ 'a\nb' | indent(2) }}"
        ),
        "ax, ya\n  b"
    );
    assert_eq!(
        text(
            "{% set a, b = 1, 'x' %}{% set c %}{{ a }}{{ b }}{% endset %}{{ c }}{% macro m(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ m(1) }}"
        ),
        "1x[12]"
    );
}

#[test]
fn more_names_reach_the_template() {
    let template = ChatTemplate::new("{% if enable_thinking is defined and enable_thinking is false %}quick{% else %}think{% endif %}{{ tools }}", "x").unwrap();
    let run = |options: ChatOptions| {
        template
            .render(&messages(&[("user", "")]), &options, "", "")
            .unwrap()
    };
    assert_eq!(run(ChatOptions::default()), "thinkNone");
    assert_eq!(
        run(ChatOptions::default()
            .with_extra("enable_thinking", false)
            .with_extra("tools", "t")),
        "quickt"
    );
    assert_eq!(
        run(ChatOptions::default()
            .with_extra("messages", "no")
            .with_extra("__now", 1)),
        "thinkNone"
    );
}

#[test]
fn errors_name_the_line_and_whose_fault_it_is() {
    let fails = |source: &str, kind: ErrorKind, says: &[&str]| {
        let error = render(source, &[("user", "hi")]).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        for what in says {
            assert!(error.to_string().contains(what), "{error} lacks {what}");
        }
    };
    fails(
        "a\nb\n{% if %}",
        ErrorKind::InvalidModel,
        &["line 3", "a test"],
    );
    fails(
        "a\n{{ undefined_thing.x }}",
        ErrorKind::InvalidModel,
        &["line 2"],
    );
    fails("\n\n\n{{ 1 + 'x' }}", ErrorKind::InvalidModel, &["line 4"]);
    fails(
        "{% macro f() %}\n{{ raise_exception('no tools here') }}{% endmacro %}\n{{ f() }}",
        ErrorKind::InvalidOption,
        &["line 2", "no tools here"],
    );
    fails(
        "{{ 'x' | nofilter }}",
        ErrorKind::InvalidModel,
        &["line 1", "nofilter"],
    );
    fails(
        "{% include '/etc/passwd' %}",
        ErrorKind::Unsupported,
        &["line 1", "include"],
    );
    fails("{{ strftime_now('%Q') }}", ErrorKind::InvalidModel, &["%Q"]);
    let template = ChatTemplate::new("x", "x").unwrap();
    for (list, says) in [
        (vec![], "no messages"),
        (
            messages(&[("user", ""), (" ", "")]),
            "message 1 has no role",
        ),
    ] {
        let error = template
            .render(&list, &ChatOptions::default(), "", "")
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.to_string().contains(says), "{error}");
    }
    let long = ChatTemplate::new("x".repeat(300 << 10), "x").unwrap_err();
    assert!(long.to_string().contains("at most"), "{long}");
}

#[test]
fn templates_that_never_end_or_grow_without_end_are_stopped() {
    let hostile = [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaaaaaa') }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=['aaaaaaaa']) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] | reverse %}{% endfor %}{{ ns.x ~ '' }}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x ~ '' }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set x = 'a' * 99999999 %}{{ x }}",
        "{{ 'a' | indent(9999999999) }}",
        "{{ 'a' | indent(9999999999, true) }}",
        "{{ '{:>9999999999}'.format('a') }}",
        "{{ '%9999999999d' | format(1) }}",
        "{% for i in range(100000) %}{{ 'a' }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{{ messages }}{% endfor %}",
        "{{ [1, 2] | batch(9999999999, 'x') | list }}",
        "{% for x in range(9999999999) %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[[1]]) %}{% for i in range(99999) %}{% set ns.x = [ns.x[0][0:]] %}{% endfor %}{{ ns.x }}",
    ];
    for source in hostile {
        let started = std::time::Instant::now();
        let error = render(source, &[("user", "hi")]).expect_err(source);
        assert!(
            started.elapsed().as_secs() < 30,
            "{source}: {:?}",
            started.elapsed()
        );
        let says = error.to_string();
        assert!(
            says.contains("line 1") || says.contains("grows beyond"),
            "{source}: {error}"
        );
    }
    // These templates execute chains of steps. They must end within the limits.
    for source in [
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(99999) %}{% set ns.x = ns.x[0:] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(99999) %}{% set ns.x = ns.x | reverse %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x={'a': 1}) %}{% for i in range(99999) %}{% set ns.x = dict(ns.x, b=i) %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x={'a': 1}) %}{% for i in range(99999) %}{% set ns.x = ns.x.items() %}{% set ns.x = dict(ns.x) %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set g = ns.x %}{% macro f() %}{{ g }}{% endmacro %}{% set ns.x = f %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set g = ns.x %}{% macro f() %}{{ g }}{% endmacro %}{% set ns.x = [f] %}{% endfor %}",
    ] {
        let _ = render(source, &[("user", "hi")]);
    }
    // A loop produces a large text and assigns it to a variable, which must count against the
    // limit.
    let flood = format!(
        "{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}",
        "long text ".repeat(1000)
    );
    assert!(
        render(&flood, &[("user", "hi")])
            .unwrap_err()
            .to_string()
            .contains("grows beyond")
    );
    let nest = format!(
        "{{% with x = 'aaaaaaaa' %}}{}{}{{% endwith %}}",
        "{% with x = x ~ x %}".repeat(40),
        "{% endwith %}".repeat(40)
    );
    assert!(
        render(&nest, &[("user", "hi")])
            .unwrap_err()
            .to_string()
            .contains("grows beyond")
    );
    let deep = format!(
        "{}x{}",
        "{% if true %}".repeat(5000),
        "{% endif %}".repeat(5000)
    );
    assert!(render(&deep, &[("user", "hi")]).is_err());
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(20_000), ")".repeat(20_000));
    assert!(render(&deep, &[("user", "hi")]).is_err());
}

#[test]
fn a_panic_of_the_engine_is_an_error() {
    // A fuzzer found this crash: the template reads the last element of an empty list.
    for source in [
        "{{ ''[::-1] }}",
        "{{ [][::-1] }}",
        "{{ ()[::-1] }}",
        "{{ messages[9:][::-1] | list }}",
        "{% for m in messages[1:][::-1] %}{% endfor %}",
    ] {
        match render(source, &[("user", "hi")]) {
            Ok(text) => assert!(
                ["", "[]", "()"].contains(&text.as_str()),
                "{source}: {text}"
            ),
            Err(e) => assert_eq!(e.kind(), ErrorKind::InvalidModel, "{source}: {e}"),
        }
    }
}

#[test]
fn long_conversations_are_within_the_bounds() {
    let template = ChatTemplate::for_family("qwen2", |_| true).unwrap();
    let long: Vec<Message> = (0..4000)
        .map(|n| Message::user(format!("{n} {}", "word ".repeat(200))))
        .collect();
    let text = template
        .render(&long, &ChatOptions::answer(), "", "")
        .unwrap();
    assert!(text.len() > 4_000_000);
}

#[test]
fn directories_are_searched_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let limits = TextLimits::default();
    let load = || ChatTemplate::from_dir(dir.path(), &limits);
    assert!(load().unwrap().is_none());
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#,
    );
    assert_eq!(load().unwrap().unwrap().source(), "D");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "a", "template": "T"}, {"name": "b", "template": "D"}]}"#,
    );
    let error = load().unwrap_err().to_string();
    assert!(
        error.contains("a, b") && error.contains("tokenizer_config.json"),
        "{error}"
    );
    write("tokenizer_config.json", r#"{"chat_template": 5}"#);
    assert!(load().is_err());
    write("chat_template.json", r#"{"chat_template": "J"}"#);
    assert_eq!(load().unwrap().unwrap().source(), "J");
    write("chat_template.jinja", "{{ broken");
    let error = load().unwrap_err();
    assert!(
        error.to_string().contains("chat_template.jinja") && error.to_string().contains("line 1"),
        "{error}"
    );
    write("chat_template.jinja", "jinja");
    let template = load().unwrap().unwrap();
    assert_eq!(
        (template.source(), template.origin()),
        ("jinja", "chat_template.jinja")
    );
}
