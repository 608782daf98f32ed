//! Tests of options: defaults, setters and refusals.

use super::*;
use proptest::prelude::*;

#[test]
fn defaults_are_the_documented_ones() {
    let o = GenerateOptions::default();
    assert_eq!(
        (
            o.max_tokens,
            o.sampling.temperature,
            o.sampling.top_k,
            o.sampling.top_p,
            o.sampling.min_p
        ),
        (256, 0.0, 0, 1.0, 0.0)
    );
    assert_eq!((o.penalties.repeat_penalty, o.sampling.seed), (1.0, None));
    o.validate().unwrap();
    LoadOptions::default().validate().unwrap();
}

#[test]
fn bad_values_are_named() {
    let bad = |o: GenerateOptions, field: &str| {
        let e = o.validate().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
        assert!(e.message().starts_with(field), "{e}");
    };
    let o = GenerateOptions::new;
    for t in [-1.0, f32::NAN, f32::INFINITY] {
        bad(o().with_temperature(t), "temperature");
    }
    for p in [0.0, -0.1, 1.1, f32::NAN] {
        bad(o().with_top_p(p), "top_p");
    }
    for p in [-0.1, 1.1, f32::NAN] {
        bad(o().with_min_p(p), "min_p");
    }
    for p in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        bad(o().with_repeat_penalty(p), "repeat_penalty");
    }
    for p in [f32::NAN, f32::INFINITY] {
        bad(o().with_presence_penalty(p), "presence_penalty");
        bad(o().with_frequency_penalty(-p), "frequency_penalty");
        bad(o().with_logit_bias([(3, p)]), "logit_bias of token 3");
    }
    for p in [-0.1, 1.1, f32::NAN] {
        bad(o().with_xtc_probability(p), "xtc_probability");
    }
    for p in [-0.1, 0.6, f32::NAN] {
        bad(o().with_xtc_threshold(p), "xtc_threshold");
    }
    bad(o().with_max_tokens(3).with_min_tokens(4), "min_tokens");
    bad(o().with_logprobs(1025), "logprobs");
    let any = || crate::Grammar::json_object();
    bad(o().with_ignore_eos(true).with_grammar(any()), "ignore_eos");
    o().with_grammar(any()).validate().unwrap();
    bad(
        o().with_stop(vec![String::from("x"), String::new()]),
        "stop_strings[1] ",
    );
    let load = |o: LoadOptions| o.validate().unwrap_err().kind();
    assert_eq!(
        load(LoadOptions::new().with_context_len(0)),
        ErrorKind::InvalidOption
    );
    assert_eq!(
        load(LoadOptions::new().with_parallel_slots(0)),
        ErrorKind::InvalidOption
    );
    assert_eq!(
        load(LoadOptions::new().with_gpu_layers(-2)),
        ErrorKind::InvalidOption
    );
    assert_eq!(
        load(LoadOptions::new().with_adapter_path("")),
        ErrorKind::InvalidOption
    );
    LoadOptions::new().with_gpu_layers(-1).validate().unwrap();
}

#[test]
fn compute_types_have_names() {
    for t in [
        ComputeType::Float32,
        ComputeType::Float16,
        ComputeType::BFloat16,
    ] {
        assert_eq!(t.as_str().parse::<ComputeType>().unwrap(), t);
        assert_eq!(serde_json::to_value(t).unwrap(), t.as_str());
    }
    for p in [Precision::Exact, Precision::Fast] {
        assert_eq!(p.as_str().parse::<Precision>().unwrap(), p);
        let json = serde_json::to_string(&LoadOptions::new().with_precision(p)).unwrap();
        let read: LoadOptions = serde_json::from_str(&json).unwrap();
        assert_eq!(read.precision, Some(p), "{json}");
    }
    let e = "int8".parse::<Precision>().unwrap_err();
    assert!(e.to_string().contains("exact, fast"), "{e}");
    let e = "int8".parse::<ComputeType>().unwrap_err();
    assert!(
        e.message().contains("int8") && e.message().contains("bfloat16"),
        "{e}"
    );
}

