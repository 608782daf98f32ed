//! Checks of edits of activations during a request.

use inference::{Edit, EditOperation, EditPositions, ErrorKind, Hook, Numbers, Steering};

use crate::context::{Context, Stop, Verdict, ensure, fail};
use crate::probe::{N, first_item, greedy, refused, reply, same, usable};

/// One edit that sets the output of these layers to zero, at every position.
pub(super) fn silenced(layers: Numbers) -> Result<Steering, Stop> {
    let edit = Edit {
        layers,
        hook: Hook::ResidPost,
        positions: EditPositions::At(Numbers::All),
        units: None,
        operation: EditOperation::Scale(0.0),
    };
    Steering::new(vec![edit]).or_else(|e| fail(format!("an edit cannot be made: {e}")))
}

pub(crate) fn edits(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompts = context.all_prompts();
    let plain: Vec<_> = prompts
        .iter()
        .map(|prompt| reply(model.as_ref(), prompt, &greedy(N)))
        .collect::<Result<_, _>>()?;
    let none = greedy(N).with_steering(Steering::default());
    let unedited = reply(model.as_ref(), &prompts[0], &none)?;
    same(
        "the reply with an empty list of edits",
        &unedited,
        &plain[0],
    )?;
    // If all layers' outputs are zero, the prompt cannot influence the logits.
    let edited = greedy(N).with_steering(silenced(Numbers::All)?);
    let edited: Vec<_> = prompts
        .iter()
        .map(|prompt| reply(model.as_ref(), prompt, &edited))
        .collect::<Result<_, _>>()?;
    for (i, other) in edited.iter().enumerate() {
        ensure!(
            other.ids == edited[0].ids,
            "without the output of the layers, prompt {i} has another reply than the first"
        );
    }
    ensure!(
        plain.iter().zip(&edited).any(|(a, b)| a.ids != b.ids),
        "the edits change no reply"
    );
    let beyond = greedy(N).with_steering(silenced(Numbers::List(vec![1_000_000]))?);
    let answer = first_item(model.generate(&prompts[0], &beyond));
    refused(
        "an edit of layer 1000000",
        answer,
        &[ErrorKind::InvalidOption],
    )?;
    usable(model.as_ref(), &prompts[0], &plain[0])
}
