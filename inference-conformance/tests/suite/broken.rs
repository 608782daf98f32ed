//! Tests with backends that break one promise each. Exactly the matching check must fail.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::mock::{Fault, Mock, tales_of_a_format};
use inference_conformance::{Check, Outcome, Report, Suite};

const FAULTS: &[(Fault, Check)] = &[
    (Fault::NameWithSpaces, Check::BackendIdentity),
    (Fault::Unavailable, Check::BackendIdentity),
    (Fault::NeverLoads, Check::Load),
    (Fault::TypeIsNotArchitecture, Check::ModelInfo),
    (Fault::TraitDeclaredInVain, Check::DeclaredTraits),
    (Fault::UndeclaredWorks, Check::Undeclared),
    (Fault::MissingPathLoads, Check::LoadMissing),
    (Fault::MissingPathHangs, Check::LoadMissing),
    (Fault::NoiseLoads, Check::LoadNotAModel),
    (Fault::NoisePanics, Check::LoadNotAModel),
    (Fault::BadLoadOptionsPass, Check::LoadOptions),
    (Fault::AdapterIgnored, Check::LoadAdapter),
    (Fault::FormatNotDeclared, Check::Formats),
    (Fault::ContextEndsReply, Check::ContextLen),
    (Fault::WholeReplyFirst, Check::Streaming),
    (Fault::OtherText, Check::StreamText),
    (Fault::EndKnownTooEarly, Check::StreamEnd),
    (Fault::ZeroTokensIsOne, Check::MaxTokens),
    (Fault::GivesUpEarly, Check::IgnoreEos),
    (Fault::EosInReply, Check::Eos),
    (Fault::StopTokensIgnored, Check::StopTokens),
    (Fault::StopStringsIgnored, Check::StopStrings),
    (Fault::HeldBackLost, Check::StopHeldBack),
    (Fault::StopCauseWrong, Check::StopCause),
    (Fault::SeedMovesGreedy, Check::Greedy),
    (Fault::TopKIgnored, Check::Filters),
    (Fault::PenaltyIgnored, Check::RepeatPenalty),
    (Fault::PresenceIgnored, Check::PresencePenalty),
    (Fault::FrequencyIgnored, Check::FrequencyPenalty),
    (Fault::BiasIgnored, Check::LogitBias),
    (Fault::BannedComes, Check::BannedTokens),
    (Fault::ForcedNotCounted, Check::ForcedTokens),
    (Fault::MinTokensIgnored, Check::MinTokens),
    (Fault::XtcIgnored, Check::Xtc),
    (Fault::ProcessorNotCalled, Check::Processors),
    (Fault::ProcessorErrorLost, Check::Processors),
    (Fault::LogprobsAlways, Check::Logprobs),
    (Fault::LogprobsUnsorted, Check::Logprobs),
    (Fault::LogprobsOfTemperature, Check::Logprobs),
    (Fault::GrammarIgnored, Check::Grammars),
    (Fault::GrammarCutShort, Check::Grammars),
    (Fault::BrokenGrammarPasses, Check::Grammars),
    (Fault::UndeclaredGrammar, Check::Undeclared),
    (Fault::SeedIgnored, Check::Seeds),
    (Fault::SeedsAllOne, Check::SeedsDiffer),
    (Fault::UnseededIsSeeded, Check::Unseeded),
    (Fault::CancelledGivesToken, Check::CancelBefore),
    (Fault::CancelIgnored, Check::CancelDuring),
    (Fault::DeadlineGivesToken, Check::DeadlinePast),
    (Fault::DeadlineIgnored, Check::DeadlineDuring),
    (Fault::DropLeaks, Check::DropStream),
    (Fault::DecodeTakesTooLong, Check::Metrics),
    (Fault::CountsOneMore, Check::Metrics),
    (Fault::FiguresGoDown, Check::Metrics),
    (Fault::ModelFiguresMissing, Check::ModelMetrics),
    (Fault::NanIsGreedy, Check::InvalidOptions),
    (Fault::ForeignIdsPass, Check::InvalidPrompts),
    (Fault::EmptyTextPanics, Check::EmptyText),
    (Fault::ChatIgnoresMaxTokens, Check::Chat),
    (Fault::ChatTakesNan, Check::ChatErrors),
    (Fault::ClassifyOutOfOrder, Check::Classify),
    (Fault::ClassifyLogitsShort, Check::ClassifyLogits),
    (Fault::ClassifyLogitsAlways, Check::ClassifyLogits),
    (Fault::ClassifyNothingFails, Check::ClassifyErrors),
    (Fault::ClassifyNotCancelled, Check::ClassifyInterrupted),
    (Fault::BatchOutOfOrder, Check::Batch),
    (Fault::BatchFailsWhole, Check::BatchErrors),
    (Fault::BatchOutlivesDeadline, Check::BatchInterrupted),
    (Fault::SessionMixesRows, Check::Session),
    (Fault::SessionRemovesNothing, Check::SessionRemoved),
    (Fault::SessionFailsWhole, Check::SessionErrors),
    (Fault::SessionNotCancelled, Check::SessionStopped),
    (Fault::UndeclaredSession, Check::Undeclared),
    (Fault::DecodesAnything, Check::EncodeDecode),
    (Fault::IdsReversed, Check::PromptForms),
    (Fault::LogitsShapeSwapped, Check::Logits),
    (Fault::LogitsNegated, Check::LogitsGreedy),
    (Fault::TokenLogitsMissing, Check::TokenLogits),
    (Fault::ConversationLost, Check::PrepareChat),
    (Fault::ConversationOfOtherIds, Check::PrepareChat),
    (Fault::LoraRankZero, Check::Training),
    (Fault::AdapterNotReadBack, Check::AdapterSaved),
    (Fault::AttentionTooShort, Check::Attention),
    (Fault::StatesSorted, Check::HiddenStates),
    (Fault::StatesBeyondPass, Check::HiddenStates),
    (Fault::EmbedOutOfOrder, Check::Embeddings),
    (Fault::EmbedLongPasses, Check::Embeddings),
    (Fault::RerankOutOfOrder, Check::Reranking),
    (Fault::CacheChanged, Check::PromptCache),
    (Fault::CacheDamagedLoads, Check::PromptCache),
    (Fault::CacheOfCancelled, Check::PromptCache),
    (Fault::EditsIgnored, Check::Edits),
    (Fault::UnknownAdapterIgnored, Check::NamedAdapters),
    (Fault::AdapterNotDropped, Check::NamedAdapters),
    (Fault::UndeclaredAttention, Check::Undeclared),
    (Fault::UndeclaredCache, Check::Undeclared),
    (Fault::UndeclaredAdapters, Check::Undeclared),
    (Fault::UndeclaredEdits, Check::Undeclared),
    (Fault::UndeclaredEmbeddings, Check::Undeclared),
    (Fault::UndeclaredLogits, Check::Undeclared),
    (Fault::UndeclaredReranking, Check::Undeclared),
    (Fault::UndeclaredStates, Check::Undeclared),
    (Fault::UndeclaredTraining, Check::Undeclared),
    (Fault::LogitsOutliveDeadline, Check::CallsInterrupted),
    (Fault::MixesRequests, Check::Concurrent),
    (Fault::BoundToThread, Check::Crossing),
    (Fault::OneStreamAThread, Check::Interleaved),
    (Fault::CloseClosesAll, Check::Reload),
    (Fault::ModelsStay, Check::DroppedModels),
    (Fault::CloseTwiceFails, Check::CloseTwice),
    (Fault::ClosedIsEngine, Check::ClosedCalls),
    (Fault::ClosedEmbeds, Check::ClosedCalls),
    (Fault::CloseEndsSilently, Check::CloseEndsStreams),
    (Fault::DropEndsSilently, Check::DropModel),
];