#[test]
fn unknown_fields_are_refused() {
    assert!(serde_json::from_str::<GenerateOptions>(r#"{"temprature": 1}"#).is_err());
    assert!(serde_json::from_str::<LoadOptions>(r#"{"backends": "cpu"}"#).is_err());
    let o: LoadOptions = serde_json::from_str(r#"{"dtype": "bfloat16"}"#).unwrap();
    assert_eq!(o.dtype, Some(ComputeType::BFloat16));
}

/// The groups of the default options in JSON.
fn groups() -> Vec<(String, serde_json::Map<String, serde_json::Value>)> {
    let json = serde_json::to_value(GenerateOptions::default()).unwrap();
    let all = json.as_object().unwrap().clone();
    all.into_iter()
        .filter_map(|(name, value)| Some((name, value.as_object()?.clone())))
        .collect()
}

#[test]
fn fields_of_groups_stand_for_themselves() {
    let groups = groups();
    let names: Vec<&str> = groups.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, GROUPS, "every group is known as one");
    // Each field name must be unique among all groups; otherwise `to_flat_json` would lose a field.
    let of_groups: usize = groups.iter().map(|(_, fields)| fields.len()).sum();
    let flat = GenerateOptions::default().to_flat_json().unwrap();
    assert_eq!(flat.len(), of_groups + 1, "max_tokens, and those of groups");
    for (_, fields) in &groups {
        assert!(fields.iter().all(|(name, value)| &flat[name] == value));
    }
}

#[test]
fn groups_are_set_whole_and_read_alone() {
    let sampling = SamplingOptions::new().with_temperature(0.5).with_top_k(40);
    let penalties = PenaltyOptions::new().with_presence_penalty(0.5);
    let constraints = ConstraintOptions::new().with_banned_tokens([3]);
    let stop = StopOptions::new().with_stop_strings(vec![String::from("x")]);
    let output = OutputOptions::new().with_logprobs(3);
    let prefill = PrefillOptions::new().with_prefill_step_size(64usize);
    let speculative = SpeculativeOptions::new().with_prompt_lookup(2);
    let grouped = GenerateOptions::new()
        .with_sampling(sampling.clone())
        .with_penalties(penalties)
        .with_constraints(constraints)
        .with_stop_options(stop)
        .with_output(output)
        .with_prefill(prefill)
        .with_speculative(speculative);
    let single = GenerateOptions::new()
        .with_temperature(0.5)
        .with_top_k(40)
        .with_presence_penalty(0.5)
        .with_banned_tokens([3])
        .with_stop(vec![String::from("x")])
        .with_logprobs(3)
        .with_prefill_step_size(64)
        .with_prompt_lookup(2);
    let json = |o: &GenerateOptions| serde_json::to_value(o).unwrap();
    assert_eq!(json(&grouped), json(&single));
    let read: SamplingOptions =
        serde_json::from_str(r#"{"temperature": 0.5, "top_k": 40}"#).unwrap();
    assert_eq!(read, sampling);
    let e = serde_json::from_str::<GenerateOptions>(r#"{"sampling": {"topk": 1}}"#).unwrap_err();
    assert!(e.to_string().contains("`topk`") && e.to_string().contains("`top_k`"));
}

#[test]
fn what_is_not_honored_is_refused_by_name() {
    let refused = |o: GenerateOptions, honored: &[&str]| {
        let e = o.refuse_all_but("mine", honored).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        e.message().to_owned()
    };
    let o = || GenerateOptions::new().with_top_k(3).with_max_tokens(9);
    assert!(refused(o(), &["max_tokens"]).contains("option top_k;"));
    // Naming a group does not honor the group's fields.
    assert!(refused(o(), &["max_tokens", "sampling"]).contains("option top_k;"));
    o().refuse_all_but("mine", &["max_tokens", "top_k"])
        .unwrap();
    let biased = GenerateOptions::new().with_logit_bias([(1, 2.0)]);
    assert!(refused(biased, &[]).contains("option logit_bias;"));
    // These options change only the speed, or every backend must honor them.
    GenerateOptions::new()
        .with_cache_prompt(false)
        .with_cancel(CancelToken::new())
        .refuse_all_but("mine", &[])
        .unwrap();
    let load = LoadOptions::new().with_backend("mine").with_kv_bits(4);
    assert_eq!(load.first_not_of(&[]).unwrap().as_deref(), Some("kv_bits"));
    load.refuse_all_but("mine", &["kv_bits"]).unwrap();
    let load = LoadOptions::new().with_feed_forward("0=attention-only".parse().unwrap());
    let message = load.refuse_all_but("mine", &[]).unwrap_err().to_string();
    assert!(message.contains("option feed_forward;"), "{message}");
    load.validate().unwrap();
    assert!(load.with_split(crate::Split::Tensor).validate().is_err());
}

#[test]
fn interrupts_are_told_apart() {
    let token = CancelToken::new();
    let o = GenerateOptions::new().with_cancel(token.clone());
    o.check_interrupt().unwrap();
    token.cancel();
    assert_eq!(
        o.check_interrupt().unwrap_err().kind(),
        ErrorKind::Cancelled
    );
    let o = GenerateOptions::new().with_deadline(Instant::now());
    assert_eq!(
        o.check_interrupt().unwrap_err().kind(),
        ErrorKind::DeadlineExceeded
    );
}

proptest! {
    #[test]
    fn options_survive_json(
        max_tokens in any::<usize>(), temperature in 0.0f32..5.0, top_k in any::<usize>(),
        top_p in 0.01f32..1.0, seed in any::<Option<u64>>(), stop in prop::collection::vec(".+", 0..3),
    ) {
        let o = GenerateOptions::new().with_max_tokens(max_tokens).with_temperature(temperature)
            .with_top_k(top_k).with_top_p(top_p).with_seed(seed).with_stop(stop)
            .with_logit_bias([(7, top_p), (70_000, -top_p)]).with_banned_tokens([1, 2])
            .with_logprobs(top_k % 9).with_grammar(crate::Grammar::Regex("[ab]+".into()));
        o.validate().unwrap();
        let json = serde_json::to_string(&o).unwrap();
        let back: GenerateOptions = serde_json::from_str(&json).unwrap();
        prop_assert_eq!(serde_json::to_string(&back).unwrap(), json);
        prop_assert_eq!(back.sampling.seed, seed);
    }

    #[test]
    fn load_options_survive_json(
        backend in any::<Option<String>>(), context_len in prop::option::of(1usize..),
        gpu_layers in prop::option::of(-1i32..), slots in prop::option::of(1usize..), adapter in ".+",
    ) {
        let mut o = LoadOptions::new().with_context_len(context_len).with_gpu_layers(gpu_layers)
            .with_parallel_slots(slots).with_adapter_path(adapter).with_dtype(ComputeType::Float16);
        o.backend = backend;
        o.validate().unwrap();
        let json = serde_json::to_string(&o).unwrap();
        prop_assert_eq!(serde_json::from_str::<LoadOptions>(&json).unwrap(), o);
    }

    #[test]
    fn only_values_in_range_pass(
        temperature in any::<f32>(), top_p in any::<f32>(), min_p in any::<f32>(), repeat_penalty in any::<f32>(),
    ) {
        let o = GenerateOptions::new();
        let passes = |o: GenerateOptions| o.validate().is_ok();
        prop_assert_eq!(passes(o.clone().with_temperature(temperature)), (0.0..=f32::MAX).contains(&temperature));
        prop_assert_eq!(passes(o.clone().with_top_p(top_p)), top_p > 0.0 && top_p <= 1.0);
        prop_assert_eq!(passes(o.clone().with_min_p(min_p)), (0.0..=1.0).contains(&min_p));
        let ok = repeat_penalty > 0.0 && repeat_penalty <= f32::MAX;
        prop_assert_eq!(passes(o.with_repeat_penalty(repeat_penalty)), ok);
    }

    #[test]
    fn any_json_is_read_or_refused(text in "[{}\"a-z_:,0-9. -]{0,60}") {
        let _ = serde_json::from_str::<GenerateOptions>(&text);
        let _ = serde_json::from_str::<LoadOptions>(&text);
    }
}

#[test]
fn layers_that_walk_need_their_features() {
    let walk = LoadOptions::new().with_feed_forward("1-=walk:9".parse().unwrap());
    let dir = std::path::PathBuf::from("features");
    let refused = |options: &LoadOptions| options.validate().unwrap_err().to_string();
    assert!(refused(&walk).contains("needs vindex"));
    let fits = walk.clone().with_vindex(dir.clone());
    fits.validate().unwrap();
    fits.clone().with_walk_only(true).validate().unwrap();
    assert!(refused(&walk.with_walk_only(true)).contains("walk_only"));
    let sparse = fits.clone().with_feed_forward("sparse:9".parse().unwrap());
    assert!(refused(&sparse).contains("no layer of feed_forward walks"));
    let adapter = fits.clone().with_adapter_path("adapter");
    assert!(refused(&adapter).contains("vindex and adapter_path"));
    let json = serde_json::to_string(&fits).unwrap();
    assert_eq!(serde_json::from_str::<LoadOptions>(&json).unwrap(), fits);
}

#[test]
fn a_directory_of_computed_prompts_is_for_a_whole_model() {
    let options = LoadOptions::new().with_cache_dir(std::path::PathBuf::from("prompts"));
    options.validate().unwrap();
    let json = serde_json::to_string(&options).unwrap();
    assert_eq!(serde_json::from_str::<LoadOptions>(&json).unwrap(), options);
    let refused = |options: LoadOptions| options.validate().unwrap_err().to_string();
    assert!(refused(options.clone().with_split(Split::Pipeline)).contains("split and cache_dir"));
    let walking = options.clone().with_vindex(std::path::PathBuf::from("v"));
    assert!(refused(walking).contains("vindex and cache_dir"));
    assert!(refused(options.clone().with_cache_dir_bytes(0)).contains("cache_dir_bytes is 0"));
    assert!(
        refused(options.with_cache_dir(std::path::PathBuf::new())).contains("cache_dir is empty")
    );
}