fn report(fault: Fault) -> Report {
    let mut suite =
        Suite::new(Mock::with(fault), tales_of_a_format()).with_timeout(Duration::from_secs(20));
    if fault == Fault::MissingPathHangs {
        suite = suite.with_timeout(Duration::from_secs(4));
    }
    if fault == Fault::OneStreamAThread {
        suite = suite.require(Check::Interleaved);
    }
    suite.run()
}

/// Further checks that fail because of a fault, because they use the same function.
const ALSO: [(Fault, Check); 1] = [(Fault::IdsReversed, Check::PrepareChat)];

fn failed(report: &Report) -> Vec<Check> {
    let failed = |o: &Outcome| matches!(o, Outcome::Failed(_));
    let checks = report.checks.iter().filter(|c| failed(&c.outcome));
    checks.map(|c| c.check).collect()
}

/// There are many faults, which mostly wait, so several run in parallel.
#[test]
fn each_broken_promise_fails_the_check_that_is_named_for_it() {
    let next = AtomicUsize::new(0);
    let wrong = parking_lot::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while let Some((fault, check)) = FAULTS.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let report = report(*fault);
                    let mut failed = failed(&report);
                    failed.retain(|check| !ALSO.contains(&(*fault, *check)));
                    if failed != [*check] || report.passed() {
                        let text =
                            format!("{fault:?}: expected {check}, failed {failed:?}\n{report}");
                        wrong.lock().push(text);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn there_is_a_broken_backend_for_every_check() {
    for check in Check::ALL {
        assert!(FAULTS.iter().any(|(_, c)| c == check), "{check}");
    }
}

#[test]
fn reasons_say_what_happened() {
    for (fault, check, says) in [
        (Fault::Unavailable, Check::BackendIdentity, "on the moon"),
        (
            Fault::NoisePanics,
            Check::LoadNotAModel,
            "panicked: index out of bounds",
        ),
        (
            Fault::MissingPathHangs,
            Check::LoadMissing,
            "did not end within 4 seconds",
        ),
        (Fault::StopTokensIgnored, Check::StopTokens, "expected"),
    ] {
        match report(fault).outcome(check) {
            Some(Outcome::Failed(reason)) => assert!(reason.contains(says), "{fault:?}: {reason}"),
            other => panic!("{fault:?}: {other:?}"),
        }
    }
}

#[test]
fn what_cannot_be_checked_without_a_model_is_missing_and_not_failed() {
    let report = report(Fault::NeverLoads);
    let Some(Outcome::Skipped(reason)) = report.outcome(Check::Greedy) else {
        panic!("{report}");
    };
    assert!(reason.contains("never loads"), "{reason}");
    assert!(report.problems().any(|c| c.check == Check::Greedy));
}
